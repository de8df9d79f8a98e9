"""ParamTable: every parameter of a model family, listed once, in models/<family>/table.yaml. No torch.

It tells the loader the checkpoint names, the sharding code the axes, the quantiser what to pack, the planner the sizes.
First the file is read into rows; then the rows are expanded with the numbers of one model: names, shapes, and the
layouts in which a checkpoint may hold the parameters.

The file has one entry per parameter. The first `*` stands for the layer number, the second for the expert number:

    model.layers.*.self_attn.qkv_proj.weight:
      {shape: [[q, kv, kv], hidden], from: [q_proj, k_proj, v_proj], shard: 0, unit: kv_group, quant: true}
    ignore: ["model.layers.*.self_attn.rotary_emb.inv_freq"]

    shape    sizes of the axes: words of SIZES, integer fields of ModelConfig by name (`extra.NAME`: from its extra), or
             integers. A list in place of a size gives the pieces of that axis, joined in this order.
    from     how Transformers' checkpoints hold the parameter, if they do so differently: a list of names, one per piece
             of the shape or one for all pieces. A bare name replaces the module's own name (the last part but one); a
             name with dots is a whole name. A mapping says more: {names: [...], order: ..., transposed: ...,
             stacked: ...}
               order: kv_group     one tensor holds all pieces, and for each key/value head in turn, that head's share
                                   of every piece
               order: rotary_pairs one tensor per piece; all but the last piece are rotated, and the checkpoint
                                   interleaves the rotated rows of each of their heads as pairs, the engine as halves.
                                   For the norms of q and k, it does so with their elements
               order: rotary       rotary_pairs if the rotary embedding is `interleaved`, otherwise none
               order: alternating  one tensor holds both pieces, whose rows take turns
               transposed: true    [in, out] in the checkpoint, if it holds floats; codes are never transposed
               stacked: true       one tensor for all experts, which are its first axis
               numbered: true      a tensor for each row, NAME.0 to NAME.N-1; only for rows that are joined
    or       a list of other ways in which a checkpoint may hold it, each as in `from`. Its own name, for the whole
             parameter, is always allowed, unless `from` or `or` gives that name another meaning.
    shard    the axis that tensor parallelism splits; absent or -1: every rank has the whole parameter.
    unit     the smallest part of that axis that stays on one rank: "kv_group" is one key/value head with its query
             heads.
    quant    true: the parameter may be stored in any quantised form; "int8": in int8, but in no coarser form.
    leaves   the product over the last axis is reduced in this many pieces (kernels/ops.py). leaf_bounds gives the
             elements of each if K does not divide evenly: with U units of `unit`, leaf i has the units i*U//leaves ..
             (i+1)*U//leaves, possibly none. Rank r of R takes the leaves r*leaves/R .. (r+1)*leaves/R, so that 1, 2, 4
             and 8 ranks cut at the ends of leaves.
    tied_to  the parameter whose values it shares if the model ties its word embeddings.
    when     conditions for its existence: a field of ModelConfig, or a mapping of fields to the value (or list of
             values) that they must have. A field with an entry per layer is read for the parameter's layer.
    like     another table file, relative to this one: its entries hold here, too. An entry of the same name replaces
             only the fields that it has.
    ignore   checkpoint names that hold no values of the model; one that ends in * is the beginning of such names.
    constants  checkpoint names that hold one number each, and the only value that is allowed.
    prefix   start of Transformers' names that some checkpoints leave out; or a list of it and of what other checkpoints
             have instead.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.errors import ModelLoadError, shown
from penstock.spec.config_reader import read_text, read_yaml
from penstock.spec.model_config import ModelConfig

SIZES: dict[str, Callable[[ModelConfig], int]] = {
    "vocab": lambda config: config.vocab_size,
    "hidden": lambda config: config.hidden_size,
    "intermediate": lambda config: config.intermediate_size,
    "q": lambda config: config.num_attention_heads * config.head_dim,
    "kv": lambda config: config.num_key_value_heads * config.head_dim,
    "head": lambda config: config.head_dim,
    "q_norm": lambda config: config.head_dim * (config.num_attention_heads if config.qk_norm_together else 1),
    "k_norm": lambda config: config.head_dim * (config.num_key_value_heads if config.qk_norm_together else 1),
    "experts": lambda config: config.num_experts,
    "expert_intermediate": lambda config: config.moe_intermediate_size,
    "positions": lambda config: config.max_position_embeddings,
    "labels": lambda config: len(config.labels),
}
FIELDS = ("shape", "from", "or", "shard", "unit", "quant", "leaves", "tied_to", "when")
UNIT_SIZES: dict[str | None, Callable[[ModelConfig], int]] = {
    None: lambda config: 1,
    "kv_group": lambda config: config.num_attention_heads // config.num_key_value_heads * config.head_dim,
}
CONFIG_TYPES = {item.name: item.type for item in fields_of(ModelConfig)}
EXTRA = "extra."  # before the name of a value in ModelConfig.extra
QUANT = (False, True, "int8")
LEAVES = (1, 8)
PAIR = 2
LIKE = re.compile(r"^like: *(\S+)", re.MULTILINE)
ROTARY = ("rotary_pairs", "rotary")  # orders of rows or elements of heads that are rotated

Axis = str | int | tuple[str | int, ...]
Conditions = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Held:
    """A row's `from` or one entry of its `or`: a Layout whose layer, expert and sizes are not yet known."""

    names: tuple[str, ...]
    order: str | None = None
    transposed: bool = False
    stacked: bool = False
    numbered: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: a Parameter for each layer, whose sizes are not yet known."""

    pattern: str
    shape: tuple[Axis, ...]
    held: tuple[Held, ...]
    shard: int | None
    unit: str | None
    quant: bool | str
    leaves: int
    tied_to: str | None
    when: Conditions
    fields: Mapping[str, Any] = field(compare=False)  # as in the file, in the order of FIELDS


@lru_cache(maxsize=16)  # planner, loader and fingerprint read the same text, and YAML is slow to parse
def read_table(
    text: str, where: str, base: str = ""
) -> tuple[tuple[Row, ...], tuple[str, ...], tuple[str, ...], tuple[tuple[str, float], ...]]:
    """Parse the rows, `ignore`, `prefix` and `constants` of a table; see ParamTable.from_text.

    base: the table that `like` names.
    """
    entries = read_yaml(text, where)
    if not isinstance(entries, dict):
        raise ModelLoadError(f"{where}: it must map parameter names to their fields")
    if base:
        del entries["like"]
        entries = _merged(read_yaml(base, where), entries)
    ignore = entries.pop("ignore", [])
    if not isinstance(ignore, list) or not all(isinstance(item, str) for item in ignore):
        raise ModelLoadError(f"{where}: ignore = {shown(ignore)} is not allowed; it must be a list of names")
    prefix = entries.pop("prefix", "")
    prefixes = prefix if isinstance(prefix, list) and prefix else [prefix]
    if not all(isinstance(item, str) for item in prefixes):
        raise ModelLoadError(f"{where}: prefix = {shown(prefix)} is not allowed; it must be a word, or a list of words")
    constants = entries.pop("constants", {})
    if not isinstance(constants, dict) or not all(isinstance(item, int | float) for item in constants.values()):
        raise ModelLoadError(f"{where}: constants = {shown(constants)} is not allowed; it must map names to numbers")
    rows = tuple(_RowReader(where, pattern, fields).row() for pattern, fields in entries.items())
    return rows, tuple(ignore), tuple(prefixes), tuple(constants.items())


def _merged(base: dict[str, Any], entries: dict[str, Any]) -> dict[str, Any]:
    """Replace fields of a table's entries, and add entries."""
    merged = dict(base)
    for name, fields in entries.items():
        known = base.get(name)
        merged[name] = known | fields if isinstance(known, dict) and isinstance(fields, dict) else fields
    return merged


