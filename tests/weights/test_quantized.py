"""Safetensors files with codes: every format as its own package writes it, whole models, and damaged files."""

import itertools
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from penstock import LLM, SamplingParams
from penstock.assembly import build_engine
from penstock.config import EngineConfig
from penstock.errors import ModelLoadError, PenstockError
from penstock.kernels.backends import load_ops
from penstock.kernels.coding import CodedRows
from penstock.kernels.ops import Packing
from penstock.kernels.tensors import Array
from penstock.spec.quantization import parse_quantization
from penstock.weights.kv_scales import read_kv_scales
from penstock.weights.quantized import QuantizedCheckpoint
from penstock_lab.prove.file_mutations import mutate_json, mutate_safetensors
from tests.hf_models import TINY, make_llama, make_qwen2, randomise
from tests.kernels.packed import levels
from tests.paged import PagedModel

GOLDEN = Path(__file__).parents[1] / "golden" / "quantized"
WRITTEN = sorted(file.stem for file in GOLDEN.glob("*.safetensors"))
ULP = 2.0**-23
# Where a format has a factor for all of a row, we multiply by it last, and its own package first.
ONE_ROUNDING = {"bnb_int8", "ct_nvfp4"}


def golden(name: str, directory: Path) -> tuple[QuantizedCheckpoint, Array]:
    """A directory with the module of a golden file, and the values that its writer read from it."""
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        config = json.loads(file.metadata()["quantization_config"])
    expected = tensors.pop("expected").numpy()
    save_file(tensors, directory / "model.safetensors")
    quantization = parse_quantization(config)
    assert quantization is not None
    return QuantizedCheckpoint(directory, quantization), expected


@pytest.mark.parametrize("name", WRITTEN)
def test_values_are_those_of_the_formats_own_package(name: str, tmp_path: Path) -> None:
    """Guards against another order of nibbles, bits or columns, and zero points that are one off."""
    checkpoint, expected = golden(name, tmp_path)
    assert {key: entry.shape for key, entry in checkpoint.entries.items()} == {"m.weight": expected.shape}
    rows = checkpoint.rows("m.weight")
    assert isinstance(rows, CodedRows)
    found = {key: (part.shape, str(part.dtype)) for key, part in rows.read_parts(0, len(expected)).items()}
    assert found == rows.coding.parts(rows.shape)
    values = np.concatenate(
        [rows.read(start, stop) for start, stop in itertools.pairwise((0, 7, 8, 29, len(expected)))]
    )
    if name in ONE_ROUNDING:
        np.testing.assert_allclose(values, expected, rtol=1.01 * ULP)
    else:
        np.testing.assert_array_equal(values, expected)


@pytest.mark.skipif(not levels(), reason="no native kernels here")
@pytest.mark.parametrize("name", WRITTEN)
def test_native_products_with_every_format(name: str, tmp_path: Path) -> None:
    """Guards against a coding that the reader makes and the kernels refuse, or multiply with other scales."""
    checkpoint, values = golden(name, tmp_path)
    rows, ops = checkpoint.rows("m.weight"), load_ops("cpu", np.dtype(np.float32))
    assert isinstance(rows, CodedRows)
    k = values.shape[1]  # with leaves of which some are empty, as the query heads of a small model leave them
    weight = ops.pack_linear(rows, None, Packing((0, 0, 0, 0, k, k, k, k), coding=rows.coding, slices=3))
    x = np.random.default_rng(0).standard_normal((5, k)).astype(np.float32)
    expected = x.astype(np.float64) @ values.T
    assert np.abs(ops.linear(ops.tensor(x), weight) - expected).max() < 1e-6 * np.abs(expected).max()


