"""Runs custom logits processors (penstock/plugins/logits_processors.py) on the rows whose requests name some."""

from typing import Any

import torch
from torch import Tensor

from penstock.kernels.ops import Ops
from penstock.plugins.logits_processors import PROCESSORS, takes_ids
from penstock.runner.input_batch import InputBatch, Int64


def apply_custom_processors(logits: Tensor, batch: InputBatch, rows: Int64, ops: Ops) -> tuple[Tensor, dict[int, str]]:
    """Return processed logits [M, V] float32 of `rows` [M], and an error message by index for rows that failed.

    The logits are a copy if any row names a processor. A row with an error keeps its logits, so that one function's
    mistake fails only the requests that named it.
    """
    asking = [index for index, row in enumerate(rows.tolist()) if batch.custom_processors[row]]
    if not asking:
        return logits, {}
    processed, errors = logits.clone(), {}
    for index in asking:
        row = int(rows[index])
        wanted = batch.custom_processors[row]
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
