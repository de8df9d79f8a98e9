"""Sampler: one token per row of logits, and the log-probabilities that were asked for.

Log-probabilities are of the raw distribution: they are taken before masks, bias, penalties and temperature. The
arithmetic is the backend's (`ops.log_softmax`, `ops.sample`); here parameters are collected, and tokens compared and
picked. What no row of a step needs is None in SamplingTensors, so that its pass over the logits is skipped. Rows
without LogitAdjustments cost a few indexed reads and no Python of their own.

Order: higher log-probability first, the lower id first on a tie. Rank: 1 + the number of tokens with a strictly
greater log-probability, so tied tokens share a rank.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.interface.step import TokenLogprobs
from penstock.kernels.ops import Ops
from penstock.kernels.sampling import SamplingTensors
from penstock.kernels.tensors import Array, Tensor, as_array, as_torch
from penstock.plugins.logits_processors import PROCESSORS, takes_ids
from penstock.plugins.time_limit import TimeLimitError, call_limited
from penstock.runner.input_batch import InputBatch
from penstock.runner.sampling_rows import Float32, Int64

_Part = tuple[int, Int64, Float32]  # a row of the step, ids [P], their values [P] or none
NO_VALUES: Float32 = np.zeros(0, dtype=np.float32)
PROCESSOR_LIMIT_S = 2.0  # for one call of a custom logits processor, while which everybody waits


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampler's results for M rows.

    Attributes:
        token_ids: [M] int64, NO_TOKEN where nothing may be chosen.
        logprobs: [M], None for a row that does not ask for any.
    """

    token_ids: Int64
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Chooses tokens with the arithmetic of one backend."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._key: tuple[Any, ...] = ()  # of the parameters kept
        self._kept: SamplingTensors | None = None

    def sample(self, logits: Tensor, batch: InputBatch, rows: Int64, processed: Tensor | None = None) -> Sampled:
        """Sample logits [M, V] float32 of `rows` [M]; no row has a NaN or is -inf throughout. Changes neither.

        processed: the logits to sample from, if custom processors have changed them.
        """
        asked = np.flatnonzero(batch.sampling.num_logprobs[rows] >= 0)
        raw = None
        if asked.size:
            some = logits if len(asked) == len(rows) else logits[self._ops.tensor(asked)]
            raw = as_array(self._ops.log_softmax(some))
        chosen_from = logits if processed is None else processed
        token_ids = as_array(self._ops.sample(chosen_from, self._tensors(batch, rows, logits.shape[1])))
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if raw is not None:
            chosen = np.maximum(token_ids[asked], 0)  # entries at NO_TOKEN are not used
            found = token_logprobs(raw, chosen, batch.sampling.num_logprobs[rows[asked]].tolist())
            for index, entry in zip(asked.tolist(), found, strict=True):
                logprobs[index] = entry
        return Sampled(token_ids, logprobs)

    def _tensors(self, batch: InputBatch, rows: Int64, vocab_size: int) -> SamplingTensors:
        """Return `sampling_tensors`, recomputed only when the rows or their requests change.

        Those of a step with adjusted rows are never kept: they change with every token.
        """
        key = (batch, batch.sampling.version, rows.tobytes(), vocab_size)
        if self._kept is None or key != self._key:
            made = sampling_tensors(batch, rows, vocab_size, self._ops)
            plain = all(batch.sampling.adjustments[row] is None for row in rows.tolist())
            self._key, self._kept = key, made if plain else None
            return made
        if self._kept.noise_key is not None:
            self._kept = replace(self._kept, noise_key=self._ops.tensor(_noise_key(batch, rows)))
        return self._kept


def top_ids(logprobs: Array, count: int) -> Int64:
    """Return the ids of the `count` greatest of logprobs [M, V]: [M, count] int64, best first, lowest id on a tie."""
    ids = np.empty((len(logprobs), count), dtype=np.int64)
    for row, values in enumerate(logprobs):
        least = np.partition(values, -count)[-count]
        found = np.flatnonzero(values >= least)  # more than `count` on a tie
        ids[row] = found[np.argsort(-values[found], kind="stable")[:count]]
    return ids


