"""Safetensors files with codes: modules that the formats' own packages wrote, and writers of whole models."""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden" / "quantized"
WRITTEN = sorted(file.stem for file in GOLDEN.glob("*.safetensors"))


def read_golden(name: str) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """Return a description, the tensors of a module `m`, and the values that their writer read from them."""
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        description = json.loads(file.metadata()["quantization_config"])
    return description, tensors, tensors.pop("expected")


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


def awq(weight: Tensor, group: int = 32) -> Written:
    codes, scales, zeros = integers(weight, 4, group, symmetric=False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    columns = [packed(part.t().reshape(part.shape[1], -1, 8)[..., order].flatten(1), 4) for part in (codes, zeros)]
    held = {"qweight": columns[0], "qzeros": columns[1], "scales": scales.t().half()}
    return held, values_of(codes, scales, zeros)


def gptq(weight: Tensor, bits: int, seed: int | None, *, symmetric: bool, group: int = 32) -> Written:
    """seed: of act-order's random order of columns."""
    k = weight.shape[1]
    order = np.random.default_rng(seed).permutation(k) if seed is not None else np.arange(k)
    codes, scales, zeros = integers(weight[:, order], bits, group, symmetric=symmetric)
    values, stored, groups = torch.empty_like(weight), torch.empty_like(codes), torch.empty(k, dtype=torch.int32)
    values[:, order], stored[:, order] = values_of(codes, scales, zeros), codes
    groups[order] = torch.arange(k, dtype=torch.int32) // group
    held = {"qweight": packed(stored, bits).t(), "qzeros": packed(zeros.t() - 1, bits), "scales": scales.t().half()}
    return held | {"g_idx": groups}, values


def pack_quantized(weight: Tensor, bits: int, group: int = 32) -> Written:
    codes, scales, zeros = integers(weight, bits, group, symmetric=False)
    padded = torch.nn.functional.pad(zeros.t(), (0, -len(weight) % 32))
    held = {
        "weight_packed": packed(codes, bits),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
        "weight_zero_point": packed(padded, bits).t()[: -(-len(weight) * bits // 32)],
    }
    return held, values_of(codes, scales, zeros)


def int8(weight: Tensor) -> Written:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round()
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales


def fp8(weight: Tensor, block: int = 0, dtype: torch.dtype = torch.float8_e4m3fn) -> Written:
    n, k = weight.shape
    high, wide = (block, block) if block else (n, k)
    shape = (-(-n // high), -(-k // wide))
    blocks = torch.nn.functional.pad(weight, (0, -k % wide, 0, -n % high)).reshape(shape[0], high, shape[1], wide)
    scales = blocks.abs().amax((1, 3)) / torch.finfo(dtype).max
    spread = scales.repeat_interleave(high, 0)[:n].repeat_interleave(wide, 1)[:, :k]
    codes = (weight / spread).to(dtype)
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
    **{
        f"pack-quantized, {bits} bits": (
            weights(bits, "int", strategy="group", group_size=32, symmetric=False) | {"format": "pack-quantized"},
            partial(pack_quantized, bits=bits),
        )
        for bits in range(2, 9)
    },
    "int-quantized": (weights(8, "int", strategy="channel", symmetric=True) | {"format": "int-quantized"}, int8),
    "fp8 blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"},
        lambda weight: fp8(weight, 128),
    ),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8),
    "fp8 e5m2": ({"quant_method": "fp8"}, lambda weight: fp8(weight, dtype=torch.float8_e5m2)),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, nvfp4),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4),
}
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 199,
}  # fmt: skip


def quantise(
    directory: Path, config: Mapping[str, Any], write: Callable[[Tensor], Written], part: str = "_proj.weight"
) -> Path:
    """Quantise the weights of a directory whose names have a part, in place. Return a twin with their values."""
    tensors = load_file(directory / "model.safetensors")
    values: dict[str, Tensor] = {}
    held: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if part not in name:
            held[name] = values[name] = tensor
            continue
        written, values[name] = write(tensor.float())
        module = name if next(iter(written)).startswith("_") else f"{name.removesuffix('weight')}"
        held |= {module + key: value for key, value in written.items()}
    return replace(directory, config, held, values)


def replace(
    directory: Path, config: Mapping[str, Any], held: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> Path:
    """Make a directory one whose weights are quantised. Return a twin with their values."""
    twin = directory.with_name(f"{directory.name}-values")
    shutil.copytree(directory, twin, ignore=shutil.ignore_patterns("*.safetensors"))
    for place, tensors in ((twin, values), (directory, held)):
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, place / "model.safetensors", {"format": "pt"})
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": dict(config)}))
    return twin
