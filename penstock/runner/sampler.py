"""Sampler: from the logits of a step to one token per row, and the log-probabilities that were asked for.

    custom processors -> forms (structured.py) -> rows that the kernels cannot adjust are warped (logits.py) -> draw

Rows that are not finite, or in which no token may be chosen, get an error; the others are sampled all the same.
Log-probabilities are of the raw distribution: they are taken before all of this. The backend does the arithmetic
(`ops.log_softmax`, `ops.sample`); this module collects its parameters and ranks tokens. A parameter that no row of a
step needs is None in SamplingTensors, so that its pass over the logits is skipped. Rows without LogitAdjustments cost a
few indexed reads and no Python per row.

Order: higher log-probability first, the lower id first on a tie. Rank: 1 + the number of tokens with a strictly
greater log-probability, so tied tokens share a rank.
"""

from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.interface.plugins import PROCESSORS, TimeLimitError, call_limited, takes_ids
from penstock.interface.step import SamplerState, TokenLogprobs
from penstock.kernels.ops import Ops
from penstock.kernels.sampling import NO_TOKEN, SamplingTensors, adjust
from penstock.kernels.tensors import Array, Bools, Float32, Int64, Tensor, as_array, as_torch
from penstock.runner.input_batch import InputBatch, Positions
from penstock.runner.logits import AdjustedRow, Draw, adjusted_pairs, next_state
from penstock.runner.structured import StructuredRows

NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
ALL_MASKED = "no token may be chosen: min_tokens, bad words and other masks leave none that the model allows"
PROCESSOR_LIMIT_S = 2.0  # for one call of a custom logits processor; every request waits meanwhile


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
class _Cached:
    """State that stays the same from step to step as long as the rows and their requests do.

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
        """Tell whether these are the same rows, with the same requests."""
        if self.batch is not batch or self.version != batch.sampling.version or self.vocab_size != vocab_size:
            return False
        return self.rows is rows or np.array_equal(self.rows, rows)


class Sampler:
    """Chooses tokens with the arithmetic of one backend."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._cached: _Cached | None = None  # of the last step

    def choose(
        self, logits: Tensor, batch: InputBatch, positions: Positions, structured: StructuredRows, failed: Bools | None
    ) -> tuple[Sampled, dict[int, str]]:
        """Sample the rows of logits [M, V] that have no error. Also return the error messages of rows that fail here.

        failed: [M], rows whose sequence has an error already; None if no row has.
        """
        assert logits.shape[0] == len(positions.rows), "one row of logits per position"
        healthy = as_array(self._ops.finite_rows(logits)).astype(bool)
        usable = healthy if failed is None else healthy & ~failed
        if np.count_nonzero(usable) == len(usable):
            return self._choose_healthy(logits, batch, positions, structured)
        errors, kept = dict.fromkeys(np.flatnonzero(~healthy).tolist(), NOT_FINITE), np.flatnonzero(usable)
        found = Sampled(np.full(len(usable), NO_TOKEN, dtype=np.int64), [None] * len(usable))
        if len(kept):
            some = logits[self._ops.tensor(kept)]
            sampled, wrong = self._choose_healthy(some, batch, positions.at(kept), structured)
            found.token_ids[kept] = sampled.token_ids
            for index, entry in zip(kept.tolist(), sampled.logprobs, strict=True):
                found.logprobs[index] = entry
            found.sampler_state.update((int(kept[index]), state) for index, state in sampled.sampler_state.items())
            errors |= {int(kept[index]): error for index, error in wrong.items()}
        return found, errors

    def _choose_healthy(
        self, logits: Tensor, batch: InputBatch, positions: Positions, structured: StructuredRows
    ) -> tuple[Sampled, dict[int, str]]:
        """Do the work of `choose` for logits whose rows are all finite."""
        processed, wrong, unfit = logits, dict[int, str](), dict[int, str]()
        if batch.sampling.custom_processors:
            processed, wrong = apply_custom_processors(processed, batch, positions, self._ops)
        if structured.by_row:
            processed, unfit = structured.apply(processed, positions)
        sampled = self.sample(logits, batch, positions, processed)
        masked = sampled.token_ids == NO_TOKEN
        if unfit or wrong or np.count_nonzero(masked):
            return sampled, dict.fromkeys(np.flatnonzero(masked).tolist(), ALL_MASKED) | unfit | wrong
        return sampled, {}

    def sample(
        self, logits: Tensor, batch: InputBatch, positions: Positions, processed: Tensor | None = None
    ) -> Sampled:
        """Sample logits [M, V] float32, in which no row has a NaN or only -inf. Changes neither argument.

        processed: the logits to sample from, if custom processors or forms have changed them.
        """
        rows = positions.rows
        cached = self._cached_for(batch, rows, logits.shape[1])
        asked, raw = cached.asked, None
        if asked.size:
            some = logits if len(asked) == len(rows) else logits[self._ops.tensor(asked)]
            raw = as_array(self._ops.log_softmax(some))
            if processed is not None:
                searches = np.flatnonzero(batch.sampling.searches[rows[asked]])
                for index in searches.tolist():
                    raw[index, np.isneginf(as_array(processed)[asked[index]])] = -np.inf
        chosen_from = logits if processed is None else processed
        params, warped = self._tensors(cached, batch, positions, chosen_from)
        if warped:
            replaced = as_array(chosen_from).copy()
            for index, row in warped.items():
                replaced[index] = row
            chosen_from = self._ops.tensor(replaced)
        token_ids = as_array(self._ops.sample(chosen_from, params))
        assert token_ids.shape == rows.shape, "one token per row"
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if raw is not None:
            chosen = np.maximum(token_ids[asked], 0)  # entries at NO_TOKEN are not used
            found = token_logprobs(raw, chosen, batch.sampling.num_logprobs[rows[asked]].tolist())
            for index, entry in zip(asked.tolist(), found, strict=True):
                logprobs[index] = entry
        return Sampled(token_ids, logprobs, _next_states(batch, rows, warped, token_ids) if warped else {})

    def _cached_for(self, batch: InputBatch, rows: Int64, vocab_size: int) -> _Cached:
        """Look up what is known of these rows; collect it anew if they or their requests have changed."""
        cached = self._cached
        if cached is None or not cached.holds_for(batch, rows, vocab_size):
            asked = np.flatnonzero(batch.sampling.num_logprobs[rows] >= 0)
            cached = self._cached = _Cached(batch, rows, batch.sampling.version, vocab_size, asked)
        return cached

    def _tensors(
        self, cached: _Cached, batch: InputBatch, positions: Positions, logits: Tensor
    ) -> tuple[SamplingTensors, dict[int, Float32]]:
        """Make `sampling_tensors`, or take those of the last step if they are still valid, and `warped_rows`."""
        if cached.params is None:
            adjusted = adjusted_rows(batch, positions)
            warped = warped_rows(logits, batch, positions, adjusted)
            params = sampling_tensors(batch, positions, logits.shape[1], self._ops, adjusted, warped)
            if not adjusted:
                cached.params = params
            return params, warped
        if cached.params.noise_key is not None:
            cached.params = replace(cached.params, noise_key=self._ops.tensor(_noise_key(batch, positions)))
        return cached.params, {}


# --- the parameters of the kernels -----------------------------------------------------------------------------------


def adjusted_rows(batch: InputBatch, positions: Positions) -> list[AdjustedRow]:
    found = []
    for index, (row, offset) in positions:
        item = batch.sampling.adjustments[row]
        if item is not None:
            history = batch.history(row, offset)
            num_outputs = batch.num_outputs(row) + offset
            found.append(AdjustedRow(index, item.after(history[len(history) - offset :]), history, num_outputs))
    return found


