"""InputBatch: the runner's state of every request, and the packing of a step from it.

A request has a row from the step that brings its NewRequest until it is forgotten. Rows are numpy arrays of fixed size,
so packing takes a few indexed reads, whatever the number of tokens. The scheduler has decided which tokens are
computed and where they are stored; the batch follows. It handles no model, torch tensor or logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import EngineError, NotSupportedError
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import CacheGroup, NewRequest, ScheduledRequest, SchedulerOutput
from penstock.runner.block_table import BlockTable
from penstock.runner.logit_adjustments import LogitAdjustments

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]

NOT_ASKED = -1  # in the arrays of logprobs counts
UINT64 = 2**64


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """The prompt positions of one sequence whose log-probabilities a step reports.

    Attributes:
        sequence: index in the step.
        targets: [n] int64, the prompt token after each position.
        num_top: number of most likely tokens to report beside the token itself.
    """

    sequence: int
    targets: Int64
    num_top: int


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One step as a flat batch: B sequences with T tokens, of which M are sampled and P scored as prompt.

        tokens  [ sequence 0 | sequence 1 | ... ]          query_start_loc points at the bars
        logits  [ M sampled positions | P prompt positions ]

    Attributes:
        rows: [B] int64, each sequence's row.
        input_ids, positions: [T] int64.
        query_start_loc: [B+1] int32.    seq_lens: [B] int32, cached plus new tokens.
        block_tables: per cache group [B, max_blocks] int32, cut to the longest sequence of the step.
        slot_mappings: per cache group [T] int64; -1 for the tokens of a ring that are not stored.
        logits_indices: [M + P] int64 into the T tokens.
        sampled: [M] int64, the sequences that are sampled.
        prompt_pieces: the P positions, in order.
    """

    rows: Int64
    input_ids: Int64
    positions: Int64
    query_start_loc: Int32
    seq_lens: Int32
    block_tables: tuple[Int32, ...]
    slot_mappings: tuple[Int64, ...]
    logits_indices: Int64
    sampled: Int64
    prompt_pieces: list[PromptPiece]


