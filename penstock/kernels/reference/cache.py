"""The paged cache of one layer in plain torch: keys and values [num_blocks, block_size, Hkv, D]."""

import torch
from torch import Tensor

from penstock.kernels.metadata import CacheSpec
from penstock.kernels.reference import quantized_kv as kv

Quantised = tuple[Tensor, Tensor, Tensor]  # integers, scales, offsets


class ReferenceKVCache:
    """Keys and values of one layer in a float type."""

    def __init__(self, spec: CacheSpec, device: torch.device) -> None:
        self.dtype = spec.dtype
        shape = (spec.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        self.keys = torch.empty(shape, dtype=spec.dtype, device=device)
        self.values = torch.empty(shape, dtype=spec.dtype, device=device)
        self.num_bytes = 2 * self.keys.numel() * self.keys.element_size()

    def store(self, k_new: Tensor, v_new: Tensor, slots: Tensor) -> None:
        """Write the new tokens [T, Hkv, D] to their slots [T]; a token with a negative slot is not stored."""
        if bool((slots < 0).any()):
            kept = slots >= 0
            k_new, v_new, slots = k_new[kept], v_new[kept], slots[kept]
        self._write(k_new, v_new, slots)

    def copy(self, source: int, target: int) -> None:
        """Copy a block to another one."""
        for memory in (self.keys, self.values):
            memory[target] = memory[source]

    def load(self, block_tables: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Read B sequences at positions [B, S] -> keys, values [B, S, Hkv, D]; 0 at negative positions."""
        absent = positions < 0
        inside = positions.masked_fill(absent, 0)
        block_size = self.keys.shape[1]
        slots = block_tables.long().gather(1, inside // block_size) * block_size + inside % block_size
        slots.masked_fill_(absent, 0)
        keys, values = self.read(slots)
        if bool(absent.any()):
            keys[absent] = 0
            values[absent] = 0
        return keys, values

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Read slots of any shape [...] -> keys, values [..., Hkv, D]."""
        return self.keys.flatten(0, 1)[slots], self.values.flatten(0, 1)[slots]

    def rounded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return k and v as `read` would return them once they are stored, in their own type."""
        return k.to(self.dtype).to(k.dtype), v.to(self.dtype).to(v.dtype)

    def rounded_queries(self, q: Tensor) -> Tensor:
        """Return queries rounded as they are when multiplied with this cache's keys, in their own type."""
        return q.to(self.dtype).to(q.dtype)

    def _write(self, k_new: Tensor, v_new: Tensor, slots: Tensor) -> None:
        self.keys.flatten(0, 1)[slots] = k_new.to(self.dtype)
        self.values.flatten(0, 1)[slots] = v_new.to(self.dtype)


class Int8KVCache(ReferenceKVCache):
    """Keys and values as int8, with scales and offsets per token or per channel (quantized_kv.py).

    With 0 slices, queries are not rounded.
    """

    def __init__(self, spec: CacheSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self.slices = spec.slices
        own, self.channels = spec.scales, None  # scales and offsets of keys, and of values
        if own is not None:
            self.channels = (own.key_scales, own.key_offsets), (own.value_scales, own.value_offsets)
        tokens = (*self.keys.shape[:3], 2) if spec.scales is None else (0, 0, 0, 2)
        self.key_scales = torch.empty(tokens, device=device)  # scale and offset per token and kv head
        self.value_scales = torch.empty(tokens, device=device)
        self.num_bytes += 2 * self.key_scales.numel() * self.key_scales.element_size()

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().read(slots)
        if self.channels is None:
            of_keys, of_values = (x.flatten(0, 1)[slots].chunk(2, -1) for x in (self.key_scales, self.value_scales))
        else:
            of_keys, of_values = self.channels
        return kv.dequantize(keys, *of_keys), kv.dequantize(values, *of_values)

    def copy(self, source: int, target: int) -> None:
        super().copy(source, target)
        if self.channels is None:
            for scales in (self.key_scales, self.value_scales):
                scales[target] = scales[source]

    def rounded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return kv.dequantize(*self._quantize(k, 0)).to(k.dtype), kv.dequantize(*self._quantize(v, 1)).to(v.dtype)

    def rounded_queries(self, q: Tensor) -> Tensor:
        if self.slices == 0:
            return q
        if self.channels is None:
            return kv.slices(q.float(), self.slices).to(q.dtype)
        # Scales per channel are applied to the query before it is written as slices.
        key_scales: Tensor = self.channels[0][0]
        scales: Tensor = key_scales.repeat_interleave(q.shape[-2] // key_scales.shape[0], dim=0)
        return kv.slices(q.float() * scales, self.slices).to(q.dtype) / scales.to(q.dtype)

    def _write(self, k_new: Tensor, v_new: Tensor, slots: Tensor) -> None:
        places = (self.keys, self.key_scales), (self.values, self.value_scales)
        for index, (x, (rows, scales)) in enumerate(zip((k_new, v_new), places, strict=True)):
            integers, *numbers = self._quantize(x, index)
            rows.flatten(0, 1)[slots] = integers
            if self.channels is None:
                scales.flatten(0, 1)[slots] = torch.cat(numbers, dim=-1)

    def _quantize(self, x: Tensor, index: int) -> Quantised:
        """Return the integers of keys (index 0) or values (1), with scales and offsets as kv.dequantize takes them."""
        if self.channels is not None:
            return kv.quantize_channels(x, *self.channels[index]), *self.channels[index]
        integers, scales, offsets = kv.quantize_tokens(x)
        return integers, scales[..., None], offsets[..., None]