def warped_rows(
    logits: Tensor, batch: InputBatch, positions: Positions, adjusted: Sequence[AdjustedRow]
) -> dict[int, Float32]:
    """Warp the logits [V] of the rows that the kernels cannot adjust, ready for the draw, by index in [M]. Changes
    nothing."""
    rows = [row for row in adjusted if row.item.warps(row.history)]
    if not rows:
        return {}
    some = as_array(logits)[[row.place for row in rows]]  # a copy
    numbered = [row._replace(place=number) for number, row in enumerate(rows)]
    adjust(some, SamplingTensors(np.zeros(len(rows), np.float32), **adjusted_pairs(numbered, *some.shape)))
    found: dict[int, Float32] = {}
    for values, (place, item, history, num_outputs) in zip(some, rows, strict=True):
        row = positions.rows[place]
        seed, choice = batch.sampling.noise_key[row].tolist()
        draw = Draw((seed, choice, num_outputs), batch.sampling.sampler_state[row])
        found[place] = item.warp(values, history, num_outputs, draw)
    return found


def _next_states(
    batch: InputBatch, rows: Int64, warped: dict[int, Float32], token_ids: Array
) -> dict[int, SamplerState]:
    """Compute the next state, by index, of the warped rows that have one and drew a token."""
    found: dict[int, SamplerState] = {}
    for index, logits in warped.items():
        row, token_id = int(rows[index]), int(token_ids[index])
        state, item = batch.sampling.sampler_state[row], batch.sampling.adjustments[row]
        if state is not None and item is not None and token_id != NO_TOKEN:
            found[index] = next_state(logits, token_id, item.params, state)
    return found


def sampling_tensors(
    batch: InputBatch,
    positions: Positions,
    vocab_size: int,
    ops: Ops,
    adjusted: Sequence[AdjustedRow],
    warped: Collection[int] = (),
) -> SamplingTensors:
    """Collect the parameters for logits [M, vocab_size]. A parameter that no row needs is None.

    warped: indices of rows whose logits are warped already, so that only the draw remains.
    """
    own, rows = batch.sampling, positions.rows
    temperature = own.temperature[rows]
    top_k, top_p, min_p = own.top_k[rows], own.top_p[rows], own.min_p[rows]
    if warped:
        done = list(warped)
        temperature[done] = temperature[done] > 0
        top_k[done], top_p[done], min_p[done] = 0, 1.0, 0.0
    left = [row for row in adjusted if row.place not in warped]
    pairs = adjusted_pairs(left, len(rows), vocab_size) if left else {}
    limited = (top_k > 0) & (top_k < vocab_size)
    tensor = ops.tensor
    return SamplingTensors(
        temperature=tensor(temperature),
        top_k=tensor(np.where(limited, top_k, vocab_size)) if limited.any() else None,
        top_p=tensor(top_p) if (top_p < 1.0).any() else None,
        min_p=tensor(min_p) if (min_p > 0.0).any() else None,
        noise_key=tensor(_noise_key(batch, positions)) if temperature.any() else None,
        **{name: tuple(map(tensor, item)) if isinstance(item, tuple) else tensor(item) for name, item in pairs.items()},
    )


def _noise_key(batch: InputBatch, positions: Positions) -> Int64:
    """Pack [M, 3] int64: seed, choice, and the number of outputs so far, which is the position of the next output."""
    rows = positions.rows
    num_outputs = batch.num_tokens[rows] - batch.num_prompt_tokens[rows] + positions.offsets
    return np.concatenate([batch.sampling.noise_key[rows], num_outputs[:, None]], axis=1)


# --- log-probabilities -----------------------------------------------------------------------------------------------


def top_ids(logprobs: Array, count: int) -> Int64:
    """Select the ids of the `count` greatest logprobs per row [M, V]: [M, count] int64, best first, then lowest id."""
    ids = np.empty((len(logprobs), count), dtype=np.int64)
    for row, values in enumerate(logprobs):
        least = np.partition(values, -count)[-count]
        found = np.flatnonzero(values >= least)  # more than `count` on a tie
        ids[row] = found[np.argsort(-values[found], kind="stable")[:count]]
    return ids


