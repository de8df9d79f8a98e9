"""Which of Transformers' modules computes which of our layers, from the parameter table alone.

The table has the checkpoint names of every parameter, and these are the names of Transformers' modules. So one of our
layers corresponds to one of theirs or, where our product joins several, to one per piece of its columns. A decoder
block corresponds to the common parent of the modules of its layers.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, takewhile

import torch
from torch import Tensor, nn

from penstock.kernels.ops import TensorRows
from penstock.spec.param_table import Layout, Parameter
from penstock.weights.rows import parameter_rows

BLOCK = re.compile(r"(.*?\.\d+)\.")  # the block that a layer is in, by the first number in its name
WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Piece:
    """A module of theirs that computes the same as one of our layers, or as some of its output columns.

    Attributes:
        module: its name.
        rows: rows of our weight, and so columns of our output, if it joins several pieces.
        layout: how a checkpoint holds the weight.
    """

    module: str
    rows: slice
    layout: Layout

    @property
    def is_part(self) -> bool:
        return len(self.layout.sources) > 1

    def of_ours(self, columns: Tensor) -> Tensor:
        """Return the columns of our output [T, N] that their module computes."""
        return columns[:, self.rows] if self.is_part else columns

    def in_our_order(self, columns: Tensor) -> Tensor:
        """Return their output [T, N] with interleaved pieces one after the other."""
        layout = self.layout
        if layout.groups == 1:
            return columns
        shares = [size // layout.groups for size in layout.pieces]
        grouped = torch.split(columns.view(*columns.shape[:-1], layout.groups, -1), shares, dim=-1)
        return torch.cat([part.flatten(-2) for part in grouped], dim=-1)


@dataclass(frozen=True, slots=True)
class Pairs:
    """How two models correspond.

    Attributes:
        pieces: our layer -> their modules, for each layer with parameters that has a counterpart.
        blocks: our decoder block -> theirs.
        branches: our module whose parameters have no module of their own (experts) -> theirs.
        experts: the same modules of ours -> those parameters.
    """

    pieces: dict[str, tuple[Piece, ...]]
    blocks: dict[str, str]
    branches: dict[str, str]
    experts: dict[str, list[Parameter]]


def find_pairs(parameters: Mapping[str, Parameter], ours: nn.Module, theirs: nn.Module) -> Pairs:
    """Match the modules of our model and Transformers'."""
    their_modules = dict(theirs.named_modules())
    our_modules = dict(ours.named_modules())
    pieces: dict[str, tuple[Piece, ...]] = {}
    lost: list[Parameter] = []
    for name, parameter in parameters.items():
        layer = name.removesuffix(WEIGHT)
        if not name.endswith(WEIGHT) or parameter.tied_to is not None:
            continue
        found = _pieces(layer, parameter, their_modules) if layer in our_modules else ()
        if found:
            pieces[layer] = found
        elif layer.count("."):
            lost.append(parameter)
    blocks = _blocks(pieces)
    branches = _branches(lost, pieces, blocks, our_modules, their_modules)
    experts = {branch: [item for item in lost if item.name.startswith(f"{branch}.")] for branch in branches}
    return Pairs(pieces, blocks, branches, experts)


def their_values(parameter: Parameter, state: Mapping[str, Tensor]) -> Tensor | None:
    """Return a parameter of their model in memory, laid out as ours; None if no known name holds it."""

    def find(name: str, index: int | None) -> TensorRows:
        return TensorRows(state[name] if index is None else state[name][index])

    layout = next((layout for layout in parameter.layouts if all(name in state for name in layout.sources)), None)
    rows = None if layout is None else parameter_rows(layout, find)
    return None if rows is None or rows.shape != parameter.shape else rows.read(0, rows.shape[0]).float()


def _pieces(layer: str, parameter: Parameter, modules: Mapping[str, nn.Module]) -> tuple[Piece, ...]:
    """Return the modules that hold the parameter in its first layout that they have; () if it has no own module."""
    for layout in parameter.layouts:
        names = [source.removesuffix(WEIGHT) for source in layout.sources]
        if layout.index is not None or not all(name in modules for name in names):
            continue
        sizes = layout.pieces if len(names) > 1 else (parameter.shape[0],)
        ends = list(accumulate(sizes))
        return tuple(
            Piece(name, slice(end - size, end), layout) for name, size, end in zip(names, sizes, ends, strict=True)
        )
    return ()


def _blocks(pieces: Mapping[str, tuple[Piece, ...]]) -> dict[str, str]:
    """Return our decoder blocks -> the common parent of their modules in it."""
    inside: dict[str, list[str]] = {}
    for layer, found in pieces.items():
        if (match := BLOCK.match(layer)) is not None:
            inside.setdefault(match[1], []).extend(piece.module for piece in found)
    return {block: _common_parent(names) for block, names in inside.items() if len(set(names)) > 1}


def _common_parent(names: Iterable[str]) -> str:
    columns = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns))


def _branches(
    lost: Iterable[Parameter],
    pieces: Mapping[str, tuple[Piece, ...]],
    blocks: Mapping[str, str],
    our_modules: Mapping[str, nn.Module],
    their_modules: Mapping[str, nn.Module],
) -> dict[str, str]:
    """Return the branches that hold parameters without a module of their own (experts); these are compared whole.

    Ours is the module just below the block; theirs is the parent of the router, whose counterpart is known.
    """
    result: dict[str, str] = {}
    for parameter in lost:
        match = BLOCK.match(parameter.name)
        if match is None or match[1] not in blocks:
            continue
        branch = ".".join(parameter.name.split(".")[: match[1].count(".") + 2])
        siblings = [piece.module for layer, found in pieces.items() if _parent(layer) == branch for piece in found]
        parents = Counter(_parent(name) for name in siblings) - Counter({blocks[match[1]]: len(siblings)})
        if branch in our_modules and parents and (common := parents.most_common(1)[0][0]) in their_modules:
            result[branch] = common
    return result


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
