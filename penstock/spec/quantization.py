"""Read what a model directory says about the codes of its weights: `quantization_config` in config.json. No torch.

Instead of that key, older files stand beside config.json: hf_quant_config.json (modelopt), quantize_config.json (GPTQ)
and quant_config.json (AWQ). Every key is used, or known not to change a weight, or refused by name. Which tensors have
codes, and most of the sizes, can be seen from the tensors themselves (weights/quantized.py); widths and group sizes
are read in order to be compared with them.

What the files say about activations (`input_activations`, `activation_scheme`, `llm_int8_threshold`) is how another
engine would round them. It is not applied: this engine rounds activations as its own options say.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ModelLoadError, NotSupportedError, shown
from penstock.spec.config_file import has_config, read_config
from penstock.spec.config_reader import MAX_SIZE, ConfigReader, read_json

KEY = "quantization_config"
FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}  # the methods
WHOLE_ROW = 0  # as a group size


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of a checkpoint are coded.

    Attributes:
        method: "awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4", "bitsandbytes" or "modelopt".
        bits, groups: allowed widths of codes, and allowed numbers of elements that share a scale; (): any.
        blocks: sizes [rows, columns] of blocks that share a scale, if the file has them.
        is_float: codes are small floating-point numbers, of FP8 or FP4, instead of integers.
        symmetric: all zero points are in the middle of the codes, so that they need not be kept (GPTQ).
        zero_offset: what is added to stored zero points: 1 in the first format of GPTQ.
        kv_levels: the largest number that the scales of a key/value cache stand for, 448 (FP8) or 127; 0: no scales.
    """

    method: str
    bits: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    is_float: bool = False
    symmetric: bool = False
    zero_offset: int = 0
    kv_levels: int = 0


# Keys that say how a file was made, which modules were left as they were, or how another engine computes with it.
HARMLESS_KEYS = """
    act_group_aware activation_scale_ub amp autoround_version backend batch_size block_name_to_quantize
    bnb_4bit_compute_dtype bnb_4bit_quant_storage cache_block_outputs damp_auto_increment damp_percent dataset
    desc_act disable_exllama do_fuse enable_alg_ext enable_deterministic_algorithms enable_minmax_tuning
    enable_norm_bias_tuning enable_quanted_input exclude_modules exllama_config fuse_max_seq_len
    global_compression_ratio gradient_accumulate_steps ignore ignored_layers iters llm_int8_enable_fp32_cpu_offload
    llm_int8_skip_modules llm_int8_threshold lm_head low_cpu_mem_usage low_gpu_mem_usage lr lr_scheduler mappings
    max_input_length meta minmax_lr model_file_base_name model_name_or_path model_seqlen
    module_name_preceding_first_block modules_in_block_to_quantize modules_to_convert modules_to_fuse
    modules_to_not_convert moe_sparsity_config nsamples offload_to_disk pack_impl pad_token_id producer provider
    quant_lm_head quantization_status run_compressed scale_dtype seqlen static_groups to_quant_block_names tokenizer
    true_sequential use_cuda_fp16 use_exllama use_optimized_inference version
"""
HARMLESS = frozenset(HARMLESS_KEYS.split())


