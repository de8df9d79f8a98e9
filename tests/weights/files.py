"""Tiny models in files of every format, each with a twin of plain float32 values: rows of the table in docs/files.md.

Weights in codes are written by the formats' own packages (tests/golden/quantized, the package gguf), or after their
descriptions.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from penstock_lab.prove.file_mutations import mutate_bytes, mutate_gguf, mutate_json, mutate_safetensors
from tests.hf_models import TINY, make_llama, make_mistral, make_qwen2, randomise
from tests.tokenizer.vocabularies import byte_level
from tests.weights.gguf_files import write_gguf
from tests.weights.mistral_files import write_mistral
from tests.weights.quantized_files import MODELS, SIZES, mxfp4, quantise, read_golden, replace

Made = tuple[Path, Path]  # what a user names, and the directory of the twin
Mutate = Callable[[Random, bytes], bytes]
MUTATIONS: dict[str, Mutate] = {
    ".gguf": mutate_gguf, ".safetensors": mutate_safetensors, ".json": mutate_json, ".bin": mutate_bytes,
    ".pth": mutate_bytes,
}  # fmt: skip
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class File:
    """A model in one format.

    Attributes:
        row: of docs/files.md.
        name: of this case of the row.
        make: writes the model and its twin below a directory.
        splits: whether two ranks can share it.
        is_float: whether it holds floats.
    """

    row: str
    name: str
    make: Callable[[Path], Made]
    splits: bool = True
    is_float: bool = False

    def __str__(self) -> str:
        return self.name


def _llama(**sizes: Any) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**TINY | sizes)).eval()
    randomise(model, 0)
    return model


def _twin(model: PreTrainedModel, directory: Path) -> Path:
    model.float().save_pretrained(directory)
    return directory


# Two blocks of 256 in every K that two ranks cut; the vocabulary is the tokenizer's.
GGUF_SIZES: dict[str, Any] = {
    "vocab_size": 600, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64,
}  # fmt: skip
Q4_K_M = {
    "embed_tokens": "Q6_K", "lm_head": "Q6_K", "0.self_attn.v_proj": "Q6_K", "0.mlp.down_proj": "Q6_K",
    "_proj": "Q4_K",
}  # fmt: skip


def gguf(kinds: Any, directory: Path) -> Made:
    model = _llama(**GGUF_SIZES)
    return write_gguf(model, directory / "model.gguf", kinds, tokenizer=byte_level()), _twin(model, directory / "twin")


def floats(name: str, dtype: torch.dtype, directory: Path) -> Made:
    """Write safetensors, a file of torch.save, or Mistral's files."""
    if name == "consolidated.safetensors":
        model, place = make_mistral(directory, dtype=dtype, sliding_window=None)
        params = {"sliding_window": None, "rope_theta": 10000.0}
        return write_mistral(place, directory / "model", **params), _twin(model, directory / "twin")
    model, place = _llama(), directory / "model"
    model.to(torch.float32 if dtype == torch.float64 else dtype).save_pretrained(place)  # no config.json says float64
    tensors = {key: tensor.to(dtype) for key, tensor in load_file(place / "model.safetensors").items()}
    (place / "model.safetensors").unlink()
    (save_file if name == "model.safetensors" else torch.save)(tensors, place / name)
    return place, _twin(model, directory / "twin")


def golden(name: str, directory: Path) -> Made:
    """A module that the format's own package wrote, as the last product of both layers."""
    description, module, expected = read_golden(name)
    hidden, intermediate = expected.shape
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    place = make_llama(directory, hidden_size=hidden, intermediate_size=intermediate, **sizes)[1]
    values = load_file(place / "model.safetensors")
    held = dict(values)
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp.down_proj."
        held |= {stem + key.removeprefix("m."): tensor.clone() for key, tensor in module.items()}
        values[f"{stem}weight"] = expected.clone()
        if "m.weight" not in module:
            del held[f"{stem}weight"]
    return place, replace(place, description, held, values)


def written(name: str, directory: Path, **sizes: Any) -> Made:
    """Every projection, after the format's description."""
    place = (make_qwen2 if name == "awq" else make_llama)(directory, **SIZES | sizes)[1]
    return place, quantise(place, *MODELS[name])


