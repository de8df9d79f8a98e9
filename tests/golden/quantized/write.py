"""Write the golden files of this folder: a weight in every format, by the format's own packages, and its values.

    pip install compressed-tensors==0.20.0 bitsandbytes==0.50.2 auto-round==0.16.1    # not needed by the tests
    python tests/golden/quantized/write.py

auto-round writes the files of GPTQ (both versions of zero points) and of AWQ. Every file has the tensors of a module
`m`, its values as `expected`, and the description that stands in config.json as metadata.
"""

import json
from pathlib import Path
from typing import Any

import torch
from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant, int8_vectorwise_quant, quantize_4bit
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file
from torch import Tensor

FOLDER = Path(__file__).parent
N, K, GROUP = 32, 64, 32


def save(name: str, config: dict[str, Any], tensors: dict[str, Tensor], expected: Tensor) -> None:
    held = {f"m.{key}": value.detach().contiguous().clone() for key, value in tensors.items()}
    held["expected"] = expected.detach().float().contiguous()
    save_file(held, FOLDER / f"{name}.safetensors", metadata={"quantization_config": json.dumps(config)})


def ranges(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """The smallest and largest value of every part with a scale of its own."""
    n, k = weight.shape
    match str(getattr(args.strategy, "value", args.strategy)):
        case "tensor":
            return weight.min().reshape(1), weight.max().reshape(1)
        case "channel":
            return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        case "block":
            high, wide = args.block_structure
            padded = torch.nn.functional.pad(weight, (0, -k % wide, 0, -n % high))
            blocks = padded.reshape(-(-n // high), high, -(-k // wide), wide)
            return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.reshape(n, -1, args.group_size)
    return groups.amin(2), groups.amax(2)


def compressed(name: str, kind: str, n: int = N, k: int = K, **options: Any) -> None:
    """Write a format of compressed-tensors. It computes values in the type of the scales, here float32."""
    args = QuantizationArgs(**options)
    weight = torch.randn(n, k) * torch.logspace(-2, 0, n)[:, None]
    least, most = ranges(weight, args)
    state = {"weight": weight.bfloat16()}
    if kind.startswith("nvfp4"):
        state["weight_global_scale"] = generate_gparam(least.min().reshape(1), most.max().reshape(1))
    scale, zero_point = calculate_qparams(least, most, args, global_scale=state.get("weight_global_scale"))
    state["weight_scale"] = scale if kind.startswith("nvfp4") else scale.bfloat16()
    if not args.symmetric:
        state["weight_zero_point"] = zero_point.to(torch.int8)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(kind)
    held = compressor.compress(state, scheme)
    if kind.startswith("nvfp4"):
        levels = unpack_fp4_from_uint8(held["weight_packed"], n, k, dtype=torch.float32)
        expected = levels * (held["weight_scale"].float() / held["weight_global_scale"]).repeat_interleave(16, 1)
    else:
        floats = {key: value.float() if value.dtype == torch.bfloat16 else value for key, value in held.items()}
        expected = compressor.decompress(floats, scheme)["weight"]
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=kind, quantization_status="compressed")
    save(name, config.model_dump(mode="json"), held, expected)


def four_bits(kind: str, *, nested: bool) -> None:
    weight = torch.randn(40, 512 if nested else 128)
    codes, state = quantize_4bit(weight, quant_type=kind, compress_statistics=nested, blocksize=64)
    config = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
        "llm_int8_threshold": 6.0, "llm_int8_skip_modules": None, "llm_int8_has_fp16_weight": False,
        "llm_int8_enable_fp32_cpu_offload": False, "_load_in_4bit": True, "_load_in_8bit": False,
    }  # fmt: skip
    held = {"weight": codes} | {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    save(f"bnb_{kind}{'_nested' if nested else ''}", config, held, dequantize_4bit(codes, state))


def eight_bits() -> None:
    codes, largest, _ = int8_vectorwise_quant(torch.randn(N, K).half())
    held = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False, "llm_int8_threshold": 6.0}
    save("bnb_int8", config, held, int8_vectorwise_dequant(codes, largest))


def rounded(bits: int, *, symmetric: bool) -> tuple[torch.nn.Linear, Tensor, Tensor]:
    """A layer whose weight is integers times scales, with the scales and zero points [N, K / GROUP]."""
    most, groups = 2**bits - 1, torch.randn(N, K // GROUP, GROUP)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = (torch.maximum(-low, high) * 2 if symmetric else high - low) / most
    zeros = torch.full_like(scales, 2 ** (bits - 1)) if symmetric else (-low / scales).round().clamp(1, most)
    scales = scales.half().float()
    codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, most)
    layer = torch.nn.Linear(K, N, bias=False)
    layer.weight.data = ((codes - zeros[..., None]) * scales[..., None]).reshape(N, K)
    return layer, scales, zeros


def gptq(bits: int, version: str, *, symmetric: bool) -> None:
    layer, scales, zeros = rounded(bits, symmetric=symmetric)
    module = qlinear_torch_zp if version == "gptq" else qlinear_torch
    packed = module.QuantLinear(bits, GROUP, K, N, False)
    packed.__dict__["device"] = torch.device("cpu")
    packed.pack(layer, scales, 2 ** (bits - 1) if symmetric else zeros.int())
    held = {"qweight": packed.qweight, "qzeros": packed.qzeros, "scales": packed.scales}
    held["g_idx"] = torch.arange(K, dtype=torch.int32) // GROUP
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": symmetric, "desc_act": False,
        "damp_percent": 0.01, "true_sequential": True, "static_groups": False, "checkpoint_format": version,
    }  # fmt: skip
    save(f"{version}_w{bits}_{'sym' if symmetric else 'asym'}", config, held, layer.weight)


