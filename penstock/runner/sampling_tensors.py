"""From rows of the InputBatch to SamplingTensors, the form in which a kernel reads sampling parameters.

What no row of a step needs becomes None, so that its pass over the logits is skipped. Rows without RowProcessors cost
a few indexed reads and no Python of their own.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.sampling import SamplingTensors
from penstock.runner.input_batch import InputBatch, Int32, Int64
from penstock.runner.logit_adjustments import FloatArray, IntArray, RowProcessors


def on_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor of that device; on the CPU they share memory."""
    return torch.from_numpy(array).to(device)


class PairList:
    """Collects (row, id) pairs, each with a value where values are given."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._ids: list[IntArray] = []
        self._values: list[FloatArray] = []

    def add(self, row: int, ids: IntArray, values: FloatArray | None = None) -> None:
        """Take ids [P] for a row, and their values [P]; the arrays must not change before `collect`."""
        self._rows.append(row)
        self._ids.append(ids)
        if values is not None:
            self._values.append(values)

    def collect(self, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """All pairs [P, 2] int64 and their values [P] float32 (or none at all), copied; None where P is 0.

        Ids that the vocabulary does not have are left out: no logit is theirs.
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


class StepProcessors:
    """The RowProcessors of the rows of one step, put together.

    Attributes:
        repetition, frequency, presence: penalties [M] float32; 1, 0 and 0 are off.
        masked, bias, seen, counts: the pairs that SamplingTensors describes.
    """

    def __init__(self, num_rows: int) -> None:
        self.repetition: FloatArray = np.ones(num_rows, dtype=np.float32)
        self.frequency: FloatArray = np.zeros(num_rows, dtype=np.float32)
        self.presence: FloatArray = np.zeros(num_rows, dtype=np.float32)
        self.masked = PairList()
        self.bias = PairList()
        self.seen = PairList()
        self.counts = PairList()

    def add(self, index: int, processors: RowProcessors, history: Int32, num_outputs: int) -> None:
        """Take in row `index` of the step, with its tokens so far [num_tokens] int32."""
        for ids in processors.masked_ids(history, num_outputs):
            self.masked.add(index, ids)
        if processors.bias is not None:
            self.bias.add(index, *processors.bias)
        if processors.seen is not None:
            self.repetition[index] = processors.params.repetition_penalty
            self.seen.add(index, processors.seen.ids)
        if processors.generated is not None:
            self.frequency[index] = processors.params.frequency_penalty
            self.presence[index] = processors.params.presence_penalty
            self.counts.add(index, processors.generated.ids, processors.generated.counts)

    def collect(self, vocab_size: int, device: torch.device) -> list[tuple[Tensor, Tensor] | None]:
        """Masked, bias, seen and counts, as PairList.collect has them."""
        return [pairs.collect(vocab_size, device) for pairs in (self.masked, self.bias, self.seen, self.counts)]


class SamplingCache:
    """`sampling_tensors`, made anew only when the rows or their requests change. Rows with processors are never kept:
    what these ask for changes with every token."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._kept: SamplingTensors | None = None

    def tensors(self, batch: InputBatch, rows: Int64, vocab_size: int, device: torch.device) -> SamplingTensors:
        key = (batch, batch.version, rows.tobytes(), vocab_size, device)
        if self._kept is None or key != self._key:
            made = sampling_tensors(batch, rows, vocab_size, device)
            simple = all(batch.processors[row] is None for row in rows.tolist())
            self._key, self._kept = key, made if simple else None
            return made
        if self._kept.noise_key is not None:
            self._kept = replace(self._kept, noise_key=on_device(_noise_key(batch, rows), device))
        return self._kept


def sampling_tensors(batch: InputBatch, rows: Int64, vocab_size: int, device: torch.device) -> SamplingTensors:
    """The parameters of `rows` [M] for logits [M, vocab_size] of that device; what no row needs is None."""
    temperature = batch.temperature[rows]
    top_k, top_p, min_p = batch.top_k[rows], batch.top_p[rows], batch.min_p[rows]
    limited = (top_k > 0) & (top_k < vocab_size)
    step = _step_processors(batch, rows)
    masked, bias, seen, counts = (None,) * 4 if step is None else step.collect(vocab_size, device)
    moved = partial(on_device, device=device)
    return SamplingTensors(
        temperature=moved(temperature),
        top_k=moved(np.where(limited, top_k, vocab_size)) if limited.any() else None,
        top_p=moved(top_p) if (top_p < 1.0).any() else None,
        min_p=moved(min_p) if (min_p > 0.0).any() else None,
        noise_key=moved(_noise_key(batch, rows)) if temperature.any() else None,
        masked=None if masked is None else masked[0],
        bias=bias,
        repetition=None if step is None or seen is None else (moved(step.repetition), seen[0]),
        counts=None if step is None or counts is None else (moved(step.frequency), moved(step.presence), *counts),
    )


def _step_processors(batch: InputBatch, rows: Int64) -> StepProcessors | None:
    """None where no row has any, which is usual."""
    asking = [
        (index, row, processors)
        for index, row in enumerate(rows.tolist())
        if (processors := batch.processors[row]) is not None
    ]
    if not asking:
        return None
    step = StepProcessors(len(rows))
    for index, row, processors in asking:
        step.add(index, processors, batch.history(row), batch.num_outputs(row))
    return step


def _noise_key(batch: InputBatch, rows: Int64) -> Int64:
    """[M, 3] int64: seed, choice, and the number of outputs so far, which is the position of the next one."""
    num_outputs = batch.num_tokens[rows] - batch.num_prompt_tokens[rows]
    return np.concatenate([batch.noise_key[rows], num_outputs[:, None]], axis=1)
