"""Sampler: chooses one token per row of logits, and computes the log-probabilities that were asked for.

Log-probabilities are of the raw distribution: they are taken before masks, bias, penalties and temperature. The
backend does the arithmetic (`ops.log_softmax`, `ops.sample`); this module collects its parameters and ranks tokens. A
parameter that no row of a step needs is None in SamplingTensors, so that its pass over the logits is skipped. Rows
without LogitAdjustments cost a few indexed reads and no Python per row. Rows that ask for an option that the kernels
do not have are shaped in numpy first (logit_adjustments.py); the kernels then only draw from them.

Order: higher log-probability first, the lower id first on a tie. Rank: 1 + the number of tokens with a strictly
greater log-probability, so tied tokens share a rank.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.interface.step import SamplerState, TokenLogprobs
from penstock.kernels.ops import Ops
from penstock.kernels.sampling import NO_TOKEN, SamplingTensors
from penstock.kernels.tensors import Array, Float32, Int64, Tensor, as_array
from penstock.runner.input_batch import InputBatch, Positions
from penstock.runner.logit_adjustments import LogitAdjustments
from penstock.runner.truncations import Draw, next_state

_Part = tuple[int, Int64, Float32]  # a row of the step, ids [P], their values [P] or NO_VALUES
NO_VALUES: Float32 = np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampler's results for M rows.

    Attributes:
        token_ids: [M] int64, NO_TOKEN where nothing may be chosen.
        logprobs: [M], None for a row that does not ask for any.
        sampler_state: the next state, by index, of the rows that have one and drew a token.
    """

    token_ids: Int64
    logprobs: list[TokenLogprobs | None]
    sampler_state: dict[int, SamplerState] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Known:
    """What stays the same from step to step as long as the rows and their requests do.

    Attributes:
        batch, rows, version, vocab_size: what it is valid for; `rows` is the same array in steps of the same layout.
        asked: indices of the rows [M] that ask for log-probabilities.
        params: None if any row has adjustments, because they change with every token.
    """

    batch: InputBatch
    rows: Int64
    version: int
    vocab_size: int
    asked: Int64
    params: SamplingTensors | None = None

    def holds_for(self, batch: InputBatch, rows: Int64, vocab_size: int) -> bool:
        """Return whether these are the same rows, with the same requests."""
        if self.batch is not batch or self.version != batch.sampling.version or self.vocab_size != vocab_size:
            return False
        return self.rows is rows or np.array_equal(self.rows, rows)


class Sampler:
    """Chooses tokens with the arithmetic of one backend."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._known: _Known | None = None  # of the last step

    def sample(
        self, logits: Tensor, batch: InputBatch, positions: Positions, processed: Tensor | None = None
    ) -> Sampled:
        """Sample logits [M, V] float32, in which no row has a NaN or only -inf. Changes neither argument.

        processed: the logits to sample from, if custom processors or forms have changed them.
        """
        rows = positions.rows
        known = self._remembered(batch, rows, logits.shape[1])
        asked, raw = known.asked, None
        if asked.size:
            some = logits if len(asked) == len(rows) else logits[self._ops.tensor(asked)]
            raw = as_array(self._ops.log_softmax(some))
            if processed is not None:
                searches = np.flatnonzero(batch.sampling.searches[rows[asked]])
                for index in searches.tolist():
                    raw[index, np.isneginf(as_array(processed)[asked[index]])] = -np.inf
        chosen_from = logits if processed is None else processed
        params, shaped = self._tensors(known, batch, positions, chosen_from)
        if shaped:
            chosen_from = self._with_shaped(chosen_from, shaped)
        token_ids = as_array(self._ops.sample(chosen_from, params))
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if raw is not None:
            chosen = np.maximum(token_ids[asked], 0)  # entries at NO_TOKEN are not used
            found = token_logprobs(raw, chosen, batch.sampling.num_logprobs[rows[asked]].tolist())
            for index, entry in zip(asked.tolist(), found, strict=True):
                logprobs[index] = entry
        return Sampled(token_ids, logprobs, _next_states(batch, rows, shaped, token_ids) if shaped else {})

    def _remembered(self, batch: InputBatch, rows: Int64, vocab_size: int) -> _Known:
        """Return what is known of these rows; collect it anew if they or their requests differ from the last step's."""
        known = self._known
        if known is None or not known.holds_for(batch, rows, vocab_size):
            asked = np.flatnonzero(batch.sampling.num_logprobs[rows] >= 0)
            known = self._known = _Known(batch, rows, batch.sampling.version, vocab_size, asked)
        return known

    def _tensors(
        self, known: _Known, batch: InputBatch, positions: Positions, logits: Tensor
    ) -> tuple[SamplingTensors, dict[int, Float32]]:
        """Return `sampling_tensors`, from the last step if they are still valid, and `shaped_rows`."""
        if known.params is None:
            shaped = shaped_rows(logits, batch, positions)
            made = sampling_tensors(batch, positions, logits.shape[1], self._ops, shaped)
            if all(batch.sampling.adjustments[row] is None for row in positions.rows.tolist()):
                known.params = made
            return made, shaped
        if known.params.noise_key is not None:
            known.params = replace(known.params, noise_key=self._ops.tensor(_noise_key(batch, positions)))
        return known.params, {}

    def _with_shaped(self, logits: Tensor, shaped: dict[int, Float32]) -> Tensor:
        """Return a copy of logits [M, V] in which shaped rows replace the original ones."""
        found = as_array(logits).copy()
        for index, row in shaped.items():
            found[index] = row
        return self._ops.tensor(found)