def awq() -> None:
    layer, scales, zeros = rounded(4, symmetric=False)
    packed = WQLinear_GEMM.from_linear(layer, 4, GROUP, scales=scales.t(), zeros=zeros.t())
    held = {"qweight": packed.qweight, "qzeros": packed.qzeros, "scales": packed.scales}
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    save(
        "awq",
        config,
        held,
        dequantize_gemm(*(held[key] for key in ("qweight", "qzeros")), packed.scales.float(), 4, GROUP).t(),
    )


def main() -> None:
    torch.manual_seed(0)
    for bits, symmetric in ((4, True), (4, False), (8, True), (8, False), (3, True), (5, False)):
        name = f"ct_w{bits}_group{'' if symmetric else '_asym'}"
        compressed(name, "pack-quantized", num_bits=bits, symmetric=symmetric, strategy="group", group_size=GROUP)
    compressed("ct_w4_channel", "pack-quantized", num_bits=4, symmetric=True, strategy="channel")
    for name, symmetric in (("channel", True), ("channel", False), ("tensor", True)):
        options = {"num_bits": 8, "symmetric": symmetric, "strategy": name}
        compressed(f"ct_int8_{name}{'' if symmetric else '_asym'}", "int-quantized", **options)
    number: dict[str, Any] = {"type": "float", "symmetric": True}
    for name in ("tensor", "channel"):
        compressed(f"ct_fp8_{name}", "float-quantized", num_bits=8, strategy=name, **number)
    blocks = {"strategy": "block", "block_structure": [16, 32]}
    compressed("ct_fp8_block", "float-quantized", 40, 96, num_bits=8, **blocks, **number)
    compressed("ct_nvfp4", "nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16, **number)
    exponents = {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
    compressed("ct_mxfp4", "mxfp4-pack-quantized", num_bits=4, **exponents, **number)
    compressed("ct_mxfp8", "mxfp8-quantized", num_bits=8, **exponents, **number)
    for kind in ("nf4", "fp4"):
        for nested in (True, False):
            four_bits(kind, nested=nested)
    eight_bits()
    for bits in (2, 3, 4, 8):
        for symmetric in (True, False):
            gptq(bits, "gptq", symmetric=symmetric)
    for symmetric in (True, False):
        gptq(4, "gptq_v2", symmetric=symmetric)
    awq()


if __name__ == "__main__":
    main()