class _RowReader:
    """Checks the fields of one row."""

    def __init__(self, where: str, pattern: str, fields: Any) -> None:
        self._line, self._pattern = f"{where}: {pattern}", pattern
        if not isinstance(fields, dict):
            raise ModelLoadError(f"{self._line}: it must have fields, at least a shape")
        unknown = [name for name in fields if name not in FIELDS]
        if unknown:
            raise ModelLoadError(f"{self._line}: unknown field {unknown[0]!r}; known are {', '.join(FIELDS)}")
        self._fields = {name: fields[name] for name in FIELDS if name in fields}
        if isinstance(when := fields.get("when"), str):
            self._fields["when"] = {when: True}

    def row(self) -> Row:
        shape = self._shape()
        shard = self._choice("shard", None, (None, -1, *range(len(shape))))
        tied_to = self._fields.get("tied_to")
        if tied_to is not None and not isinstance(tied_to, str):
            raise self._wrong("tied_to", "the name of another parameter")
        return Row(
            pattern=self._pattern,
            shape=shape,
            held=self._all_held(shape),
            shard=None if shard == -1 else shard,
            unit=self._choice("unit", None, tuple(UNIT_SIZES)),
            quant=self._choice("quant", False, QUANT),
            leaves=self._choice("leaves", 1, LEAVES),
            tied_to=tied_to,
            when=self._when(),
            fields=self._fields,
        )

    def _wrong(self, field: str, allowed: str) -> ModelLoadError:
        value = shown(self._fields.get(field))
        return ModelLoadError(f"{self._line}: {field} = {value} is not allowed; it must be {allowed}")

    def _choice(self, field: str, default: Any, allowed: tuple[Any, ...]) -> Any:
        value = self._fields.get(field, default)
        if not any(value == item and type(value) is type(item) for item in allowed):
            raise self._wrong(field, "one of " + ", ".join(str(item) for item in allowed))
        return value

    def _shape(self) -> tuple[Axis, ...]:
        shape = self._fields.get("shape")
        axes = [tuple(axis) if isinstance(axis, list) else axis for axis in shape] if isinstance(shape, list) else []
        joined = [axis for axis in axes if isinstance(axis, tuple)]
        words = [word for axis in axes for word in (axis if isinstance(axis, tuple) else [axis])]
        if not words or len(joined) > 1 or not all(_is_size(word) for word in words):
            raise self._wrong("shape", f"a list of {', '.join(SIZES)}, or of lists of these for one axis")
        return tuple(axes)

    def _when(self) -> Conditions:
        when = self._fields.get("when", {})
        if not isinstance(when, dict) or not all(
            isinstance(name, str) and (name in CONFIG_TYPES or name.startswith(EXTRA)) for name in when
        ):
            raise self._wrong("when", "a field of ModelConfig (or of its extra), or a mapping of fields to values")
        return {name: tuple(value) if isinstance(value, list) else (value,) for name, value in when.items()}

    def _all_held(self, shape: tuple[Axis, ...]) -> tuple[Held, ...]:
        """List `from`, every entry of `or`, and the parameter's own name unless one of them consists of it alone."""
        others = self._fields.get("or", [])
        if not isinstance(others, list):
            raise self._wrong("or", "a list")
        given = [self._held("from", self._fields.get("from", [self._pattern]), shape)]
        given += [self._held("or", other, shape) for other in others]
        own = [] if any(item.names == (self._pattern,) for item in given) else [Held((self._pattern,))]
        return tuple(dict.fromkeys([*given, *own]))

    def _held(self, field: str, value: Any, shape: tuple[Axis, ...]) -> Held:
        """Read one way of holding the parameter, with whole checkpoint names that still contain `*`."""
        given = value if isinstance(value, dict) else {"names": value}
        names, order = given.get("names"), given.get("order")
        flags = {name: given.get(name, False) for name in ("transposed", "stacked", "numbered")}
        pieces = next((len(axis) for axis in shape if isinstance(axis, tuple)), 1)
        counts = sorted({1, pieces})
        allowed = f"a list of {' or '.join(map(str, counts))} names, or a mapping of `names` and their layout"
        if not isinstance(names, list) or len(names) not in counts or not all(isinstance(name, str) for name in names):
            raise self._wrong(field, allowed)
        known = set(given) <= {"names", "order", *flags} and all(isinstance(flag, bool) for flag in flags.values())
        names_of_order = {None: counts, "kv_group": [1]} | {name: [pieces] for name in ROTARY}  # numbers of names
        names_of_order["alternating"] = [1] if pieces == PAIR else []
        unordered = order is not None and not isinstance(shape[0], tuple)  # only joined rows have an order, or
        if order in ROTARY and pieces == 1:  # what has an element for each element of a head
            unordered = shape[-1] != "head" and shape[0] not in ("q", "kv")
        taken = names_of_order.get(order, ()) if isinstance(order, str | None) else ()
        if not known or len(names) not in taken or unordered:
            raise self._wrong(field, allowed)
        is_joined = len(shape) == 2 and isinstance(shape[0], tuple)
        if flags["numbered"] and (not is_joined or flags["transposed"] or flags["stacked"] or order is not None):
            raise self._wrong(field, "numbered for a matrix with joined rows only, as it is")
        if (flags["transposed"] and len(shape) != 2) or (flags["stacked"] and self._pattern.count("*") != 2):
            raise self._wrong(field, "transposed for a matrix only, and stacked for a parameter of an expert only")
        parent, _, leaf = self._pattern.rpartition(".")
        parent = parent.rpartition(".")[0]
        return Held(tuple(name if "." in name else f"{parent}.{name}.{leaf}" for name in names), order, **flags)