def shaped_rows(logits: Tensor, batch: InputBatch, positions: Positions) -> dict[int, Float32]:
    """Return the shaped logits [V] of the rows that need shaping, by index in [M]. Changes nothing."""
    found: dict[int, Float32] = {}
    for index, (row, offset) in positions:
        item = batch.sampling.adjustments[row]
        history = batch.history(row, offset)
        if item is not None and item.shapes(history):
            num_outputs = batch.num_outputs(row) + offset
            seed, choice = batch.sampling.noise_key[row].tolist()
            draw = Draw((seed, choice, num_outputs), batch.sampling.sampler_state[row])
            item = item.after(history[len(history) - offset :])
            found[index] = item.shape(as_array(logits)[index], history, num_outputs, draw)
    return found


def _next_states(
    batch: InputBatch, rows: Int64, shaped: dict[int, Float32], token_ids: Array
) -> dict[int, SamplerState]:
    """Return the next state, by index, of the shaped rows that have one and drew a token."""
    found: dict[int, SamplerState] = {}
    for index, logits in shaped.items():
        row, token_id = int(rows[index]), int(token_ids[index])
        state, item = batch.sampling.sampler_state[row], batch.sampling.adjustments[row]
        if state is not None and item is not None and token_id != NO_TOKEN:
            found[index] = next_state(logits, token_id, item.params, state)
    return found


def top_ids(logprobs: Array, count: int) -> Int64:
    """Return the ids of the `count` greatest logprobs per row [M, V]: [M, count] int64, best first, then lowest id."""
    ids = np.empty((len(logprobs), count), dtype=np.int64)
    for row, values in enumerate(logprobs):
        least = np.partition(values, -count)[-count]
        found = np.flatnonzero(values >= least)  # more than `count` on a tie
        ids[row] = found[np.argsort(-values[found], kind="stable")[:count]]
    return ids


