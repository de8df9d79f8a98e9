"""ParamTable: every parameter of a model family, once, read from its YAML file. No torch here.

Four readers: the loader (checkpoint names), sharding (axes), the quantiser (what to pack), the planner (sizes).
One entry a parameter; `*` stands for the layer number:

    model.layers.*.self_attn.qkv_proj.weight:
      {shape: [[q, kv, kv], hidden], from: [q_proj, k_proj, v_proj], shard: 0, unit: kv_group, quant: true}
    ignore: ["model.layers.*.self_attn.rotary_emb.inv_freq"]

    shape    sizes of the axes, in the words of SIZES. A list in place of a size: the pieces of that axis, one for
             each name in `from`, joined in this order.
    from     checkpoint names, where they differ: a bare one replaces the module's own name (the last but one part),
             one with dots is a whole name.
    shard    the axis that tensor parallelism splits; absent or -1: every rank has all of it.
    unit     what that axis may be cut into at the finest: "kv_group" is one key/value head with its query heads.
    quant    true: may be stored in any quantised form; "int8": in int8 at the finest.
    leaves   the product over the last axis reduces in this many pieces (kernels/ops.py). Where K does not divide
             evenly, leaf_bounds says which elements each piece has: leaves are made of whole units of `unit`, and
             with U of them leaf i has the units i*U//leaves .. (i+1)*U//leaves, which may be none. Rank r of R takes
             the leaves r*leaves/R .. (r+1)*leaves/R, so 1, 2, 4 and 8 ranks cut where leaves end.
    tied_to  the parameter that it shares, where the model ties its word embeddings.
    when     the word of CONDITIONS under which it exists.
    ignore   checkpoint names that carry nothing.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from penstock.errors import ModelLoadError
from penstock.model_config import ModelConfig, find_architecture
from penstock.validation import shown

SIZES: dict[str, Callable[[ModelConfig], int]] = {
    "vocab": lambda config: config.vocab_size,
    "hidden": lambda config: config.hidden_size,
    "intermediate": lambda config: config.intermediate_size,
    "q": lambda config: config.num_attention_heads * config.head_dim,
    "kv": lambda config: config.num_key_value_heads * config.head_dim,
    "head": lambda config: config.head_dim,
}
CONDITIONS: dict[str, Callable[[ModelConfig], bool]] = {
    "attention_bias": lambda config: config.attention_bias,
    "attention_out_bias": lambda config: config.attention_out_bias,
    "mlp_bias": lambda config: config.mlp_bias,
    "qk_norm": lambda config: config.qk_norm,
}
FIELDS = ("shape", "from", "shard", "unit", "quant", "leaves", "tied_to", "when")
UNIT_SIZES: dict[str | None, Callable[[ModelConfig], int]] = {
    None: lambda config: 1,
    "kv_group": lambda config: config.num_attention_heads // config.num_key_value_heads * config.head_dim,
}
QUANT = (False, True, "int8")
LEAVES = (1, 8)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of one model.

    Attributes:
        sources: checkpoint tensors and their shapes, joined along `join_axis`.
        shard: axis, or None where every rank has all of it.
        quant: False, True or "int8".
        tied_to: name of the parameter whose values it shares.
        unit_size: elements of the last axis that its leaves do not cut apart.
    """

    name: str
    shape: tuple[int, ...]
    sources: dict[str, tuple[int, ...]]
    join_axis: int
    shard: int | None
    unit: str | None
    quant: bool | str
    leaves: int
    tied_to: str | None
    unit_size: int = 1

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
class Row:
    """One line of the table: a Parameter for each layer, before the sizes are known."""

    pattern: str
    shape: tuple[str | tuple[str, ...], ...]
    sources: tuple[str, ...]
    shard: int | None
    unit: str | None
    quant: bool | str
    leaves: int
    tied_to: str | None
    when: str | None


@dataclass(frozen=True, slots=True)
class ParamTable:
    """All lines of one family's file."""

    rows: tuple[Row, ...]
    ignore: tuple[str, ...]

    @classmethod
    def from_text(cls, text: str, where: str) -> "ParamTable":
        """Read a table. Errors call it `where`.

        Raises:
            ModelLoadError: an unknown field or a value that a field cannot have.
        """
        try:
            entries = yaml.load(text, UniqueKeys)
        except yaml.YAMLError as error:
            raise ModelLoadError(f"{where}: not YAML: {error}") from None
        if not isinstance(entries, dict):
            raise ModelLoadError(f"{where}: it must map parameter names to their fields")
        ignore = entries.pop("ignore", [])
        if not isinstance(ignore, list) or not all(isinstance(item, str) for item in ignore):
            raise ModelLoadError(f"{where}: ignore = {shown(ignore)} is not allowed; it must be a list of names")
        return cls(tuple(_read_row(where, pattern, fields) for pattern, fields in entries.items()), tuple(ignore))

    @classmethod
    def from_file(cls, path: Path) -> "ParamTable":
        return cls.from_text(path.read_text(encoding="utf-8"), path.name)

    @classmethod
    def for_architecture(cls, architecture: str) -> "ParamTable":
        """The table of a built-in architecture; needs no torch, so the planner can read it too."""
        return cls.from_file(Path(__file__).parent / f"{find_architecture(architecture).family}.yaml")

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        """Every parameter of this model by name, in the order of the table.

        Raises:
            ModelLoadError: two parameters claim one checkpoint tensor, or one is tied to nothing of its shape.
        """
        present = [row for row in self.rows if row.when is None or CONDITIONS[row.when](config)]
        expanded = [item for row in present for item in _expand(row, config)]
        result = {item.name: item for item in expanded}
        claims = Counter(name for item in expanded if item.tied_to is None for name in item.sources)
        twice = [name for name, count in claims.items() if count > 1]
        if twice:
            raise ModelLoadError(f"parameter table: {twice[0]} is claimed by two parameters")
        for item in expanded:
            if item.tied_to is not None and (item.tied_to not in result or result[item.tied_to].shape != item.shape):
                raise ModelLoadError(f"parameter table: {item.name} is tied to {item.tied_to}, which is no such tensor")
        return result

    def ignores(self, name: str) -> bool:
        """Whether this checkpoint tensor carries nothing."""
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        return pattern in self.ignore


