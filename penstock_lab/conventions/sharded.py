"""Tensors of which each rank has a part, for models of JetStream's calling convention that several ranks share.

JetStream leaves it to its compiler (GSPMD) to infer, from the axes of the weights alone, what the devices exchange.
Here it is found out as the model runs. The model sees tensors with the shape of the whole, so its code knows nothing of
ranks. A product whose rows are split returns a Sharded; what works on each feature by itself, or only rearranges them,
works on the parts; a product whose depth is split, and attention, take the parts that they need. Anything else gathers
the whole first. So the answer does not depend on what is split, only the exchanged bytes do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from penstock.kernels.tensors import as_array, as_torch
from penstock.ranks.links import Links

WORDS = """abs add clamp clone cos detach div erf exp gelu log maximum minimum mul neg pow reciprocal relu rsqrt sigmoid
silu sin sqrt square sub tanh _to_copy"""
ELEMENTWISE = frozenset(WORDS.split())


@dataclass(frozen=True, slots=True)
class Borders:
    """How an axis is split over the ranks of a block: where the part of each begins, and where the last one ends."""

    at: tuple[int, ...]
    index: int
    links: Links

    @property
    def own(self) -> tuple[int, int]:
        """The first and past-the-last element of this rank's part."""
        return self.at[self.index], self.at[self.index + 1]

    def scaled(self, new: int, old: int) -> "Borders | None":
        """Count in elements of size `new` instead of `old`; None if a border falls inside one."""
        if any(border * old % new for border in self.at):
            return None
        return Borders(tuple(border * old // new for border in self.at), self.index, self.links)


class Sharded(Tensor):
    """A tensor with the shape of the whole, of which this rank has a part along one axis.

    Attributes:
        held: the part; the whole, once it was gathered.
        axis: the split axis.
        borders: how it is split; None: the whole is here.
    """

    held: Tensor
    axis: int
    borders: Borders | None

    @staticmethod
    def __new__(cls, part: Tensor, axis: int, borders: Borders) -> "Sharded":
        shape = list(part.shape)
        shape[axis] = borders.at[-1]
        make: Any = Tensor._make_wrapper_subclass
        made: Sharded = make(cls, shape, dtype=part.dtype, device=part.device)
        return made

    def __init__(self, part: Tensor, axis: int, borders: Borders) -> None:
        self.held, self.axis, self.borders = part, axis, borders

    def whole(self) -> Tensor:
        """Gather the parts of all ranks, once."""
        if self.borders is not None:
            first = self.held.movedim(self.axis, 0)
            own, sizes = as_array(first.reshape(first.shape[0], -1)), [b - a for a, b in pairwise(self.borders.at)]
            links, rows = self.borders.links, np.empty((sum(sizes), own.shape[1]), own.dtype)
            step = max(1, links.buffer_bytes // (max(sizes) * own.itemsize))
            for start in range(0, own.shape[1], step):
                columns = own[:, start : start + step]
                shapes = [(size, columns.shape[1]) for size in sizes]
                np.concatenate(links.gather(columns, len(sizes), shapes), out=rows[:, start : start + step])
            self.held = as_torch(rows).view(-1, *first.shape[1:]).movedim(0, self.axis).contiguous()
            self.borders = None
        return self.held

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        found = _by_parts(name, func, args, kwargs)
        if found is None and func._can_decompose():  # inference mode does not do it
            found = func.decompose(*args, **kwargs)
        if found is not None:
            return found
        return func(*_map(whole, args), **_map(whole, kwargs))


def whole(x: Any) -> Any:
    """Return the whole of a tensor; other values as they are."""
    return x.whole() if isinstance(x, Sharded) else x


def part(x: Tensor, axis: int, borders: Borders) -> Tensor:
    """Return this rank's part of a tensor along an axis."""
    axis %= x.ndim
    if isinstance(x, Sharded) and x.borders == borders and x.axis == axis:
        return x.held
    begin, end = borders.own
    found: Tensor = whole(x).narrow(axis, begin, end - begin)
    return found


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_map(change, item) for item in value)
    if isinstance(value, dict):
        return {key: _map(change, item) for key, item in value.items()}
    return change(value)


def _by_parts(name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute an operation on the parts; None if it needs the whole."""
    if name.rstrip("_") in ELEMENTWISE:
        return _elementwise(name, func, args, kwargs)
    x = args[0] if args else None
    if not isinstance(x, Sharded) or x.borders is None:
        return None
    if name in ("view", "_unsafe_view"):
        return _view(x, x.borders, list(args[1]))
    ndim = x.ndim
    if name in ("transpose", "t"):
        a, b = (args[1] % ndim, args[2] % ndim) if name == "transpose" else (0, 1)
        return Sharded(x.held.transpose(a, b), {a: b, b: a}.get(x.axis, x.axis), x.borders)
    if name == "permute":
        order = [axis % ndim for axis in args[1]]
        return Sharded(x.held.permute(order), order.index(x.axis), x.borders)
    if name == "unsqueeze":
        at = args[1] % (ndim + 1)
        return Sharded(x.held.unsqueeze(at), x.axis + (at <= x.axis), x.borders)
    along = {"slice": (args[1] if len(args) > 1 else 0), "split": (args[2] if len(args) > 2 else 0)}
    if name in along and along[name] % ndim != x.axis:
        found = func(x.held, *args[1:], **kwargs)
        pieces = [Sharded(item, x.axis, x.borders) for item in (found if name == "split" else [found])]
        return pieces if name == "split" else pieces[0]
    return None


def _elementwise(name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute each element by itself, on the parts of the first operand that is split."""
    operands = [item for item in args if isinstance(item, Tensor)]
    lead = next((item for item in operands if isinstance(item, Sharded) and item.borders is not None), None)
    in_place = name.endswith("_")
    if lead is None or (in_place and operands[0] is not lead):
        return None
    from_end, borders = lead.axis - lead.ndim, lead.borders
    assert borders is not None
    if any(item.ndim > lead.ndim for item in operands):
        return None

    def own(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        if item.ndim < -from_end or item.shape[from_end] == 1:
            return whole(item)
        return part(item, from_end, borders)

    result = func(*_map(own, args), **kwargs)
    return lead if in_place else Sharded(result, result.ndim + from_end, borders)


def _view(x: Sharded, borders: Borders, shape: list[int]) -> Sharded | None:
    """Arrange the same elements in another shape, if every part is then still a part of one axis."""
    if -1 in shape:
        shape[shape.index(-1)] = x.numel() // -int(np.prod(shape))
    before = int(np.prod(x.shape[: x.axis]))
    ends = [int(np.prod(shape[:axis])) for axis in range(len(shape))]
    if before not in ends:
        return None
    axis = len(ends) - 1 - ends[::-1].index(before)
    scaled = borders.scaled(int(np.prod(shape[axis + 1 :])), int(np.prod(x.shape[x.axis + 1 :])))
    if scaled is None or scaled.at[-1] != shape[axis]:
        return None
    begin, end = scaled.own
    return Sharded(x.held.reshape([*shape[:axis], end - begin, *shape[axis + 1 :]]), axis, scaled)
