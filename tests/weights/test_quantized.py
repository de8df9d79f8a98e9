"""Safetensors files with codes: modules that the formats' own packages wrote, and descriptions. Whole models are in
test_files.py."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

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
from tests.hf_models import make_llama, random_ids
from tests.kernels.packed import levels
from tests.paged import PagedModel
from tests.weights.quantized_files import MODELS, SIZES, WRITTEN, fp8, quantise, read_golden

ULP = 2.0**-23
# Where a format has a factor for all of a row, we multiply by it last, and its own package first.
ONE_ROUNDING = {"bnb_int8", "ct_nvfp4"}


def golden(name: str, directory: Path) -> tuple[QuantizedCheckpoint, Array]:
    """A directory with the module of a golden file, and the values that its writer read from it."""
    description, tensors, expected = read_golden(name)
    save_file(tensors, directory / "model.safetensors")
    quantization = parse_quantization(description)
    assert quantization is not None
    return QuantizedCheckpoint(directory, quantization), expected.numpy()


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


def logits_of(directory: Path) -> Array:
    return np.asarray(PagedModel(directory, slices=3).step({0: random_ids(60)})[0])


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
    first, second = read_kv_scales(directory, [(2, 32)] * 2)  # where asked: for int8, whose largest number is 127
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
