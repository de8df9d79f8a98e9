"""GreedyDecoder: decodes rows of a runner with their likeliest tokens, many steps per call, as drafts need it.

A step for drafts takes less time than its Python would: that of a small model takes 0.05 ms. So the steps are neither
planned nor packed one by one. A recorded program runs them in one native call, as long as its attention plan holds;
without a program, the model is called once per step.
"""

from collections.abc import Sequence

import numpy as np

from penstock.kernels.attention.plan import steps_with_same_tiles
from penstock.kernels.sampling import SamplingTensors
from penstock.kernels.tensors import Int32, Int64, as_array
from penstock.layers.module import ForwardContext
from penstock.runner.model_runner import ModelRunner
from penstock.runner.packed_step import Layout, PackedStep
from penstock.runner.programs import RecordedModel


class GreedyDecoder:
    """Decodes rows whose text lies in a single block of each cache group. It changes no request of the runner."""

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
        step.positions[:] = positions
        for slots, first in zip(step.slot_mappings, self._first_slots, strict=True):
            np.add(step.positions, first, out=slots)
        with runner.computing():
            done, num_steps = 0, tokens.shape[1] - 1
            while done < num_steps:
                at = [position + done for position in positions]
                ctx = self._planned_context(step, at)
                ends = min(end - position for position, (_, end) in zip(at, self._planned, strict=True))
                count = min(num_steps - done, ends)
                part = tokens[:, done : done + count + 1]
                if not isinstance(runner.model, RecordedModel) or not runner.model.decode(part, ctx, runner.vocab_size):
                    count = 1
                    self._decode_once(tokens[:, done : done + 2], step, ctx)
                done += count

    def _step_of(self, rows: list[int]) -> PackedStep:
        """Return the arrays of a step with one token of each row; those of the last call if the blocks are the same."""
        batch = self._runner.batch
        versions = [table.version for table in batch.block_tables]
        if self._step is None or rows != self._rows or versions != self._versions:
            layout = Layout.of([(row, 1, 1, 0) for row in rows])
            zeros = np.zeros_like(layout.rows)
            self._first_slots = [table.slots(layout.rows, zeros, zeros + 1) for table in batch.block_tables]
            self._step = PackedStep(
                rows=layout.rows,
                input_ids=zeros,
                positions=zeros.copy(),
                query_start_loc=layout.query_start_loc,
                seq_lens=zeros.astype(np.int32),
                block_tables=tuple(table.gather(layout.rows, 1) for table in batch.block_tables),
                slot_mappings=tuple(np.zeros_like(zeros) for _ in batch.block_tables),
                logits_indices=layout.indices,
                sampled=layout.sampled,
                sampled_rows=layout.sampled_rows,
                offsets=layout.offsets,
                drafts=layout.no_drafts,
                has_drafts=False,
                prompt_pieces=[],
            )
            self._rows, self._versions, self._context = rows, versions, None
        return self._step

    def _planned_context(self, step: PackedStep, positions: Sequence[int]) -> ForwardContext:
        """Return the context of the step with these positions [B]; that of the last call if its plan holds."""
        planned = zip(positions, self._planned, strict=True) if self._context is not None else ()
        if self._context is None or not all(begin <= position < end for position, (begin, end) in planned):
            step.seq_lens[:] = step.positions + 1
            self._context = self._runner.context(step)
            ends = step.positions + self._steps_with_this_plan(step.seq_lens)
            self._planned = list(zip(positions, ends.tolist(), strict=True))
        return self._context

    def _steps_with_this_plan(self, seq_lens: Int32) -> Int32:
        windows = {group.sliding_window for group in self._runner.groups}
        steps: Int32 = np.min([steps_with_same_tiles(seq_lens, window) for window in windows], axis=0)
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
        found = as_array(runner.ops.sample(runner.without_padding(logits), greedy))
        np.copyto(tokens[:, 1], np.maximum(found, 0), where=tokens[:, 1] < 0)
        step.positions[:] += 1
        for slots in step.slot_mappings:
            slots += 1
