"""DraftModelProposer: a smaller model with the same vocabulary drafts the likeliest token, one after the other.

It uses a ModelRunner with its own KV cache, which has one block for each of a few requests; a block has room for the
longest sequence. A request keeps its block with what was computed of its text. For the next drafts, only the tokens
from the first wrong draft on are computed. A request without a block gets no drafts until another request ends.

All drafts of a step are made in one call of a GreedyDecoder, because one step of a small model takes less time (0.05
ms) than its Python would: the steps are neither planned nor packed one by one. Its first tokens are those of the text
that are not in the cache yet, mostly one or two; the others are drafts:

    text        [ cached | a b ]
    steps              a   b   d1  d2        input of each step; the last draft is not computed
    drafts                 d1  d2  d3
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import DraftQuery, NewRequest, ScheduledRequest, SchedulerOutput
from penstock.kernels.attention.plan import steps_with_same_tiles
from penstock.kernels.sampling import SamplingTensors
from penstock.kernels.tensors import Int32, Int64, address_of, as_array
from penstock.layers.module import ForwardContext
from penstock.runner.input_batch import Layout, PackedStep
from penstock.runner.model_runner import ModelRunner, RecordedModel

GREEDY = SamplingParams(temperature=0.0)
MAX_STEPS_BEHIND = 4  # most missing tokens of a text that are computed one by one, in the steps of other requests


class GreedyDecoder:
    """Decodes rows whose text lies in a single block of each cache group with their likeliest tokens, many steps per
    call. It changes no request of the runner.

    A recorded program runs the steps in one native call, as long as its attention plan holds; without a program, the
    model is called once per step.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._rows: list[int] = []  # of the last call, and what is known of them
        self._versions: list[int] = []  # of the block tables
        self._step: PackedStep | None = None
        self._first_slots: list[Int64] = []  # by cache group: [B], the slot of each row's first position
        self._context: ForwardContext | None = None
        self._planned: list[tuple[int, int]] = []  # by row: first and past-the-last position for which the plan holds

    def decode(self, rows: list[int], positions: list[int], tokens: Int64) -> None:
        """Compute S greedy decode steps.

        Args:
            rows: [B], rows of the runner's batch.
            positions: [B], the position of each row's first token here; all tokens before it are cached.
            tokens: [B, S+1] int64, as in `Program.decode`: its negative entries are replaced with the likeliest tokens.

        Raises:
            EngineError: a row has no block.
        """
        runner = self._runner
        step = self._step_of(rows)
        self._place(step, positions)
        with runner.computing():
            done, num_steps = 0, tokens.shape[1] - 1
            while done < num_steps:
                at = [position + done for position in positions]
                ctx = self._planned_context(step, at)
                on_host = address_of(ctx.attention[0].slot_mapping) == address_of(step.slot_mappings[0])
                self._context = ctx if on_host else None  # a device has a copy, which no later call can change
                ends = min(end - position for position, (_, end) in zip(at, self._planned, strict=True))
                count = min(num_steps - done, ends)
                part = tokens[:, done : done + count + 1]
                if not isinstance(runner.model, RecordedModel) or not runner.model.decode(part, ctx, runner.vocab_size):
                    count = 1
                    self._decode_once(tokens[:, done : done + 2], step, ctx)
                done += count
                if not on_host:
                    self._place(step, [position + done for position in positions])

    def _place(self, step: PackedStep, positions: Sequence[int]) -> None:
        """Let a step's tokens be at these positions."""
        step.positions[:] = positions
        for slots, first in zip(step.slot_mappings, self._first_slots, strict=True):
            np.add(step.positions, first, out=slots)

    def _step_of(self, rows: list[int]) -> PackedStep:
        """Pack a step with one token of each row; the arrays are those of the last call if the blocks are the same."""
        batch = self._runner.batch
        versions = [table.version for table in batch.block_tables]
        if self._step is None or rows != self._rows or versions != self._versions:
            layout = Layout.of([(row, 1, 1, 0) for row in rows])
            zeros = np.zeros_like(layout.rows)
            self._first_slots = [table.slots(layout.rows, zeros, zeros + 1) for table in batch.block_tables]
            self._step = PackedStep(
                layout=layout,
                input_ids=zeros,
                positions=zeros.copy(),
                seq_lens=zeros.astype(np.int32),
                block_tables=tuple(table.gather(layout.rows, 1) for table in batch.block_tables),
                slot_mappings=tuple(np.zeros_like(zeros) for _ in batch.block_tables),
                logits_indices=layout.indices,
                drafts=layout.no_drafts,
                prompt_pieces=[],
            )
            self._rows, self._versions, self._context = rows, versions, None
        return self._step

    def _planned_context(self, step: PackedStep, positions: Sequence[int]) -> ForwardContext:
        """Plan the context of the step with these positions [B]; that of the last call if its plan holds."""
        planned = zip(positions, self._planned, strict=True) if self._context is not None else ()
        if self._context is None or not all(begin <= position < end for position, (begin, end) in planned):
            step.seq_lens[:] = step.positions + 1
            self._context = self._runner.context(step)
            ends = step.positions + self._steps_with_this_plan(step.seq_lens)
            self._planned = list(zip(positions, ends.tolist(), strict=True))
        return self._context

    def _steps_with_this_plan(self, seq_lens: Int32) -> Int32:
        windows = {(group.sliding_window, group.chunked) for group in self._runner.groups}
        steps: Int32 = np.min(
            [steps_with_same_tiles(seq_lens, window, chunked=chunked) for window, chunked in windows], axis=0
        )
        return steps

    def _decode_once(self, tokens: Int64, step: PackedStep, ctx: ForwardContext) -> None:
        """Compute one step with the model itself, tokens [B, 2], and advance the step."""
        runner, self._context = self._runner, None  # only a program moves the plan on to the next positions
        step.seq_lens[:] = step.positions + 1
        input_ids = runner.ops.tensor(tokens[:, 0].copy())
        if isinstance(runner.model, RecordedModel):
            logits = runner.model.logits(input_ids, ctx)
        else:
            logits = runner.model.compute_logits(runner.model(input_ids, ctx))
        greedy = SamplingTensors(runner.ops.tensor(np.zeros(len(tokens), dtype=np.float32)))
        found = as_array(runner.ops.choose(runner.without_padding(logits), greedy)[0])
        np.copyto(tokens[:, 1], np.maximum(found, 0), where=tokens[:, 1] < 0)
        step.positions[:] += 1
        for slots in step.slot_mappings:
            slots += 1


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
        """Go on to the current text. Drafts that did not become part of it no longer count as cached."""
        right = 0
        for draft, token_id in zip(self.drafts, self.token_ids[self.length :], strict=False):
            if draft != token_id:
                break
            right += 1
        # At least the last token is computed again, because the next draft needs its logits.
        self.num_computed = min(self.num_computed, self.length + right, len(self.token_ids) - 1)
        self.length, self.drafts = len(self.token_ids), []
        assert 0 <= self.num_computed < self.length, "the last token is never cached"


