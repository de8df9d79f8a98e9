"""ParamTable: every parameter of a model family, listed once, read from its YAML file. No torch.

It tells the loader the checkpoint names, the sharding code the axes, the quantiser what to pack, the planner the sizes.
spec/table_rows.py reads the file; this module expands its rows with the numbers of one model: names, shapes, and the
layouts in which a checkpoint may hold the parameters.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ModelLoadError
from penstock.spec.model_config import ModelConfig
from penstock.spec.table_rows import EXTRA, SIZES, UNIT_SIZES, Conditions, Held, Row, read_table, read_text


@dataclass(frozen=True, slots=True)
class Layout:
    """One way in which a checkpoint may hold a parameter.

    Attributes:
        sources: checkpoint tensors and their shapes. Several are joined along `join_axis`.
        pieces: sizes of the joined pieces along `join_axis`, whether they are in one tensor or in several.
        groups: one tensor holds all pieces in `groups` groups with an equal share of each piece; 1: one piece after the
            other.
        transposed: the tensors are [K, N] in the checkpoint.
        paired_head: head size if all tensors but the last interleave rotated rows as pairs; 0: as halves.
        index: this parameter's index on the first axis of a stacked tensor; None: the tensor is not stacked.
    """

    sources: dict[str, tuple[int, ...]]
    join_axis: int = 0
    pieces: tuple[int, ...] = ()
    groups: int = 1
    transposed: bool = False
    paired_head: int = 0
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of one model.

    Attributes:
        layouts: how checkpoints may hold it; Transformers' layout is first, the layout under its own name last.
        shard: the axis that tensor parallelism splits; None: every rank has the whole parameter.
        quant: False, True or "int8".
        tied_to: name of the parameter whose values it shares.
        unit_size: number of neighbouring elements of the last axis that stay in one leaf.
        num_units: number of units on the split axis, if the parameter has a unit.
        ends: where the leaves end in a rank's part of the last axis; None: the parameter is whole.
    """

    name: str
    shape: tuple[int, ...]
    layouts: tuple[Layout, ...]
    shard: int | None
    unit: str | None
    quant: bool | str
    leaves: int
    tied_to: str | None
    unit_size: int = 1
    num_units: int = 1
    ends: tuple[int, ...] | None = None

    @property
    def sources(self) -> dict[str, tuple[int, ...]]:
        """Return the checkpoint tensors that Transformers writes, with their shapes."""
        return self.layouts[0].sources

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def leaf_ends(self) -> tuple[int, ...]:
        """Return where the leaves of the last axis end; () if it is reduced in one piece."""
        if self.ends is not None:
            return self.ends
        if self.leaves == 1:
            return ()
        return tuple(end for _, end in leaf_bounds(self.shape[-1], self.leaves, self.unit_size))


@dataclass(frozen=True, slots=True)
class ParamTable:
    """The parameter table of one family. spec/table_rows.py explains the fields."""

    rows: tuple[Row, ...]
    ignore: tuple[str, ...]
    prefix: str = ""

    @classmethod
    def from_text(cls, text: str, where: str) -> "ParamTable":
        """Read a table, which errors call `where`. Raise ModelLoadError if a field or its value is not allowed."""
        return cls(*read_table(text, where))

    @classmethod
    def from_file(cls, path: Path) -> "ParamTable":
        """Read a YAML file. Raise ModelLoadError if it cannot be read or is not a table."""
        return cls.from_text(read_text(path), path.name)

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        """Return every parameter of a model by name, in the order of the table.

        Raises:
            ModelLoadError: two parameters claim one checkpoint tensor, or one is tied to a name that is not a
                parameter of its shape.
        """
        expanded = [item for row in self.rows for item in _expand(row, config)]
        result = {item.name: item for item in expanded}
        own = [item.layouts[0] for item in expanded if item.tied_to is None]
        claims = Counter((name, layout.index) for layout in own for name in layout.sources)
        twice = [name for (name, _), count in claims.items() if count > 1]
        if twice:
            raise ModelLoadError(f"parameter table: {twice[0]} is claimed by two parameters")
        for item in expanded:
            if item.tied_to is not None and (item.tied_to not in result or result[item.tied_to].shape != item.shape):
                raise ModelLoadError(
                    f"parameter table: {item.name} is tied to {item.tied_to}, which is not a parameter of its shape"
                )
        return result

    def ignores(self, name: str) -> bool:
        """Return whether a checkpoint tensor, whose name may lack the prefix, holds no values of the model."""
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        return pattern in self.ignore or self.prefix + pattern in self.ignore


