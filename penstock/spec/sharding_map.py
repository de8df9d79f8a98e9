"""Sharding maps: the axis of each weight that tensor parallelism splits, one weight per line. No torch.

    layers.*.self_attn.wo.weight : 1 # -1, 1] #  torch.float32 (2048, 2048)

This is the format of JetStream's sharding files: a name, with * for every number, and an axis of that tensor, -1 for
none; # begins a comment. Names are those of the parameter table or of the checkpoint's tensors. A map must fit the
model: every parameter is named once, as itself or by all of its pieces.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ModelLoadError
from penstock.spec.param_table import Layout, Parameter
from penstock.spec.table_rows import read_text, read_yaml
from penstock.spec.unsupported import hint, listed
from penstock.validation import shown

REPLICATED = -1


@dataclass(frozen=True, slots=True)
class ShardingMap:
    """The axes in a sharding file, which errors call `where`: name, with * for numbers -> axis."""

    where: str
    axes: dict[str, int]

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
        """Read a file. Raise ModelLoadError if it cannot be read, or is not a map."""
        return cls.from_text(read_text(file), file.name)

    def resolve(self, parameters: Mapping[str, Parameter]) -> dict[str, int | None]:
        """Return the axis of every parameter of a model, None if it is not split. A tied one may be left out.

        Raises:
            ModelLoadError: a name matches no parameter, or an axis is out of range; or a parameter is named twice, not
                at all, or with pieces that are split differently.
        """
        axes: dict[str, int | None] = {}
        used: set[str] = set()
        problems: dict[str, None] = {}  # as an ordered set: all layers have the same
        for parameter in parameters.values():
            found = [layout for layout in parameter.layouts if self._names(layout)]
            used |= {name for layout in found for name in self._names(layout)}
            try:
                axes[parameter.name] = self._axis(parameter, found)
            except ValueError as error:
                problems[str(error)] = None
        known = {general(name) for item in parameters.values() for layout in item.layouts for name in layout.sources}
        unknown = [f"{name} is not a parameter{hint(name, known)}" for name in self.axes if name not in used]
        if problems or unknown:
            raise ModelLoadError(f"{self.where}: {listed([*unknown, *problems], '; ')}")
        return axes

    def _names(self, layout: Layout) -> list[str]:
        """Return the tensors of a layout that the map names."""
        return [name for name in map(general, layout.sources) if name in self.axes]

    def _axis(self, parameter: Parameter, found: list[Layout]) -> int | None:
        """Return the axis of a parameter whose layouts `found` the map names. Raise ValueError unless it is one."""
        name = general(parameter.name)
        if not found:
            if parameter.tied_to is not None:
                return None
            raise ValueError(f"{name} is not named")
        spellings = {tuple(self._names(layout)) for layout in found}
        if len(spellings) > 1:
            both = " and ".join(sorted(", ".join(names) for names in spellings))
            raise ValueError(f"{name} is named twice, as {both}")
        layout = max(found, key=lambda layout: len(self._names(layout)) == len(layout.sources))
        missing = [source for source in map(general, layout.sources) if source not in self.axes]
        if missing:
            raise ValueError(f"{missing[0]} is not named, another piece of {name}")
        split = {self._own_axis(general(source), shape, layout) for source, shape in layout.sources.items()}
        if len(split) > 1:
            raise ValueError(f"{', '.join(spellings.pop())} are one parameter and must be split alike")
        return split.pop()

    def _own_axis(self, source: str, shape: tuple[int, ...], layout: Layout) -> int | None:
        """Return the parameter's axis for that of a tensor. Raise ValueError if the tensor has no such axis."""
        axis = self.axes[source]
        if axis == REPLICATED:
            return None
        first = 0 if layout.index is None else 1
        if not first <= axis < len(shape):
            allowed = f"{first} .. {len(shape) - 1}" if len(shape) > first + 1 else str(first)
            raise ValueError(f"{source}: axis {axis} is out of range; it must be {allowed}, or -1 for none")
        axis -= first
        return 1 - axis if layout.transposed else axis


def general(name: str) -> str:
    """Return a name with * for every number."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
