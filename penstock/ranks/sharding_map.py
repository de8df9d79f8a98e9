"""Sharding maps: the axis of each weight that tensor parallelism splits, one weight per line. No torch.

    layers.*.self_attn.wo.weight : 1 # -1, 1] #  torch.float32 (2048, 2048)

This is the format of JetStream's sharding files: a name, with * for every number, and an axis of that tensor, or -1 for
none; # begins a comment. Names are those of the parameter table or of the checkpoint's tensors, with or without the
table's prefix. A map must fit the model: every parameter is named, either by its own name or by those of all its
pieces, and not twice with different axes. Two kinds of names may be absent from the model: biases of its weights, and
names that the table ignores.

The name of a module that computes a branch is a hint: it gives the split axis of the [tokens, features] inside it.

    layers.*.mlp : 1         each rank computes some of the neurons; with -1 every rank computes all of them

`split_by_map` turns the axes of a map into the form of every weight, which alone determines what each rank computes and
what the ranks exchange (sharding.py). Three kinds of parameters do not follow the map exactly:

- A weight whose depth one process sums in one piece cannot be cut along its depth without changing the order of the
  sum. It is cut along its rows instead, which gives every rank a share of the same size.
- Experts are split in both of their weights or in neither.
- Vectors are too small to be worth an exchange: a bias is split as its weight is, and every rank has the norms.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.errors import ModelLoadError, hint, listed, shown
from penstock.ranks.sharding import EXPERT, Degrees, Form, depth_degree, general, is_beginning, is_looked_up, module_of
from penstock.spec.config_reader import read_text, read_yaml
from penstock.spec.param_table import Layout, Parameter, ParamTable

REPLICATED = -1
Hints = Mapping[str, bool]  # module of a branch, with * for numbers -> whether the features in it are split


@dataclass(frozen=True, slots=True)
class ShardingMap:
    """The axes in a sharding file, which errors call `where`: name, with * for numbers -> axis.

    Attributes:
        prefix: a prefix that names may lack.
        ignored: names that are allowed without being parameters.
    """

    where: str
    axes: dict[str, int]
    prefix: str = ""
    ignored: frozenset[str] = frozenset()

    @classmethod
    def from_text(cls, text: str, where: str) -> "ShardingMap":
        """Read a map. Raise ModelLoadError if it does not map names to integers, or repeats a name."""
        entries = read_yaml(text, where)
        if not isinstance(entries, dict) or not entries:
            raise ModelLoadError(f"{where}: it must map names of weights to the axis to split")
        for name, axis in entries.items():
            if not isinstance(name, str) or isinstance(axis, bool) or not isinstance(axis, int) or axis < REPLICATED:
                raise ModelLoadError(
                    f"{where}: {shown(name)}: {shown(axis)} is not allowed; it must be an axis from 0, or -1 for none"
                )
        return cls(where, entries)

    @classmethod
    def from_file(cls, file: Path) -> "ShardingMap":
        """Read a file. Raise ModelLoadError if it cannot be read or is not a map."""
        return cls.from_text(read_text(file), file.name)

    def of(self, table: ParamTable) -> "ShardingMap":
        """Add a table's prefix and ignored names to the map."""
        return replace(self, prefix=table.prefix, ignored=frozenset(name for name in self.axes if table.ignores(name)))

    def hints(self, parameters: Mapping[str, Parameter]) -> dict[str, bool]:
        """Find whether the features in a branch are split, by the name of its module.

        Raises:
            ModelLoadError: a hint names the axis of the tokens.
        """
        modules = {module_of(item) for item in parameters.values() if is_beginning(item)}
        full = self._full(modules)
        wrong = next((name for name, axis in full.items() if name in modules and axis == 0), None)
        if wrong is not None:
            raise ModelLoadError(f"{self.where}: {wrong}: 0 is not allowed; tokens are not split: it must be 1 or -1")
        return {name: axis == 1 for name, axis in full.items() if name in modules}

    def _full(self, known: Collection[str]) -> dict[str, int]:
        """Add the prefix to names that are known only with it."""
        full = {name: name if name in known else self.prefix + name for name in self.axes}
        return {full[name] if full[name] in known else name: axis for name, axis in self.axes.items()}

    def resolve(self, parameters: Mapping[str, Parameter]) -> dict[str, int | None]:
        """Find the axis of every parameter of a model, None if it is not split. The map may leave out a tied one.

        Raises:
            ModelLoadError: a name matches no parameter, or an axis is out of range; or a parameter is not named, is
                named twice with different axes, or has pieces that are split differently.
        """
        known = {general(name) for item in parameters.values() for layout in item.layouts for name in layout.sources}
        biases = {re.sub(r"\.weight$", ".bias", name) for name in known}
        modules = {module_of(item) for item in parameters.values()}
        full = replace(self, axes=self._full(known | biases | modules), ignored=self.ignored | (biases - known))
        return full._resolve(parameters, known)

    def _resolve(self, parameters: Mapping[str, Parameter], known: Collection[str]) -> dict[str, int | None]:
        """Resolve full names. known: the names of all tensors that a checkpoint may hold."""
        axes: dict[str, int | None] = {}
        used: set[str] = set()
        problems: dict[str, None] = {}  # used as an ordered set, because all layers have the same problems
        for parameter in parameters.values():
            found = [layout for layout in parameter.layouts if self._names(layout)]
            used |= {name for layout in found for name in self._names(layout)}
            try:
                axes[parameter.name] = self._axis(parameter, found)
            except ValueError as error:
                problems[str(error)] = None
        used |= self.hints(parameters).keys() | self.ignored
        unknown = [f"{name} is not a parameter{hint(name, known)}" for name in self.axes if name not in used]
        if problems or unknown:
            raise ModelLoadError(f"{self.where}: {listed([*unknown, *problems], '; ')}")
        return axes

    def _names(self, layout: Layout) -> list[str]:
        return [name for name in map(general, layout.sources) if name in self.axes]

    def _axis(self, parameter: Parameter, found: list[Layout]) -> int | None:
        """Find a parameter's axis; `found` has the layouts that the map names. Raise ValueError if they differ."""
        name = general(parameter.name)
        if not found:
            if parameter.tied_to is not None:
                return None
            raise ValueError(f"{name} is not named")
        found = sorted(found, key=lambda layout: -len(self._names(layout)))
        spellings: dict[tuple[str, ...], int | None] = {}
        for layout in found:
            names = tuple(self._names(layout))
            if not any(set(names) <= set(others) for others in spellings):
                spellings[names] = self._layout_axis(name, layout)
        if len(set(spellings.values())) > 1:
            both = " and ".join(sorted(", ".join(names) for names in spellings))
            raise ValueError(f"{name} is named twice, and split differently, as {both}")
        return next(iter(spellings.values()))

    def _layout_axis(self, name: str, layout: Layout) -> int | None:
        """Find the axis that a layout's tensors give. Raise ValueError if one is not named, or their axes differ."""
        missing = [source for source in map(general, layout.sources) if source not in self.axes]
        if missing:
            raise ValueError(f"{missing[0]} is not named, which is another piece of {name}")
        split = {self._own_axis(general(source), shape, layout) for source, shape in layout.sources.items()}
        if len(split) > 1:
            raise ValueError(f"{', '.join(self._names(layout))} are one parameter and must be split alike")
        return split.pop()

    def _own_axis(self, source: str, shape: tuple[int, ...], layout: Layout) -> int | None:
        """Convert a tensor's axis to an axis of the parameter. Raise ValueError if the tensor has no such axis."""
        axis = self.axes[source]
        if axis == REPLICATED:
            return None
        first = 0 if layout.index is None else 1
        if not first <= axis < len(shape):
            allowed = f"{first} .. {len(shape) - 1}" if len(shape) > first + 1 else str(first)
            raise ValueError(f"{source}: axis {axis} is out of range; it must be {allowed}, or -1 for none")
        axis -= first
        return 1 - axis if layout.transposed else axis


