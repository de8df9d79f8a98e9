"""Pair our layers with Transformers' modules, from the parameter table alone.

The table has the checkpoint names of every parameter, which contain the names of Transformers' modules. So each of our
layers corresponds to one module or, if our product joins several, to one module per piece of its columns. A decoder
block corresponds to the common parent of the modules of its layers.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from posixpath import commonpath

import torch
from torch import Tensor

from penstock.kernels.ops import TensorRows
from penstock.kernels.tensors import as_torch
from penstock.layers.module import named_modules
from penstock.layers.weights import Xielu
from penstock.spec.param_table import Layout, Parameter
from penstock.weights.rows import parameter_rows, tensor_rows
from penstock.weights.sources import CheckpointSource

BLOCK = re.compile(r"(.*?\.\d+)\.")  # the block that a layer is in, by the first number in its name
WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Pairs:
    """The correspondence of two models.

    Attributes:
        layouts: our layer -> how their modules hold its weight, for each layer with parameters and a counterpart.
        blocks: our decoder block -> theirs.
        branches: our module -> theirs, for parameters that do not belong to a separate module of theirs (experts).
    """

    layouts: dict[str, Layout]
    blocks: dict[str, str]
    branches: dict[str, str]


def find_pairs(parameters: Mapping[str, Parameter], ours: object, theirs: object) -> Pairs:
    """Match the modules of our model with those of Transformers' model."""
    our_modules, their_modules = (dict(named_modules(model)) for model in (ours, theirs))
    with_weights = {name for name, module in their_modules.items() if hasattr(module, "weight")}
    layouts: dict[str, Layout] = {}
    unmatched: dict[str, Parameter] = {}
    for name, parameter in parameters.items():
        layer = name.removesuffix(WEIGHT)
        if isinstance(our_modules.get(name.rpartition(".")[0]), Xielu):  # it has no weight, so its branch is compared
            unmatched[layer] = parameter
        if layer == name or parameter.tied_to is not None:
            continue
        unstacked = (item for item in parameter.layouts if item.index is None)
        layout = next((item for item in unstacked if with_weights >= {*modules_of(item)}), None)
        if layout is not None and layer in our_modules:
            layouts[layer] = layout
        else:
            unmatched[layer] = parameter
    blocks = _blocks(layouts)
    branches = _branches(unmatched, layouts, blocks)
    known = {ours: theirs for ours, theirs in branches.items() if ours in our_modules and theirs in their_modules}
    return Pairs(layouts, blocks, known)


def modules_of(layout: Layout) -> list[str]:
    return [name.removesuffix(WEIGHT) for name in layout.sources]


def split_columns(layout: Layout, columns: Tensor) -> dict[str, Tensor]:
    """Split the columns of our output [T, N] among their modules that compute them, in their order.

    Columns of an output correspond to rows of the weight, so a checkpoint's layout also splits the output.
    """
    parts = tensor_rows(replace(layout, transposed=False), TensorRows(columns.t().contiguous()))
    return {name.removesuffix(WEIGHT): as_torch(rows.read(0, rows.shape[0])).t() for name, rows in parts.items()}


def split_heads(layout: Layout, shape: tuple[int, ...], columns: Tensor) -> dict[str, Tensor]:
    """Split normed heads, the first of our columns [T, N], among their modules that norm them: [T, h * D] each.

    shape: [heads, D], of the weights of the norms. Each token's heads are held as these weights are.
    """
    found: dict[str, list[Tensor]] = defaultdict(list)
    for row in columns[:, : shape[0] * shape[1]].reshape(-1, *shape):
        for name, rows in tensor_rows(layout, TensorRows(row.contiguous())).items():
            found[name.removesuffix(WEIGHT)].append(as_torch(rows.read(0, rows.shape[0])).flatten())
    return {module: torch.stack(parts) for module, parts in found.items()}


def both_values(
    module: str, source: CheckpointSource, state: Mapping[str, Tensor]
) -> Iterator[tuple[Parameter, Tensor, Tensor]]:
    """Yield each parameter in a module of ours, with its values in our checkpoint and in their state_dict, float32.

    Their values are converted to our layout. A parameter that they hold under no known name is left out.
    """

    def find(name: str, index: int | None) -> TensorRows:
        return TensorRows(state[name] if index is None else state[name][index])

    for parameter in source.parameters.values():
        if not parameter.name.startswith(f"{module}."):
            continue
        layouts = source.parameters[parameter.tied_to or parameter.name].layouts
        layout = next((layout for layout in layouts if state.keys() >= layout.sources.keys()), None)
        if layout is not None:
            found = source.rows(parameter), parameter_rows(layout, find)
            ours, theirs = (as_torch(rows.read(0, rows.shape[0])).float() for rows in found)
            yield parameter, ours, theirs


def _blocks(layouts: Mapping[str, Layout]) -> dict[str, str]:
    """Map our decoder block to the common parent of the modules that correspond to its layers."""
    inside: defaultdict[str, set[str]] = defaultdict(set)
    for layer, layout in layouts.items():
        if match := BLOCK.match(layer):
            inside[match[1]] |= {name.replace(".", "/") for name in modules_of(layout)}
    return {block: commonpath(names).replace("/", ".") for block, names in inside.items() if len(names) > 1}


def _branches(
    unmatched: Mapping[str, Parameter], layouts: Mapping[str, Layout], blocks: Mapping[str, str]
) -> dict[str, str]:
    """Find the branches with parameters that have no separate module (experts); these are compared as a whole.

    Our branch is the module just below the block; theirs is the parent of the router, whose counterpart is known. If
    that is their block, which computes more, ours is the parent of the experts, and theirs the module of their weights.
    """
    matches = filter(None, map(BLOCK.match, unmatched))
    found = {".".join(match.string.split(".")[: match[1].count(".") + 2]): match[1] for match in matches}
    result: dict[str, str] = {}
    for branch, block in found.items():
        siblings = (layout for layer, layout in layouts.items() if _parent(layer) == branch)
        parents = Counter(_parent(name) for layout in siblings for name in modules_of(layout))
        del parents[blocks.get(block, "")]
        if block in blocks and parents:
            result[branch] = parents.most_common(1)[0][0]
            continue
        for layer, parameter in unmatched.items():
            parent = layer.rpartition(".experts.")[0]
            if parent and layer.startswith(f"{branch}."):
                result[parent] = _parent(next(iter(parameter.layouts[0].sources)))
    return result


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
