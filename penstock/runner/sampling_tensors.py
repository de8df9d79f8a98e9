"""From rows of the InputBatch to SamplingTensors, the form in which a kernel reads sampling parameters.

What no row of a step needs becomes None, so that its pass over the logits is skipped. Rows without LogitAdjustments
cost a few indexed reads and no Python of their own.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.sampling import SamplingTensors
from penstock.runner.input_batch import InputBatch, Int64
from penstock.runner.logit_adjustments import FloatArray, IntArray

_Part = tuple[int, IntArray, FloatArray]  # a row of the step, ids [P], their values [P] or none
NO_VALUES: FloatArray = np.zeros(0, dtype=np.float32)


def on_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on a device; on the CPU they share memory."""
    return torch.from_numpy(array).to(device)


class SamplingCache:
    """`sampling_tensors`, recomputed only when the rows or their requests change. A step with adjusted rows is never
    kept: what these ask for changes with every token."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._kept: SamplingTensors | None = None

    def tensors(self, batch: InputBatch, rows: Int64, vocab_size: int, device: torch.device) -> SamplingTensors:
        """As sampling_tensors."""
        key = (batch, batch.version, rows.tobytes(), vocab_size, device)
        if self._kept is None or key != self._key:
            made = sampling_tensors(batch, rows, vocab_size, device)
            plain = all(batch.adjustments[row] is None for row in rows.tolist())
            self._key, self._kept = key, made if plain else None
            return made
        if self._kept.noise_key is not None:
            self._kept = replace(self._kept, noise_key=on_device(_noise_key(batch, rows), device))
        return self._kept


def sampling_tensors(batch: InputBatch, rows: Int64, vocab_size: int, device: torch.device) -> SamplingTensors:
    """Collect the parameters of `rows` [M] for logits [M, vocab_size] on a device; None where no row needs one."""
    temperature = batch.temperature[rows]
    top_k, top_p, min_p = batch.top_k[rows], batch.top_p[rows], batch.min_p[rows]
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
        (index, row, item) for index, row in enumerate(rows.tolist()) if (item := batch.adjustments[row]) is not None
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
    """[M, 3] int64: seed, choice, and the number of outputs so far, which is the position of the next one."""
    num_outputs = batch.num_tokens[rows] - batch.num_prompt_tokens[rows]
    return np.concatenate([batch.noise_key[rows], num_outputs[:, None]], axis=1)
