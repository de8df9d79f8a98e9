"""What `penstock table` prints: the parameter table of a model, or a template to start a new one from. No torch.

Of a checkpoint only the headers are read. A line says what is in a table of spec/table_rows.py; its comment, which
type and shape the tensor has.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ModelLoadError
from penstock.models.config_json import parse_model_config
from penstock.models.registry import ARCHITECTURES, find_model
from penstock.spec.config_file import has_config, read_config
from penstock.spec.model_config import ModelConfig
from penstock.spec.param_table import Parameter, num_elements
from penstock.spec.table_rows import Axis, Held, Row
from penstock.weights.safetensors import FLOATS, PACKED, Checkpoint, TensorEntry

LINE = 120  # columns
ROW_PARALLEL = re.compile(r"(^|\.)(o_proj|out_proj|c_proj|down_proj|dense|dense_4h_to_h|fc2|wo|w2)\.")
LOOKUP = re.compile(r"embed|wte|wpe|norm|(^|\.)ln_")  # read row by row, or as a whole
TYPES = FLOATS | {"U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "BOOL": "bool"}
# Where config.json says a size, in the spellings that models of Transformers use.
SPELLINGS = {
    "vocab": ("vocab_size",),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "intermediate": ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim"),
    "positions": ("max_position_embeddings", "n_positions"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_intermediate": ("moe_intermediate_size",),
}
HEADS = ("num_attention_heads", "n_head")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table.

    Attributes:
        fields: "shape: [hidden]" and so on.
        axis: for a sharding map; a guess where nobody knows.
        dtype: torch's name; "" where no such parameter is in the model.
        remark: what else the comment says.
    """

    name: str
    fields: tuple[str, ...]
    axis: int
    dtype: str
    shape: tuple[int, ...]
    remark: str = ""

    def table(self) -> str:
        comment = f"  # {self.dtype} {list(self.shape)}" if self.dtype else "  #"
        comment += f"; {self.remark}" if self.remark and self.dtype else f" {self.remark}" if self.remark else ""
        fields = f"{{{', '.join(self.fields)}}}"
        if len(whole := f"{self.name}: {fields}{comment}") <= LINE:
            return whole
        lines = [fields] if len(fields) + 2 <= LINE else self.fields
        return f"{self.name}:{comment}\n" + "\n".join(f"  {line}" for line in lines)

    def sharding(self) -> str:
        shape = f"({', '.join(map(str, self.shape))}{',' if len(self.shape) == 1 else ''})"
        remark = f"; {self.remark}" if self.remark else ""
        return f"{self.name} : {self.axis} #  torch.{self.dtype} {shape}{remark}"


def table_text(model: Path, *, sharding: bool = False) -> str:
    """The table of a model directory or of a config.json, or as a sharding map: one axis a name.

    Raises:
        ModelLoadError: there is neither a config.json of a known architecture nor a checkpoint.
    """
    directory = model.parent if model.is_file() else model
    config = _read_config(model) if model.is_file() else _config_of(directory)
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if name in ARCHITECTURES:
        head, lines, end = _known(directory, config)
    else:
        head, lines, end = _unknown(directory, config, name)
    if sharding:
        return "\n".join([*head, *(line.sharding() for line in lines if line.dtype)]) + "\n"
    return "\n".join([*head, "", *(line.table() for line in lines), *end]) + "\n"


def _known(directory: Path, config: dict[str, Any]) -> tuple[list[str], list[Line], list[str]]:
    model = parse_model_config(config)
    table = find_model(model.architecture).read_table()
    entries = _entries(directory)
    parameters = table.parameters(model)
    head = [
        f"# {model.architecture}: {model.num_hidden_layers} layers, {num_elements(parameters.values()):,} parameters",
        "# A name stands for all layers (the first *) and experts (the second); the comments show the first of them.",
    ]
    lines = [_known_line(row, model, parameters, entries) for row in table.rows]
    end = [f'prefix: "{table.prefix}"'] if table.prefix else []
    ignored = ", ".join(f'"{name}"' for name in table.ignore)
    return head, lines, [*end, *([f"ignore: [{ignored}]"] if ignored else [])]


def _known_line(
    row: Row, model: ModelConfig, parameters: Mapping[str, Parameter], entries: Mapping[str, TensorEntry]
) -> Line:
    pattern = re.compile(re.escape(row.pattern).replace(r"\*", r"\d+"))
    found = [item for name, item in parameters.items() if pattern.fullmatch(name)]
    axis = -1 if row.shard is None else row.shard
    if not found:
        return Line(row.pattern, row_fields(row), axis, "", (), "not in this model")
    first = found[0]
    stored = next((entries[name] for layout in first.layouts for name in layout.sources if name in entries), None)
    dtype = TYPES.get(stored.dtype, stored.dtype) if stored is not None else model.dtype
    remark = "" if len({item.shape for item in found}) == 1 else "other layers have other shapes"
    return Line(row.pattern, row_fields(row), axis, dtype, first.shape, remark)


