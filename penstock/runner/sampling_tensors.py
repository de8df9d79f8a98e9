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
    masked, bias, seen, counts = (_PairList() for _ in range(4))
    for index, row, item in adjusted:
        for ids in item.masked_ids(batch.history(row), batch.num_outputs(row)):
            masked.add(index, ids)
        if item.bias is not None:
            bias.add(index, *item.bias)
        if item.seen is not None:
            repetition[index] = item.params.repetition_penalty
            seen.add(index, item.seen.ids)
        if item.generated is not None:
            frequency[index], presence[index] = item.params.frequency_penalty, item.params.presence_penalty
            counts.add(index, item.generated.ids, item.generated.counts)
    found: dict[str, Any] = {}
    if pairs := masked.collect(vocab_size, device):
        found["masked"] = pairs[0]
    if pairs := bias.collect(vocab_size, device):
        found["bias"] = pairs
    if pairs := seen.collect(vocab_size, device):
        found["repetition"] = on_device(repetition, device), pairs[0]
    if pairs := counts.collect(vocab_size, device):
        found["counts"] = on_device(frequency, device), on_device(presence, device), *pairs
    return found


class _PairList:
    """Collects (row, id) pairs, each with a value where values are given."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._ids: list[IntArray] = []
        self._values: list[FloatArray] = []

    def add(self, row: int, ids: IntArray, values: FloatArray | None = None) -> None:
        """Add ids [P] of a row, and their values [P]; the arrays must not change before `collect`."""
        self._rows.append(row)
        self._ids.append(ids)
        if values is not None:
            self._values.append(values)

    def collect(self, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return copies of all pairs [P, 2] int64 and their values [P] float32 (or [0]); None if there are no pairs.

        Ids beyond the vocabulary are left out: they have no logit.
        """
        if not self._ids:
            return None
        ids = np.concatenate(self._ids)
        pairs = np.empty((len(ids), 2), dtype=np.int64)
        pairs[:, 0] = np.repeat(self._rows, [len(part) for part in self._ids])
        pairs[:, 1] = ids
        values = np.concatenate(self._values) if self._values else np.zeros(0, dtype=np.float32)
        inside = ids < vocab_size
        if not inside.all():
            pairs, values = pairs[inside], values[inside] if self._values else values
        return (on_device(pairs, device), on_device(values, device)) if len(pairs) else None


def _noise_key(batch: InputBatch, rows: Int64) -> Int64:
    """[M, 3] int64: seed, choice, and the number of outputs so far, which is the position of the next one."""
    num_outputs = batch.num_tokens[rows] - batch.num_prompt_tokens[rows]
    return np.concatenate([batch.noise_key[rows], num_outputs[:, None]], axis=1)
