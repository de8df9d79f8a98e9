"""Trace: what went into the modules of a model during one pass, and what came out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a module.

    Attributes:
        name: the module's.
        inputs, outputs: copies of the float tensors among the arguments and results, in their order.
    """

    name: str
    inputs: Tensors
    outputs: Tensors


@dataclass(slots=True)
class Trace:
    """The calls of one pass, in the order in which they ended."""

    calls: list[Call] = field(default_factory=list)

    def of(self, name: str) -> Call | None:
        """The last call of the module of that name."""
        return next((call for call in reversed(self.calls) if call.name == name), None)


@contextmanager
def watching(model: nn.Module, follow: Trace | None = None) -> Iterator[Trace]:
    """Write down every call of every module of the model.

    follow: a pass of a model with the same modules. What a module returned there takes the place of its own result,
        once that is written down: so each module computes from what the same module computed from there, and no
        difference is carried on.
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
    """Inputs are copied before the call: a layer may write into them, and buffers are used again."""
    pending: list[Tensors] = []

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        pending.append(float_tensors((args, tuple(kwargs.values()))))

    def after(module: nn.Module, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        trace.calls.append(Call(name, pending.pop(), float_tensors(result)))
        return replaced(result, name, follow)

    return before, after


def replaced(result: Any, name: str, follow: Trace | None) -> Any:
    """A result, tensor or tuple, with the values that the module of that name returned in another pass."""
    call = None if follow is None else follow.of(name)
    if call is None or not call.outputs:
        return result
    several = result if isinstance(result, tuple) else (result,)
    values = tuple(value.to(own.dtype, copy=True) for own, value in zip(several, call.outputs, strict=True))
    return values if isinstance(result, tuple) else values[0]


def float_tensors(value: Any) -> Tensors:
    """Copies of the float tensors in a value, in float32; of nested tuples and lists too."""
    if isinstance(value, Tensor):
        return (value.detach().float().clone(),) if value.is_floating_point() else ()
    if isinstance(value, tuple | list):
        return tuple(tensor for item in value for tensor in float_tensors(item))
    return ()
