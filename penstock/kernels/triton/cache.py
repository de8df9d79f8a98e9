"""The paged keys and values of one layer.

`store_token`: a program owns one kv head of one new token, and writes its key and its value, and their scales.
`load_token`: a program owns one kv head of one slot, and reads both as float32.

A value that is not finite is stored as a key of NaN and a value of zeros. So rows that see its token become NaN, and
rows that do not see it multiply zeros by zeros, where zero times NaN would reach them, too.

Layout: keys are [block, kv head, position, D], and so are float values. int8 values are [block, kv head, D, position],
because tensor cores read operands of 8 bits along the summed dimension only. The scale and the offset of each token are
[keys or values, block, kv head, position, 2]. Integers, scales and offsets are those of reference/quantized_kv.py.
"""

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.errors import NotSupportedError
from penstock.kernels.metadata import CacheSpec, KVScales, check_block_ids
from penstock.kernels.reference.quantized_weights import MAGNITUDE_LIMIT, SMALLEST
from penstock.kernels.tensors import as_torch
from penstock.kernels.triton.device import MAX_HEAD_DIM, TILE
from penstock.kernels.triton.elements import divide, round_to_integer
from penstock.kernels.triton.launch import launch

LIMIT = tl.constexpr(float(MAGNITUDE_LIMIT))
LEAST = tl.constexpr(float(SMALLEST))
CHANNELS = ("key_scales", "key_offsets", "value_scales", "value_offsets")


@dataclass(slots=True, eq=False)
class TritonCache:
    """One layer's cache.

    Attributes:
        token_scales: int8 with scales per token: [2, blocks, Hkv, block size, 2] float32; else None.
        channel_scales: int8 with scales per channel: [4, Hkv, D] float32, in the order of CHANNELS; else None.
    """

    keys: Tensor
    values: Tensor
    spec: CacheSpec
    token_scales: Tensor | None = None
    channel_scales: Tensor | None = None
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        tensors = self.keys, self.values, self.token_scales
        self.num_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @classmethod
    def new(cls, spec: CacheSpec, device: torch.device) -> "TritonCache":
        """Allocate an empty cache.

        Raises:
            NotSupportedError: a type, a block size or slices that attention cannot read.
            ValueError: the scales are not [Hkv, D].
        """
        if spec.dtype not in (torch.float32, torch.bfloat16, torch.int8):
            raise NotSupportedError(f"dtype: {spec.dtype}; float32, bfloat16 or int8", param="dtype")
        if spec.block_size % TILE:
            text = f"block_size: {spec.block_size}; kernels='triton' needs a multiple of {TILE}"
            raise NotSupportedError(text, param="block_size")
        if spec.head_dim > MAX_HEAD_DIM:
            raise NotSupportedError(f"head_dim: {spec.head_dim}; at most {MAX_HEAD_DIM}", param="head_dim")
        quantised = spec.dtype == torch.int8
        if spec.slices not in ((2, 3) if quantised else (0,)):
            text = f"slices: {spec.slices}; 2 or 3 for an int8 cache, 0 for any other"
            raise NotSupportedError(text, param="slices")
        if spec.scales is not None and not quantised:
            raise NotSupportedError(f"scales: for an int8 cache, not for {spec.dtype}", param="scales")
        shape = spec.num_blocks, spec.num_kv_heads, spec.block_size
        keys = torch.empty(*shape, spec.head_dim, dtype=spec.dtype, device=device)
        if not quantised:
            return cls(keys, torch.empty_like(keys), spec)
        values = torch.empty(*shape[:2], spec.head_dim, spec.block_size, dtype=spec.dtype, device=device)
        if spec.scales is not None:
            return cls(keys, values, spec, channel_scales=_channels(spec.scales, keys))
        return cls(keys, values, spec, torch.empty(2, *shape, 2, dtype=torch.float32, device=device))

    def block(self, block_id: int) -> list[Tensor]:
        """View the memory of a block, in parts. Raise ValueError if the cache does not have the block."""
        check_block_ids(len(self.keys), block_id)
        parts = [self.keys[block_id], self.values[block_id]]
        return parts if self.token_scales is None else [*parts, *self.token_scales[:, block_id]]

    def read_block(self, block_id: int) -> bytes:
        """Copy a block to the host, part by part."""
        parts = [part.reshape(-1).view(torch.uint8).cpu() for part in self.block(block_id)]
        return bytes(torch.cat(parts).numpy())

    def write_block(self, block_id: int, content: bytes | memoryview) -> None:
        """Overwrite a block. Raise ValueError if the content has another size."""
        parts = self.block(block_id)
        sizes = [part.nbytes for part in parts]
        if len(content) != sum(sizes):
            raise ValueError(f"content: {len(content)} bytes, but a block has {sum(sizes)}")
        whole = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        for part, values in zip(parts, torch.split(whole, sizes), strict=True):
            part.view(-1).view(torch.uint8).copy_(values)


def _channels(scales: KVScales, keys: Tensor) -> Tensor:
    found = [as_torch(getattr(scales, name)) for name in CHANNELS]
    shape = keys.shape[1], keys.shape[3]
    for name, tensor in zip(CHANNELS, found, strict=True):
        if tensor.shape != shape:
            raise ValueError(f"{name}: {tuple(tensor.shape)}; kv heads and head dim are {shape}")
    return torch.stack(found).to(keys.device)


