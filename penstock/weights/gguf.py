"""A checkpoint in GGUF files: tensors under the names of Transformers, quantised ones in the codes of the file.

FORMATS says where the blocks of each type have the parts of a CodedRows, NAMES what each tensor is called. What
llama.cpp's converter changes is turned back as rows are read: Llama's queries and keys are stored in pairs, the norms
of Gemma and Nemotron with 1 added, experts in one tensor. Other changes (GPT-2's transposed weights, the regrouped
queries, keys and values of Falcon and BLOOM) give the parameter as the model has it, so it is found under the name of
the table.

Rows are read, not mapped: the pages of a map would count as this process's memory in addition to the packed model, and
a file that becomes shorter would end the process.
"""

import array
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import ModelLoadError, shown
from penstock.kernels.coding import Bits, BlockForm, CodedRows, Coding
from penstock.kernels.ops import RowSource
from penstock.kernels.tensors import FLOAT32, Array
from penstock.spec.gguf import BLOCKS, GGUFTensor, read_model
from penstock.weights.quantized import MXFP4
from penstock.weights.rows import halved, read_rows
from penstock.weights.safetensors import FLOATS, Checkpoint, FileRows, TensorEntry

IQ4_LEVELS = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)


def _bits(*fields: tuple[int, int, int, int]) -> tuple[Bits, ...]:
    """Return where values are that are made of several fields, the lowest bits first.

    fields: (first byte, runs of bytes, bytes of a run, bits). A run holds the lowest bits of its first values, then the
        next bits of the next values.
    """
    found, left = [], 0
    for first, runs, width, bits in fields:
        each, mask = 8 // bits, (1 << bits) - 1
        for index in range(each):
            if width == 1:
                found.append(Bits(first, runs, index, each, index * bits, left, mask))
                continue
            for run in range(runs):
                to = (run * each + index) * width
                found.append(Bits(first + run * width, width, to, 1, index * bits, left, mask))
        left += bits
    return tuple(found)


def _k_steps(own: int, right: int) -> tuple[Bits, ...]:
    """Return where the 8 steps, or steps of mins, of Q4_K and Q5_K are: 6 bits each, the last four in two places."""
    return Bits(own, 4, mask=63), Bits(12, 4, 4, right=right, mask=15), Bits(own, 4, 4, right=6, left=4, mask=3)


_K: dict[str, Any] = {"min": 2, "is_subtracted": True, "steps": _k_steps(4, 0), "step_mins": _k_steps(8, 4)}
# Name -> the coding, and where a block has its parts.
FORMATS: dict[str, tuple[Coding, BlockForm]] = {
    "Q4_0": (Coding("Q4_0", 4, zero=8), BlockForm(_bits((2, 1, 16, 4)))),
    "Q4_1": (Coding("Q4_1", 4, mins=True), BlockForm(_bits((4, 1, 16, 4)), min=2)),
    "Q5_0": (Coding("Q5_0", 6, zero=16), BlockForm(_bits((6, 1, 16, 4), (2, 4, 1, 1)))),
    "Q5_1": (Coding("Q5_1", 6, mins=True), BlockForm(_bits((8, 1, 16, 4), (4, 4, 1, 1)), min=2)),
    "Q8_0": (Coding("Q8_0", 8, zero=128), BlockForm((Bits(2, 32),), code_offset=128)),
    "Q2_K": (
        Coding("Q2_K", 4, 16, 256, steps=True, mins=True, step_mins=True),
        BlockForm(
            _bits((16, 2, 32, 2)),
            scale=80,
            min=82,
            is_subtracted=True,
            steps=(Bits(0, 16, mask=15),),
            step_mins=(Bits(0, 16, right=4),),
        ),
    ),
    "Q3_K": (
        Coding("Q3_K", 4, 16, 256, zero=4, steps=True),
        BlockForm(
            _bits((32, 2, 32, 2), (0, 1, 32, 1)),
            scale=108,
            steps=_bits((96, 1, 8, 4), (104, 1, 4, 2)),
            step_offset=-32,
        ),
    ),
    "Q4_K": (
        Coding("Q4_K", 4, 32, 256, steps=True, mins=True, step_mins=True),
        BlockForm(_bits((16, 4, 32, 4)), **_K),
    ),
    "Q5_K": (
        Coding("Q5_K", 6, 32, 256, steps=True, mins=True, step_mins=True),
        BlockForm(_bits((48, 4, 32, 4), (16, 1, 32, 1)), **_K),
    ),
    "Q6_K": (
        Coding("Q6_K", 6, 16, 256, zero=32, steps=True),
        BlockForm(_bits((0, 2, 64, 4), (128, 2, 32, 2)), scale=208, steps=(Bits(192, 16),)),
    ),
    "IQ4_NL": (Coding("IQ4_NL", 4, levels=IQ4_LEVELS), BlockForm(_bits((2, 1, 16, 4)))),
    "IQ4_XS": (
        Coding("IQ4_XS", 4, 32, 256, levels=IQ4_LEVELS, steps=True),
        BlockForm(_bits((8, 8, 16, 4)), steps=_bits((4, 4, 1, 4), (2, 2, 1, 2)), step_offset=-32),
    ),
    "MXFP4": (MXFP4, BlockForm(_bits((1, 1, 16, 4)), is_exponent=True)),
}