def token_logprobs(logprobs: Array, token_ids: Int64, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Make one entry per row of logprobs [M, V]: for the row's token in token_ids [M] int64 and its num_top best."""
    columns = token_ids[:, None]
    own = np.take_along_axis(logprobs, columns, axis=-1)
    ranks = ((logprobs > own).sum(axis=-1) + 1).tolist()
    most = min(max(num_top, default=0), logprobs.shape[1])
    if most:
        columns = np.concatenate([columns, top_ids(logprobs, most)], axis=-1)
    values = np.take_along_axis(logprobs, columns, axis=-1).tolist()
    rows = zip(columns.tolist(), values, ranks, num_top, strict=True)
    return [TokenLogprobs(ids[: top + 1], found[: top + 1], rank) for ids, found, rank, top in rows]


# --- custom logits processors (interface/plugins.py) -----------------------------------------------------------------
# Every call of one is limited in time and gets copies. Whatever it does wrong ends its own request only.


def apply_custom_processors(
    logits: Tensor, batch: InputBatch, positions: Positions, ops: Ops
) -> tuple[Tensor, dict[int, str]]:
    """Run custom logits processors on the rows whose requests name any.

    Returns processed logits [M, V] float32, a copy if any row names a processor, and the error messages of the rows
    that failed, by index. These rows keep their logits, so that a faulty function fails only the requests that named
    it.
    """
    if not batch.sampling.custom_processors:
        return logits, {}
    rows, offsets = positions.rows.tolist(), positions.offsets.tolist()
    asked = [index for index, row in enumerate(rows) if row in batch.sampling.custom_processors]
    if not asked:
        return logits, {}
    raw, errors = as_array(logits), {}
    processed = raw.copy()
    for index in asked:
        row = int(rows[index])
        wanted = batch.sampling.custom_processors[row]
        found = _process_row(raw[index : index + 1], wanted, batch.history(row, offsets[index]).tolist())
        if isinstance(found, str):
            errors[index] = found
        elif not bool(ops.finite_rows(ops.tensor(found))[0]):
            errors[index] = f"logits_processors: {', '.join(wanted)}: returned NaN or +inf, or left no token to choose"
        else:
            processed[index : index + 1] = found
    return ops.tensor(processed), errors


def _process_row(logits: Array, wanted: dict[str, Any], token_ids: list[int]) -> Array | str:
    """Apply the named functions to logits [1, V], in order. Return the result, or an error message.

    Every function gets its own torch.Tensor and lists, so that it cannot change what other functions see.
    """
    for name, args in wanted.items():
        function = PROCESSORS[name]
        more = (list(token_ids),) if takes_ids(function) else ()
        try:
            found = call_limited(function, as_torch(logits.copy()), deepcopy(args), *more, seconds=PROCESSOR_LIMIT_S)
        except KeyboardInterrupt:
            raise
        except TimeLimitError:
            return f"logits_processors: {name}: it took longer than {PROCESSOR_LIMIT_S:g} s for one token"
        except BaseException as error:  # sys.exit() in a user's function must not end the engine either
            text = " ".join(str(error).split())
            return f"logits_processors: {name}: {type(error).__name__}: {text}"
        wrong = _wrong_result(found, logits.shape)
        if wrong is not None:
            return f"logits_processors: {name}: returned {wrong}; it must be a tensor {list(logits.shape)} of floats"
        logits = as_array(found.detach().to("cpu").float().contiguous())
    return logits


def _wrong_result(found: Any, shape: tuple[int, ...]) -> str | None:
    """Describe what a processor returned instead of a float tensor of this shape; None if it returned one."""
    import torch

    if not isinstance(found, torch.Tensor):
        return type(found).__name__
    if tuple(found.shape) != tuple(shape):
        return str(list(found.shape))
    return None if found.is_floating_point() and found.layout == torch.strided else str(found.dtype)
