"""DecodeStep: a decode step that is packed again in place, as long as the same rows have as many new tokens each.

From one decode step to the next only lengths, slots, last tokens and drafts change. They are written into the arrays of
the step before, so that attention metadata and the addresses in a recorded program, which refer to them, stay valid.

    step k      rows [ 4 | 7 | 2 ]    seq_lens [ 18 | 33 |  9 ]
    step k+1    the same arrays                [ 19 | 34 | 10 ]
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.kernels.tensors import Int32, Int64
from penstock.runner.block_table import BlockTable
from penstock.runner.packed_step import Layout, PackedStep


class DecodeStep:
    """A packed step in which every token is sampled: each sequence has one token and its drafts."""

    def __init__(self, step: PackedStep, layout: Layout, block_tables: Sequence[BlockTable], longest: int) -> None:
        """longest: the number of tokens of the longest sequence of the step."""
        self._step = step
        self._layout = layout
        self._longest = longest
        self._tables = tuple(zip(block_tables, step.block_tables, step.slot_mappings, strict=True))
        self._versions = [table.version for table in block_tables]
        # A longer sequence needs wider tables, and so a newly packed step.
        self._room = min(ids.shape[1] * table.group.block_size for table, ids, _ in self._tables)

    def precedes(self, layout: Layout, computed: Int64, num_tokens: Int64) -> bool:
        """Return whether this step can be packed again as the next one.

        Each row must have as many new tokens as in this step, and they must be its last ones; without drafts, each row
        must have one token more than in this step.

        computed: [B], tokens cached before that step. num_tokens: [max_num_seqs], the number of tokens of each row.
        """
        if layout is not self._layout:
            return False
        if layout.is_decode:
            is_next = (computed == self._step.seq_lens) & (num_tokens[layout.rows] == computed + 1)
            return self._longest < self._room and bool(np.count_nonzero(is_next) == len(computed))
        ends = computed + layout.new
        known = num_tokens[layout.rows] + layout.num_drafts
        return int(ends.max()) <= self._room and not np.count_nonzero(known != ends)

    def advance(self, token_ids: Int32) -> PackedStep:
        """Pack the step that follows, without drafts. It is the same object if no sequence begins a new block.

        token_ids: [max_num_seqs, max_model_len], the tokens of each row.

        Raises:
            EngineError: a token has no block. The next step must then be packed from the beginning.
        """
        step, rows, stays = self._step, self._layout.rows, True
        self._longest += 1
        step.positions[:] = step.seq_lens
        step.seq_lens[:] += 1
        step.input_ids[:] = token_ids[rows, step.positions]
        for index, (table, ids, slots) in enumerate(self._tables):
            if table.version == self._versions[index] and not table.begins_block(step.positions):
                slots[:] += 1
                continue
            self._versions[index], stays = table.version, False
            ids[:] = table.gather(rows, self._longest)
            slots[:] = table.slots(rows, step.positions, step.positions + 1)
        if not stays:
            self._step = replace(step)
        return self._step

    def advance_with_drafts(self, token_ids: Int32, computed: Int64, drafts: Int64) -> PackedStep:
        """Pack the step that follows, with as many drafts of each row. It is the same object if no block table changed.

        Args:
            token_ids: [max_num_seqs, max_model_len], the tokens of each row and then its drafts.
            computed, drafts: as in `precedes` and PackedStep.

        Raises: as `advance`.
        """
        step, layout, stays = self._step, self._layout, True
        step.positions[:] = layout.positions(computed)
        step.seq_lens[:] = computed + layout.new
        step.input_ids[:] = token_ids[layout.token_rows, step.positions]
        step.drafts[:] = drafts
        ends = (computed + layout.new)[layout.token_sequences]
        for index, (table, ids, slots) in enumerate(self._tables):
            if table.version != self._versions[index]:
                self._versions[index], stays = table.version, False
                ids[:] = table.gather(layout.rows, ids.shape[1] * table.group.block_size)
            slots[:] = table.slots(layout.token_rows, step.positions, ends)
        if not stays:
            self._step = replace(step)
        return self._step
