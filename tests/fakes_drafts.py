"""A fake for speculation: a proposer that is right as often as it is told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from penstock.interface.step import DraftQuery


@dataclass
class Oracle:
    """Proposes the tokens that will come, each with probability `share`, and otherwise another one.

    Attributes:
        truth: the tokens after a text: request id, its tokens so far, and how many.
    """

    truth: Callable[[str, list[int], int], list[int]]
    share: float = 1.0
    vocab_size: int = 50
    random: Random = field(default_factory=lambda: Random(0))
    is_free: bool = True
    forgotten: list[str] = field(default_factory=list)

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        return [[self._maybe(token) for token in self._truth(query)] for query in queries]

    def _truth(self, query: DraftQuery) -> list[int]:
        return self.truth(query.request_id, query.token_ids, query.count)

    def _maybe(self, token: int) -> int:
        right = self.random.random() < self.share
        return token if right else (token + self.random.randrange(1, self.vocab_size)) % self.vocab_size

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)

    def shutdown(self) -> None:
        pass
