"""DraftModelProposer: a smaller model with the same vocabulary drafts the likeliest token, one after the other.

It uses a ModelRunner with its own KV cache, which has one block for each of a few requests; a block has room for the
longest sequence. A request keeps its block with what was computed of its text. For the next drafts, only the tokens
from the first wrong draft on are computed. A request without a block gets no drafts until another request ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.interface.drafts import DraftQuery
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import NewRequest, ScheduledRequest, SchedulerOutput
from penstock.runner.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class _Sequence:
    """The draft model's state of a request.

    Attributes:
        length: the number of known tokens of its text.
        drafts: the drafts after these tokens; all but the last draft are in the cache, too.
        num_computed: how many leading tokens are in the cache, drafts included.
    """

    block: int
    length: int = 0
    drafts: list[int] = field(default_factory=list)
    num_computed: int = 0

    def follow(self, token_ids: list[int]) -> None:
        """Take the current text. Drafts that did not become part of it no longer count as cached."""
        right = 0
        for draft, token_id in zip(self.drafts, token_ids[self.length :], strict=False):
            if draft != token_id:
                break
            right += 1
        # At least the last token is computed again, because the next draft needs its logits.
        self.num_computed = min(self.num_computed, self.length + right, len(token_ids) - 1)
        self.length, self.drafts = len(token_ids), []


class DraftModelProposer:
    """Makes drafts with a runner that nothing else uses.

    Args:
        num_blocks: how many requests it can follow at once. Each cache group has that many blocks, and each block holds
            at least max_model_len tokens.
        max_num_batched_tokens: the largest number of tokens in a step.
    """

    is_free = False

    def __init__(self, runner: ModelRunner, num_blocks: int, max_num_batched_tokens: int) -> None:
        self._runner: ModelRunner | None = runner
        self._max_tokens = max_num_batched_tokens
        self._free = list(range(num_blocks))
        self._sequences: dict[str, _Sequence] = {}
        self._removed: list[str] = []
        self._num_steps = 0

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        wanted = {query.request_id: count for query in queries if (count := self._take(query))}
        while waiting := [name for name in wanted if not self._sequences[name].drafts]:
            self._catch_up(waiting)
        for place in range(1, max(wanted.values(), default=0)):
            self._step({name: 1 for name, count in wanted.items() if count > place})
        return [self._sequences[query.request_id].drafts if query.request_id in wanted else [] for query in queries]

    def _take(self, query: DraftQuery) -> int:
        """Store a request's text. Return how many drafts the request can have."""
        runner = self._runner
        if runner is None:
            return 0
        count = min(query.count, int(runner.batch.token_ids.shape[1]) - len(query.token_ids))
        if count <= 0 or (query.request_id not in self._sequences and not self._introduce(query)):
            return 0
        sequence = self._sequences[query.request_id]
        known = sequence.length
        sequence.follow(query.token_ids)
        start = min(known, sequence.num_computed)
        runner.batch.rewrite(runner.batch.row(query.request_id), start, query.token_ids[start:])
        return count

    def _introduce(self, query: DraftQuery) -> bool:
        """Give a new request a block. Return False if none is free."""
        runner = self._runner
        if runner is None or not self._free:
            return False
        block = self._free.pop()
        tables = [[block] for _ in runner.batch.block_tables]
        new = NewRequest(query.request_id, query.token_ids[:1], 1, GREEDY, 0, tables)
        self._execute(SchedulerOutput(self._num_steps, [new], [], self._take_removed()))
        self._sequences[query.request_id] = _Sequence(block)
        return True

    def _catch_up(self, names: list[str]) -> None:
        """Compute as many of these requests' missing tokens as fit into a step. Complete requests get a draft."""
        room, counts = self._max_tokens, dict[str, int]()
        for name in names:
            sequence = self._sequences[name]
            count = min(sequence.length - sequence.num_computed, room)
            if count:
                counts[name], room = count, room - count
        self._step(counts)

    def _step(self, counts: dict[str, int]) -> None:
        """Compute the given number of further tokens of each request. Draft a token for each that is complete then."""
        runner = self._runner
        if runner is None:
            return
        nothing: list[list[int]] = [[] for _ in runner.batch.block_tables]
        released = [0] * len(nothing)
        scheduled = []
        for name, count in counts.items():
            sequence = self._sequences[name]
            is_done = sequence.num_computed + count == sequence.length + len(sequence.drafts)
            scheduled.append(ScheduledRequest(name, sequence.num_computed, count, nothing, released, int(is_done)))
            sequence.num_computed += count
        results = self._execute(SchedulerOutput(self._num_steps, [], scheduled, self._take_removed()))
        for item in scheduled:
            if item.num_samples:
                self._sequences[item.request_id].drafts += results[item.request_id]

    def _execute(self, plan: SchedulerOutput) -> dict[str, list[int]]:
        """Compute a step and return its tokens. Raises RuntimeError if the draft model fails for a request."""
        self._num_steps += 1
        if self._runner is None:
            return {}
        results = self._runner.execute(plan).results
        failed = next((result.error for result in results.values() if result.error is not None), None)
        if failed is not None:
            raise RuntimeError(f"the draft model: {failed}")
        return {name: result.new_token_ids for name, result in results.items()}

    def _take_removed(self) -> list[str]:
        removed, self._removed = self._removed, []
        return removed

    def forget(self, request_id: str) -> None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._free.append(sequence.block)
            self._removed.append(request_id)

    def shutdown(self) -> None:
        self._runner = None
        self._sequences.clear()