def row_fields(row: Row) -> tuple[str, ...]:
    """The fields of a table's row as they would be written."""
    first, *others = row.held
    own = Held((row.pattern,))
    words = [f"shape: {_shape_words(row.shape)}"]
    if first != own:
        words.append(f"from: {_held_words(first, row.pattern)}")
    if others and others != [own]:
        words.append("or: [" + ", ".join(_held_words(held, row.pattern) for held in others if held != own) + "]")
    values: dict[str, Any] = {"shard": row.shard, "unit": row.unit, "quant": row.quant or None}
    values |= {"leaves": row.leaves if row.leaves != 1 else None, "tied_to": row.tied_to}
    words += [f"{name}: {_scalar(value)}" for name, value in values.items() if value is not None]
    if row.when:
        words.append("when: {" + ", ".join(f"{name}: {_choices(value)}" for name, value in row.when.items()) + "}")
    return tuple(words)


def _held_words(held: Held, pattern: str) -> str:
    parent, _, leaf = pattern.rpartition(".")
    parent = parent.rpartition(".")[0]
    short = re.compile(rf"{re.escape(parent)}\.([^.]+)\.{re.escape(leaf)}")
    bare = [match[1] if (match := short.fullmatch(name)) else name for name in held.names]
    names = "[" + ", ".join(bare) + "]"
    more = [f"order: {held.order}"] if held.order else []
    more += [f"{flag}: true" for flag in ("transposed", "stacked") if getattr(held, flag)]
    return "{" + ", ".join([f"names: {names}", *more]) + "}" if more else names


def _shape_words(shape: Iterable[Axis]) -> str:
    axes = [f"[{', '.join(map(str, axis))}]" if isinstance(axis, tuple) else str(axis) for axis in shape]
    return f"[{', '.join(axes)}]"


def _choices(values: tuple[Any, ...]) -> str:
    return _scalar(values[0]) if len(values) == 1 else f"[{', '.join(map(_scalar, values))}]"


def _scalar(value: Any) -> str:
    """JSON is YAML; a plain word needs no quotes."""
    plain = (
        isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.]*", value) and value not in ("true", "false", "null")
    )
    return value if plain else json.dumps(value)


def _unknown(directory: Path, config: dict[str, Any], name: Any) -> tuple[list[str], list[Line], list[str]]:
    entries = _entries(directory)
    if not entries:
        raise ModelLoadError(
            f"{directory}: architectures = {name!s:.80} is not known here, and there is no checkpoint whose names a "
            f"template could be made of; known are {', '.join(sorted(ARCHITECTURES))}"
        )
    head = [
        f"# {name or 'unknown architecture'}: a template, made of the names, types and shapes in the checkpoint.",
        "# The first * stands for the layer, a second one for the expert. Fill in the axis to shard (-1: none) and,",
        "# where they hold, other fields of spec/table_rows.py: quant, leaves, unit, tied_to, pieces of an axis.",
    ]
    sizes = size_words(config)
    patterns: dict[str, list[TensorEntry]] = {}
    for tensor, entry in sorted(entries.items(), key=lambda item: _natural(item[0])):
        patterns.setdefault(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", tensor, count=2), []).append(entry)
    return head, [_unknown_line(pattern, found, sizes) for pattern, found in patterns.items()], []


def _unknown_line(pattern: str, found: list[TensorEntry], sizes: Mapping[int, list[str]]) -> Line:
    first, axis = found[0], guess_axis(pattern, len(found[0].shape))
    words = [sizes[size][0] if len(sizes.get(size, [])) == 1 else str(size) for size in first.shape]
    unclear = {size: sizes[size] for size in first.shape if len(sizes.get(size, [])) > 1}
    remarks = [f"shard: {axis}?"]
    remarks += [f"{size} is {' or '.join(names)}" for size, names in unclear.items()]
    if len({(entry.shape, entry.dtype) for entry in found}) > 1:
        remarks.append("others of this name differ")
    dtype = TYPES.get(first.dtype, first.dtype)
    fields = (f"shape: [{', '.join(words)}]", "shard: '?'")
    return Line(pattern, fields, -1, dtype, first.shape, "; ".join(remarks))


def guess_axis(name: str, num_axes: int) -> int:
    """Which axis tensor parallelism probably splits: the last of a product whose results are added, else the first."""
    if num_axes == 0 or (num_axes == 1 and (ROW_PARALLEL.search(name) or LOOKUP.search(name))):
        return -1
    if "norm" in name:
        return -1
    return num_axes - 1 if ROW_PARALLEL.search(name) else 0


def size_words(config: Mapping[str, Any]) -> dict[int, list[str]]:
    """Size -> the words of a table's shape that stand for it, as far as config.json tells."""
    found = {word: _first(config, keys) for word, keys in SPELLINGS.items()}
    heads, hidden = _first(config, HEADS), found["hidden"]
    head = _first(config, ("head_dim",)) or (hidden // heads if heads and hidden else None)
    if heads and head:
        found |= {"q": heads * head, "kv": (_first(config, KV_HEADS) or heads) * head, "head": head}
    words: dict[int, list[str]] = {}
    for word, size in found.items():
        if size is not None:
            words.setdefault(size, []).append(word)
    return words


def _first(config: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    values = (config.get(key) for key in keys)
    return next(
        (value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0), None
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _entries(directory: Path) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint, if there is one; of a hub name only its index may be."""
    there = any(directory.glob("*.safetensors")) and not (directory / PACKED).is_file()
    return Checkpoint(directory).entries if there else {}


def _config_of(directory: Path) -> dict[str, Any]:
    """Of a directory; nothing where there is none."""
    return read_config(directory) if has_config(directory) else {}


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelLoadError(f"{file}: must hold an object")
    return config
