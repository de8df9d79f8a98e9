"""InputBatch: the runner's state of every request, and the packing of a step from it into flat arrays (PackedStep).

    step k      rows [ 4 | 7 | 2 ]    seq_lens [ 18 | 33 |  9 ]
    step k+1    the same arrays                [ 19 | 34 | 10 ]

A request has a row from the step that brings its NewRequest until it is removed. The rows are those of numpy arrays of
fixed size, so packing takes a few indexed reads, whatever the number of tokens. From one decode step to the next only
lengths, slots, last tokens and drafts change; they are written into the arrays of the step before, so that attention
metadata and the addresses in a recorded program, which refer to them, stay valid. The scheduler decides which tokens
are computed and where they are stored; the batch follows. It handles no model, torch tensor or logits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.errors import EngineError
from penstock.interface.step import (
    NO_ADAPTER,
    NO_BLOCK,
    CacheGroup,
    NewRequest,
    SamplerState,
    ScheduledRequest,
    SchedulerOutput,
)
from penstock.kernels.tensors import Bools, Float32, Int32, Int64
from penstock.runner.logits import LogitAdjustments, first_state

Integer = TypeVar("Integer", np.int32, np.int64)
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
        """Set the first num_released entries to -1, but for those of sink tokens."""
        assert num_released <= self._num_entries[row], "only entries that the row has are released"
        if num_released > self._num_released[row]:
            start = max(self._num_released[row], self.group.hidden_blocks(0).start)
            self.version += 1
            self._ids[row, start:num_released] = NO_BLOCK
            self._num_released[row] = num_released

    def clear(self, row: int) -> None:
        """Empty a row."""
        self.version += 1
        self._ids[row, : self._num_entries[row]] = NO_BLOCK
        self._num_entries[row] = self._num_released[row] = 0

    def slots(self, rows: Int64, positions: Int64, ends: Int64) -> Int64:
        """Compute the slots [T] int64 of the tokens at `positions` [T] of `rows` [T].

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
        """Tell whether any of `positions` is the first position of a block."""
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
        """Compute the position of each token, [T], if `computed` [B] tokens of each sequence are cached."""
        return computed[self.token_sequences] + self.token_offsets


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One step as a flat batch of B sequences with T tokens. M positions are sampled, P are scored as prompt.

        tokens  [ sequence 0 | sequence 1 | ... ]          query_start_loc points at the bars
        logits  [ M sampled positions | P prompt positions ]

    A sequence with drafts is sampled several times, at neighbouring positions.

    Attributes:
        input_ids, positions: [T] int64.
        token_types: [T] int64, as in ForwardContext.
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
    token_types: Int64 | None = None

    def padded(self, tokens: int) -> "PackedStep":
        """Copy the step with more sequences, of one token each that sees itself alone and is not stored, so that it has
        `tokens` tokens. What is sampled and scored stays the same."""
        more = tokens - len(self.input_ids)
        ends = self.layout.query_start_loc[-1] + np.arange(1, more + 1, dtype=np.int32)
        return replace(
            self,
            layout=replace(self.layout, query_start_loc=np.concatenate([self.layout.query_start_loc, ends])),
            input_ids=_extended(self.input_ids, more, 0),
            positions=_extended(self.positions, more, 0),
            seq_lens=_extended(self.seq_lens, more, 1),
            block_tables=tuple(_extended(ids, more, NO_BLOCK) for ids in self.block_tables),
            slot_mappings=tuple(_extended(slots, more, NO_SLOT) for slots in self.slot_mappings),
            token_types=None if self.token_types is None else _extended(self.token_types, more, 0),
        )