@triton.jit
def quantised(x, inside, scales, to):
    """Quantise a head's elements with a scale of their own, which is stored."""
    usable = tl.min(tl.where(inside & ((tl.abs(x) < LIMIT) == 0), 0, 1), axis=0) == 1
    low = tl.min(tl.where(inside, x, float("inf")), axis=0)
    high = tl.max(tl.where(inside, x, float("-inf")), axis=0)
    middle = (low + high) * 0.5
    half = tl.maximum(high - middle, middle - low)
    spread = usable & (half >= LEAST)
    steps = tl.full([], 127.0, tl.float32)
    half = tl.where(spread, half, 1.0)
    scale = tl.where(spread, divide(half, steps), tl.abs(middle))
    sign = tl.where(middle > 0, 1.0, tl.where(middle < 0, -1.0, 0.0))
    offset = tl.where(spread, divide(middle, tl.where(spread, scale, 1.0)), sign)
    tl.store(scales + to * 2, tl.where(usable, scale, float("nan")))
    tl.store(scales + to * 2 + 1, tl.where(usable, offset, 0.0))
    return round_to_integer(tl.where(spread & inside, (x - middle) * divide(steps, half), 0.0)).to(tl.int8)


@triton.jit
def by_channel(x, inside, channels):
    """Quantise a head's elements with the scales of their channels; the offsets are [Hkv, D] after them."""
    scale, offset = channels
    steps = divide(x, tl.load(scale, mask=inside, other=1.0)) - tl.load(offset, mask=inside, other=0.0)
    steps = tl.clamp(tl.where(steps == steps, steps, 0.0), -127.0, 127.0)
    return round_to_integer(steps).to(tl.int8)


@triton.jit(do_not_specialize=["blocks"])
def store_token(
    k, v, slots, keys, values, token_scales, channels, blocks,
    HKV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
    inside, slot = d < D, tl.load(slots + token)
    if slot >= 0:
        place, offset = (slot // BLOCK) * HKV + head, slot % BLOCK
        source = (token * HKV + head) * D + d
        key = tl.load(k + source, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(v + source, mask=inside, other=0.0).to(tl.float32)
        at = place * BLOCK * D + offset * D + d
        if keys.dtype.element_ty == tl.int8:
            if channels is None:
                line = place * BLOCK + offset
                stored_key = quantised(key, inside, token_scales, line)
                stored_value = quantised(value, inside, token_scales, blocks.to(tl.int64) * HKV * BLOCK + line)
            else:
                own = channels + head * D + d
                stored_key = by_channel(key, inside, (own, own + HKV * D))
                stored_value = by_channel(value, inside, (own + 2 * HKV * D, own + 3 * HKV * D))
            tl.store(keys + at, stored_key, mask=inside)
            tl.store(values + place * BLOCK * D + d * BLOCK + offset, stored_value, mask=inside)
        else:
            value = value.to(values.dtype.element_ty).to(tl.float32)
            fine = tl.min(tl.where(inside & ((tl.abs(value) < float("inf")) == 0), 0, 1), axis=0) == 1
            key, value = tl.where(fine, key, float("nan")), tl.where(fine, value, 0.0)
            tl.store(keys + at, key.to(keys.dtype.element_ty), mask=inside)
            tl.store(values + at, value.to(values.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["blocks"])
def load_token(
    slots, keys, values, token_scales, channels, k, v, blocks,
    HKV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
    inside, slot = d < D, tl.load(slots + token)
    place, offset = (slot // BLOCK) * HKV + head, slot % BLOCK
    at = place * BLOCK * D + offset * D + d
    key = tl.load(keys + at, mask=inside, other=0).to(tl.float32)
    if keys.dtype.element_ty == tl.int8:
        value = tl.load(values + place * BLOCK * D + d * BLOCK + offset, mask=inside, other=0).to(tl.float32)
        if channels is None:
            own = token_scales + (place * BLOCK + offset) * 2
            other = own + blocks.to(tl.int64) * HKV * BLOCK * 2
            key = (key + tl.load(own + 1)) * tl.load(own)
            value = (value + tl.load(other + 1)) * tl.load(other)
        else:
            own = channels + head * D + d
            key = key + tl.load(own + HKV * D, mask=inside, other=0.0)
            key = key * tl.load(own, mask=inside, other=0.0)
            value = value + tl.load(own + 3 * HKV * D, mask=inside, other=0.0)
            value = value * tl.load(own + 2 * HKV * D, mask=inside, other=0.0)
    else:
        value = tl.load(values + at, mask=inside, other=0).to(tl.float32)
    to = (token * HKV + head) * D + d
    tl.store(k + to, key, mask=inside)
    tl.store(v + to, value, mask=inside)


def _sizes(cache: TritonCache) -> dict[str, int]:
    spec = cache.spec
    width = triton.next_power_of_2(spec.head_dim)
    return {"HKV": spec.num_kv_heads, "D": spec.head_dim, "BLOCK": spec.block_size, "WIDTH": width}


def store(cache: TritonCache, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store keys and values [N, Hkv, D] at slots [N]; a negative slot stores nothing."""
    grid = len(k), cache.spec.num_kv_heads
    places = cache.keys, cache.values, cache.token_scales, cache.channel_scales
    launch(store_token, grid, k, v, slots, *places, len(cache.keys), **_sizes(cache), warps=1)


def load(cache: TritonCache, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Read keys and values at slots [N], none negative: [N, Hkv, D] float32."""
    heads = cache.spec.num_kv_heads
    k = torch.empty(len(slots), heads, cache.spec.head_dim, dtype=torch.float32, device=slots.device)
    v = torch.empty_like(k)
    places = cache.keys, cache.values, cache.token_scales, cache.channel_scales
    launch(load_token, (len(slots), heads), slots, *places, k, v, len(cache.keys), **_sizes(cache), warps=1)
    return k, v
