"""A step as flat arrays: PackedStep, which the model and the sampler read; BlockTable, from which its slots come;
Layout, which stays the same from decode step to decode step; DecodeStep, which packs the next one in place.

    step k      rows [ 4 | 7 | 2 ]    seq_lens [ 18 | 33 |  9 ]
    step k+1    the same arrays                [ 19 | 34 | 10 ]

From one decode step to the next only lengths, slots, last tokens and drafts change. They are written into the arrays of
the step before, so that attention metadata and the addresses in a recorded program, which refer to them, stay valid.
Nothing here knows requests, only rows of the InputBatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.errors import EngineError
from penstock.interface.step import NO_BLOCK, CacheGroup
from penstock.kernels.tensors import Bools, Int32, Int64

NO_DRAFT = -1
NO_SLOT = -1


class BlockTable:
    """The block ids of all rows of the InputBatch, for one cache group, by position // block_size; -1 where no
    block is allocated.

        row:  [ -1 released (before the window) | block ids | -1 not allocated yet ]
              0                    num_released     num_entries          max_blocks

    A row of a ring repeats its only block id up to max_model_len, so that readers need no special case for rings.

    Attributes:
        group: the cache group that the table addresses.
        version: incremented by every change of a row.
    """

    def __init__(self, group: CacheGroup, max_num_seqs: int, max_model_len: int) -> None:
        max_blocks = -(-max_model_len // group.block_size)
        self.group = group
        self._ids: Int32 = np.full((max_num_seqs, max_blocks), NO_BLOCK, dtype=np.int32)
        self._num_entries = [0] * max_num_seqs
        self._num_released = [0] * max_num_seqs
        self.version = 0

    def append(self, row: int, block_ids: list[int]) -> None:
        """Append block ids to a row.

        Raises:
            EngineError: the row would exceed max_model_len, or a ring would have two blocks.
        """
        if self.group.ring and block_ids:
            if len(block_ids) > 1 or self._num_entries[row]:
                raise EngineError("a ring is one block, and more were given")
            block_ids = block_ids * int(self._ids.shape[1])
        start = self._num_entries[row]
        end = start + len(block_ids)
        if end > self._ids.shape[1]:
            raise EngineError(f"a block table holds {self._ids.shape[1]} blocks, and {end} were given")
        self.version += 1
        self._ids[row, start:end] = block_ids
        self._num_entries[row] = end

    def release(self, row: int, num_released: int) -> None:
        """Set the first num_released entries to -1, counted from the start of the row."""
        assert num_released <= self._num_entries[row], "only entries that the row has are released"
        start = self._num_released[row]
        if num_released > start:
            self.version += 1
            self._ids[row, start:num_released] = NO_BLOCK
            self._num_released[row] = num_released

    def clear(self, row: int) -> None:
        """Empty a row."""
        self.version += 1
        self._ids[row, : self._num_entries[row]] = NO_BLOCK
        self._num_entries[row] = self._num_released[row] = 0

    def slots(self, rows: Int64, positions: Int64, ends: Int64) -> Int64:
        """Return the slots [T] int64 of the tokens at `positions` [T] of `rows` [T].

        In a ring, a token is not stored (NO_SLOT) if a later token of the same step takes its place. ends: [T], the
        length of each token's sequence after the step.

        Raises:
            EngineError: a token has no block.
        """
        block_size = self.group.block_size
        block_ids = self._ids[rows, positions // block_size].astype(np.int64)
        if np.count_nonzero(block_ids < 0):
            raise EngineError("a token was scheduled whose block is not allocated")
        slots = block_ids * block_size + positions % block_size
        return np.where(ends - positions > block_size, NO_SLOT, slots) if self.group.ring else slots

    def begins_block(self, positions: Int64) -> bool:
        """Return whether any of `positions` is the first position of a block."""
        return bool(np.count_nonzero(positions % self.group.block_size) < len(positions))

    def gather(self, rows: Int64, longest: int) -> Int32:
        """Copy `rows` [B], cut to the blocks that `longest` tokens need: [B, max_blocks] int32."""
        return self._ids[rows, : -(-longest // self.group.block_size)]


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """The prompt positions of one sequence whose log-probabilities a step reports.

    Attributes:
        sequence: the sequence's index in the step.
        targets: [n] int64, the prompt token after each position.
        num_top: number of most likely tokens to report beside the token itself.
    """

    sequence: int
    targets: Int64
    num_top: int


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The part of a packed step that depends on which requests take part with how many tokens, but not on their
    positions. A decode step uses the layout of the step before, until a request comes or goes. Its arrays must not be
    changed.

    Attributes:
        key: what it was made from: the row, new tokens, samples and drafts of each sequence.
        rows, new, num_drafts: [B] int64.
        has_drafts: whether any of num_drafts is above 0.
        starts, query_start_loc: [B+1], where each sequence's tokens begin, as int64 and as int32.
        is_decode: whether every sequence has one token and no draft, and is sampled.
        catches_up: [B] bool, sequences whose last token must be in the step.
        samples_all: whether every token is sampled: each sequence has one token and its drafts.
        token_rows, token_sequences, token_offsets: [T] int64, of each token its row, its sequence, and its index among
            the sequence's new tokens.
        indices: [M] int64, logits_indices of the sampled positions.
        sampled, sampled_rows: [M] int64, the sequence of each sampled position, and its row.
        offsets: [M] int64, how many of the sequence's drafts precede the token that is sampled.
        no_drafts: `drafts` of PackedStep for a step without drafts.
    """

    key: list[tuple[int | None, int, int, int]]
    rows: Int64
    new: Int64
    num_drafts: Int64
    has_drafts: bool
    is_decode: bool
    starts: Int64
    samples_all: bool
    catches_up: Bools
    token_rows: Int64
    token_sequences: Int64
    token_offsets: Int64
    indices: Int64
    query_start_loc: Int32
    sampled: Int64
    sampled_rows: Int64
    offsets: Int64
    no_drafts: Int64

    @classmethod
    def of(cls, key: list[tuple[int | None, int, int, int]]) -> "Layout":
        """Lay out the sequences of a step.

        Raises:
            EngineError: a sequence occurs twice, has no tokens, or is not sampled after its last token and each draft.
        """
        rows, new, num_samples, num_drafts = np.array(key, dtype=np.int64).T.copy()
        if len(set(rows.tolist())) < len(rows) or new.min() < 1:
            raise EngineError("a step schedules a request twice, or without tokens")
        if ((num_samples != 1 + num_drafts) & (num_samples > 0)).any() or (num_drafts >= new).any():
            raise EngineError("num_samples: a request must be sampled after its last token and after each draft")
        starts = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(new, out=starts[1:])
        sampled = np.repeat(np.arange(len(rows)), num_samples)
        offsets = np.arange(len(sampled)) - (np.cumsum(num_samples) - num_samples)[sampled]
        token_sequences = np.repeat(np.arange(len(rows)), new)
        return cls(
            key=key,
            rows=rows,
            new=new,
            num_drafts=num_drafts,
            has_drafts=bool(num_drafts.any()),
            is_decode=len(sampled) == len(rows) == int(starts[-1]),
            starts=starts,
            samples_all=len(sampled) == int(starts[-1]),
            catches_up=(num_samples > 0) | (num_drafts > 0),
            token_rows=rows[token_sequences],
            token_sequences=token_sequences,
            token_offsets=np.arange(starts[-1]) - starts[token_sequences],
            indices=starts[1:][sampled] - num_samples[sampled] + offsets,
            query_start_loc=starts.astype(np.int32),
            sampled=sampled,
            sampled_rows=rows[sampled],
            offsets=offsets,
            no_drafts=np.full(len(sampled), NO_DRAFT, dtype=np.int64),
        )

    def positions(self, computed: Int64) -> Int64:
        """Return the position of each token, [T], if `computed` [B] tokens of each sequence are cached."""
        return computed[self.token_sequences] + self.token_offsets


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One step as a flat batch of B sequences with T tokens. M positions are sampled, P are scored as prompt.

        tokens  [ sequence 0 | sequence 1 | ... ]          query_start_loc points at the bars
        logits  [ M sampled positions | P prompt positions ]

    A sequence with drafts is sampled several times, at neighbouring positions.

    Attributes:
        input_ids, positions: [T] int64.
        seq_lens: [B] int32, cached plus new tokens.
        block_tables: per cache group [B, max_blocks] int32, cut to the longest sequence of the step.
        slot_mappings: per cache group [T] int64; -1 for tokens that are not stored, which only a ring has.
        logits_indices: [M + P] int64 into the T tokens.
        drafts: [M] int64, the draft at the place of the token that is sampled; NO_DRAFT after the last draft.
        prompt_pieces: the P positions, in order.
    """

    layout: Layout
    input_ids: Int64
    positions: Int64
    seq_lens: Int32
    block_tables: tuple[Int32, ...]
    slot_mappings: tuple[Int64, ...]
    logits_indices: Int64
    drafts: Int64
    prompt_pieces: list[PromptPiece]


class DecodeStep:
    """A packed step that is packed again in place, as long as the same rows have as many new tokens each. In it
    every token is sampled: each sequence has one token and its drafts."""

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
        assert len(step.input_ids) == len(rows), "one token per row"
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
        assert len(drafts) == len(step.drafts), "as many drafts as in the step before"
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