def _extended(array: npt.NDArray[Integer], more: int, value: int) -> npt.NDArray[Integer]:
    rows = np.full((more, *array.shape[1:]), value, dtype=array.dtype)
    return np.concatenate([array, rows])


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
        """Tell whether this step can be packed again as the next one.

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


NOT_ASKED = -1  # in num_logprobs and num_prompt_logprobs


class SamplingRows:
    """The sampling parameters of rows; the values of free rows mean nothing.

    Attributes (by row):
        temperature, top_p, min_p: [max_num_seqs] float32.    top_k: int64, 0 keeps all.
        noise_key: [max_num_seqs, 2] int64, the seed's 64 bits and the choice index.
        num_logprobs, num_prompt_logprobs: [max_num_seqs] int64, -1 where not asked for.
        adjustments: masks, bias and penalties; None for most rows.
        searches: [max_num_seqs] bool, whether it is a beam, which continues only with tokens that are not masked.
        sampler_state: what the next draw needs of those before; None where it needs nothing.
        custom_processors: the arguments of custom logits processors, by name, for the rows that have any.
        allowed_ids, listed_ids: allowed_token_ids and logprob_token_ids as int64, for the rows that have any.
        version: incremented by every `set`; parameters do not change otherwise.

    For greedy rows top_k, top_p and min_p are off: they cannot change the most likely token.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, eos_token_ids: Sequence[int]) -> None:
        self.temperature: Float32 = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_p: Float32 = np.ones(max_num_seqs, dtype=np.float32)
        self.min_p: Float32 = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k: Int64 = np.zeros(max_num_seqs, dtype=np.int64)
        self.noise_key: Int64 = np.zeros((max_num_seqs, 2), dtype=np.int64)
        self.num_logprobs: Int64 = np.full(max_num_seqs, NOT_ASKED, dtype=np.int64)
        self.num_prompt_logprobs: Int64 = np.full(max_num_seqs, NOT_ASKED, dtype=np.int64)
        self.searches: Bools = np.zeros(max_num_seqs, dtype=np.bool_)
        self.adjustments: list[LogitAdjustments | None] = [None] * max_num_seqs
        self.custom_processors: dict[int, dict[str, Any]] = {}
        self.allowed_ids: dict[int, Int64] = {}
        self.listed_ids: dict[int, Int64] = {}
        self.sampler_state: list[SamplerState | None] = [None] * max_num_seqs
        self.version = 0
        self._max_model_len = max_model_len
        self._eos_token_ids = tuple(eos_token_ids)

    def set(self, row: int, request: NewRequest, token_ids: Int32) -> None:
        """Set the parameters of a request with the history token_ids [num_tokens] int32.

        Raises:
            EngineError: the request is sampled and has no seed.
        """
        params = request.params
        if params.seed is None and not params.greedy:
            raise EngineError("seed: not resolved before the request reached the runner")
        self.version += 1
        self.noise_key[row] = np.uint64((params.seed or 0) % 2**64).astype(np.int64), request.choice
        self.temperature[row] = params.temperature
        self.top_k[row] = 0 if params.greedy else max(0, params.top_k)
        self.top_p[row] = 1.0 if params.greedy else params.top_p
        self.min_p[row] = 0.0 if params.greedy else params.min_p
        self.num_logprobs[row] = NOT_ASKED if params.logprobs is None else params.logprobs
        self.searches[row] = params.use_beam_search
        if params.use_beam_search:
            num_candidates = params.num_candidates(len(self._eos_token_ids))
            self.num_logprobs[row] = max(num_candidates, params.logprobs or 0)
        self.num_prompt_logprobs[row] = NOT_ASKED if params.prompt_logprobs is None else params.prompt_logprobs
        custom = params.logits_processors
        self.custom_processors.pop(row, None)
        if custom and isinstance(custom, dict):
            self.custom_processors[row] = custom
        for found, ids in ((self.allowed_ids, params.allowed_token_ids), (self.listed_ids, params.logprob_token_ids)):
            found.pop(row, None)
            if ids:
                found[row] = np.array(ids, dtype=np.int64)
        self.adjustments[row] = None
        if LogitAdjustments.needed(params):
            limits = (request.num_prompt_tokens, self._max_model_len)
            self.adjustments[row] = LogitAdjustments(params, token_ids, *limits, self._eos_token_ids)
        self.sampler_state[row] = first_state(params) if request.sampler_state is None else request.sampler_state


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions for which M rows of logits are sampled. A request with n drafts has n + 1 of them.

    Attributes:
        rows: [M] int64, rows of the InputBatch.
        offsets: [M] int64, how many of the request's drafts count as outputs.
    """

    rows: Int64
    offsets: Int64

    def at(self, chosen: Int64) -> "Positions":
        """Select the positions with the indices `chosen` [m]."""
        return Positions(self.rows[chosen], self.offsets[chosen])

    def __iter__(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield (index, (row, offset)) for each position."""
        return enumerate(zip(self.rows.tolist(), self.offsets.tolist(), strict=True))


