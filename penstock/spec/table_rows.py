"""The lines of a parameter table: the language of models/<family>.yaml, and how it is read. No torch here.

One entry a parameter; the first `*` stands for the layer number, a second one for that of the expert:

    model.layers.*.self_attn.qkv_proj.weight:
      {shape: [[q, kv, kv], hidden], from: [q_proj, k_proj, v_proj], shard: 0, unit: kv_group, quant: true}
    ignore: ["model.layers.*.self_attn.rotary_emb.inv_freq"]

    shape    sizes of the axes: words of SIZES, whole numbers of ModelConfig by name (`extra.NAME`: of its extra), or
             integers. A list in place of a size: the pieces of that axis, joined in this order.
    from     how checkpoints of Transformers hold it, where that differs: a list of names. A bare name replaces the
             module's own (the last but one part), one with dots is a whole name. One name for each piece of the shape,
             or one for all of them. A mapping says more: {names: [...], order: ..., transposed: ..., stacked: ...}
               order: kv_group     one tensor holds all pieces, not one after the other but, for each key/value head
                                   in turn, that head's share of every piece
               order: rotary_pairs one tensor a piece; all but the last piece are rotated, and the checkpoint has the
                                   rows of each of their heads as pairs to be rotated, where Transformers has halves
               transposed: true    [in, out] in the checkpoint
               stacked: true       one tensor for all experts, which are its first axis
    or       a list of other ways in which a checkpoint may hold it, each as in `from`. Under the parameter's own name,
             whole, it may always stand, unless `from` or `or` give that name another meaning.
    shard    the axis that tensor parallelism splits; absent or -1: every rank has all of it.
    unit     what that axis may be cut into at the finest: "kv_group" is one key/value head with its query heads.
    quant    true: may be stored in any quantised form; "int8": in int8 at the finest.
    leaves   the product over the last axis reduces in this many pieces (kernels/ops.py). Where K does not divide
             evenly, leaf_bounds says which elements each piece has: leaves are made of whole units of `unit`, and
             with U of them leaf i has the units i*U//leaves .. (i+1)*U//leaves, which may be none. Rank r of R takes
             the leaves r*leaves/R .. (r+1)*leaves/R, so 1, 2, 4 and 8 ranks cut where leaves end.
    tied_to  the parameter that it shares, where the model ties its word embeddings.
    when     what has to hold for it to exist: a field of ModelConfig, or a mapping of fields to the value (or a list
             of values) that they must have. A field with an entry a layer is asked for the parameter's layer.
    ignore   checkpoint names that carry nothing.
    prefix   what Transformers' names begin with and some checkpoints leave out.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any

import yaml

from penstock.errors import ModelLoadError
from penstock.spec.model_config import ModelConfig
from penstock.validation import shown

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
FIELDS = ("shape", "from", "or", "shard", "unit", "quant", "leaves", "tied_to", "when")
UNIT_SIZES: dict[str | None, Callable[[ModelConfig], int]] = {
    None: lambda config: 1,
    "kv_group": lambda config: config.num_attention_heads // config.num_key_value_heads * config.head_dim,
}
CONFIG_TYPES = {item.name: item.type for item in fields_of(ModelConfig)}
EXTRA = "extra."  # before the name of a number in ModelConfig.extra
QUANT = (False, True, "int8")
LEAVES = (1, 8)

Axis = str | int | tuple[str | int, ...]
Conditions = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Held:
    """A line's `from`, or one entry of its `or`: a Layout before layer, expert and sizes are known."""

    names: tuple[str, ...]
    order: str | None = None
    transposed: bool = False
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a Parameter for each layer, before the sizes are known."""

    pattern: str
    shape: tuple[Axis, ...]
    held: tuple[Held, ...]
    shard: int | None
    unit: str | None
    quant: bool | str
    leaves: int
    tied_to: str | None
    when: Conditions


@dataclass(frozen=True, slots=True)
class Lines:
    """All that a table's file says."""

    rows: tuple[Row, ...]
    ignore: tuple[str, ...]
    prefix: str


def read_lines(text: str, where: str) -> Lines:
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
    prefix = entries.pop("prefix", "")
    if not isinstance(prefix, str):
        raise ModelLoadError(f"{where}: prefix = {shown(prefix)} is not allowed; it must be a word")
    rows = tuple(_read_row(where, pattern, entry) for pattern, entry in entries.items())
    return Lines(rows, tuple(ignore), prefix)


