"""Custom logits processors (plugins/logits_processors.py), applied to the rows of a step whose requests name any.

Every call of a processor is limited in time and gets copies. Whatever it does wrong ends its own request only.
"""

from copy import deepcopy
from typing import Any

from penstock.kernels.ops import Ops
from penstock.kernels.tensors import Array, Tensor, as_array, as_torch
from penstock.plugins.logits_processors import PROCESSORS, takes_ids
from penstock.plugins.time_limit import TimeLimitError, call_limited
from penstock.runner.input_batch import InputBatch, Positions

PROCESSOR_LIMIT_S = 2.0  # for one call of a custom logits processor; every request waits meanwhile


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
