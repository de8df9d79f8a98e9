"""Trace: the inputs and outputs of a model's modules during one pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a module: its name, and copies of the float tensors among its arguments and results, in order."""

    name: str
    inputs: Tensors
    outputs: Tensors


@dataclass(slots=True)
class Trace:
    """The calls of one pass, in the order in which they ended."""

    calls: list[Call] = field(default_factory=list)

    def of(self, name: str) -> Call | None:
        """Return the last call of the module of that name."""
        return next((call for call in reversed(self.calls) if call.name == name), None)


@contextmanager
def watching(model: nn.Module, follow: Trace | None = None) -> Iterator[Trace]:
    """Record every call of every module of the model.

    Args:
        follow: a trace of a model with the same modules. After a call is recorded, its result is replaced by the one
            in that trace, so each module computes from the other model's values and no difference is carried on.
    """
    trace = Trace()
    handles: list[Any] = []
    for name, module in model.named_modules():
        before, after = _hooks(trace, name, follow)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def _hooks(trace: Trace, name: str, follow: Trace | None) -> tuple[Callable[..., None], Callable[..., Any]]:
    """Return the hooks of one module. Inputs are copied before the call: a layer may write into them."""
    pending: list[Tensors] = []

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        pending.append(float_tensors((args, tuple(kwargs.values()))))

    def after(module: nn.Module, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        trace.calls.append(Call(name, pending.pop(), float_tensors(result)))
        return replaced(result, name, follow)

    return before, after


def replaced(result: Any, name: str, follow: Trace | None) -> Any:
    """Return a result, tensor or tuple, with the values that the module of that name returned in another pass."""
    call = None if follow is None else follow.of(name)
    if call is None or not call.outputs:
        return result
    others = iter(call.outputs)
    several = result if isinstance(result, tuple) else (result,)
    values = tuple(next(others).to(own.dtype, copy=True) if isinstance(own, Tensor) else own for own in several)
    return values if isinstance(result, tuple) else values[0]


def float_tensors(value: Any) -> Tensors:
    """Return float32 copies of the float tensors in a value, also in nested tuples and lists."""
    if isinstance(value, Tensor):
        return (value.detach().float().clone(),) if value.is_floating_point() else ()
    if isinstance(value, tuple | list):
        return tuple(tensor for item in value for tensor in float_tensors(item))
    return ()