def leaf_bounds(k: int, leaves: int, unit: int = 1) -> list[tuple[int, int]]:
    """Return the [first, past-the-last) elements of each leaf, on an axis of k elements that is cut only between units.

    Raises:
        ValueError: k is not a multiple of the unit.
    """
    if k % unit:
        raise ValueError(f"an axis of {k} elements is not made of units of {unit}")
    borders = [index * (k // unit) // leaves * unit for index in range(leaves + 1)]
    return list(itertools.pairwise(borders))


def num_elements(parameters: Iterable[Parameter]) -> int:
    """Return the number of stored elements; tied parameters count once."""
    return sum(item.num_elements for item in parameters if item.tied_to is None)


def _expand(row: Row, config: ModelConfig) -> list[Parameter]:
    """Return the parameters of one row: one for each layer and expert that has it."""
    layers = range(config.num_hidden_layers if "*" in row.pattern else 1)
    experts = range(config.num_experts if row.pattern.count("*") > 1 else 1)
    existing = [layer for layer in layers if _holds(row.when, config, layer)]
    return [_Expansion(config, layer, expert).parameter(row) for layer in existing for expert in experts]


@dataclass(frozen=True, slots=True)
class _Expansion:
    """Makes the parameters of one layer and one expert of a model."""

    config: ModelConfig
    layer: int
    expert: int

    def parameter(self, row: Row) -> Parameter:
        axes = [axis if isinstance(axis, tuple) else (axis,) for axis in row.shape]
        pieces = [tuple(self._size(word) for word in axis) for axis in axes]
        return Parameter(
            name=self._name(row.pattern),
            shape=tuple(map(sum, pieces)),
            layouts=tuple(self._layout(held, pieces) for held in row.held),
            shard=row.shard,
            unit=row.unit,
            quant=row.quant,
            leaves=row.leaves,
            tied_to=row.tied_to if self.config.tie_word_embeddings else None,
            unit_size=UNIT_SIZES[row.unit](self.config),
            num_units=1 if row.unit is None else self.config.num_key_value_heads,
        )

    def _layout(self, held: Held, pieces: list[tuple[int, ...]]) -> Layout:
        """Return the layout. pieces: the sizes of the pieces of each axis; at most one axis has several."""
        shape = tuple(map(sum, pieces))
        axis = next((index for index, sizes in enumerate(pieces) if len(sizes) > 1), 0)
        sizes = pieces[axis] if len(held.names) > 1 else (shape[axis],)
        parts = [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]
        if held.transposed:
            parts = [part[::-1] for part in parts]
        if held.stacked:
            parts = [(self.config.num_experts, *part) for part in parts]
        return Layout(
            sources=dict(zip(map(self._name, held.names), parts, strict=True)),
            join_axis=axis,
            pieces=pieces[axis],
            groups=self.config.num_key_value_heads if held.order == "kv_group" else 1,
            transposed=held.transposed,
            paired_head=self.config.head_dim if held.order == "rotary_pairs" else 0,
            index=self.expert if held.stacked else None,
        )

    def _name(self, pattern: str) -> str:
        return pattern.replace("*", str(self.layer), 1).replace("*", str(self.expert), 1)

    def _size(self, word: str | int) -> int:
        if isinstance(word, int):
            return word
        if word.startswith(EXTRA):
            return int(self.config.extra[word.removeprefix(EXTRA)])
        return SIZES[word](self.config) if word in SIZES else int(getattr(self.config, word))


def _holds(when: Conditions, config: ModelConfig, layer: int) -> bool:
    """Return whether every field of the conditions has one of its allowed values in this layer."""
    for name, allowed in when.items():
        value = config.extra.get(name.removeprefix(EXTRA)) if name.startswith(EXTRA) else getattr(config, name)
        if isinstance(value, tuple):
            value = value[layer]
        if not any(value == item and type(value) is type(item) for item in allowed):
            return False
    return True