def token_logprobs(logprobs: Array, token_ids: Int64, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return one entry per row of logprobs [M, V]: for the row's token in token_ids [M] int64 and its num_top best."""
    columns = token_ids[:, None]
    own = np.take_along_axis(logprobs, columns, axis=-1)
    ranks = ((logprobs > own).sum(axis=-1) + 1).tolist()
    most = min(max(num_top, default=0), logprobs.shape[1])
    if most:
        columns = np.concatenate([columns, top_ids(logprobs, most)], axis=-1)
    values = np.take_along_axis(logprobs, columns, axis=-1).tolist()
    rows = zip(columns.tolist(), values, ranks, num_top, strict=True)
    return [TokenLogprobs(ids[: top + 1], found[: top + 1], rank) for ids, found, rank, top in rows]


def sampling_tensors(
    batch: InputBatch, positions: Positions, vocab_size: int, ops: Ops, shaped: Collection[int] = ()
) -> SamplingTensors:
    """Collect the parameters for logits [M, vocab_size]. A parameter that no row needs is None.

    shaped: indices of rows whose logits are shaped already, so that only the draw remains.
    """
    own, rows = batch.sampling, positions.rows
    temperature = own.temperature[rows]
    top_k, top_p, min_p = own.top_k[rows], own.top_p[rows], own.min_p[rows]
    if shaped:
        done = list(shaped)
        temperature[done] = temperature[done] > 0
        top_k[done], top_p[done], min_p[done] = 0, 1.0, 0.0
    limited = (top_k > 0) & (top_k < vocab_size)
    tensor = ops.tensor
    return SamplingTensors(
        temperature=tensor(temperature),
        top_k=tensor(np.where(limited, top_k, vocab_size)) if limited.any() else None,
        top_p=tensor(top_p) if (top_p < 1.0).any() else None,
        min_p=tensor(min_p) if (min_p > 0.0).any() else None,
        noise_key=tensor(_noise_key(batch, positions)) if temperature.any() else None,
        **_adjustments(batch, positions, vocab_size, ops, shaped),
    )


def _adjustments(
    batch: InputBatch, positions: Positions, vocab_size: int, ops: Ops, shaped: Collection[int]
) -> dict[str, Any]:
    """Return those of masked, bias, repetition and counts of SamplingTensors that any row's LogitAdjustments need."""
    rows = positions.rows
    adjusted: list[tuple[int, int, int, LogitAdjustments]] = [
        (index, row, offset, item)
        for index, (row, offset) in positions
        if (item := batch.sampling.adjustments[row]) is not None and index not in shaped
    ]
    if not adjusted:
        return {}
    repetition, frequency, presence = np.ones(len(rows), np.float32), *np.zeros((2, len(rows)), np.float32)
    masked, bias, seen, counts = list[_Part](), list[_Part](), list[_Part](), list[_Part]()
    for index, row, offset, known in adjusted:
        history = batch.history(row, offset)
        item = known.after(history[len(history) - offset :])
        masked += [(index, ids, NO_VALUES) for ids in item.masked_ids(history, batch.num_outputs(row) + offset)]
        if (added := item.bias(history)) is not None:
            bias.append((index, *added))
        if item.seen is not None:
            repetition[index] = item.params.repetition_penalty
            seen.append((index, item.seen.ids, NO_VALUES))
        if item.generated is not None:
            frequency[index], presence[index] = item.params.frequency_penalty, item.params.presence_penalty
            counts.append((index, item.generated.ids, item.generated.counts))
    found: dict[str, Any] = {}
    if pairs := _pairs(masked, vocab_size, ops):
        found["masked"] = pairs[0]
    if pairs := _pairs(bias, vocab_size, ops):
        found["bias"] = pairs
    if pairs := _pairs(seen, vocab_size, ops):
        found["repetition"] = ops.tensor(repetition), pairs[0]
    if pairs := _pairs(counts, vocab_size, ops):
        found["counts"] = ops.tensor(frequency), ops.tensor(presence), *pairs
    return found


def _pairs(parts: list[_Part], vocab_size: int, ops: Ops) -> tuple[Tensor, Tensor] | None:
    """Return all (row, id) pairs [P, 2] int64 and their values, [P] float32 or [0] without; None if there are no pairs.

    Ids beyond the vocabulary are left out, because they have no logit.
    """
    if not parts:
        return None
    rows, ids, values = zip(*parts, strict=True)
    pairs = np.stack([np.repeat(rows, [len(part) for part in ids]), np.concatenate(ids)], axis=1)
    numbers, inside = np.concatenate(values), pairs[:, 1] < vocab_size
    if not inside.all():
        pairs, numbers = pairs[inside], numbers[inside] if len(numbers) else numbers
    return (ops.tensor(pairs), ops.tensor(numbers)) if len(pairs) else None


def _noise_key(batch: InputBatch, positions: Positions) -> Int64:
    """Return [M, 3] int64: seed, choice, and the number of outputs so far, which is the position of the next output."""
    rows = positions.rows
    num_outputs = batch.num_tokens[rows] - batch.num_prompt_tokens[rows] + positions.offsets
    return np.concatenate([batch.sampling.noise_key[rows], num_outputs[:, None]], axis=1)