class InputBatch:
    """Rows of requests, each of at most max_model_len tokens.

    Attributes (by row; the values of free rows mean nothing):
        token_ids: [max_num_seqs, max_model_len] int32, prompt and outputs.
        num_tokens, num_prompt_tokens: [max_num_seqs] int64.
        temperature, top_p, min_p: [max_num_seqs] float32.    top_k: int64, 0 keeps all.
        noise_key: [max_num_seqs, 2] int64, the seed's 64 bits and the choice index.
        num_logprobs, num_prompt_logprobs: [max_num_seqs] int64, -1 where not asked for.
        adjustments: masks, bias and penalties; None for most rows.
        custom_processors: the arguments of custom logits processors, by name.
        version: incremented by every `learn`; a row's parameters do not change in between.

    For greedy rows top_k, top_p and min_p are off: they cannot change the most likely token.
    """

    def __init__(
        self, groups: Sequence[CacheGroup], max_num_seqs: int, max_model_len: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self.token_ids: Int32 = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.num_tokens: Int64 = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens: Int64 = np.zeros(max_num_seqs, dtype=np.int64)
        self.temperature: npt.NDArray[np.float32] = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_p: npt.NDArray[np.float32] = np.ones(max_num_seqs, dtype=np.float32)
        self.min_p: npt.NDArray[np.float32] = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k: Int64 = np.zeros(max_num_seqs, dtype=np.int64)
        self.noise_key: Int64 = np.zeros((max_num_seqs, 2), dtype=np.int64)
        self.num_logprobs: Int64 = np.full(max_num_seqs, NOT_ASKED, dtype=np.int64)
        self.num_prompt_logprobs: Int64 = np.full(max_num_seqs, NOT_ASKED, dtype=np.int64)
        self.adjustments: list[LogitAdjustments | None] = [None] * max_num_seqs
        self.custom_processors: list[dict[str, Any]] = [{} for _ in range(max_num_seqs)]
        self.version = 0
        self.block_tables = [BlockTable(group, max_num_seqs, max_model_len) for group in groups]
        self._eos_token_ids = tuple(eos_token_ids)
        self._row_of: dict[str, int] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))

    @property
    def num_requests(self) -> int:
        return len(self._row_of)

    # --- learning and forgetting requests --------------------------------------------------------------------------

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Forget requests, learn new ones, and update the block tables, in this order.

        Raises:
            EngineError: the scheduler and this batch disagree. The step must not run; the batch is consistent again
                once all requests of the step have been forgotten.
        """
        for request_id in scheduler_output.forgotten_request_ids:
            self.forget(request_id)
        for request in scheduler_output.new_requests:
            self.learn(request)
        for item in scheduler_output.scheduled:
            self._update_blocks(item)

    def forget(self, request_id: str) -> None:
        """Free the request's row. Ignores an unknown id: its first step may have failed before it was learnt."""
        row = self._row_of.pop(request_id, None)
        if row is None:
            return
        for table in self.block_tables:
            table.clear(row)
        self.adjustments[row] = None
        self._free_rows.append(row)

    def learn(self, request: NewRequest) -> None:
        """Assign a row to a request.

        Raises:
            EngineError: the request is known already, too long, or has no seed; or no row is free.
        """
        num_tokens = len(request.token_ids)
        if request.request_id in self._row_of:
            raise EngineError(f"request {request.request_id} was introduced twice")
        if not self._free_rows:
            raise EngineError(f"more than max_num_seqs = {len(self.adjustments)} requests")
        if num_tokens > self.token_ids.shape[1]:
            raise EngineError(f"{num_tokens} tokens, more than max_model_len = {self.token_ids.shape[1]}")
        row = self._row_of[request.request_id] = self._free_rows.pop()
        self.version += 1
        self.token_ids[row, :num_tokens] = request.token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        for table, block_ids in zip(self.block_tables, request.block_tables, strict=True):
            table.append(row, block_ids)
        self._set_params(row, request.params, request.choice)

    def _set_params(self, row: int, params: SamplingParams, choice: int) -> None:
        if params.seed is None and not params.greedy:
            raise EngineError("seed: not resolved before the request reached the runner")
        bits = (params.seed or 0) % UINT64
        self.noise_key[row] = bits - UINT64 if bits >= UINT64 // 2 else bits, choice
        self.temperature[row] = params.temperature
        self.top_k[row] = 0 if params.greedy else max(0, params.top_k)
        self.top_p[row] = 1.0 if params.greedy else params.top_p
        self.min_p[row] = 0.0 if params.greedy else params.min_p
        self.num_logprobs[row] = NOT_ASKED if params.logprobs is None else params.logprobs
        self.num_prompt_logprobs[row] = NOT_ASKED if params.prompt_logprobs is None else params.prompt_logprobs
        custom = params.logits_processors
        self.custom_processors[row] = custom if isinstance(custom, dict) else {}
        if LogitAdjustments.needed(params):
            prompt = int(self.num_prompt_tokens[row])
            self.adjustments[row] = LogitAdjustments(params, self.history(row), prompt, self._eos_token_ids)

    def _update_blocks(self, item: ScheduledRequest) -> None:
        row = self.row(item.request_id)
        for table, new_ids, num_released in zip(
            self.block_tables, item.new_block_ids, item.num_released_blocks, strict=True
        ):
            if new_ids:
                table.append(row, new_ids)
            if num_released:
                table.release(row, num_released)

    def append(self, rows: Int64, token_ids: Int64) -> None:
        """Append one sampled token to each of `rows` [M].

        Raises:
            EngineError: a request has max_model_len tokens already.
        """
        ends = self.num_tokens[rows]
        if ends.size and ends.max() >= self.token_ids.shape[1]:
            raise EngineError(f"a request grew beyond max_model_len = {self.token_ids.shape[1]}")
        self.token_ids[rows, ends] = token_ids
        self.num_tokens[rows] += 1
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            adjustments = self.adjustments[row]
            if adjustments is not None:
                adjustments.append(token_id)

    # --- reading ---------------------------------------------------------------------------------------------------

    def row(self, request_id: str) -> int:
        """Return the row of a request. Raises EngineError if it is unknown."""
        row = self._row_of.get(request_id)
        if row is None:
            raise EngineError(f"request {request_id} was scheduled but never introduced")
        return row

    def history(self, row: int) -> Int32:
        """Return the prompt and the outputs so far, a view [num_tokens] int32."""
        view: Int32 = self.token_ids[row, : self.num_tokens[row]]
        return view

    def num_outputs(self, row: int) -> int:
        """Return the number of tokens generated so far, before preemptions included."""
        return int(self.num_tokens[row] - self.num_prompt_tokens[row])

    # --- packing ---------------------------------------------------------------------------------------------------

    def pack(self, scheduled: Sequence[ScheduledRequest]) -> PackedStep:
        """Pack the scheduled tokens (at least one) into one flat batch. Changes nothing; the arrays are new.

        Raises:
            EngineError: a scheduled token is not in the batch or has no block.
        """
        rows = np.array([self.row(item.request_id) for item in scheduled], dtype=np.int64)
        computed = np.array([item.num_computed_tokens for item in scheduled], dtype=np.int64)
        new = np.array([item.num_new_tokens for item in scheduled], dtype=np.int64)
        num_samples = np.array([item.num_samples for item in scheduled], dtype=np.int64)
        seq_lens = computed + new
        self._check(rows, new, seq_lens, num_samples)
        starts = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(new, out=starts[1:])
        token_rows, token_ends = np.repeat(rows, new), np.repeat(seq_lens, new)
        positions = np.repeat(computed - starts[:-1], new) + np.arange(starts[-1])
        sampled = np.flatnonzero(num_samples)
        prompt_indices, pieces = self._prompt_positions(rows, computed, seq_lens, starts)
        longest = int(seq_lens.max())
        return PackedStep(
            rows=rows,
            input_ids=self.token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            query_start_loc=starts.astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            block_tables=tuple(table.gather(rows, longest) for table in self.block_tables),
            slot_mappings=tuple(table.slots(token_rows, positions, token_ends) for table in self.block_tables),
            logits_indices=np.concatenate([starts[1:][sampled] - 1, *prompt_indices]),
            sampled=sampled,
            prompt_pieces=pieces,
        )

    def _check(self, rows: Int64, new: Int64, seq_lens: Int64, num_samples: Int64) -> None:
        """Check the scheduled work against the batch; all arrays [B]."""
        if num_samples.max() > 1:
            raise NotSupportedError("num_samples: more than one sampled token per step is not built yet")
        num_tokens = self.num_tokens[rows]
        if len(set(rows.tolist())) < len(rows) or new.min() < 1 or (seq_lens > num_tokens).any():
            raise EngineError("a step schedules a request twice, without tokens, or beyond its last token")
        if (seq_lens != num_tokens)[num_samples > 0].any():
            raise EngineError("a step samples a request that has not caught up with its tokens")

    def _prompt_positions(
        self, rows: Int64, computed: Int64, seq_lens: Int64, starts: Int64
    ) -> tuple[list[Int64], list[PromptPiece]]:
        """Return the packed indices whose next token is a prompt token to be scored, and their pieces."""
        last = np.minimum(seq_lens, self.num_prompt_tokens[rows] - 1)  # positions computed .. last - 1
        indices: list[Int64] = []
        pieces: list[PromptPiece] = []
        for b in np.flatnonzero((self.num_prompt_logprobs[rows] >= 0) & (last > computed)).tolist():
            count = int(last[b] - computed[b])
            targets = self.token_ids[rows[b], computed[b] + 1 : last[b] + 1].astype(np.int64)
            indices.append(starts[b] + np.arange(count))
            pieces.append(PromptPiece(b, targets, int(self.num_prompt_logprobs[rows[b]])))
        return indices, pieces