def gpt_oss(directory: Path) -> Made:
    """As it is published: the codes of experts as [out, in], floats (of the twin) as [in, out]."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 16}
    config = GptOssConfig(**TINY | SIZES | sizes | {"intermediate_size": SIZES["hidden_size"]})
    config.architectures = ["GptOssForCausalLM"]
    model = GptOssForCausalLM(config).eval()
    randomise(model, 0)
    place = directory / "gpt-oss"
    config.save_pretrained(place)
    values = {name: value.detach() for name, value in model.state_dict().items()}
    held = dict(values)
    for name in [name for name in values if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        codes, decoded = mxfp4(held.pop(name).mT.contiguous())
        held |= {name + suffix: tensor for suffix, tensor in codes.items()}
        values[name] = decoded.mT
    return place, replace(place, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, held, values)


def stacked(directory: Path) -> Made:
    """The experts of a layer as one tensor of blocks."""
    config = MixtralConfig(**TINY | SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2})
    config.architectures = ["MixtralForCausalLM"]
    model = MixtralForCausalLM(config).eval()
    randomise(model, 0)
    place = directory / "mixtral"
    config.save_pretrained(place)
    tensors = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    description = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return place, quantise(place, description, mxfp4, "experts")


def _golden(row: str, *names: str, **options: Any) -> list[File]:
    return [File(row, name, partial(golden, name), **options) for name in names]


def _written(row: str, *names: str, **options: Any) -> list[File]:
    return [File(row, name, partial(written, name), **options) for name in names]


WHOLE_BLOCKS = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
FILES = [
    *(File("safetensors, floats", name, partial(floats, "model.safetensors", dtype), is_float=True)
      for name, dtype in FLOATS.items()),
    File("consolidated.safetensors (Mistral)", "consolidated.safetensors",
         partial(floats, "consolidated.safetensors", torch.bfloat16), is_float=True),
    *(File("torch.save", name, partial(floats, name, torch.float16), is_float=True)
      for name in ("pytorch_model.bin", "consolidated.00.pth")),
    *(File("GGUF, floats", kind, partial(gguf, kind), is_float=True) for kind in ("F32", "F16", "BF16")),
    *(File(f"GGUF, {kind}", kind, partial(gguf, kind)) for kind in (
        "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")),
    File("GGUF, Q4_K_M", "Q4_K_M", partial(gguf, Q4_K_M)),
    *_golden("AWQ", "awq"),
    *_written("AWQ", "awq"),
    *_golden("GPTQ, 2 bits", "gptq_w2_sym", "gptq_w2_asym"),
    *_golden("GPTQ, 3 bits", "gptq_w3_sym", "gptq_w3_asym"),
    *_written("GPTQ, 3 bits", "gptq 3 bits"),
    *_golden("GPTQ, 4 bits", "gptq_w4_sym", "gptq_w4_asym", "gptq_v2_w4_sym", "gptq_v2_w4_asym"),
    *_written("GPTQ, 4 bits", "gptq"),
    *_written("GPTQ, `desc_act`", "gptq act-order", splits=False),
    *_golden("GPTQ, 8 bits", "gptq_w8_sym", "gptq_w8_asym"),
    *_written("compressed-tensors, 2 bits", "pack-quantized, 2 bits"),
    *_golden("compressed-tensors, 3 bits", "ct_w3_group"),
    *_written("compressed-tensors, 3 bits", "pack-quantized, 3 bits"),
    *_golden("compressed-tensors, 4 bits", "ct_w4_channel", "ct_w4_group", "ct_w4_group_asym"),
    *_written("compressed-tensors, 4 bits", "pack-quantized, 4 bits"),
    *_golden("compressed-tensors, 5 bits", "ct_w5_group_asym"),
    *_written("compressed-tensors, 5 bits", "pack-quantized, 5 bits"),
    *_written("compressed-tensors, 6 bits", "pack-quantized, 6 bits"),
    *_written("compressed-tensors, 7 bits", "pack-quantized, 7 bits"),
    *_golden("compressed-tensors, 8 bits", "ct_w8_group", "ct_w8_group_asym"),
    *_written("compressed-tensors, 8 bits", "pack-quantized, 8 bits"),
    *_golden("compressed-tensors, int8", "ct_int8_channel", "ct_int8_tensor"),
    *_golden("compressed-tensors, int8", "ct_int8_channel_asym", splits=False),  # a block is a row
    *_written("compressed-tensors, int8", "int-quantized"),
    *_golden("FP8, a scale per tensor or channel", "ct_fp8_tensor", "ct_fp8_channel"),
    *_written("FP8, a scale per tensor or channel", "fp8", "fp8 e5m2"),
    *_golden("FP8, a scale per block", "ct_fp8_block", splits=False),
    *_written("FP8, a scale per block", "fp8 blocks", splits=False),
    File("FP8, a scale per block", "fp8 whole blocks", partial(written, "fp8 blocks", **WHOLE_BLOCKS)),
    *_golden("MXFP8", "ct_mxfp8"),
    *_golden("MXFP4", "ct_mxfp4"),
    File("MXFP4", "experts in one tensor", stacked),
    File("MXFP4", "gpt-oss", gpt_oss),
    *_golden("NVFP4", "ct_nvfp4"),
    *_written("NVFP4", "nvfp4"),
    *_golden("bitsandbytes, NF4", "bnb_nf4", "bnb_nf4_nested"),
    *_written("bitsandbytes, NF4", "nf4", splits=False),
    *_golden("bitsandbytes, FP4", "bnb_fp4", "bnb_fp4_nested"),
    *_golden("bitsandbytes, int8", "bnb_int8"),
]  # fmt: skip


def parts_of(place: Path) -> list[Path]:
    """The files of a model that a test damages: what describes the weights, and what holds them."""
    if place.is_file():
        return [place]
    names = ("config.json", "params.json")
    return sorted(file for file in place.iterdir() if file.name in names or file.suffix in {*MUTATIONS} - {".json"})


def copied(place: Path, directory: Path) -> Path:
    """Return a copy of a model."""
    copy = directory / place.name
    return Path(shutil.copy(place, copy) if place.is_file() else shutil.copytree(place, copy))