class InputBatch:
    """Rows of requests, each of at most max_model_len tokens.

    Attributes (by row; the values of free rows mean nothing):
        token_ids: [max_num_seqs, max_model_len] int32, prompt and outputs.
        num_tokens, num_prompt_tokens: [max_num_seqs] int64.
        second_text: [max_num_seqs] int64, where the second text of a pair begins; None for a model without token types.
        adapters: [max_num_seqs] int32, the slot of the request's LoRA adapter.
        sampling: sampling parameters.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        max_num_seqs: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        *,
        has_token_types: bool = False,
    ) -> None:
        self.second_text: Int64 | None = np.zeros(max_num_seqs, dtype=np.int64) if has_token_types else None
        self.token_ids: Int32 = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.num_tokens: Int64 = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens: Int64 = np.zeros(max_num_seqs, dtype=np.int64)
        self.adapters: Int32 = np.full(max_num_seqs, NO_ADAPTER, dtype=np.int32)
        self.sampling = SamplingRows(max_num_seqs, max_model_len, eos_token_ids)
        self.block_tables = [BlockTable(group, max_num_seqs, max_model_len) for group in groups]
        self._layout: Layout | None = None  # of the last step
        self._decode: DecodeStep | None = None  # the last step, if it was a decode step
        self._row_of: dict[str, int] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Remove requests, add new ones, and update the block tables, in this order.

        Raises:
            EngineError: the scheduler and this batch disagree. The step must not run. The batch is consistent again
                once all requests of the step have been removed.
        """
        for request_id in scheduler_output.removed_request_ids:
            self.remove_request(request_id)
        for request in scheduler_output.new_requests:
            self.add_request(request)
        for item in scheduler_output.scheduled:
            if any(item.new_block_ids) or any(item.num_released_blocks):  # rare in decode steps
                self._update_blocks(item)
        assert len(self._row_of) + len(self._free_rows) == len(self.num_tokens), "every row is free or has one request"

    def remove_request(self, request_id: str) -> None:
        """Free the request's row. An unknown id is ignored: the request's first step may have failed before that."""
        row = self._row_of.pop(request_id, None)
        if row is None:
            return
        for table in self.block_tables:
            table.clear(row)
        self._free_rows.append(row)

    def add_request(self, request: NewRequest) -> None:
        """Assign a row to a request.

        Raises:
            EngineError: the request is known already, too long, or has no seed; or no row is free.
        """
        num_tokens = len(request.token_ids)
        if request.request_id in self._row_of:
            raise EngineError(f"request {request.request_id} was introduced twice")
        if not self._free_rows:
            raise EngineError(f"more than max_num_seqs = {len(self.num_tokens)} requests")
        if num_tokens > self.token_ids.shape[1]:
            raise EngineError(f"{num_tokens} tokens, more than max_model_len = {self.token_ids.shape[1]}")
        assert 0 < request.num_prompt_tokens <= num_tokens, "the history begins with the prompt"
        row = self._row_of[request.request_id] = self._free_rows.pop()
        self.token_ids[row, :num_tokens] = request.token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        if self.second_text is not None:
            pooling = request.params.pooling
            self.second_text[row] = num_tokens if pooling is None else pooling.second_text_start or num_tokens
        self.adapters[row] = request.adapter
        for table, block_ids in zip(self.block_tables, request.block_tables, strict=True):
            table.append(row, block_ids)
        self.sampling.set(row, request, self.history(row))

    def _update_blocks(self, item: ScheduledRequest) -> None:
        row = self.row(item.request_id)
        for table, new_ids, num_released in zip(
            self.block_tables, item.new_block_ids, item.num_released_blocks, strict=True
        ):
            if new_ids:
                table.append(row, new_ids)
            if num_released:
                table.release(row, num_released)

    def rewrite(self, row: int, start: int, token_ids: Sequence[int]) -> None:
        """Replace a row's tokens from position `start` on. The token counts of penalties are not updated."""
        end = start + len(token_ids)
        if end > self.token_ids.shape[1]:
            raise EngineError(f"{end} tokens, more than max_model_len = {self.token_ids.shape[1]}")
        self.token_ids[row, start:end] = token_ids
        self.num_tokens[row] = end

    def append(self, rows: Int64, token_ids: Int64, offsets: Int64) -> None:
        """Append a sampled token to each of `rows` [M]. A row may occur several times, with the offsets 0, 1, 2 ...

        Raises:
            EngineError: a request has max_model_len tokens already.
        """
        assert len(rows) == len(token_ids) == len(offsets), "one token per position"
        ends = self.num_tokens[rows] + offsets
        if np.count_nonzero(ends >= self.token_ids.shape[1]):
            raise EngineError(f"a request grew beyond max_model_len = {self.token_ids.shape[1]}")
        self.token_ids[rows, ends] = token_ids
        self.num_tokens[rows] = ends + 1  # if a row occurs several times, its last value stays
        if any(self.sampling.adjustments):
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                if (adjustments := self.sampling.adjustments[row]) is not None:
                    adjustments.append(token_id)

    def extend(self, token_ids: Mapping[int, Sequence[int]]) -> None:
        """Append several tokens to each row, given by row. Raises EngineError as `append` does."""
        pairs = [(row, token_id) for row, ids in token_ids.items() for token_id in ids]
        if pairs:
            rows, new_ids = np.array(pairs, dtype=np.int64).T
            offsets = np.concatenate([np.arange(len(ids)) for ids in token_ids.values()])
            self.append(rows, new_ids, offsets)

    def has_request(self, request_id: str) -> bool:
        return request_id in self._row_of

    def row(self, request_id: str) -> int:
        """Look up the row of a request. Raise EngineError if it is unknown."""
        row = self._row_of.get(request_id)
        if row is None:
            raise EngineError(f"request {request_id} was scheduled but never introduced")
        return row

    def history(self, row: int, offset: int = 0) -> Int32:
        """View the prompt, the outputs so far and the first `offset` drafts of this step: [tokens] int32."""
        view: Int32 = self.token_ids[row, : self.num_tokens[row] + offset]
        return view

    def num_outputs(self, row: int) -> int:
        """Count the tokens generated so far, including those from before a preemption."""
        return int(self.num_tokens[row] - self.num_prompt_tokens[row])

    def pack(self, scheduled: Sequence[ScheduledRequest]) -> PackedStep:
        """Pack the scheduled tokens (at least one) into one flat batch.

        Its arrays must not be changed, and are valid until the next call: a decode step that follows one with the same
        rows and as many drafts may be the same object, packed again in place. Drafts are written behind the row's
        tokens, and have no meaning there after this step.

        Raises:
            EngineError: a scheduled token is not in the batch or has no block.
        """
        layout = self._lay_out(scheduled)
        rows, new = layout.rows, layout.new
        computed = np.array([item.num_computed_tokens for item in scheduled], dtype=np.int64)
        decode, self._decode = self._decode, None  # it stays None if this call fails
        if layout.has_drafts:
            self._write_drafts(scheduled, rows)
        if decode is not None and decode.precedes(layout, computed, self.num_tokens):
            if layout.has_drafts:
                step = decode.advance_with_drafts(self.token_ids, computed, _drafts_at(scheduled))
            else:
                step = decode.advance(self.token_ids)
            self._decode = decode
            return step
        seq_lens = computed + new
        self._check(layout, seq_lens)
        token_rows, token_ends, positions = rows, seq_lens, computed
        if len(layout.token_rows) > len(rows):  # else every sequence has one token, as in most steps
            token_rows, token_ends = layout.token_rows, seq_lens[layout.token_sequences]
            positions = layout.positions(computed)
        prompt_indices, pieces = self._prompt_positions(rows, computed, seq_lens, layout.starts)
        longest = int(seq_lens.max())
        step = PackedStep(
            layout=layout,
            input_ids=self.token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            seq_lens=seq_lens.astype(np.int32),
            block_tables=tuple(table.gather(rows, longest) for table in self.block_tables),
            slot_mappings=tuple(table.slots(token_rows, positions, token_ends) for table in self.block_tables),
            logits_indices=np.concatenate([layout.indices, *prompt_indices]) if pieces else layout.indices,
            drafts=_drafts_at(scheduled) if layout.has_drafts else layout.no_drafts,
            prompt_pieces=pieces,
            token_types=self._token_types(token_rows, positions),
        )
        assert len(step.input_ids) == len(step.positions) == layout.starts[-1], "T tokens, as laid out"
        assert len(step.drafts) == len(layout.sampled), "one draft, or none, per sampled position"
        if layout.samples_all and not pieces:
            self._decode = DecodeStep(step, layout, self.block_tables, longest)
        return step

    def _token_types(self, token_rows: Int64, positions: Int64) -> Int64 | None:
        if self.second_text is None:
            return None
        return (positions >= self.second_text[token_rows]).astype(np.int64)

    def _lay_out(self, scheduled: Sequence[ScheduledRequest]) -> Layout:
        """Lay out a step; the layout is the last step's object if it is equal."""
        row_of = self._row_of
        key = [
            (row_of.get(item.request_id), item.num_new_tokens, item.num_samples, len(item.draft_token_ids))
            for item in scheduled
        ]
        if self._layout is None or key != self._layout.key:
            for item in scheduled:
                self.row(item.request_id)  # raises EngineError
            self._layout = Layout.of(key)
        return self._layout

    def _write_drafts(self, scheduled: Sequence[ScheduledRequest], rows: Int64) -> None:
        for item, row in zip(scheduled, rows.tolist(), strict=True):
            if item.draft_token_ids:
                start = int(self.num_tokens[row])
                end = start + len(item.draft_token_ids)
                if end > self.token_ids.shape[1]:
                    raise EngineError(f"drafts reach beyond max_model_len = {self.token_ids.shape[1]}")
                self.token_ids[row, start:end] = item.draft_token_ids

    def _check(self, layout: Layout, seq_lens: Int64) -> None:
        """Check that the batch has the scheduled tokens. seq_lens: [B], the lengths after the step."""
        missing = self.num_tokens[layout.rows] + layout.num_drafts - seq_lens
        if not np.count_nonzero(missing):  # as in most steps
            return
        if missing.min() < 0:
            raise EngineError("a step schedules a request beyond its last token")
        if (missing * layout.catches_up).any():
            raise EngineError("a step samples a request that has not caught up with its tokens")

    def _prompt_positions(
        self, rows: Int64, computed: Int64, seq_lens: Int64, starts: Int64
    ) -> tuple[list[Int64], list[PromptPiece]]:
        """Collect the packed indices of positions whose next token is a prompt token to score, and their pieces."""
        indices: list[Int64] = []
        pieces: list[PromptPiece] = []
        num_top = self.sampling.num_prompt_logprobs[rows]
        if not np.count_nonzero(num_top >= 0):
            return indices, pieces
        last = np.minimum(seq_lens, self.num_prompt_tokens[rows] - 1)  # positions computed .. last - 1
        for b in np.flatnonzero((num_top >= 0) & (last > computed)).tolist():
            count = int(last[b] - computed[b])
            targets = self.token_ids[rows[b], computed[b] + 1 : last[b] + 1].astype(np.int64)
            indices.append(starts[b] + np.arange(count))
            pieces.append(PromptPiece(b, targets, int(num_top[b])))
        return indices, pieces


def _drafts_at(scheduled: Sequence[ScheduledRequest]) -> Int64:
    """Collect the draft at the place of each sampled token, [M] int64."""
    parts = [[*item.draft_token_ids, NO_DRAFT] for item in scheduled if item.num_samples]
    return np.concatenate(parts).astype(np.int64)
