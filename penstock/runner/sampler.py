"""Sampler: one token per row of logits, and the log-probabilities that were asked for.

Log-probabilities are of the raw distribution: they are taken before masks, bias, penalties and temperature. The
arithmetic is the backend's (`ops.log_softmax`, `ops.sample`); here tokens are only compared and picked.

Order: higher log-probability first, the lower id first on a tie. Rank: 1 + the number of tokens with a strictly
greater log-probability, so tied tokens share a rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.interface.step import TokenLogprobs
from penstock.kernels.ops import Ops
from penstock.runner.input_batch import InputBatch, Int64
from penstock.runner.sampling_tensors import SamplingCache, on_device


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
        self._params = SamplingCache()

    def sample(self, logits: Tensor, batch: InputBatch, rows: Int64, processed: Tensor | None = None) -> Sampled:
        """Sample logits [M, V] float32 of `rows` [M]; no row has a NaN or is -inf throughout. Changes neither.

        processed: the logits to sample from, if custom processors have changed them.
        """
        device = self._ops.device
        asking = np.flatnonzero(batch.num_logprobs[rows] >= 0)
        raw = None
        if asking.size:
            picked = on_device(asking, device)
            raw = self._ops.log_softmax(logits if len(asking) == len(rows) else logits[picked])
        chosen_from = logits if processed is None else processed
        token_ids = self._ops.sample(chosen_from, self._params.tensors(batch, rows, logits.shape[1], device))
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if raw is not None:
            some = token_ids[picked].clamp(min=0)  # entries at NO_TOKEN are not used
            found = token_logprobs(raw, some, batch.num_logprobs[rows[asking]].tolist())
            for index, entry in zip(asking.tolist(), found, strict=True):
                logprobs[index] = entry
        return Sampled(token_ids.cpu().numpy(), logprobs)


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