def _is_size(word: Any) -> bool:
    if isinstance(word, str):
        return word in SIZES or word.startswith(EXTRA) or CONFIG_TYPES.get(word) is int
    return type(word) is int and word > 0


@dataclass(frozen=True, slots=True)
class Layout:
    """One way in which a checkpoint may hold a parameter.

    Attributes:
        sources: checkpoint tensors and their shapes. Several are joined along `join_axis`.
        pieces: sizes of the joined pieces along `join_axis`, whether they are in one tensor or in several.
        groups: one tensor holds all pieces in `groups` groups with an equal share of each piece; 1: one piece after the
            other.
        transposed: the tensors are [K, N] in the checkpoint.
        paired_head: head size if the tensors interleave rotated elements as pairs; 0: as halves. Of several tensors
            whose rows are these elements, the last is not rotated.
        rotated: the number of elements of such a head that are rotated, its first ones.
        paired_axis: the axis with the elements of heads.
        index: this parameter's index on the first axis of a stacked tensor; None: the tensor is not stacked.
        numbered: each tensor is one row.
    """

    sources: dict[str, tuple[int, ...]]
    join_axis: int = 0
    pieces: tuple[int, ...] = ()
    groups: int = 1
    transposed: bool = False
    paired_head: int = 0
    rotated: int = 0
    paired_axis: int = 0
    index: int | None = None
    numbered: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of one model.

    Attributes:
        layouts: how checkpoints may hold it; Transformers' layout is first, the layout under its own name last.
        shard: the axis that tensor parallelism splits; None: every rank has the whole parameter.
        is_gathered: every rank needs the whole result of a product whose rows are split.
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
    is_gathered: bool = False

    @property
    def sources(self) -> dict[str, tuple[int, ...]]:
        """List the checkpoint tensors that Transformers writes, with their shapes."""
        return self.layouts[0].sources

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def leaf_ends(self) -> tuple[int, ...]:
        """List the ends of the leaves of the last axis; () if it is reduced in one piece."""
        if self.ends is not None:
            return self.ends
        if self.leaves == 1:
            return ()
        return tuple(end for _, end in leaf_bounds(self.shape[-1], self.leaves, self.unit_size))


