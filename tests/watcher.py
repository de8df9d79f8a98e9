"""Watcher: which operations torch carries out, and which of them compute with floats; WatchedArray: the same of numpy.

Every operation that may happen during a step is on a list: it moves values, compares them, or counts in integers. One
that is not on the list is forbidden, so a new one has to be looked at.
"""

from typing import Any, ClassVar

import numpy as np
import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MOVES = {
    "aten::alias",
    "aten::cat",
    "aten::clone",
    "aten::copy_",
    "aten::detach",
    "aten::empty.memory_format",
    "aten::flatten.using_ints",
    "aten::gather",
    "aten::index.Tensor",
    "aten::index_put_",
    "aten::is_nonzero",
    "aten::item",
    "aten::new_empty",
    "aten::lift_fresh",
    "aten::resolve_conj",
    "aten::resolve_neg",
    "aten::select.int",
    "aten::slice.Tensor",
    "aten::to.dtype_layout",
    "aten::unsqueeze",
    "aten::view",
    "aten::_local_scalar_dense",
}
COMPARISONS = {
    "aten::all",
    "aten::amax",
    "aten::amin",
    "aten::any",
    "aten::ge.Tensor",
    "aten::gt.Scalar",
    "aten::gt.Tensor",
    "aten::max",
    "aten::min",
    "aten::nonzero",
    "aten::sort",
    "aten::sort.stable",
    "aten::topk",
}
CONVERSIONS = {"aten::to.dtype_layout", "aten::copy_", "aten::cat"}  # moves only where the type stays
INTEGER = {"aten::add.Tensor", "aten::clamp", "aten::sum.dim_IntList"}  # on whole numbers and truth values only


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation, and those that are not allowed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()
        self.forbidden: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name()
        self.seen.add(name)
        counts = name in INTEGER and not any(item.is_floating_point() for item in tensors([*args, result]))
        converts = name in CONVERSIONS and len({item.dtype for item in tensors([*args, result])}) > 1
        if converts or (name not in MOVES and name not in COMPARISONS and not counts):
            self.forbidden.add(name)
        return result


def tensors(values: Any) -> list[Tensor]:
    return [item for item in values if isinstance(item, Tensor)]


EXACT = {"greater", "greater_equal", "less", "equal", "negative", "maximum", "logical_and", "isfinite"}  # of numpy


class WatchedArray(np.ndarray):  # type: ignore[type-arg]
    """An array that notes every operation on it or on its views, and those that compute with floats."""

    seen: ClassVar[set[str]] = set()
    forbidden: ClassVar[set[str]] = set()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        self.seen.add(ufunc.__name__)
        if ufunc.__name__ not in EXACT and any(np.asarray(item).dtype.kind in "fV" for item in inputs):
            self.forbidden.add(ufunc.__name__)
        plain = [np.asarray(item) if isinstance(item, WatchedArray) else item for item in inputs]
        if out is not None:
            kwargs["out"] = tuple(np.asarray(item) for item in out)
        return getattr(ufunc, method)(*plain, **kwargs)

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        if np.dtype(dtype) != self.dtype:
            self.forbidden.add("astype")
        return super().astype(dtype, *args, **kwargs)


def watch_arrays(patch: pytest.MonkeyPatch, ops: type) -> type[WatchedArray]:
    """Let a backend hand out watched arrays from now on."""
    WatchedArray.seen.clear()
    WatchedArray.forbidden.clear()
    for name in ("_new", "tensor"):
        patch.setattr(ops, name, _watched(getattr(ops, name)))
    return WatchedArray


def _watched(make: Any) -> Any:
    return lambda *args: made.view(WatchedArray) if isinstance(made := make(*args), np.ndarray) else made
