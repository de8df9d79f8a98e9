"""The rows of a parameter table: the format of models/<family>/table.yaml, and how it is read. No torch.

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
                                   interleaves the rows of each of their heads as pairs, Transformers as halves
               transposed: true    [in, out] in the checkpoint
               stacked: true       one tensor for all experts, which are its first axis
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
    ignore   checkpoint names that hold no values of the model.
    prefix   start of Transformers' names that some checkpoints leave out.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from penstock.errors import ModelLoadError, one_line, shown
from penstock.spec.model_config import ModelConfig

SIZES: dict[str, Callable[[ModelConfig], int]] = {
    "vocab": lambda config: config.vocab_size,
    "hidden": lambda config: config.hidden_size,
    "intermediate": lambda config: config.intermediate_size,
    "q": lambda config: config.num_attention_heads * config.head_dim,
    "kv": lambda config: config.num_key_value_heads * config.head_dim,
    "head": lambda config: config.head_dim,
    "experts": lambda config: config.num_experts,
    "expert_intermediate": lambda config: config.moe_intermediate_size,
    "positions": lambda config: config.max_position_embeddings,
}
MAX_YAML = 2**20  # characters in a file; tables and maps have a few thousand
MAX_DEPTH = 64  # nested brackets
FIELDS = ("shape", "from", "or", "shard", "unit", "quant", "leaves", "tied_to", "when")
UNIT_SIZES: dict[str | None, Callable[[ModelConfig], int]] = {
    None: lambda config: 1,
    "kv_group": lambda config: config.num_attention_heads // config.num_key_value_heads * config.head_dim,
}
CONFIG_TYPES = {item.name: item.type for item in fields_of(ModelConfig)}
EXTRA = "extra."  # before the name of a value in ModelConfig.extra
QUANT = (False, True, "int8")
LEAVES = (1, 8)

Axis = str | int | tuple[str | int, ...]
Conditions = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Held:
    """A row's `from` or one entry of its `or`: a Layout whose layer, expert and sizes are not yet known."""

    names: tuple[str, ...]
    order: str | None = None
    transposed: bool = False
    stacked: bool = False


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
def read_table(text: str, where: str) -> tuple[tuple[Row, ...], tuple[str, ...], str]:
    """Return the rows, `ignore` and `prefix` of a table; see ParamTable.from_text."""
    entries = read_yaml(text, where)
    if not isinstance(entries, dict):
        raise ModelLoadError(f"{where}: it must map parameter names to their fields")
    ignore = entries.pop("ignore", [])
    if not isinstance(ignore, list) or not all(isinstance(item, str) for item in ignore):
        raise ModelLoadError(f"{where}: ignore = {shown(ignore)} is not allowed; it must be a list of names")
    prefix = entries.pop("prefix", "")
    if not isinstance(prefix, str):
        raise ModelLoadError(f"{where}: prefix = {shown(prefix)} is not allowed; it must be a word")
    rows = tuple(_RowReader(where, pattern, fields).row() for pattern, fields in entries.items())
    return rows, tuple(ignore), prefix


def read_text(file: Path) -> str:
    """Read a text file. Raise ModelLoadError if it cannot be read."""
    if file.exists() and not file.is_file():
        raise ModelLoadError(f"{file}: is not a file")  # reading a pipe would never end
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def read_yaml(text: str, where: str) -> Any:
    """Parse YAML, refusing duplicate keys. Raise ModelLoadError if it is not YAML, or a key is repeated."""
    if len(text) > MAX_YAML:
        raise ModelLoadError(f"{where}: has {len(text)} characters; at most {MAX_YAML} are allowed")
    try:
        _check_depth(text)
        return yaml.load(text, _UniqueKeys)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ModelLoadError(f"{where}: not YAML: {place}{one_line(error.problem or error.context)}") from None
    except RecursionError:
        raise ModelLoadError(f"{where}: not YAML that can be read: it is nested too deep") from None
    except (yaml.YAMLError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
        raise ModelLoadError(f"{where}: not YAML: {one_line(error)}") from None  # or a bad date, base64 value or key


def _check_depth(text: str) -> None:
    """Raise RecursionError for brackets nested too deeply, on which the scanner takes quadratic time."""
    depth = 0
    for char in text:
        depth = max(0, depth + (char in "[{") - (char in "]}"))
        if depth > MAX_DEPTH:
            raise RecursionError


class _UniqueKeys(yaml.SafeLoader):
    """The safe loader, but duplicate keys are refused instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        if not all(isinstance(key, yaml.ScalarNode) for key, _ in node.value):
            raise yaml.YAMLError("a key must be a word")
        names = Counter(key.value for key, _ in node.value)
        name, count = names.most_common(1)[0] if names else ("", 0)
        if count > 1:
            raise yaml.YAMLError(f"duplicate key {shown(name)}")
        return super().construct_mapping(node, deep)


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
        """Return `from`, every entry of `or`, and the parameter's own name unless one of them consists of it alone."""
        others = self._fields.get("or", [])
        if not isinstance(others, list):
            raise self._wrong("or", "a list")
        given = [self._held("from", self._fields.get("from", [self._pattern]), shape)]
        given += [self._held("or", other, shape) for other in others]
        own = [] if any(item.names == (self._pattern,) for item in given) else [Held((self._pattern,))]
        return tuple(dict.fromkeys([*given, *own]))

    def _held(self, field: str, value: Any, shape: tuple[Axis, ...]) -> Held:
        """Return one way of holding the parameter, with whole checkpoint names that still contain `*`."""
        given = value if isinstance(value, dict) else {"names": value}
        names, order = given.get("names"), given.get("order")
        flags = {name: given.get(name, False) for name in ("transposed", "stacked")}
        pieces = next((len(axis) for axis in shape if isinstance(axis, tuple)), 1)
        counts = sorted({1, pieces})
        allowed = f"a list of {' or '.join(map(str, counts))} names, or a mapping of `names` and their layout"
        if not isinstance(names, list) or len(names) not in counts or not all(isinstance(name, str) for name in names):
            raise self._wrong(field, allowed)
        known = set(given) <= {"names", "order", *flags} and all(isinstance(flag, bool) for flag in flags.values())
        names_of_order = {None: counts, "kv_group": [1], "rotary_pairs": [pieces]}  # how many names the order takes
        unordered = order is not None and (pieces == 1 or not isinstance(shape[0], tuple))  # only rows have an order
        taken = names_of_order.get(order, ()) if isinstance(order, str | None) else ()
        if not known or len(names) not in taken or unordered:
            raise self._wrong(field, allowed)
        if (flags["transposed"] and len(shape) != 2) or (flags["stacked"] and self._pattern.count("*") != 2):
            raise self._wrong(field, "transposed for a matrix only, and stacked for a parameter of an expert only")
        parent, _, leaf = self._pattern.rpartition(".")
        parent = parent.rpartition(".")[0]
        return Held(tuple(name if "." in name else f"{parent}.{name}.{leaf}" for name in names), order, **flags)


def _is_size(word: Any) -> bool:
    if isinstance(word, str):
        return word in SIZES or word.startswith(EXTRA) or CONFIG_TYPES.get(word) is int
    return type(word) is int and word > 0