@dataclass(frozen=True, slots=True)
class ParamTable:
    """The parameter table of one family."""

    rows: tuple[Row, ...]
    ignore: tuple[str, ...]
    prefixes: tuple[str, ...] = ("",)
    constants: tuple[tuple[str, float], ...] = ()

    @classmethod
    def from_text(cls, text: str, where: str) -> "ParamTable":
        """Read a table, which errors call `where`. Raise ModelLoadError if a field or its value is not allowed."""
        return cls(*read_table(text, where))

    @classmethod
    def from_file(cls, path: Path) -> "ParamTable":
        """Read a YAML file. Raise ModelLoadError if it cannot be read or is not a table."""
        text = read_text(path)
        like = LIKE.search(text)
        return cls(*read_table(text, path.name, "" if like is None else read_text(path.parent / like[1])))

    @property
    def prefix(self) -> str:
        return self.prefixes[0]

    def full_name(self, name: str) -> str:
        """Put the prefix before a checkpoint's name, in place of one that other checkpoints have."""
        other = next((item for item in self.prefixes if name.startswith(item)), "")
        return self.prefix + name.removeprefix(other)

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        """List every parameter of a model by name, in the order of the table.

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
        """Tell whether a checkpoint tensor, whose name may lack the prefix, holds no values of the model."""
        is_listed = any(fnmatchcase(found, item) for item in self.ignore for found in self._names(name))
        return is_listed or self.constant(name) is not None

    def constant(self, name: str) -> float | None:
        """Find the value that a checkpoint tensor, whose name may lack the prefix, must have; None: it is none."""
        return next((value for item, value in self.constants if item in self._names(name)), None)

    def _names(self, name: str) -> list[str]:
        """List a name with and without the prefix, and with * for numbers."""
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        return [self.full_name(item) if full else item for item in (name, pattern) for full in (False, True)]


def leaf_bounds(k: int, leaves: int, unit: int = 1) -> list[tuple[int, int]]:
    """Cut an axis of k elements into leaves, only between units: the [first, past-the-last) elements of each leaf.

    Raises:
        ValueError: k is not a multiple of the unit.
    """
    if k % unit:
        raise ValueError(f"an axis of {k} elements is not made of units of {unit}")
    borders = [index * (k // unit) // leaves * unit for index in range(leaves + 1)]
    return list(itertools.pairwise(borders))


def _expand(row: Row, config: ModelConfig) -> list[Parameter]:
    """Expand a row to its parameters: one for each layer and expert that has it."""
    layers = range(config.num_hidden_layers if "*" in row.pattern else 1)
    experts = range(config.num_experts if row.pattern.count("*") > 1 else 1)
    existing = [(layer, config.at(layer)) for layer in layers if _holds(row.when, config, layer)]
    return [_Expansion(own, layer, expert).parameter(row) for layer, own in existing for expert in experts]


@dataclass(frozen=True, slots=True)
class _Expansion:
    """Makes the parameters of one layer and one expert of a model. config: the numbers of this layer."""

    config: ModelConfig
    layer: int
    expert: int

    def parameter(self, row: Row) -> Parameter:
        axes = [axis if isinstance(axis, tuple) else (axis,) for axis in row.shape]
        pieces = [tuple(self._size(word) for word in axis) for axis in axes]
        return Parameter(
            name=self._name(row.pattern),
            shape=tuple(map(sum, pieces)),
            layouts=tuple(self._layout(row, held, pieces) for held in row.held),
            shard=row.shard,
            unit=row.unit,
            quant=row.quant,
            leaves=row.leaves,
            tied_to=row.tied_to if self.config.tie_word_embeddings else None,
            unit_size=UNIT_SIZES[row.unit](self.config),
            num_units=1 if row.unit is None else self.config.num_key_value_heads,
        )

    def _layout(self, row: Row, held: Held, pieces: list[tuple[int, ...]]) -> Layout:
        """Make the layout. pieces: the sizes of the pieces of each axis; at most one axis has several."""
        shape, rope = tuple(map(sum, pieces)), self.config.rope
        is_paired = held.order == "rotary_pairs"
        if held.order == "rotary":
            is_paired = rope is not None and rope.interleaved
        axis = next((index for index, sizes in enumerate(pieces) if len(sizes) > 1), 0)
        sizes = pieces[axis] if len(held.names) > 1 else (shape[axis],)
        parts = [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]
        if held.transposed:
            parts = [part[::-1] for part in parts]
        if held.stacked:
            parts = [(self.config.num_experts, *part) for part in parts]
        sources = dict(zip(map(self._name, held.names), parts, strict=True))
        if held.numbered:
            sources = {
                f"{name.removesuffix(leaf)}.{row}{leaf}": part[1:]
                for name, part in sources.items()
                for leaf in (f".{name.rpartition('.')[2]}",)
                for row in range(part[0])
            }
        return Layout(
            sources=sources,
            join_axis=axis,
            pieces=pieces[axis],
            groups=self._groups(held, pieces[axis][0]),
            transposed=held.transposed,
            paired_head=self.config.head_dim if is_paired else 0,
            rotated=self._rotated() if is_paired else 0,
            paired_axis=1 if is_paired and row.shape[1:] == ("head",) else 0,
            index=self.expert if held.stacked else None,
            numbered=held.numbered,
        )

    def _groups(self, held: Held, piece: int) -> int:
        return {"kv_group": self.config.num_key_value_heads, "alternating": piece}.get(held.order or "", 1)

    def _rotated(self) -> int:
        """Count the elements of a head that are rotated."""
        head, rope = self.config.head_dim, self.config.rope
        return head if rope is None else (rope.rotary_dim(head) + 1) // 2 * 2

    def _name(self, pattern: str) -> str:
        return pattern.replace("*", str(self.layer), 1).replace("*", str(self.expert), 1)

    def _size(self, word: str | int) -> int:
        if isinstance(word, int):
            return word
        if word.startswith(EXTRA):
            return int(self.config.extra[word.removeprefix(EXTRA)])
        return SIZES[word](self.config) if word in SIZES else int(getattr(self.config, word))


def _holds(when: Conditions, config: ModelConfig, layer: int) -> bool:
    """Tell whether every field of the conditions has one of its allowed values in this layer."""
    for name, allowed in when.items():
        value = config.extra.get(name.removeprefix(EXTRA)) if name.startswith(EXTRA) else getattr(config, name)
        if isinstance(value, tuple):
            value = value[layer]
        if not any(value == item and type(value) is type(item) for item in allowed):
            return False
    return True