class UniqueKeys(yaml.SafeLoader):
    """The safe loader, which would let the second of two equal keys win, made to refuse them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = Counter(key.value for key, _ in node.value)
        name, count = names.most_common(1)[0] if names else ("", 0)
        if count > 1:
            raise yaml.YAMLError(f"{name} stands there twice")
        return super().construct_mapping(node, deep)


def _read_row(where: str, pattern: str, fields: Any) -> Row:
    """Check one line, field by field."""
    line = f"{where}: {pattern}"
    if not isinstance(fields, dict):
        raise ModelLoadError(f"{line}: it must have fields, at least a shape")
    unknown = [field for field in fields if field not in FIELDS]
    if unknown:
        raise ModelLoadError(f"{line}: unknown field {unknown[0]!r}; known are {', '.join(FIELDS)}")
    shape = _read_shape(line, fields)
    held = _read_held(line, pattern, fields, "from", fields.get("from", [pattern]), shape)
    others = fields.get("or", [])
    if not isinstance(others, list):
        raise _wrong(line, fields, "or", "a list")
    listed = [held, *(_read_held(line, pattern, fields, "or", other, shape) for other in others)]
    own = [] if any(item.names == (pattern,) for item in listed) else [Held((pattern,))]
    axes = (None, -1, *range(len(shape)))
    shard = _read_choice(line, fields, "shard", None, axes)
    tied_to = fields.get("tied_to")
    if tied_to is not None and not isinstance(tied_to, str):
        raise _wrong(line, fields, "tied_to", "the name of another parameter")
    return Row(
        pattern=pattern,
        shape=shape,
        held=tuple(dict.fromkeys([*listed, *own])),
        shard=None if shard == -1 else shard,
        unit=_read_choice(line, fields, "unit", None, tuple(UNIT_SIZES)),
        quant=_read_choice(line, fields, "quant", False, QUANT),
        leaves=_read_choice(line, fields, "leaves", 1, LEAVES),
        tied_to=tied_to,
        when=_read_when(line, fields),
    )


def _wrong(line: str, fields: dict[str, Any], field: str, allowed: str) -> ModelLoadError:
    return ModelLoadError(f"{line}: {field} = {shown(fields.get(field))} is not allowed; it must be {allowed}")


def _read_choice(line: str, fields: dict[str, Any], field: str, default: Any, allowed: tuple[Any, ...]) -> Any:
    value = fields.get(field, default)
    if not any(value == item and type(value) is type(item) for item in allowed):
        raise _wrong(line, fields, field, "one of " + ", ".join(str(item) for item in allowed))
    return value


def _read_shape(line: str, fields: dict[str, Any]) -> tuple[Axis, ...]:
    shape = fields.get("shape")
    axes = shape if isinstance(shape, list) else []
    words = [word for axis in axes for word in (axis if isinstance(axis, list) else [axis])]
    joined = [axis for axis in axes if isinstance(axis, list)]
    if not words or len(joined) > 1 or not all(_is_size(word) for word in words):
        raise _wrong(line, fields, "shape", f"a list of {', '.join(SIZES)}, or of lists of these for one axis")
    return tuple(tuple(axis) if isinstance(axis, list) else axis for axis in axes)


def _is_size(word: Any) -> bool:
    if isinstance(word, bool) or not isinstance(word, str | int):
        return False
    if isinstance(word, int):
        return word > 0
    return word in SIZES or word.startswith(EXTRA) or CONFIG_TYPES.get(word) is int


def _read_when(line: str, fields: dict[str, Any]) -> Conditions:
    when = fields.get("when", {})
    if isinstance(when, str):
        when = {when: True}
    if not isinstance(when, dict) or not all(_is_condition(name) for name in when):
        raise _wrong(line, fields, "when", "a field of ModelConfig (or of its extra), or a mapping of fields to values")
    return {name: tuple(value) if isinstance(value, list) else (value,) for name, value in when.items()}


def _is_condition(name: Any) -> bool:
    return isinstance(name, str) and (name in CONFIG_TYPES or name.startswith(EXTRA))


def _read_held(
    line: str, pattern: str, fields: dict[str, Any], field: str, value: Any, shape: tuple[Axis, ...]
) -> Held:
    """Whole checkpoint names, with `*` still in them, and how the tensors lie there."""
    given = value if isinstance(value, dict) else {"names": value}
    names, order = given.get("names"), given.get("order")
    flags = {name: given.get(name, False) for name in ("transposed", "stacked")}
    pieces = next((len(axis) for axis in shape if isinstance(axis, tuple)), 1)
    counts = sorted({1, pieces})
    allowed = f"a list of {' or '.join(map(str, counts))} names, or a mapping with `names` and how they lie"
    if not isinstance(names, list) or len(names) not in counts or not all(isinstance(name, str) for name in names):
        raise _wrong(line, fields, field, allowed)
    known = set(given) <= {"names", "order", *flags} and all(isinstance(flag, bool) for flag in flags.values())
    names_of_order = {None: counts, "kv_group": [1], "rotary_pairs": [pieces]}  # how many it takes
    unordered = order is not None and (pieces == 1 or not isinstance(shape[0], tuple))  # orders are of rows
    if not known or order not in names_of_order or len(names) not in names_of_order[order] or unordered:
        raise _wrong(line, fields, field, allowed)
    if (flags["transposed"] and len(shape) != 2) or (flags["stacked"] and pattern.count("*") != 2):
        raise _wrong(line, fields, field, "transposed for a matrix only, and stacked for a parameter of an expert only")
    parent, _, leaf = pattern.rpartition(".")
    parent = parent.rpartition(".")[0]
    whole = tuple(name if "." in name else f"{parent}.{name}.{leaf}" for name in names)
    return Held(whole, order, **flags)
