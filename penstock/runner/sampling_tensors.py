"""From rows of the InputBatch to SamplingTensors, the form in which a kernel reads sampling parameters.

What no row of a step needs becomes None, so that its pass over the logits is skipped. Rows without RowProcessors cost
a few indexed reads and no Python of their own.
"""

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.sampling import SamplingTensors
from penstock.runner.input_batch import InputBatch, Int32, Int64
from penstock.runner.logits_processors import FloatArray, IntArray, RowProcessors


class PairList:
    """Collects (row, id) pairs with an optional value, dropping ids that the vocabulary does not have.

    It is false while it is empty.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[IntArray] = []
        self._ids: list[IntArray] = []
        self._values: list[FloatArray] = []

    def add(self, row: int, ids: IntArray, values: FloatArray | None = None) -> None:
        """Take ids [P] for a row, and their values [P]."""
        if ids.size and int(ids.max()) >= self._vocab_size:
            inside = ids < self._vocab_size
            ids, values = ids[inside], None if values is None else values[inside]
        if ids.size:
            self._rows.append(np.full(ids.size, row, dtype=np.int64))
            self._ids.append(ids)
            self._values.extend([] if values is None else [values])

    def __bool__(self) -> bool:
        return bool(self._ids)

    def pairs(self) -> Tensor:
        """[P, 2] int64, a copy of everything added (at least one pair)."""
        return torch.from_numpy(np.stack([np.concatenate(self._rows), np.concatenate(self._ids)], axis=1))

    def values(self) -> Tensor:
        """[P] float32, a copy."""
        return torch.from_numpy(np.concatenate(self._values))


class StepProcessors:
    """The RowProcessors of the rows of one step, put together.

    Attributes:
        repetition, frequency, presence: penalties [M] float32; 1, 0 and 0 are off.
        masked, bias, seen, counts: the pairs that SamplingTensors describes.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.repetition: FloatArray = np.ones(num_rows, dtype=np.float32)
        self.frequency: FloatArray = np.zeros(num_rows, dtype=np.float32)
        self.presence: FloatArray = np.zeros(num_rows, dtype=np.float32)
        self.masked = PairList(vocab_size)
        self.bias = PairList(vocab_size)
        self.seen = PairList(vocab_size)
        self.counts = PairList(vocab_size)

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


def sampling_tensors(batch: InputBatch, rows: Int64, vocab_size: int) -> SamplingTensors:
    """The parameters of `rows` [M] for logits [M, vocab_size]; what no row needs is None."""
    temperature = batch.temperature[rows]
    top_k, top_p, min_p = batch.top_k[rows], batch.top_p[rows], batch.min_p[rows]
    limited = (top_k > 0) & (top_k < vocab_size)
    step = _step_processors(batch, rows, vocab_size)
    return SamplingTensors(
        temperature=torch.from_numpy(temperature),
        top_k=torch.from_numpy(np.where(limited, top_k, vocab_size)) if limited.any() else None,
        top_p=torch.from_numpy(top_p) if (top_p < 1.0).any() else None,
        min_p=torch.from_numpy(min_p) if (min_p > 0.0).any() else None,
        noise_key=_noise_key(batch, rows) if temperature.any() else None,
        masked=step.masked.pairs() if step.masked else None,
        bias=(step.bias.pairs(), step.bias.values()) if step.bias else None,
        repetition=(torch.from_numpy(step.repetition), step.seen.pairs()) if step.seen else None,
        counts=_counts(step) if step.counts else None,
    )


def _step_processors(batch: InputBatch, rows: Int64, vocab_size: int) -> StepProcessors:
    step = StepProcessors(len(rows), vocab_size)
    for index, row in enumerate(rows.tolist()):
        processors = batch.processors[row]
        if processors is not None:
            step.add(index, processors, batch.history(row), batch.num_outputs(row))
    return step


def _counts(step: StepProcessors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    penalties = torch.from_numpy(step.frequency), torch.from_numpy(step.presence)
    return *penalties, step.counts.pairs(), step.counts.values()


def _noise_key(batch: InputBatch, rows: Int64) -> Tensor:
    """[M, 3] int64: seed, choice, and the number of outputs so far, which is the position of the next one."""
    num_outputs = batch.num_tokens[rows] - batch.num_prompt_tokens[rows]
    return torch.from_numpy(np.concatenate([batch.noise_key[rows], num_outputs[:, None]], axis=1))
