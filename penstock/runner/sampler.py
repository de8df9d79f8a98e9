"""Sampler: one token per row of logits, and the log-probabilities that were asked for.

Log-probabilities are of the raw distribution: they are taken before masks, bias, penalties and temperature. The
arithmetic is the backend's (`ops.log_softmax`, `ops.sample`); here parameters are collected, and tokens compared and
picked. What no row of a step needs is None in SamplingTensors, so that its pass over the logits is skipped. Rows
without LogitAdjustments cost a few indexed reads and no Python of their own.

Order: higher log-probability first, the lower id first on a tie. Rank: 1 + the number of tokens with a strictly
greater log-probability, so tied tokens share a rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.interface.step import TokenLogprobs
from penstock.kernels.ops import Ops
from penstock.kernels.sampling import SamplingTensors
from penstock.plugins.logits_processors import PROCESSORS, takes_ids
from penstock.runner.input_batch import InputBatch
from penstock.runner.sampling_rows import Float32, Int64

_Part = tuple[int, Int64, Float32]  # a row of the step, ids [P], their values [P] or none
NO_VALUES: Float32 = np.zeros(0, dtype=np.float32)


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
            picked = on_device(asked, self._ops.device)
            raw = self._ops.log_softmax(logits if len(asked) == len(rows) else logits[picked])
        chosen_from = logits if processed is None else processed
        token_ids = self._ops.sample(chosen_from, self._tensors(batch, rows, logits.shape[1]))
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if raw is not None:
            some = token_ids[picked].clamp(min=0)  # entries at NO_TOKEN are not used
            found = token_logprobs(raw, some, batch.sampling.num_logprobs[rows[asked]].tolist())
            for index, entry in zip(asked.tolist(), found, strict=True):
                logprobs[index] = entry
        return Sampled(token_ids.cpu().numpy(), logprobs)

    def _tensors(self, batch: InputBatch, rows: Int64, vocab_size: int) -> SamplingTensors:
        """Return `sampling_tensors`, recomputed only when the rows or their requests change.

        Those of a step with adjusted rows are never kept: they change with every token.
        """
        device = self._ops.device
        key = (batch, batch.sampling.version, rows.tobytes(), vocab_size)
        if self._kept is None or key != self._key:
            made = sampling_tensors(batch, rows, vocab_size, device)
            plain = all(batch.sampling.adjustments[row] is None for row in rows.tolist())
            self._key, self._kept = key, made if plain else None
            return made
        if self._kept.noise_key is not None:
            self._kept = replace(self._kept, noise_key=on_device(_noise_key(batch, rows), device))
        return self._kept


def top_ids(logprobs: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` greatest of logprobs [M, V]: [M, count] int64, best first, lowest id on a tie."""
    values, ids = torch.topk(logprobs, count, dim=-1)  # its choice and order among equal values are not specified
    least = values[:, -1:]
    ids, order = ids.sort(dim=-1)
    best = values.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices
    ids = ids.gather(-1, best)
    for row in ((logprobs >= least).sum(dim=-1) > count).nonzero().flatten().tolist():
        tied = (logprobs[row] >= least[row]).nonzero().flatten()
        ids[row] = tied[logprobs[row, tied].sort(descending=True, stable=True).indices[:count]]
    return ids


