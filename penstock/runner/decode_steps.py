"""DecodeStep: a decode step that is packed again in place, as long as the same rows have one new token each.

From one decode step to the next only lengths, slots and last tokens change. They are written into the arrays of the
step before, so that attention metadata and the addresses in a recorded program, which refer to them, stay valid.

    step k      rows [ 4 | 7 | 2 ]    seq_lens [ 18 | 33 |  9 ]
    step k+1    the same arrays                [ 19 | 34 | 10 ]
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.runner.block_table import BlockTable
from penstock.runner.masks import Int32, Int64
from penstock.runner.packed_step import Layout, PackedStep


class DecodeStep:
    """A packed step in which each sequence has one token and no draft, and is sampled."""

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
        """Return whether a step can follow this one: each row has one token more, and that token is computed.

        computed: [B], tokens cached before that step. num_tokens: [max_num_seqs], the number of tokens of each row.
        """
        if layout is not self._layout or self._longest >= self._room:
            return False
        is_next = (computed == self._step.seq_lens) & (num_tokens[layout.rows] == computed + 1)
        return bool(np.count_nonzero(is_next) == len(computed))

    def advance(self, token_ids: Int32) -> PackedStep:
        """Pack the step that follows. It is the same object if no sequence begins a new block.

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