# Descriptions as they are published, with the keys of their writers, and what they say: bits, group sizes, zero_offset.
CT = {"quant_method": "compressed-tensors", "kv_cache_scheme": None, "quantization_status": "compressed"}
ARGUMENTS = {
    "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
    "observer": "minmax", "observer_kwargs": {}, "strategy": "channel", "symmetric": True, "type": "int",
}  # fmt: skip
BNB = {
    "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False, "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0, "load_in_4bit": True, "load_in_8bit": False, "quant_method": "bitsandbytes",
}  # fmt: skip
PUBLISHED: list[tuple[dict[str, Any], tuple[str, tuple[int, ...], tuple[int, ...], int]]] = [
    (
        {"quant_method": "awq", "zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
        | {"modules_to_not_convert": None},
        ("awq", (4,), (128,), 0),
    ),
    (
        {"bits": 4, "group_size": 128, "sym": True, "data_type": "int", "autoround_version": "0.9.4"}
        | {"provider": "auto-round", "quant_method": "awq", "zero_point": False, "version": "gemm"},
        ("awq", (4,), (128,), 0),
    ),
    (
        {"bits": 3, "group_size": 128, "damp_percent": 0.1, "desc_act": True, "sym": True, "true_sequential": True}
        | {"model_name_or_path": None, "model_file_base_name": None, "quant_method": "gptq"},
        ("gptq", (3,), (128,), 1),
    ),
    (
        {"bits": 4, "dynamic": None, "group_size": 32, "desc_act": True, "sym": True, "lm_head": False}
        | {"quant_method": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32", "pack_impl": "cpu"}
        | {"meta": {"quantizer": ["gptqmodel:1.7.4"], "damp_percent": 0.1, "act_group_aware": True}},
        ("gptq", (4,), (32,), 1),
    ),
    (
        {"batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.1}
        | {"dataset": None, "desc_act": False, "exllama_config": {"version": 1}, "group_size": -1, "sym": True}
        | {"max_input_length": None, "model_seqlen": None, "module_name_preceding_first_block": None}
        | {"modules_in_block_to_quantize": None, "pad_token_id": None, "quant_method": "gptq", "tokenizer": None}
        | {"true_sequential": True, "use_cuda_fp16": False, "use_exllama": True},
        ("gptq", (4,), (0,), 1),
    ),
    (
        {"bits": 4, "group_size": 128, "sym": False, "data_type": "int", "seqlen": 512, "batch_size": 2}
        | {"gradient_accumulate_steps": 4, "autoround_version": "0.6.0", "quant_method": "auto-round"}
        | {"packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers"},
        ("gptq", (4,), (128,), 1),
    ),
    (
        {"amp": True, "autoround_version": "0.4.2", "backend": "auto_round:gptq:exllamav2", "batch_size": 8, "bits": 4}
        | {"data_type": "int", "dataset": "NeelNanda/pile-10k", "enable_minmax_tuning": True, "group_size": 128}
        | {"enable_norm_bias_tuning": False, "enable_quanted_input": True, "iters": 1000, "low_gpu_mem_usage": False}
        | {"lr": 0.001, "minmax_lr": 0.001, "nsamples": 512, "quant_method": "intel/auto-round", "sym": True}
        | {"scale_dtype": "torch.float16", "seqlen": 2048, "to_quant_block_names": None},
        ("gptq", (4,), (128,), 1),
    ),
    (
        CT | {"format": "int-quantized", "global_compression_ratio": 1.27, "ignore": ["lm_head"]}
        | {"config_groups": {"group_0": {
            "input_activations": ARGUMENTS | {"dynamic": True, "strategy": "token"}, "output_activations": None,
            "targets": ["Linear"], "weights": ARGUMENTS}}},
        ("compressed-tensors", (8,), (0,), 0),
    ),
    (
        CT | {"format": "nvfp4-pack-quantized", "global_compression_ratio": None, "provider": "auto-round"}
        | {"config_groups": {"group_0": {"targets": ["Linear"], "format": None, "output_activations": None,
            "weights": ARGUMENTS | {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group",
            "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": None, "observer": "static_minmax"}}}},
        ("compressed-tensors", (4,), (16,), 0),
    ),
    (BNB, ("bitsandbytes", (4,), (64,), 0)),
    (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
        | {"modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"], "scale_fmt": "ue8m0"},
        ("fp8", (8,), (), 0),
    ),
    (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        ("mxfp4", (4,), (32,), 0),
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
        | {"exclude_modules": ["lm_head", "model.layers.0.self_attn*"]},
        ("modelopt", (4,), (16,), 0),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("description", "expected"), PUBLISHED)
def test_published_descriptions(description: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """Guards against a key that a writer adds, or another name for one, which would refuse most files of its method."""
    found = parse_quantization(description)
    assert found is not None
    assert (found.method, found.bits, found.groups, found.zero_offset) == expected


@pytest.mark.parametrize(
    ("description", "named"),
    [
        ({"quant_method": "aqlm"}, "quant_method = 'aqlm' is not supported"),
        ({"quant_method": "awq", "version": "gemv"}, "version = 'gemv'"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({"quant_method": "gptq", "bits": 5}, "bits = 5"),
        (CT | {"format": "marlin-24", "config_groups": {}}, "format = 'marlin-24'"),
        (CT | {"format": "pack-quantized", "config_groups": {}, "transform_config": {"R1": {}}}, "transform_config"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo = 'W4A8_AWQ'"),
        ({"quant_method": "auto-round", "bits": 4, "rotation_config": {"a": 1}}, "rotation_config"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2'"),
    ],
)
def test_what_would_change_a_value_is_refused_by_name(description: dict[str, Any], named: str) -> None:
    """Guards against another packing, or a rotation, that is read as if it were not there."""
    with pytest.raises(PenstockError, match=re.escape(named)):
        parse_quantization(description)


# Writers of whole models, from the formats' descriptions. Each returns the tensors of a module by their names in it,
# and the values that they stand for.
Written = tuple[dict[str, Tensor], Tensor]
LITTLE = "little"


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes as int32 along the last axis, the first in the lowest bits."""
    flags = (codes.numpy().astype(np.uint8)[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    flat = flags.reshape(*codes.shape[:-1], -1)
    return torch.from_numpy(np.packbits(flat, axis=-1, bitorder=LITTLE).view(np.int32).copy())


def integers(weight: Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], and scales (of 16 bits) and zero points [N, K / group]."""
    groups, most = weight.reshape(len(weight), -1, group), 2**bits - 1
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((torch.maximum(-low, high) * 2 if symmetric else high - low) / most).half().float()
    zeros = torch.full_like(scales, 2 ** (bits - 1)) if symmetric else (-low / scales).round().clamp(1, most)
    codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, most)
    return codes.reshape(weight.shape), scales, zeros


def values_of(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    count = codes.shape[1] // scales.shape[1]
    return (codes - zeros.repeat_interleave(count, 1)) * scales.repeat_interleave(count, 1)


def awq(weight: Tensor) -> Written:
    codes, scales, zeros = integers(weight, 4, 32, symmetric=False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    columns = [packed(part.t().reshape(part.shape[1], -1, 8)[..., order].flatten(1), 4) for part in (codes, zeros)]
    held = {"qweight": columns[0], "qzeros": columns[1], "scales": scales.t().half()}
    return held, values_of(codes, scales, zeros)


def gptq(weight: Tensor, bits: int, seed: int | None, *, symmetric: bool) -> Written:
    """seed: of act-order's random order of columns."""
    k = weight.shape[1]
    order = np.random.default_rng(seed).permutation(k) if seed is not None else np.arange(k)
    codes, scales, zeros = integers(weight[:, order], bits, 32, symmetric=symmetric)
    values, stored, groups = torch.empty_like(weight), torch.empty_like(codes), torch.empty(k, dtype=torch.int32)
    values[:, order], stored[:, order] = values_of(codes, scales, zeros), codes
    groups[order] = torch.arange(k, dtype=torch.int32) // 32
    held = {"qweight": packed(stored, bits).t(), "qzeros": packed(zeros.t() - 1, bits), "scales": scales.t().half()}
    return held | {"g_idx": groups}, values


def pack_quantized(weight: Tensor) -> Written:
    codes, scales, zeros = integers(weight, 4, 32, symmetric=False)
    held = {
        "weight_packed": packed(codes, 4),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    padded = torch.nn.functional.pad(zeros.t(), (0, -len(weight) % 8))
    return held | {"weight_zero_point": packed(padded, 4).t()}, values_of(codes, scales, zeros)


def int8(weight: Tensor) -> Written:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round()
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales


def fp8(weight: Tensor, block: int = 0) -> Written:
    n, k = weight.shape
    high, wide = (block, block) if block else (n, k)
    shape = (-(-n // high), -(-k // wide))
    blocks = torch.nn.functional.pad(weight, (0, -k % wide, 0, -n % high)).reshape(shape[0], high, shape[1], wide)
    scales = blocks.abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(high, 0)[:n].repeat_interleave(wide, 1)[:, :k]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    name = {"weight_scale_inv": scales} if block else {"weight_scale": scales[0, 0], "input_scale": torch.tensor(0.1)}
    return {"weight": codes} | name, codes.float() * spread


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def fp4(weight: Tensor, scales: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Bytes with two numbers of E2M1, the first in the low bits, and their values. scales: [N, K / group]."""
    spread = scales.repeat_interleave(group, -1)
    codes = ((weight / spread).abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (weight < 0)
    values = torch.cat([E2M1, -E2M1])[codes] * spread
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), values


def nvfp4(weight: Tensor) -> Written:
    whole = weight.abs().max() / (6 * 448)
    scales = (weight.reshape(len(weight), -1, 16).abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    codes, values = fp4(weight, scales.float() * whole, 16)
    return {"weight": codes, "weight_scale": scales, "weight_scale_2": whole}, values


def mxfp4(weight: Tensor) -> Written:
    """weight: [..., N, K]; blocks of 32 are an axis of their own."""
    exponents = (weight.reshape(*weight.shape[:-1], -1, 32).abs().amax(-1) / 6).log2().ceil()
    codes, values = fp4(weight, 2**exponents, 32)
    blocks = codes.reshape(*weight.shape[:-1], -1, 16)
    return {"_blocks": blocks, "_scales": (exponents + 127).to(torch.uint8)}, values


def nf4(weight: Tensor) -> Written:
    levels = torch.cat([-(torch.linspace(1, 0, 8) ** 1.2), torch.linspace(0, 1, 9)[1:] ** 1.2])
    absmax = weight.reshape(-1, 64).abs().amax(1)
    codes = ((weight.reshape(-1, 64) / absmax[:, None])[..., None] - levels).abs().argmin(-1)
    flat = codes.flatten()
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)})
    held = {
        "weight": (flat[::2] << 4 | flat[1::2]).to(torch.uint8)[:, None],
        "weight.absmax": absmax,
        "weight.quant_map": levels,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state.encode()), dtype=torch.uint8),
    }
    return held, (levels[codes] * absmax[:, None]).reshape(weight.shape)


def weights(number: int, kind: str, **more: Any) -> dict[str, Any]:
    """A description as compressed-tensors writes it, with activations of 8 bits."""
    arguments = {"num_bits": number, "type": kind, "dynamic": False, "actorder": None, "observer": "minmax"} | more
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": {"num_bits": 8, "dynamic": True}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "damp_percent": 0.01, "lm_head": False}
MODELS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Written]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq),
    "gptq": (GPTQ | {"sym": True, "desc_act": False}, lambda weight: gptq(weight, 4, None, symmetric=True)),
    "gptq act-order": (GPTQ | {"sym": False, "desc_act": True}, lambda weight: gptq(weight, 4, 5, symmetric=False)),
    "gptq 3 bits": (GPTQ | {"bits": 3}, lambda weight: gptq(weight, 3, None, symmetric=True)),
    "pack-quantized": (
        weights(4, "int", strategy="group", group_size=32, symmetric=False) | {"format": "pack-quantized"},
        pack_quantized,
    ),
    "int-quantized": (weights(8, "int", strategy="channel", symmetric=True) | {"format": "int-quantized"}, int8),
    "fp8 blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"},
        lambda weight: fp8(weight, 128),
    ),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, nvfp4),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4),
}
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 199,
}  # fmt: skip
PROMPT = [(7 + 31 * place) % 199 for place in range(60)]


def quantise(
    directory: Path, config: Mapping[str, Any], write: Callable[[Tensor], Written], part: str = "_proj.weight"
) -> Path:
    """Quantise the weights of a directory whose names have a part, in place. Return a twin with their values."""
    twin = directory.with_name(f"{directory.name}-values")
    tensors = load_file(directory / "model.safetensors")
    values: dict[str, Tensor] = {}
    held: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if part not in name:
            held[name] = values[name] = tensor
            continue
        written, values[name] = write(tensor.float())
        module = name if next(iter(written)).startswith("_") else f"{name.removesuffix('weight')}"
        held |= {module + key: value.contiguous() for key, value in written.items()}
    shutil.copytree(directory, twin, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(
        {name: value.contiguous() for name, value in values.items()}, twin / "model.safetensors", {"format": "pt"}
    )
    save_file(held, directory / "model.safetensors")
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": dict(config)}))
    return twin


KERNELS = ["reference", *(["cpu"] if levels() else [])]


def logits_of(directory: Path, kernels: str = "reference") -> Array:
    return np.asarray(PagedModel(directory, kernels=kernels, slices=3).step({0: PROMPT})[0])


def theirs(twin: Path) -> Array:
    model = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0].log_softmax(-1).numpy()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_values_in_transformers(name: str, kernels: str, tmp_path: Path) -> None:
    """Guards against a format whose weights are read rightly one by one, but joined or cut wrongly."""
    config, write = MODELS[name]
    directory = (make_qwen2 if name == "awq" else make_llama)(tmp_path, **SIZES)[1]
    twin = quantise(directory, config, write)
    expected = theirs(twin)
    assert np.abs(logits_of(directory, kernels) - expected).max() < 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("kernels", KERNELS)
def test_stacked_experts(kernels: str, tmp_path: Path) -> None:
    """Guards against the codes of another expert: gpt-oss stores the experts of a layer as one tensor of blocks."""
    sizes = TINY | SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes)).eval()
    randomise(model, 0)
    directory = tmp_path / "mixtral"
    model.config.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text()) | {"architectures": ["MixtralForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, directory / "model.safetensors")
    twin = quantise(directory, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4, "experts")
    expected = logits_of(twin)
    assert np.abs(logits_of(directory, kernels) - expected).max() < 1e-3 * np.abs(expected).max()


def test_a_description_beside_config_json(tmp_path: Path) -> None:
    """Guards against a directory of modelopt that is planned as bfloat16, and scales of activations or of a key/value
    cache that are taken for unknown tensors."""
    directory = make_llama(tmp_path, **SIZES)[1]
    config = (directory / "config.json").read_text()
    expected = logits_of(quantise(directory, {}, fp8))
    (directory / "config.json").write_text(config)
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (directory / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": quantization}))
    tensors = load_file(directory / "model.safetensors")
    places = [(layer, x) for layer in (0, 1) for x in "kv"]
    scales = {f"model.layers.{layer}.self_attn.{x}_proj.{x}_scale": torch.tensor(0.03 + layer) for layer, x in places}
    save_file(tensors | scales, directory / "model.safetensors")
    assert np.abs(logits_of(directory) - expected).max() < 1e-3 * np.abs(expected).max()
    first, second = read_kv_scales(directory, 2, 2, 32)  # where asked: for int8, whose largest number is 127
    for found, scale in ((first, 0.03), (second, 1.03)):
        for values in (found.key_scales, found.value_scales):
            np.testing.assert_allclose(values, np.full((2, 32), scale * 448 / 127), rtol=1e-6)
    for options in ({}, {"kv_cache_dtype": "int8", "kv_cache_scales": str(directory)}):
        built = build_engine(EngineConfig.from_options(model=str(directory), kernels="reference", **options))
        assert ("kv_cache_scales" in built.info.choices_made) == (not options)


def test_biases_of_zeros(tmp_path: Path) -> None:
    """Guards against early GPTQ files, which have a bias in every layer, and against a bias that is lost with them."""
    directory = make_llama(tmp_path, **SIZES)[1]
    expected = logits_of(quantise(directory, *MODELS["gptq"]))
    tensors, name = load_file(directory / "model.safetensors"), "model.layers.1.mlp.up_proj.bias"
    save_file(tensors | {name: torch.zeros(320)}, directory / "model.safetensors")
    assert np.abs(logits_of(directory) - expected).max() < 1e-3 * np.abs(expected).max()
    save_file(tensors | {name: torch.ones(320)}, directory / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"unknown: {name}"):
        logits_of(directory)


@pytest.mark.parametrize("name", ["gptq act-order", "fp8 blocks", "nvfp4"])
def test_tokens_do_not_depend_on_the_batch(name: str, tmp_path: Path) -> None:
    """Guards against a format that is served with other sums in a batch."""
    directory = make_llama(tmp_path, **SIZES)[1]
    quantise(directory, *MODELS[name])
    llm = LLM(model=str(directory), kernels=KERNELS[-1])
    prompts = [{"prompt_token_ids": PROMPT[start : start + 9]} for start in (0, 5, 20)]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    together = [answer.outputs[0].token_ids for answer in llm.generate(prompts, params)]
    alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone


@pytest.mark.parametrize("name", WRITTEN)
def test_damaged_files_load_or_say_why(name: str, tmp_path: Path) -> None:
    """Guards against a traceback, a hang or an unbounded array for tensors or descriptions that do not fit together."""
    golden(name, tmp_path)
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        description = file.metadata()["quantization_config"].encode()
    whole, random, refusals = (tmp_path / "model.safetensors").read_bytes(), Random(name), []
    for round_ in range(60):
        mutated = description if round_ % 2 else mutate_json(random, description)
        (tmp_path / "model.safetensors").write_bytes(mutate_safetensors(random, whole) if round_ % 2 else whole)
        try:
            values = json.loads(mutated)
            quantization = parse_quantization(values) if isinstance(values, dict) else None
            if quantization is not None:
                checkpoint = QuantizedCheckpoint(tmp_path, quantization)
                for tensor, entry in checkpoint.entries.items():
                    rows = checkpoint.rows(tensor)
                    assert rows.shape == entry.shape
                    with np.errstate(all="ignore"):  # damaged scales may be anything
                        rows.read(0, rows.shape[0])
        except (ValueError, RecursionError):  # of JSON, which the file's reader checks
            continue
        except PenstockError as error:
            refusals.append(str(error))
    assert refusals
    assert [text for text in refusals if len(text.splitlines()) > 1] == []
