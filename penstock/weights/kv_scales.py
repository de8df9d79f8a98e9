"""Read fixed scales and offsets of an int8 key/value cache from a safetensors file.

    layers.{i}.key_scale, layers.{i}.value_scale      for every layer; from 2^-60 to 2^60
    layers.{i}.key_offset, layers.{i}.value_offset    optional, default 0; |offset * scale| at most 2^60

A directory in place of the file is a quantised checkpoint, whose `k_scale` and `v_scale` are used. They are made for an
FP8 cache, whose largest number is 448; that of int8 is 127.

Each tensor is one number, [Hkv] or [Hkv, D], of any float type. A stored integer B represents (B + offset) * scale
(reference/quantized_kv.py).
"""

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from penstock.config import EngineConfig
from penstock.errors import ModelLoadError, fail, invalid, shown
from penstock.kernels.metadata import KVScales
from penstock.kernels.tensors import FLOAT32, Array, rounded
from penstock.spec.model_config import ModelConfig
from penstock.spec.quantization import read_quantization
from penstock.weights.safetensors import FLOATS, FileRows, TensorEntry, find_files, fingerprint, read_entries

SCALES = ("key_scale", "value_scale")
OFFSETS = ("key_offset", "value_offset")
IN_CHECKPOINT = re.compile(r"layers\.(\d+)\.(?:self_attn|attn|attention)\.(?:attn\.|[kv]_proj\.)?([kv])_scale$")
FP8_LEVELS, INT8_LEVELS = 448, 127
LEAST, GREATEST = 2.0**-60, 2.0**60  # so that no score or sum overflows float32


def read_scales(config: EngineConfig, model: ModelConfig) -> tuple[KVScales, ...] | None:
    """Read the scales that a config names, one entry per layer; None if it names no file."""
    file = config.cache.kv_cache_scales
    if file is None:
        return None
    layers = [model.at(layer) for layer in range(model.num_hidden_layers)]
    return read_kv_scales(Path(file), [(layer.num_key_value_heads, layer.head_dim) for layer in layers])


def read_kv_scales(file: Path, shapes: Sequence[tuple[int, int]]) -> tuple[KVScales, ...]:
    """Read one KVScales per layer. shapes: the number of key/value heads and the head_dim of each.

    Raises:
        InvalidRequestError: the file cannot be read; a tensor is missing or unknown, has the wrong shape, is not finite
            or out of range. The message names the tensor.
    """
    try:
        found = file.is_file() or any(file.glob("*.safetensors"))
    except (OSError, ValueError):  # the name is too long, or contains a NUL
        found = False
    if not found:
        raise fail("kv_cache_scales", str(file), "a safetensors file, or the directory of a checkpoint")
    try:
        if file.is_dir():
            return _read_checkpoint(file, shapes)
        return _read_layers(file, shapes)
    except ModelLoadError as error:
        raise invalid("kv_cache_scales", str(error)) from error


def _read_layers(file: Path, shapes: Sequence[tuple[int, int]]) -> tuple[KVScales, ...]:
    entries, num_layers = read_entries(file), len(shapes)
    known = {f"layers.{layer}.{kind}" for layer in range(num_layers) for kind in SCALES + OFFSETS}
    unknown = sorted(entries.keys() - known)
    if unknown:
        raise ModelLoadError(
            f"{file}: {shown(unknown[0])} is not a scale or offset of a layer from 0 to {num_layers - 1}"
        )
    return tuple(_layer(file, entries, f"layers.{layer}.", shape) for layer, shape in enumerate(shapes))


def _read_checkpoint(directory: Path, shapes: Sequence[tuple[int, int]]) -> tuple[KVScales, ...]:
    """Read the scales of a checkpoint, which stand beside the weights of attention under several names."""
    entries = {}
    for file in find_files(directory):
        for name, entry in read_entries(file).items():
            if match := IN_CHECKPOINT.search(name):
                entries[f"layers.{match[1]}.{'key' if match[2] == 'k' else 'value'}_scale"] = entry
    quantization = read_quantization(directory)
    levels = (0 if quantization is None else quantization.kv_levels) or FP8_LEVELS
    factor = FLOAT32.type(levels / INT8_LEVELS)
    layers = [_layer(directory, entries, f"layers.{layer}.", shape) for layer, shape in enumerate(shapes)]
    return tuple(
        replace(layer, key_scales=layer.key_scales * factor, value_scales=layer.value_scales * factor)
        for layer in layers
    )


def kv_scales_fingerprint(file: Path) -> str:
    """Hash the file's contents. Raise ModelLoadError if it cannot be read."""
    if file.is_dir():
        return fingerprint(file)
    try:
        return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise ModelLoadError(f"kv_cache_scales: {file} cannot be read: {error}") from None


def _layer(file: Path, entries: dict[str, TensorEntry], prefix: str, shape: tuple[int, int]) -> KVScales:
    found = {kind: _read(prefix + kind, entries.get(prefix + kind), shape) for kind in SCALES + OFFSETS}
    for kind in SCALES:
        values = found[kind]
        if values is None:
            raise ModelLoadError(f"{file}: {prefix}{kind} is missing")
        if not bool(((values >= LEAST) & (values <= GREATEST)).all()):
            found_range = f"{float(values.min()):g} to {float(values.max()):g}"
            raise ModelLoadError(f"{file}: {prefix}{kind} must be between 2^-60 and 2^60; it is {found_range}")
    zeros = np.zeros(shape, FLOAT32)
    keys, values, key_offsets, value_offsets = (zeros if item is None else item for item in found.values())
    for kind, shift in (("key_offset", keys * key_offsets), ("value_offset", values * value_offsets)):
        if not bool((np.abs(shift) <= GREATEST).all()):
            raise ModelLoadError(f"{file}: {prefix}{kind} times its scale must not exceed 2^60")
    return KVScales(key_scales=keys, key_offsets=key_offsets, value_scales=values, value_offsets=value_offsets)


def _read(name: str, entry: TensorEntry | None, shape: tuple[int, int]) -> Array | None:
    """Read a tensor as [Hkv, D] float32; None if the file does not have it."""
    if entry is None:
        return None
    if entry.dtype not in FLOATS or entry.shape not in ((), (1,), shape[:1], shape):
        allowed = f"one number, {list(shape[:1])} or {list(shape)} of a float type"
        raise ModelLoadError(f"{entry.file}: {name} is {entry.dtype} {list(entry.shape)}; it must be {allowed}")
    flat = TensorEntry(entry.file, (math.prod(entry.shape),), entry.dtype, entry.offset)
    values = rounded(FileRows(name, flat).read(0, flat.shape[0]), FLOAT32)
    if not bool(np.isfinite(values).all()):
        raise ModelLoadError(f"{entry.file}: {name} is not finite")
    rows = values.reshape(shape if entry.shape == shape else (-1, 1))
    return np.array(np.broadcast_to(rows, shape))
