"""ParamTable: every parameter of a model family, once, read from its YAML file. No torch here.

Four readers: the loader (checkpoint names), sharding (axes), the quantiser (what to pack), the planner (sizes).
spec/table_rows.py has the language; here is what its lines mean for one model's numbers: names, shapes, and the
layouts in which a checkpoint may hold them.
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
from penstock.spec.table_rows import EXTRA, SIZES, UNIT_SIZES, Conditions, Held, Row, read_lines


@dataclass(frozen=True, slots=True)
class Layout:
    """One way in which a checkpoint may hold a parameter.

    Attributes:
        sources: checkpoint tensors and their shapes there. Several are joined along `join_axis`.
        pieces: sizes along `join_axis` of what is joined, whether it lies in one tensor or in several.
        groups: one tensor holds all pieces as `groups` times an equal share of each; 1: one piece after the other.
        transposed: the tensor is [K, N] in the checkpoint.
        paired_head: rows of a head whose rotated rows stand in pairs, in all tensors but the last; 0: in halves.
        index: this parameter's place on the first axis of a tensor that has one more; None: it has the tensor alone.
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
        layouts: how checkpoints may hold it; Transformers' own way first, its own name last.
        shard: axis, or None where every rank has all of it.
        quant: False, True or "int8".
        tied_to: name of the parameter whose values it shares.
        unit_size: elements of the last axis that its leaves do not cut apart.
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

    @property
    def sources(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint tensors and their shapes, as Transformers writes them."""
        return self.layouts[0].sources

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def leaf_ends(self) -> tuple[int, ...]:
        """Where the leaves of the last axis end; none where it reduces in one piece."""
        if self.leaves == 1:
            return ()
        return tuple(end for _, end in leaf_bounds(self.shape[-1], self.leaves, self.unit_size))


@dataclass(frozen=True, slots=True)
class ParamTable:
    """All lines of one family's file."""

    rows: tuple[Row, ...]
    ignore: tuple[str, ...]
    prefix: str = ""

    @classmethod
    def from_text(cls, text: str, where: str) -> "ParamTable":
        """Read a table. Errors call it `where`.

        Raises:
            ModelLoadError: an unknown field or a value that a field cannot have.
        """
        lines = read_lines(text, where)
        return cls(lines.rows, lines.ignore, lines.prefix)

    @classmethod
    def from_file(cls, path: Path) -> "ParamTable":
        """The table of a YAML file.

        Raises:
            ModelLoadError: it cannot be read, or is no table.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ModelLoadError(f"{path}: the parameter table cannot be read: {reason}") from None
        return cls.from_text(text, path.name)

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        """Every parameter of this model by name, in the order of the table.

        Raises:
            ModelLoadError: two parameters claim one checkpoint tensor, or one is tied to nothing of its shape.
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
                raise ModelLoadError(f"parameter table: {item.name} is tied to {item.tied_to}, which is no such tensor")
        return result

    def ignores(self, name: str) -> bool:
        """Whether this checkpoint tensor carries nothing; its name may lack the prefix."""
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        return pattern in self.ignore or self.prefix + pattern in self.ignore


def leaf_bounds(k: int, leaves: int, unit: int = 1) -> list[tuple[int, int]]:
    """First and past-the-last element of each leaf of an axis of k elements that is cut between units only.

    Raises:
        ValueError: k is no multiple of the unit.
    """
    if k % unit:
        raise ValueError(f"an axis of {k} elements is not made of units of {unit}")
    borders = [index * (k // unit) // leaves * unit for index in range(leaves + 1)]
    return list(itertools.pairwise(borders))


def num_elements(parameters: Iterable[Parameter]) -> int:
    """Elements that are stored; what is tied counts once."""
    return sum(item.num_elements for item in parameters if item.tied_to is None)


def _expand(row: Row, config: ModelConfig) -> list[Parameter]:
    """The parameters of one line, one for each layer and expert for which it exists."""
    layers = range(config.num_hidden_layers if "*" in row.pattern else 1)
    experts = range(config.num_experts if row.pattern.count("*") > 1 else 1)
    there = [layer for layer in layers if _holds(row.when, config, layer)]
    return [_parameter(row, config, layer, expert) for layer in there for expert in experts]


def _parameter(row: Row, config: ModelConfig, layer: int, expert: int) -> Parameter:
    pieces = [
        [_size(config, word) for word in (axis if isinstance(axis, tuple) else (axis,))]  # of each axis
        for axis in row.shape
    ]
    join_axis = next((index for index, axis in enumerate(row.shape) if isinstance(axis, tuple)), 0)
    shape = tuple(sum(axis) for axis in pieces)
    return Parameter(
        name=_numbered(row.pattern, layer, expert),
        shape=shape,
        layouts=tuple(_layout(held, config, shape, join_axis, pieces[join_axis], layer, expert) for held in row.held),
        shard=row.shard,
        unit=row.unit,
        quant=row.quant,
        leaves=row.leaves,
        tied_to=row.tied_to if config.tie_word_embeddings else None,
        unit_size=UNIT_SIZES[row.unit](config),
    )


def _layout(
    held: Held, config: ModelConfig, shape: tuple[int, ...], axis: int, pieces: list[int], layer: int, expert: int
) -> Layout:
    sizes = pieces if len(held.names) > 1 else [shape[axis]]
    parts = [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]
    if held.transposed:
        parts = [part[::-1] for part in parts]
    if held.stacked:
        parts = [(config.num_experts, *part) for part in parts]
    names = [_numbered(name, layer, expert) for name in held.names]
    return Layout(
        sources=dict(zip(names, parts, strict=True)),
        join_axis=axis,
        pieces=tuple(pieces),
        groups=config.num_key_value_heads if held.order == "kv_group" else 1,
        transposed=held.transposed,
        paired_head=config.head_dim if held.order == "rotary_pairs" else 0,
        index=expert if held.stacked else None,
    )


def _numbered(pattern: str, layer: int, expert: int) -> str:
    return pattern.replace("*", str(layer), 1).replace("*", str(expert), 1)


def _size(config: ModelConfig, word: str | int) -> int:
    if isinstance(word, int):
        return word
    if word.startswith(EXTRA):
        return int(config.extra[word.removeprefix(EXTRA)])
    return SIZES[word](config) if word in SIZES else int(getattr(config, word))


def _holds(when: Conditions, config: ModelConfig, layer: int) -> bool:
    """Whether every field has one of its values, for this layer."""
    for name, allowed in when.items():
        own = name.startswith(EXTRA)
        value = config.extra.get(name.removeprefix(EXTRA)) if own else getattr(config, name)
        if isinstance(value, tuple):
            value = value[layer]
        if not any(value == item and type(value) is type(item) for item in allowed):
            return False
    return True