class UniqueKeys(yaml.SafeLoader):
    """The safe loader, which would let the second of two equal keys win, made to refuse them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = Counter(key.value for key, _ in node.value)
        name, count = names.most_common(1)[0] if names else ("", 0)
        if count > 1:
            raise yaml.YAMLError(f"{name} stands there twice")
        return super().construct_mapping(node, deep)


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
    """The parameters of one line, one for each layer."""
    pieces = [
        [SIZES[word](config) for word in ((axis,) if isinstance(axis, str) else axis)]  # of each axis
        for axis in row.shape
    ]
    join_axis = next((index for index, axis in enumerate(row.shape) if not isinstance(axis, str)), 0)
    shape = tuple(sum(axis) for axis in pieces)
    parts = [(*shape[:join_axis], size, *shape[join_axis + 1 :]) for size in pieces[join_axis]]
    tied_to = row.tied_to if config.tie_word_embeddings else None
    return [
        Parameter(
            name=row.pattern.replace("*", str(layer)),
            shape=shape,
            sources={name.replace("*", str(layer)): part for name, part in zip(row.sources, parts, strict=True)},
            join_axis=join_axis,
            shard=row.shard,
            unit=row.unit,
            quant=row.quant,
            leaves=row.leaves,
            tied_to=tied_to,
            unit_size=UNIT_SIZES[row.unit](config),
        )
        for layer in range(config.num_hidden_layers if "*" in row.pattern else 1)
    ]


def _read_row(where: str, pattern: str, fields: Any) -> Row:
    """Check one line, field by field."""
    line = f"{where}: {pattern}"
    if not isinstance(fields, dict):
        raise ModelLoadError(f"{line}: it must have fields, at least a shape")
    unknown = [field for field in fields if field not in FIELDS]
    if unknown:
        raise ModelLoadError(f"{line}: unknown field {unknown[0]!r}; known are {', '.join(FIELDS)}")
    shape = _read_shape(line, fields)
    axes = (None, -1, *range(len(shape)))
    shard = _read_choice(line, fields, "shard", None, axes)
    tied_to = fields.get("tied_to")
    if tied_to is not None and not isinstance(tied_to, str):
        raise _wrong(line, fields, "tied_to", "the name of another parameter")
    return Row(
        pattern=pattern,
        shape=shape,
        sources=_read_sources(line, pattern, fields, shape),
        shard=None if shard == -1 else shard,
        unit=_read_choice(line, fields, "unit", None, tuple(UNIT_SIZES)),
        quant=_read_choice(line, fields, "quant", False, QUANT),
        leaves=_read_choice(line, fields, "leaves", 1, LEAVES),
        tied_to=tied_to,
        when=_read_choice(line, fields, "when", None, (None, *CONDITIONS)),
    )


def _wrong(line: str, fields: dict[str, Any], field: str, allowed: str) -> ModelLoadError:
    return ModelLoadError(f"{line}: {field} = {shown(fields.get(field))} is not allowed; it must be {allowed}")


def _read_choice(line: str, fields: dict[str, Any], field: str, default: Any, allowed: tuple[Any, ...]) -> Any:
    value = fields.get(field, default)
    if not any(value == item and type(value) is type(item) for item in allowed):
        raise _wrong(line, fields, field, "one of " + ", ".join(str(item) for item in allowed))
    return value


def _read_shape(line: str, fields: dict[str, Any]) -> tuple[str | tuple[str, ...], ...]:
    shape = fields.get("shape")
    axes = shape if isinstance(shape, list) else []
    words = [word for axis in axes for word in (axis if isinstance(axis, list) else [axis])]
    joined = [axis for axis in axes if isinstance(axis, list)]
    if not words or len(joined) > 1 or not all(isinstance(word, str) and word in SIZES for word in words):
        raise _wrong(line, fields, "shape", f"a list of {', '.join(SIZES)}, or of lists of these for one axis")
    return tuple(tuple(axis) if isinstance(axis, list) else axis for axis in axes)


def _read_sources(
    line: str, pattern: str, fields: dict[str, Any], shape: tuple[str | tuple[str, ...], ...]
) -> tuple[str, ...]:
    """Whole checkpoint names, with `*` still in them."""
    names = fields.get("from", [pattern])
    pieces = next((len(axis) for axis in shape if not isinstance(axis, str)), 1)
    if not isinstance(names, list) or len(names) != pieces or not all(isinstance(name, str) for name in names):
        raise _wrong(line, fields, "from", f"a list of {pieces} names, as many as the shape has pieces")
    parent, _, leaf = pattern.rpartition(".")
    parent = parent.rpartition(".")[0]
    return tuple(name if "." in name else f"{parent}.{name}.{leaf}" for name in names)