def split_by_map(
    degrees: Degrees, axes: Mapping[str, int | None], hints: Hints, parameters: Mapping[str, Parameter]
) -> Degrees:
    """Decide how ranks split a model according to a sharding map.

    Args:
        degrees: how they would split it by its table; the degree of attention is the largest that its heads allow.
        axes: the axis of each parameter (ShardingMap.resolve).
        hints: whether a branch is computed split or whole, for branches that do not follow their first weight.

    Raises:
        ValueError: a hint asks for a split of heads that the model does not allow.
    """
    forms: dict[str, Form] = {}
    attention, mlp, inner = 1, 1, 1
    for parameter in parameters.values():
        name = general(parameter.name)
        axis = axes[parameter.name]
        if axis is None and parameter.tied_to is not None:  # not in the map: as the parameter it is tied to
            axis = axes[parameter.tied_to]
        forms[name] = form = _form(parameter, axis, degrees.size)
        if EXPERT.search(parameter.name):
            inner = max(inner, 1 if form == "whole" else degrees.inner)
        elif is_beginning(parameter):
            module = module_of(parameter)
            if hints.get(module) and parameter.unit is not None and degrees.attention == 1:
                raise ValueError(f"{module}: 1 is not allowed; the heads of this model are not split: it must be -1")
            is_split = hints.get(module, form == "rows")
            attention = degrees.attention if is_split and parameter.unit is not None else attention
            mlp = degrees.mlp if is_split and parameter.unit is None else mlp
    return replace(degrees, attention=attention, mlp=mlp, inner=inner, forms=forms)


def _form(parameter: Parameter, axis: int | None, size: int) -> Form:
    if axis is None or len(parameter.shape) < 2:
        return "whole"
    if axis == 1 and is_looked_up(parameter):
        return "columns" if parameter.shape[1] >= size else "whole"
    if axis == 1 and parameter.leaves > 1 and depth_degree(parameter, size) > 1:
        return "depth"
    pieces = parameter.layouts[-1].pieces if parameter.unit is None else ()
    return "rows" if min(pieces or parameter.shape[:1]) >= size else "whole"
