"""Carries out users' logits processors (penstock/plugins/logits_processors.py) on the rows that ask for some."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.ops import Ops
from penstock.plugins.logits_processors import PROCESSORS, takes_ids
from penstock.runner.input_batch import InputBatch, Int64


def process(logits: Tensor, batch: InputBatch, rows: Int64, ops: Ops) -> tuple[Tensor, dict[int, str]]:
    """logits [M, V] float32 of rows [M] -> the same, or a copy where a row asks; and index -> error.

    A row with an error keeps its logits. One function's mistake costs the requests that named it, and no other.
    """
    asking = [index for index, row in enumerate(rows.tolist()) if batch.custom[row]]
    if not asking:
        return logits, {}
    processed, errors = logits.clone(), {}
    for index in asking:
        row = int(rows[index])
        found = _process_row(logits[index : index + 1], batch.custom[row], batch.history(row).tolist())
        if isinstance(found, str):
            errors[index] = found
        elif not bool(ops.finite_rows(found)[0]):
            errors[index] = f"logits_processors: {', '.join(batch.custom[row])}: NaN, +inf, or nothing to choose"
        else:
            processed[index : index + 1] = found
    return processed, errors


def _process_row(logits: Tensor, wanted: dict[str, Any], token_ids: Sequence[int]) -> Tensor | str:
    """logits [1, V] through its functions, in order; or what went wrong. Each gets a tensor of its own."""
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
