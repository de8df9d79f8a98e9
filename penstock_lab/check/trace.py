"""Trace: the inputs and outputs of a model's modules during one pass."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from penstock.layers.module import named_modules, replaced

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a module: its name, and copies of the float tensors in its arguments and results, in order."""

    name: str
    inputs: Tensors
    outputs: Tensors


class Trace(list[Call]):
    """The calls of one pass, in the order in which they ended.

    Args:
        follow: a trace of a model with the same modules. After a call is recorded, its result is replaced by that in
            the other trace, so each module computes from the other model's values and inherits no difference.
    """

    def __init__(self, follow: "Trace | None" = None) -> None:
        super().__init__()
        self._follow = follow

    def last(self, name: str) -> Call | None:
        """Return the last call of the module `name`, or None."""
        return next((call for call in reversed(self) if call.name == name), None)

    def record(self, name: str, inputs: Tensors, result: Any) -> Any:
        """Record one call. Return the result (a tensor or a tuple) with which the model continues."""
        self.append(Call(name, inputs, float_tensors(result)))
        call = None if self._follow is None else self._follow.last(name)
        if call is None or not call.outputs:
            return result
        others = iter(call.outputs)
        several = result if isinstance(result, tuple) else (result,)
        values = tuple(next(others).to(own.dtype, copy=True) if isinstance(own, Tensor) else own for own in several)
        return values if isinstance(result, tuple) else values[0]


@contextmanager
def watching(model: object, follow: Trace | None = None) -> Iterator[Trace]:
    """Record every call of every module of the model. follow: as in Trace."""
    trace = Trace(follow)

    def call(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inputs = float_tensors((args, tuple(kwargs.values())))  # copied now, because a layer may write into them
        return trace.record(name, inputs, forward(*args, **kwargs))

    with ExitStack() as stack:
        for name, module in list(named_modules(model)):
            stack.enter_context(replaced(module, "forward", partial(call, name, module.forward)))
        yield trace


def float_tensors(value: Any) -> Tensors:
    """Return float32 copies of the float tensors in a value, including nested tuples and lists."""
    if isinstance(value, Tensor):
        return (value.detach().float().clone(),) if value.is_floating_point() else ()
    if isinstance(value, tuple | list):
        return tuple(tensor for item in value for tensor in float_tensors(item))
    return ()
