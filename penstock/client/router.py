"""Router: which of several engines computes a request. It is pure: it knows no process, no request and no clock.

    cost of an engine = tokens that it still has to compute + prompt tokens that its cache does not have

The engine with the lowest cost gets the request. So a prefix attracts the requests that begin with it, until a further
request could compute it sooner elsewhere; then the prefix is in two caches, and so on. No engine is ever given more
than a prompt's length beyond the engine that has the least to do.

The router does not ask an engine what its cache holds. It remembers the content hashes of the full blocks that it sent
there recently. If the engine has evicted some of them, the request takes longer, and its answer is the same.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.engine.block_pool import hash_block, salt_bytes

Key = TypeVar("Key", bound=Hashable)
MAX_KNOWN = 2**16  # blocks that are remembered per engine
MAX_LOOKED_AT = 2**11  # first blocks of a prompt that are compared; later ones are ignored


def block_hashes(
    token_ids: Sequence[int],
    salt: str | None,
    block_size: int,
    known: Sequence[bytes] = (),
    *,
    most: int = MAX_LOOKED_AT,
) -> list[bytes]:
    """Return the content hashes of the first full blocks of a prompt. `known` may have the first of them. Different
    salts have no hash in common."""
    hashes = list(known)
    parent = hashes[-1] if hashes else salt_bytes(salt)
    num_tokens = min(len(token_ids) // block_size, most) * block_size
    for start in range(len(hashes) * block_size, num_tokens, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes


class Router(Generic[Key]):
    """Chooses among engines, which have any hashable keys: an index, or the id of a replica elsewhere.

    Args:
        block_size: tokens per block of their caches.
        max_known: blocks to remember of each engine, ideally as many as its cache has.
    """

    def __init__(self, block_size: int, max_known: int = MAX_KNOWN) -> None:
        self._block_size = block_size
        self._max_known = max(1, min(max_known, MAX_KNOWN))
        self._known: dict[Key, OrderedDict[bytes, None]] = {}  # by engine, least recently used first
        self._chosen: dict[Key, int] = {}  # when each engine was last chosen
        self._num_chosen = 0

    def cached_tokens(self, key: Key, hashes: Sequence[bytes], num_tokens: int) -> int:
        """Return how many prompt tokens an engine finds in its cache: whole blocks, and never the last token."""
        known = self._known.get(key)
        if known is None:
            return 0
        usable = hashes[: max(0, num_tokens - 1) // self._block_size]
        count = next((index for index, block in enumerate(usable) if block not in known), len(usable))
        return count * self._block_size

    def choose(self, hashes: Sequence[bytes], num_tokens: int, queued: Mapping[Key, float]) -> Key:
        """Return the engine that computes a prompt; among equals, the one chosen longest ago.

        Args:
            hashes: hashes of the prompt's full blocks.
            queued: tokens that each eligible engine still has to compute; at least one engine.
        """
        chosen = min(
            queued,
            key=lambda key: (queued[key] - self.cached_tokens(key, hashes, num_tokens), self._chosen.get(key, 0)),
        )
        self._num_chosen += 1
        self._chosen[chosen] = self._num_chosen
        return chosen

    def note(self, key: Key, hashes: Sequence[bytes]) -> None:
        """Remember that an engine computes these blocks. The first block is forgotten last, because without it the
        others cannot be found."""
        known = self._known.setdefault(key, OrderedDict())
        for block in reversed(hashes):
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._max_known:
            known.popitem(last=False)

    def forget(self, key: Key) -> None:
        """Forget what an engine has cached, because its process has ended."""
        self._known.pop(key, None)


@dataclass(slots=True)
class _Work:
    prompt: float
    outputs: float
    rows: int


class QueuedTokens:
    """What an engine still has to compute, by choice: the tokens of prompts that have no output yet, and the expected
    output tokens.

    Attributes:
        total: number of tokens.
        rows: number of rows that these choices take.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self.rows = 0
        self._work: dict[str, _Work] = {}

    def __len__(self) -> int:
        return len(self._work)

    def add(self, choice: str, prompt: float, outputs: float, rows: int = 1) -> None:
        """Count a choice. A choice that is already counted is replaced."""
        self.remove(choice)
        self._work[choice] = _Work(prompt, outputs, rows)
        self.total += prompt + outputs
        self.rows += rows

    def computed(self, choice: str, num_tokens: int) -> None:
        """Note that a choice got outputs, so its prompt is computed."""
        work = self._work.get(choice)
        if work is not None and num_tokens:
            done = min(work.outputs, num_tokens)
            self.total -= work.prompt + done
            work.prompt, work.outputs = 0.0, work.outputs - done

    def remove(self, choice: str) -> None:
        """Remove a choice from the count."""
        work = self._work.pop(choice, None)
        if work is not None:
            self.total -= work.prompt + work.outputs
            self.rows -= work.rows
            assert self.rows >= 0, "rows of more choices were removed than were added"
        if not self._work:
            assert self.rows == 0, "an engine without choices has all its rows free"
            self.total = 0.0  # so that rounding errors leave nothing behind
