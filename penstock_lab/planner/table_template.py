"""The text of `penstock table`: a model's parameter table, or a template for a new architecture. No torch.

Only the headers of a checkpoint are read. Each line is a row of a table (spec/param_table.py), with the type and shape
of the tensor in a comment.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock import ModelLoadError
from penstock.models.config_json import parse_model_config
from penstock.models.registry import ARCHITECTURES, find_model
from penstock.spec.config_file import has_config, modern_falcon, read_config
from penstock.spec.config_reader import read_json
from penstock.spec.gguf import is_gguf
from penstock.spec.gguf_config import config_of_gguf
from penstock.spec.model_config import ModelConfig
from penstock.spec.param_table import Parameter, Row
from penstock.weights.safetensors import FLOATS, PACKED, TensorEntry
from penstock.weights.sources import open_checkpoint
from penstock_lab.planner.planned import num_elements

LINE = 120  # columns
ROW_PARALLEL = re.compile(r"(^|\.)(o_proj|out_proj|c_proj|down_proj|dense|dense_4h_to_h|fc2|wo|w2)\.")
LOOKUP = re.compile(r"embed|wte|wpe|norm|(^|\.)ln_")  # parameters that are read row by row, or replicated
TYPES = FLOATS | {"U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "BOOL": "bool"}
# Word in a table's shape -> the keys under which Transformers' config.json files have that size.
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
    """One line of a table."""

    name: str
    fields: tuple[str, ...]  # "shape: [hidden]" and so on
    axis: int  # the split axis, for a sharding map; -1: replicated or unknown
    dtype: str  # torch's name; "" if the model has no such parameter
    shape: tuple[int, ...]
    remark: str = ""  # added to the comment

    def table(self) -> str:
        """Write the line of a parameter table; in a template, its field `shard` is left open."""
        tensor = f"{self.dtype} {list(self.shape)}" if self.dtype else ""
        comment = f"  # {'; '.join(filter(None, [tensor, self.remark]))}"
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
    """Write the parameter table, or the sharding map, of a model directory, a GGUF file or a config.json.

    Raises:
        ModelLoadError: there is neither a config.json of a known architecture nor a checkpoint.
    """
    directory, config = model, dict[str, Any]()
    if is_gguf(model):
        config, _ = config_of_gguf(model)
    elif model.is_file():
        directory, config = model.parent, modern_falcon(read_json(model))
    elif has_config(model):
        config = read_config(model)
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else None
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
    entries = _entries(directory, model)
    parameters = table.parameters(model)
    head = [
        f"# {model.architecture}: {model.num_hidden_layers} layers, {num_elements(parameters.values()):,} parameters",
        "# A name stands for all layers (the first *) and experts (the second); comments describe the first of them.",
    ]
    lines = [_known_line(row, model, parameters, entries) for row in table.rows]
    end = [f'prefix: "{table.prefix}"'] if table.prefix else []
    ignored = ", ".join(f'"{name}"' for name in table.ignore)
    constants = ", ".join(f'"{name}": {value:f}' for name, value in table.constants)
    end += [f"constants: {{{constants}}}"] if constants else []
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
    """Write the fields of a table's row as a file has them."""
    return tuple(f"{name}: {_value(value)}" for name, value in row.fields.items())


def _value(value: Any) -> str:
    """Write a value as YAML: JSON, but with plain words unquoted."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.*]*", value)
    return value if plain and value not in ("true", "false", "null") else json.dumps(value)


def _unknown(directory: Path, config: dict[str, Any], name: Any) -> tuple[list[str], list[Line], list[str]]:
    entries = _entries(directory, None)
    if not entries:
        raise ModelLoadError(
            f"{directory}: architectures = {name!s:.80} is not known, and there is no checkpoint to make a template "
            f"from; known are {', '.join(sorted(ARCHITECTURES))}"
        )
    head = [
        f"# {name or 'unknown architecture'}: a template, made from the names, types and shapes in the checkpoint.",
        "# The first * stands for the layer, a second one for the expert. Fill in the axis to shard (-1: none) and",
        "# the other fields of spec/param_table.py that apply: quant, leaves, unit, tied_to, pieces of an axis.",
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
    """Guess the axis that tensor parallelism splits: the last if ranks sum the product's results, else the first."""
    if num_axes == 0 or (num_axes == 1 and (ROW_PARALLEL.search(name) or LOOKUP.search(name))):
        return -1
    if "norm" in name:
        return -1
    return num_axes - 1 if ROW_PARALLEL.search(name) else 0


def size_words(config: Mapping[str, Any]) -> dict[int, list[str]]:
    """List the words for each size in a table's shape, as far as config.json gives sizes."""
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
    return next((value for value in values if type(value) is int and value > 0), None)


def _natural(name: str) -> list[tuple[int, str]]:
    """Make a sort key that puts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _entries(directory: Path, model: ModelConfig | None) -> dict[str, TensorEntry]:
    """Read the tensors of a checkpoint if there is one; the directory of a hub name may hold only an index."""
    stored = is_gguf(directory) or (any(directory.glob("*.safetensors")) and not (directory / PACKED).is_file())
    return open_checkpoint(directory, None if model is None else model.quantization).entries if stored else {}