def coded_rows(name: str, entry: TensorEntry) -> CodedRows:
    """Return a quantised matrix, whose blocks are read as they are stored."""
    coding, form = FORMATS[entry.dtype]
    elements, size = BLOCKS[entry.dtype]
    rows, k = entry.shape
    blocks = FileRows(name, replace(entry, shape=(rows, k // elements, size), dtype="U8"))
    return CodedRows(coding, {"blocks": blocks}, form)


# Architecture -> the names in the file, without .weight, .bias and blk.N, and Transformers', where * is the layer and #
# the expert, or those of the family's table.
_LAYERS, _H = "model.layers.*.", "transformer.h.*."
_DECODER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": _LAYERS + "input_layernorm",
    "attn_q": _LAYERS + "self_attn.q_proj",
    "attn_k": _LAYERS + "self_attn.k_proj",
    "attn_v": _LAYERS + "self_attn.v_proj",
    "attn_q_norm": _LAYERS + "self_attn.q_norm",
    "attn_k_norm": _LAYERS + "self_attn.k_norm",
    "attn_output": _LAYERS + "self_attn.o_proj",
    "ffn_norm": _LAYERS + "post_attention_layernorm",
    "ffn_gate": _LAYERS + "mlp.gate_proj",
    "ffn_up": _LAYERS + "mlp.up_proj",
    "ffn_down": _LAYERS + "mlp.down_proj",
}
_AFTER = {
    "post_attention_norm": _LAYERS + "post_attention_layernorm",
    "post_ffw_norm": _LAYERS + "post_feedforward_layernorm",
}
_EXPERTS = {
    **_DECODER,
    "ffn_gate_inp": _LAYERS + "mlp.gate",
    "ffn_gate_exps": _LAYERS + "mlp.experts.#.gate_proj",
    "ffn_up_exps": _LAYERS + "mlp.experts.#.up_proj",
    "ffn_down_exps": _LAYERS + "mlp.experts.#.down_proj",
}
_SHARED = {
    "ffn_gate_shexp": _LAYERS + "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": _LAYERS + "mlp.shared_experts.up_proj",
    "ffn_down_shexp": _LAYERS + "mlp.shared_experts.down_proj",
}
_SHARED_EXPERT = {stem: target.replace("shared_experts", "shared_expert") for stem, target in _SHARED.items()}
_MIXTRAL = {
    **_DECODER,
    "ffn_gate_inp": _LAYERS + "block_sparse_moe.gate",
    "ffn_gate_exps": _LAYERS + "block_sparse_moe.experts.#.w1",
    "ffn_up_exps": _LAYERS + "block_sparse_moe.experts.#.w3",
    "ffn_down_exps": _LAYERS + "block_sparse_moe.experts.#.w2",
}
_FALCON = {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": _H + "input_layernorm",
    "attn_qkv": _H + "self_attention.qkv_proj",
    "attn_output": _H + "self_attention.o_proj",
    "ffn_up": _H + "mlp.up_proj",
    "ffn_down": _H + "mlp.down_proj",
}
_BERT = "bert.encoder.layer.*."
_ENCODER = {
    "token_embd": "bert.embeddings.word_embeddings",
    "token_embd_norm": "bert.embeddings.LayerNorm",
    "token_types": "bert.embeddings.token_type_embeddings",
    "position_embd": "bert.embeddings.position_embeddings",
    "attn_q": _BERT + "attention.self.query",
    "attn_k": _BERT + "attention.self.key",
    "attn_v": _BERT + "attention.self.value",
    "attn_qkv": "bert.layers.*.attention.qkv_proj",
    "attn_output": _BERT + "attention.output.dense",
    "attn_output_norm": _BERT + "attention.output.LayerNorm",
    "ffn_up": _BERT + "intermediate.dense",
    "ffn_down": _BERT + "output.dense",
    "layer_output_norm": _BERT + "output.LayerNorm",
}
_GATED_ENCODER = {**_ENCODER, "ffn_gate": "bert.layers.*.mlp.gate_proj", "ffn_up": "bert.layers.*.mlp.up_proj"}
_GEMMA2 = {**_DECODER, **_AFTER, "ffn_norm": _LAYERS + "pre_feedforward_layernorm"}
NAMES: dict[str, dict[str, str]] = {
    "llama": _MIXTRAL,
    "apertus": _DECODER,
    "arcee": _DECODER,
    "bert": _ENCODER,
    "cohere2": _DECODER,
    "command-r": _DECODER,
    "ernie4_5": _DECODER,
    "ernie4_5-moe": {**_EXPERTS, **_SHARED, "exp_probs_b": _LAYERS + "mlp.moe_statics"},
    "exaone4": {**_DECODER, **_AFTER},
    "glm4": {
        **_DECODER,
        "post_attention_norm": _LAYERS + "post_self_attn_layernorm",
        "ffn_up": _LAYERS + "mlp.gate_up_proj",
        "post_ffw_norm": _LAYERS + "post_mlp_layernorm",
    },
    "glm4moe": {
        **_EXPERTS,
        **_SHARED,
        "post_attention_norm": _LAYERS + "post_attention_layernorm",
        "exp_probs_b": _LAYERS + "mlp.correction",
    },
    "granite": _DECODER,
    "jina-bert-v2": _GATED_ENCODER,
    "llama4": {
        **{stem: target.replace("mlp.", "feed_forward.") for stem, target in (_EXPERTS | _SHARED_EXPERT).items()},
        "ffn_gate_inp": _LAYERS + "feed_forward.router",
    },
    "minimax-m2": {**_MIXTRAL, "exp_probs_b": _LAYERS + "mlp.correction"},
    "mistral3": _DECODER,
    "nemotron": _DECODER,
    "nomic-bert": _GATED_ENCODER,
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "olmoe": _EXPERTS,
    "qwen2moe": {**_EXPERTS, **_SHARED_EXPERT, "ffn_gate_inp_shexp": _LAYERS + "mlp.shared_expert_gate"},
    "qwen3moe": _EXPERTS,
    "gpt-oss": {
        **_DECODER,
        "attn_sinks": _LAYERS + "self_attn.sinks",
        "post_attention_norm": _LAYERS + "post_attention_layernorm",
        "ffn_gate_inp": _LAYERS + "mlp.gate",
        "ffn_gate_exps": _LAYERS + "mlp.experts.#.gate_proj",
        "ffn_up_exps": _LAYERS + "mlp.experts.#.up_proj",
        "ffn_down_exps": _LAYERS + "mlp.experts.#.down_proj",
    },
    "gemma": _DECODER,
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA2,
    "olmo2": {**_DECODER, **_AFTER},
    "seed_oss": {**_DECODER, **_AFTER},
    "smollm3": _DECODER,
    "stablelm": _DECODER,
    "starcoder2": _DECODER,
    "phi3": {**_DECODER, "attn_qkv": _LAYERS + "self_attn.qkv_proj", "ffn_up": _LAYERS + "mlp.gate_up_proj"},
    "phimoe": _MIXTRAL,
    "gpt2": {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "attn_norm": _H + "ln_1",
        "attn_qkv": _H + "attn.qkv_proj",
        "attn_output": _H + "attn.o_proj",
        "ffn_norm": _H + "ln_2",
        "ffn_up": _H + "mlp.up_proj",
        "ffn_down": _H + "mlp.down_proj",
    },
    "falcon": {**_FALCON, "attn_norm_2": _H + "ln_attn"},
    "bloom": {
        **_FALCON,
        "token_embd_norm": "transformer.word_embeddings_layernorm",
        "ffn_norm": _H + "post_attention_layernorm",
    },
}
IN_PAIRS = (
    "arcee",
    "granite",
    "llama",
    "mistral3",
    "smollm3",
)  # whose files hold the rows of queries and keys in pairs
HEADS = {  # -> the keys for the number of heads, after the architecture
    "q_proj": ("attention.head_count",),
    "k_proj": ("attention.head_count_kv", "attention.head_count"),
}
ADDS_ONE = ("gemma", "gemma2", "gemma3", "nemotron")
# Numbers in the metadata that are parameters of each layer here.
NUMBERS = {
    "apertus": {f"xielu.{name}": f"{_LAYERS}mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")}
}
# What spec/gguf_config.py reads, and layers that predict further tokens.
NOT_READ = re.compile(r"rope_freqs|rope_factors_(long|short)|blk\.\d+\.(attn_rot_embd|nextn\.)")
PLACE = re.compile(r"(?:blk\.(\d{1,5})\.)?([a-z0-9_]+?)(?:\.(\d{1,5}))?\.(weight|bias)")


class GGUFCheckpoint(Checkpoint):
    """All tensors of a model in GGUF files, under the names of the family's parameter table."""

    def __init__(self, path: Path) -> None:
        """Read the headers.

        Raises:
            ModelLoadError: a file is missing or damaged, its architecture is not supported, or it holds a tensor that
                does not belong to it.
        """
        self._metadata, tensors = read_model(path)
        self.files = sorted({tensor.file for tensor in tensors.values()})
        architecture = self._metadata.get("general.architecture")
        if architecture not in NAMES:
            raise ModelLoadError(f"{path}: general.architecture = {shown(architecture)} is not supported")
        names = dict(NAMES[architecture])
        if "blk.0.attn_norm_2.weight" in tensors:  # Falcon 40B: a norm for each branch
            names["attn_norm"] = _H + "ln_mlp"
        if names.get("ffn_gate") == _GATED_ENCODER["ffn_gate"] and "blk.0.ffn_gate.weight" not in tensors:
            names["ffn_up"] = _BERT + "mlp.gated_layers"  # Jina's BERT in newer files: the gate, then the other half
        self._architecture = architecture
        self.entries = {}
        for stored, tensor in tensors.items():
            if not NOT_READ.match(stored):
                self.entries |= dict(_entries(stored, tensor, names))
        self._numbers: dict[str, NumberRows] = {}
        for key, target in NUMBERS.get(architecture, {}).items():
            values = self._metadata.get(key, ())
            for layer, value in enumerate(values if isinstance(values, array.array) else ()):
                name = target.replace("*", str(layer))
                self._numbers[name] = NumberRows(float(value))
                self.entries[name] = TensorEntry(self.files[0], (1,), "F32", 0)

    def rows(self, name: str, index: int | None = None) -> Any:
        """Return a tensor: FileRows if it holds floats, CodedRows if it is quantised, as the family's model has it."""
        if name in self._numbers:
            return self._numbers[name]
        entry = self.entries[name]
        if entry.dtype not in FLOATS:
            rows: Any = coded_rows(name, entry)
        else:
            rows = FileRows(name, entry)
        part = name.split(".")[-2]
        if self._architecture in IN_PAIRS and part in HEADS:
            head = self._head_rows(entry, tuple(f"{self._architecture}.{key}" for key in HEADS[part]))
            return halved(rows, head, head)
        return LessOneRows(rows) if self._architecture in ADDS_ONE and name.endswith("norm.weight") else rows

    def _head_rows(self, entry: TensorEntry, keys: tuple[str, ...]) -> int:
        """Return how many rows of queries or keys a head has. keys: those that tell the number of heads."""
        heads = next((self._metadata[key] for key in keys if key in self._metadata), None)
        if not isinstance(heads, int) or heads < 1 or entry.shape[0] % (2 * heads):
            raise ModelLoadError(f"{entry.file}: {keys[0]} = {shown(heads)} does not fit {entry.shape[0]} rows")
        return entry.shape[0] // heads


def _entries(stored: str, tensor: GGUFTensor, names: dict[str, str]) -> Iterator[tuple[str, TensorEntry]]:
    """Yield Transformers' name and the place of a tensor, or of each expert in it.

    Raises:
        ModelLoadError: the architecture has no such tensor.
    """
    place = PLACE.fullmatch(stored)
    layer, stem, expert, kind = place.groups() if place else (None, "", None, "")
    stem += "_exps" if expert is not None else ""  # older files: a tensor per expert
    kind = "weight" if stem == "exp_probs_b" else kind  # a parameter of its own here
    target = names.get(stem)
    if target is None or ("*" in target) != (layer is not None):
        raise ModelLoadError(f"{tensor.file}: the tensor {stored} is unknown in this architecture")
    name = f"{target.replace('*', str(layer))}.{kind}"
    shape = tensor.shape
    if len(shape) == 1 and (stem == "ffn_gate_inp_shexp" or target.endswith("moe_statics")):
        shape = (1, *shape)
    whole = TensorEntry(tensor.file, shape, tensor.dtype, tensor.offset)
    if "#" not in name or expert is not None:
        if len(whole.shape) > 2:
            raise ModelLoadError(
                f"{tensor.file}: {stored} has the shape {list(whole.shape)}; allowed are two dimensions"
            )
        yield name.replace("#", str(expert)), whole
        return
    dimensions = 3 if kind == "weight" else 2
    if len(whole.shape) != dimensions:
        raise ModelLoadError(
            f"{tensor.file}: {stored} has the shape {list(whole.shape)}; experts have {dimensions} dimensions"
        )
    elements, size = BLOCKS[whole.dtype]
    length = math.prod(whole.shape[1:]) // elements * size
    for index in range(whole.shape[0]):
        offset = whole.offset + index * length
        yield name.replace("#", str(index)), TensorEntry(whole.file, whole.shape[1:], whole.dtype, offset)


@dataclass(frozen=True, slots=True)
class LessOneRows:
    """A norm that the file holds as a factor, and the model as the difference from 1, which its layer adds again."""

    source: RowSource

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def read(self, start: int, stop: int) -> Array:
        return read_rows(self.source, start, stop).astype(FLOAT32) - FLOAT32.type(1.0)


@dataclass(frozen=True, slots=True)
class NumberRows:
    """A number of the metadata as a parameter of one element."""

    value: float

    @property
    def shape(self) -> tuple[int, ...]:
        return (1,)

    def read(self, start: int, stop: int) -> Array:
        return np.array([self.value], dtype=FLOAT32)[start:stop]