class DraftModelProposer:
    """Makes drafts with a runner that nothing else uses.

    Args:
        num_blocks: how many requests it can follow at once. Each cache group has that many blocks, and each block holds
            at least max_model_len tokens.
        max_num_batched_tokens: the largest number of tokens in a step.
    """

    is_free = False

    def __init__(self, runner: ModelRunner, num_blocks: int, max_num_batched_tokens: int) -> None:
        self._runner, self._decoder = runner, GreedyDecoder(runner)
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
        """Follow a request's text. Return whether it can have drafts."""
        if len(query.token_ids) >= self._max_length:
            return False
        if query.request_id not in self._sequences and not self._introduce(query):
            return False
        self._sequences[query.request_id].follow()
        return True

    def _introduce(self, query: DraftQuery) -> bool:
        """Give a new request a block. Return False if none is free."""
        if not self._free:
            return False
        runner = self._runner
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
        self._num_steps += 1
        removed, self._removed = self._removed, []
        results = self._runner.execute(SchedulerOutput(self._num_steps, new, scheduled, removed)).results
        failed = next((result.error for result in results.values() if result.error is not None), None)
        if failed is not None:
            raise RuntimeError(f"the draft model: {failed}")

    def _draft(self, sequences: list[_Sequence], counts: list[int]) -> None:
        """Make at least the given number of drafts of each sequence, fewer where the longest sequence has no room."""
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
        """Free the model and its cache. Nothing may be called afterwards."""
        del self._runner, self._decoder
