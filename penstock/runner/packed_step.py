"""PackedStep: one step as a flat batch. Layout: the part of it that stays the same from decode step to decode step."""

from dataclasses import dataclass

import numpy as np

from penstock.errors import EngineError
from penstock.kernels.tensors import Bools, Int32, Int64

NO_DRAFT = -1


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


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One step as a flat batch of B sequences with T tokens. M positions are sampled, P are scored as prompt.

        tokens  [ sequence 0 | sequence 1 | ... ]          query_start_loc points at the bars
        logits  [ M sampled positions | P prompt positions ]

    A sequence with drafts is sampled several times, at neighbouring positions.

    Attributes:
        rows: [B] int64, each sequence's row.
        input_ids, positions: [T] int64.
        query_start_loc: [B+1] int32.    seq_lens: [B] int32, cached plus new tokens.
        block_tables: per cache group [B, max_blocks] int32, cut to the longest sequence of the step.
        slot_mappings: per cache group [T] int64; -1 for tokens that are not stored, which only a ring has.
        logits_indices: [M + P] int64 into the T tokens.
        sampled, sampled_rows: [M] int64, the sequence of each sampled position, and its row.
        offsets: [M] int64, how many of the sequence's drafts precede the token that is sampled.
        drafts: [M] int64, the draft at the place of the token that is sampled; NO_DRAFT after the last draft.
        has_drafts: whether any of `drafts` is not NO_DRAFT.
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
    sampled_rows: Int64
    offsets: Int64
    drafts: Int64
    has_drafts: bool
    prompt_pieces: list[PromptPiece]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The part of a packed step that depends on which requests take part with how many tokens, but not on their
    positions. A decode step uses the layout of the step before, until a request comes or goes. Its arrays must not be
    changed.

    Attributes:
        key: what it was made from: the row, new tokens, samples and drafts of each sequence.
        rows, new, num_drafts, starts: [B] int64, but [B+1] for starts, which is query_start_loc as int64.
        is_decode: whether every sequence has one token and no draft, and is sampled.
        catches_up: [B] bool, sequences whose last token must be in the step.
        samples_all: whether every token is sampled: each sequence has one token and its drafts.
        token_rows, token_sequences, token_offsets: [T] int64, of each token its row, its sequence, and its index among
            the sequence's new tokens.
        indices: [M] int64, logits_indices of the sampled positions.
        query_start_loc, sampled, sampled_rows, offsets: see PackedStep.
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