def token_logprobs(logprobs: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return one entry per row of logprobs [M, V], for its token of token_ids [M] int64 and its num_top best."""
    own = logprobs.gather(-1, token_ids[:, None])
    ranks = ((logprobs > own).sum(dim=-1) + 1).tolist()
    columns = token_ids[:, None]
    most = min(max(num_top, default=0), logprobs.shape[1])
    if most:
        columns = torch.cat([columns, top_ids(logprobs, most)], dim=-1)
    values = logprobs.gather(-1, columns).tolist()
    rows = zip(columns.tolist(), values, ranks, num_top, strict=True)
    return [TokenLogprobs(ids[: top + 1], found[: top + 1], rank) for ids, found, rank, top in rows]


def sampling_tensors(batch: InputBatch, rows: Int64, vocab_size: int, device: torch.device) -> SamplingTensors:
    """Collect the parameters of `rows` [M] for logits [M, vocab_size] on a device; None where no row needs one."""
    own = batch.sampling
    temperature = own.temperature[rows]
    top_k, top_p, min_p = own.top_k[rows], own.top_p[rows], own.min_p[rows]
    limited = (top_k > 0) & (top_k < vocab_size)
    tensor = partial(on_device, device=device)
    return SamplingTensors(
        temperature=tensor(temperature),
        top_k=tensor(np.where(limited, top_k, vocab_size)) if limited.any() else None,
        top_p=tensor(top_p) if (top_p < 1.0).any() else None,
        min_p=tensor(min_p) if (min_p > 0.0).any() else None,
        noise_key=tensor(_noise_key(batch, rows)) if temperature.any() else None,
        **_adjustments(batch, rows, vocab_size, device),
    )


def _adjustments(batch: InputBatch, rows: Int64, vocab_size: int, device: torch.device) -> dict[str, Any]:
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
    if pairs := _pairs(masked, vocab_size, device):
        found["masked"] = pairs[0]
    if pairs := _pairs(bias, vocab_size, device):
        found["bias"] = pairs
    if pairs := _pairs(seen, vocab_size, device):
        found["repetition"] = on_device(repetition, device), pairs[0]
    if pairs := _pairs(counts, vocab_size, device):
        found["counts"] = on_device(frequency, device), on_device(presence, device), *pairs
    return found


def _pairs(parts: list[_Part], vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
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
    return (on_device(pairs, device), on_device(numbers, device)) if len(pairs) else None


def _noise_key(batch: InputBatch, rows: Int64) -> Int64:
    """Return [M, 3] int64: seed, choice, and the number of outputs so far, which is the position of the next one."""
    num_outputs = batch.num_tokens[rows] - batch.num_prompt_tokens[rows]
    return np.concatenate([batch.sampling.noise_key[rows], num_outputs[:, None]], axis=1)


def on_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on a device; on the CPU they share memory."""
    return torch.from_numpy(array).to(device)


def apply_custom_processors(logits: Tensor, batch: InputBatch, rows: Int64, ops: Ops) -> tuple[Tensor, dict[int, str]]:
    """Run custom logits processors (penstock/plugins/logits_processors.py) on the rows whose requests name some.

    Returns processed logits [M, V] float32 of `rows` [M], a copy if any row names a processor, and an error message by
    index for rows that failed. These keep their logits, so that one function's mistake fails only the requests that
    named it.
    """
    asked = [index for index, row in enumerate(rows.tolist()) if batch.sampling.custom_processors[row]]
    if not asked:
        return logits, {}
    processed, errors = logits.clone(), {}
    for index in asked:
        row = int(rows[index])
        wanted = batch.sampling.custom_processors[row]
        found = _process_row(logits[index : index + 1], wanted, batch.history(row).tolist())
        if isinstance(found, str):
            errors[index] = found
        elif not bool(ops.finite_rows(found)[0]):
            errors[index] = f"logits_processors: {', '.join(wanted)}: NaN, +inf, or nothing to choose"
        else:
            processed[index : index + 1] = found
    return processed, errors


def _process_row(logits: Tensor, wanted: dict[str, Any], token_ids: list[int]) -> Tensor | str:
    """Apply the named functions to logits [1, V], in order; return the result, or an error message.

    Every function gets tensors and lists of its own, so that it cannot change what others see.
    """
    for name, args in wanted.items():
        function = PROCESSORS[name]
        more = (list(token_ids),) if takes_ids(function) else ()
        try:
            found = function(logits.clone(), args, *more)
        except Exception as error:
            text = " ".join(str(error).split())
            return f"logits_processors: {name}: {type(error).__name__}: {text}"
        if not isinstance(found, Tensor) or found.shape != logits.shape:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            return f"logits_processors: {name}: returned {shape}; it must be a tensor {list(logits.shape)}"
        logits = found.to(logits.device, torch.float32).contiguous()
    return logits