def token_logprobs(logprobs: Array, token_ids: Int64, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return one entry per row of logprobs [M, V], for its token of token_ids [M] int64 and its num_top best."""
    columns = token_ids[:, None]
    own = np.take_along_axis(logprobs, columns, axis=-1)
    ranks = ((logprobs > own).sum(axis=-1) + 1).tolist()
    most = min(max(num_top, default=0), logprobs.shape[1])
    if most:
        columns = np.concatenate([columns, top_ids(logprobs, most)], axis=-1)
    values = np.take_along_axis(logprobs, columns, axis=-1).tolist()
    rows = zip(columns.tolist(), values, ranks, num_top, strict=True)
    return [TokenLogprobs(ids[: top + 1], found[: top + 1], rank) for ids, found, rank, top in rows]


def sampling_tensors(batch: InputBatch, rows: Int64, vocab_size: int, ops: Ops) -> SamplingTensors:
    """Collect the parameters of `rows` [M] for logits [M, vocab_size]; None where no row needs one."""
    own = batch.sampling
    temperature = own.temperature[rows]
    top_k, top_p, min_p = own.top_k[rows], own.top_p[rows], own.min_p[rows]
    limited = (top_k > 0) & (top_k < vocab_size)
    tensor = ops.tensor
    return SamplingTensors(
        temperature=tensor(temperature),
        top_k=tensor(np.where(limited, top_k, vocab_size)) if limited.any() else None,
        top_p=tensor(top_p) if (top_p < 1.0).any() else None,
        min_p=tensor(min_p) if (min_p > 0.0).any() else None,
        noise_key=tensor(_noise_key(batch, rows)) if temperature.any() else None,
        **_adjustments(batch, rows, vocab_size, ops),
    )


def _adjustments(batch: InputBatch, rows: Int64, vocab_size: int, ops: Ops) -> dict[str, Any]:
    """Return masked, bias, repetition and counts of SamplingTensors as far as a row has LogitAdjustments."""
    adjusted = [
        (index, row, item)
        for index, row in enumerate(rows.tolist())
        if (item := batch.sampling.adjustments[row]) is not None
    ]
    if not adjusted:
        return {}
    repetition, frequency, presence = np.ones(len(rows), np.float32), *np.zeros((2, len(rows)), np.float32)
    masked, bias, seen, counts = list[_Part](), list[_Part](), list[_Part](), list[_Part]()
    for index, row, item in adjusted:
        masked += [(index, ids, NO_VALUES) for ids in item.masked_ids(batch.history(row), batch.num_outputs(row))]
        if item.bias is not None:
            bias.append((index, *item.bias))
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
    """Copy all (row, id) pairs [P, 2] int64 and their values [P] float32 (or none, [0]); None if there are no pairs.

    Ids beyond the vocabulary are left out: they have no logit.
    """
    if not parts:
        return None
    rows, ids, values = zip(*parts, strict=True)
    pairs = np.stack([np.repeat(rows, [len(part) for part in ids]), np.concatenate(ids)], axis=1)
    numbers, inside = np.concatenate(values), pairs[:, 1] < vocab_size
    if not inside.all():
        pairs, numbers = pairs[inside], numbers[inside] if len(numbers) else numbers
    return (ops.tensor(pairs), ops.tensor(numbers)) if len(pairs) else None


def _noise_key(batch: InputBatch, rows: Int64) -> Int64:
    """Return [M, 3] int64: seed, choice, and the number of outputs so far, which is the position of the next one."""
    num_outputs = batch.num_tokens[rows] - batch.num_prompt_tokens[rows]
    return np.concatenate([batch.sampling.noise_key[rows], num_outputs[:, None]], axis=1)


def apply_custom_processors(logits: Tensor, batch: InputBatch, rows: Int64, ops: Ops) -> tuple[Tensor, dict[int, str]]:
    """Run custom logits processors (penstock/plugins/logits_processors.py) on the rows whose requests name some.

    Returns processed logits [M, V] float32 of `rows` [M], a copy if any row names a processor, and an error message by
    index for rows that failed. These keep their logits, so that one function's mistake fails only the requests that
    named it.
    """
    asked = [index for index, row in enumerate(rows.tolist()) if batch.sampling.custom_processors[row]]
    if not asked:
        return logits, {}
    raw, errors = as_array(logits), {}
    processed = raw.copy()
    for index in asked:
        row = int(rows[index])
        wanted = batch.sampling.custom_processors[row]
        found = _process_row(raw[index : index + 1], wanted, batch.history(row).tolist())
        if isinstance(found, str):
            errors[index] = found
        elif not bool(ops.finite_rows(ops.tensor(found))[0]):
            errors[index] = f"logits_processors: {', '.join(wanted)}: NaN, +inf, or nothing to choose"
        else:
            processed[index : index + 1] = found
    return ops.tensor(processed), errors


def _process_row(logits: Array, wanted: dict[str, Any], token_ids: list[int]) -> Array | str:
    """Apply the named functions to logits [1, V], in order; return the result, or an error message.

    Every function gets a torch.Tensor and lists of its own, so that it cannot change what others see.
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
    """Return what a processor returned in place of a tensor of this shape; None if it returned one."""
    import torch

    if not isinstance(found, torch.Tensor):
        return type(found).__name__
    if tuple(found.shape) != tuple(shape):
        return str(list(found.shape))
    return None if found.is_floating_point() and found.layout == torch.strided else str(found.dtype)
