"""DraftModelProposer: a smaller model with the same vocabulary drafts the likeliest token, one after the other.

It uses a ModelRunner with its own KV cache, which has one block for each of a few requests; a block has room for the
longest sequence. A request keeps its block with what was computed of its text. For the next drafts, only the tokens
from the first wrong draft on are computed. A request without a block gets no drafts until another request ends.

All drafts of a step are made in one call of a GreedyDecoder. Its first tokens are those of the text that are not
in the cache yet, mostly one or two; the others are drafts:

    text        [ cached | a b ]
    steps              a   b   d1  d2        input of each step; the last draft is not computed
    drafts                 d1  d2  d3
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.interface.drafts import DraftQuery
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import NewRequest, ScheduledRequest, SchedulerOutput
from penstock.runner.greedy_decoder import GreedyDecoder
from penstock.runner.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)
MAX_STEPS_BEHIND = 4  # most missing tokens of a text that are computed one by one, in the steps of other requests


@dataclass(slots=True)
class _Sequence:
    """The draft model's state of a request.

    Attributes:
        row: its row in the runner's batch.
        token_ids: its text, the engine's own list.
        length: the number of known tokens of its text.
        drafts: the drafts after these tokens; all but the last draft are in the cache, too.
        num_computed: how many leading tokens are in the cache, drafts included.
    """

    block: int
    row: int
    token_ids: list[int]
    length: int = 0
    drafts: list[int] = field(default_factory=list)
    num_computed: int = 0

    @property
    def num_missing(self) -> int:
        """The number of tokens to compute before the next draft."""
        return self.length - self.num_computed

    def follow(self) -> None:
        """Take the current text. Drafts that did not become part of it no longer count as cached."""
        right = 0
        for draft, token_id in zip(self.drafts, self.token_ids[self.length :], strict=False):
            if draft != token_id:
                break
            right += 1
        # At least the last token is computed again, because the next draft needs its logits.
        self.num_computed = min(self.num_computed, self.length + right, len(self.token_ids) - 1)
        self.length, self.drafts = len(self.token_ids), []


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
        self._decoder: GreedyDecoder | None = GreedyDecoder(runner)
        self._max_tokens = max_num_batched_tokens
        self._max_length = int(runner.batch.token_ids.shape[1])
        self._free = list(range(num_blocks))
        self._sequences: dict[str, _Sequence] = {}
        self._removed: list[str] = []
        self._num_steps = 0

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        counts = {query.request_id: query.count for query in queries if self._follow(query)}
        while behind := [name for name in counts if self._sequences[name].num_missing > MAX_STEPS_BEHIND]:
            self._catch_up(behind)
        if counts:
            self._draft([self._sequences[name] for name in counts], list(counts.values()))
        return [
            self._sequences[query.request_id].drafts[: query.count] if query.request_id in counts else []
            for query in queries
        ]

    def _follow(self, query: DraftQuery) -> bool:
        """Take a request's text. Return whether it can have drafts."""
        if len(query.token_ids) >= self._max_length:
            return False
        if query.request_id not in self._sequences and not self._introduce(query):
            return False
        self._sequences[query.request_id].follow()
        return True

    def _introduce(self, query: DraftQuery) -> bool:
        """Give a new request a block. Return False if none is free."""
        runner = self._runner
        if runner is None or not self._free:
            return False
        block = self._free.pop()
        tables = [[block] for _ in runner.batch.block_tables]
        new = NewRequest(query.request_id, query.token_ids[:1], 1, GREEDY, 0, tables)
        self._execute([new], [])
        row = runner.batch.row(query.request_id)
        self._sequences[query.request_id] = _Sequence(block, row, query.token_ids)
        return True

    def _catch_up(self, names: list[str]) -> None:
        """Compute as many of these requests' missing tokens as fit into a step, up to the last but one."""
        runner = self._runner
        if runner is None:
            return
        room, scheduled = self._max_tokens, []
        nothing: list[list[int]] = [[] for _ in runner.batch.block_tables]
        for name in names:
            sequence = self._sequences[name]
            start, count = sequence.num_computed, min(sequence.num_missing - 1, room)
            if count:
                runner.batch.rewrite(sequence.row, start, sequence.token_ids[start:])
                scheduled.append(ScheduledRequest(name, start, count, nothing, [0] * len(nothing), 0))
                sequence.num_computed += count
                room -= count
        self._execute([], scheduled)

    def _execute(self, new: list[NewRequest], scheduled: list[ScheduledRequest]) -> None:
        """Compute a step. Raises RuntimeError if the draft model fails for a request."""
        if self._runner is None:
            return
        self._num_steps += 1
        removed, self._removed = self._removed, []
        results = self._runner.execute(SchedulerOutput(self._num_steps, new, scheduled, removed)).results
        failed = next((result.error for result in results.values() if result.error is not None), None)
        if failed is not None:
            raise RuntimeError(f"the draft model: {failed}")

    def _draft(self, sequences: list[_Sequence], counts: list[int]) -> None:
        """Make at least the given number of drafts of each sequence, fewer where the longest sequence has no room."""
        if self._decoder is None:
            return
        pairs = zip(sequences, counts, strict=True)
        steps = max(sequence.num_missing + count - 1 for sequence, count in pairs)
        steps = min([steps, *(self._max_length - sequence.num_computed for sequence in sequences)])
        tokens = np.full((len(sequences), steps + 1), -1, dtype=np.int64)
        for row, sequence in zip(tokens, sequences, strict=True):
            missing = sequence.token_ids[sequence.num_computed : sequence.num_computed + steps + 1]
            row[: len(missing)] = missing
        positions = [sequence.num_computed for sequence in sequences]
        self._decoder.decode([sequence.row for sequence in sequences], positions, tokens)
        for ids, sequence in zip(tokens.tolist(), sequences, strict=True):
            sequence.drafts = ids[sequence.num_missing :]
            sequence.num_computed += steps

    def forget(self, request_id: str) -> None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._free.append(sequence.block)
            self._removed.append(request_id)

    def shutdown(self) -> None:
        self._runner = self._decoder = None
        self._sequences.clear()