def find_quantization(directory: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the description in config.json, or that of a file beside it; None if there is neither.

    Raises:
        ModelLoadError: the description is not an object, or a file cannot be read.
    """
    if config.get(KEY) is not None:
        if not isinstance(config[KEY], dict):
            raise ModelLoadError(f"config.json: {KEY} = {shown(config[KEY])} is not allowed; it must be an object")
        return dict(config[KEY])
    for name, method in FILES.items():
        if (directory / name).is_file():
            values = read_json(directory / name)
            inner = values.get("quantization") if method == "modelopt" else values
            if not isinstance(inner, dict):
                raise ModelLoadError(f"{name}: quantization = {shown(inner)} is not allowed; it must be an object")
            return {"quant_method": method} | inner
    return None


def read_quantization(directory: Path) -> Quantization | None:
    """Read how the weights of a model directory are coded. Raises as find_quantization and parse_quantization do."""
    found = find_quantization(directory, read_config(directory)) if has_config(directory) else None
    return None if found is None else parse_quantization(found)


def parse_quantization(values: dict[str, Any]) -> Quantization | None:
    """Make a Quantization from the description; None if it says that weights are not quantised.

    Raises:
        NotSupportedError: the method is not supported.
        ModelLoadError: a key is missing, wrong or unknown.
    """
    read = ConfigReader(values, KEY)
    method = read.raw("quant_method")
    if method is None and (read.raw("load_in_4bit") or read.raw("load_in_8bit")):
        method = "bitsandbytes"  # files of early versions do not name it
    producer = read.raw("producer")
    if method is None and isinstance(producer, dict) and producer.get("name") == "modelopt":
        method = "modelopt"  # nor do these
    if not isinstance(method, str) or method not in METHODS:
        raise NotSupportedError(
            f"{KEY}: quant_method = {shown(method)} is not supported; supported are {', '.join(METHODS)}", param="model"
        )
    result = METHODS[method](read)
    read.finish(HARMLESS)
    return result


def _group(read: ConfigReader, key: str = "group_size", default: int = 128) -> tuple[int, ...]:
    size = read.integer(key, -1, MAX_SIZE, default)
    return (WHOLE_ROW if size < 1 else size,)


def _block(read: ConfigReader, key: str) -> tuple[tuple[int, int], ...]:
    size = read.raw(key)
    if size is None:
        return ()
    if (
        not isinstance(size, list)
        or len(size) != 2
        or not all(type(item) is int and 0 < item <= MAX_SIZE for item in size)
    ):
        raise read.fail(key, "two sizes")
    return ((size[0], size[1]),)


def _kv_levels(read: ConfigReader) -> int:
    scheme = read.raw("kv_cache_scheme")
    given = [scheme, *(read.raw(key) for key in ("kv_cache_quant_algo", "kv_cache_quant_method"))]
    if not any(given):
        return 0
    return 127 if isinstance(scheme, dict) and scheme.get("type") == "int" else 448


def _awq(read: ConfigReader) -> Quantization:
    """AutoAWQ's format. Before Transformers knew it, keys had other names."""
    old = read.has("w_bit")
    bits = read.integer("w_bit" if old else "bits", 4, 4, 4)
    groups = _group(read, "q_group_size" if old else "group_size")
    for key in ("version", "format", "checkpoint_format"):
        read.choice(key, ("gemm", "GEMM"), "gemm")
    read.neutral({"pack_dtype": "int32", "data_type": "int"})
    for key in ("zero_point", "sym"):  # zero points are stored in any case
        read.boolean(key, False)
    return Quantization("awq", (bits,), groups)


def _gptq(read: ConfigReader) -> Quantization:
    bits, groups = read.integer("bits", 2, 8, 4), _group(read)
    if bits not in (2, 3, 4, 8):
        raise read.fail("bits", "2, 3, 4 or 8")
    second = "gptq_v2" in [read.choice(key, ("gptq", "gptq_v2"), "gptq") for key in ("checkpoint_format", "format")]
    read.neutral({"is_marlin_format": False, "pack_dtype": "int32", "data_type": "int"})
    symmetric = read.boolean("sym", True)
    if read.raw("dynamic"):  # other widths or zero points for some modules
        return Quantization("gptq", zero_offset=0 if second else 1)
    return Quantization("gptq", (bits,), groups, symmetric=symmetric, zero_offset=0 if second else 1)


def _auto_round(read: ConfigReader) -> Quantization:
    """AutoRound writes the formats of AWQ and GPTQ, and one of its own: GPTQ's with zero points as they are."""
    packing = read.raw("packing_format") or read.raw("backend") or "auto_round:auto_gptq"
    if not isinstance(packing, str) or not packing.startswith("auto_round"):
        raise read.fail("packing_format", "auto_round, auto_round:auto_gptq or auto_round:auto_awq")
    bits, groups, symmetric = read.integer("bits", 2, 8, 4), _group(read), read.boolean("sym", True)
    read.neutral({"data_type": "int", "act_bits": 16})
    for key in ("act_group_size", "act_sym", "act_dynamic", "act_data_type"):
        read.raw(key)
    mixed = bool(read.raw("extra_config"))
    offset = 1 if "gptq" in packing and "gptqmodel" not in packing else 0
    return Quantization(
        "awq" if "awq" in packing else "gptq",
        () if mixed else (bits,),
        () if mixed else groups,
        symmetric=symmetric and not mixed and "awq" not in packing,
        zero_offset=offset,
    )


def _compressed_tensors(read: ConfigReader) -> Quantization:
    formats = [
        "pack-quantized",
        "int-quantized",
        "float-quantized",
        "naive-quantized",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
        "mxfp8-quantized",
        "mixed-precision",
    ]
    read.choice("format", formats)
    for key in ("sparsity_config", "transform_config"):
        if read.raw(key) and read.raw(key) != {"format": "dense"}:
            raise read.fail(key, "absent: sparse weights and rotations are not supported")
    groups = read.raw("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise read.fail("config_groups", "an object of objects")
    bits, sizes, blocks = set[int](), set[int](), set[tuple[int, int]]()
    is_float, symmetric = False, True
    for name, values in groups.items():
        group = ConfigReader(values, f"{KEY}: {name}")
        weights = group.section("weights")
        if weights is not None:
            bits.add(weights.integer("num_bits", 2, 8, 8))
            strategy = weights.choice("strategy", ("tensor", "channel", "group", "block", "tensor_group"), "group")
            if "group" in strategy:
                sizes.update(_group(weights, default=-1))
            elif strategy != "block":
                sizes.add(WHOLE_ROW)
            blocks.update(_block(weights, "block_structure"))
            is_float = weights.choice("type", ("int", "float"), "int") == "float" or is_float
            symmetric = weights.boolean("symmetric", True) and symmetric
            weights.neutral({"dynamic": False})
            weights.finish({"group_size", "actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"})
        group.choice("format", formats, formats[0])
        group.finish({"targets", "input_activations", "output_activations"})
    return Quantization(
        "compressed-tensors",
        tuple(sorted(bits)),
        tuple(sorted(sizes)),
        blocks=tuple(sorted(blocks)),
        is_float=is_float,
        symmetric=symmetric,
        kv_levels=_kv_levels(read),
    )


def _fp8(read: ConfigReader) -> Quantization:
    read.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    read.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    read.choice("scale_fmt", ("float", "ue8m0"), "float")
    read.neutral({"dequantize": False, "expert_dtype": "fp8", "is_checkpoint_fp8_serialized": True})
    method, blocks = str(read.raw("quant_method")), _block(read, "weight_block_size")
    return Quantization(method, (8,), blocks=blocks, is_float=True, kv_levels=_kv_levels(read))


def _mxfp4(read: ConfigReader) -> Quantization:
    read.neutral({"dequantize": False})
    return Quantization("mxfp4", (4,), (32,), is_float=True)


def _bitsandbytes(read: ConfigReader) -> Quantization:
    four, eight = read.boolean("load_in_4bit", False), read.boolean("load_in_8bit", False)
    if four == eight:
        raise read.fail("load_in_4bit", "true, or load_in_8bit must be true, but not both")
    read.choice("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    read.boolean("bnb_4bit_use_double_quant", False)
    read.neutral({"llm_int8_has_fp16_weight": False})
    return Quantization("bitsandbytes", (4 if four else 8,), (64,) if four else (), is_float=four, symmetric=True)


def _modelopt(read: ConfigReader) -> Quantization | None:
    algorithms = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
    _group(read)
    read.neutral({"has_zero_point": False, "pre_quant_scale": False})
    for key in ("config_groups", "quantized_layers"):  # repeat what is seen from the tensors
        read.raw(key)
    if read.raw("quant_algo") is None:
        return None
    if read.choice("quant_algo", algorithms) == "MIXED_PRECISION":
        return Quantization("modelopt", is_float=True, kv_levels=_kv_levels(read))
    bits = 4 if "NVFP4" in read.choice("quant_algo", algorithms) else 8
    return Quantization("modelopt", (bits,), (16,) if bits == 4 else (), is_float=True, kv_levels=_kv_levels(read))


METHODS: dict[str, Callable[[ConfigReader], Quantization | None]] = {
    "auto-round": _auto_round,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fp8,
    "fp8": _fp8,
    "gptq": _gptq,
    "intel/auto-round": _auto_round,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": _mxfp4,
}
