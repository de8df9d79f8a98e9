"""The paged cache of one layer in plain torch: keys and values [num_blocks, block_size, Hkv, D]."""

import torch
from torch import Tensor

from penstock.kernels.metadata import KVScales
from penstock.quant import kv


class ReferenceKVCache:
    """Keys and values of one layer in a float type."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.num_bytes = 2 * self.keys.numel() * self.keys.element_size()

    def store(self, k_new: Tensor, v_new: Tensor, slots: Tensor) -> None:
        """Write the new tokens [T, Hkv, D] to their slots [T]; a token with a negative slot is not stored."""
        if bool((slots < 0).any()):
            kept = slots >= 0
            k_new, v_new, slots = k_new[kept], v_new[kept], slots[kept]
        self._write(k_new, v_new, slots)

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
        """Return k and v as `read` would return them once stored, in their own type."""
        return k.to(self.dtype).to(k.dtype), v.to(self.dtype).to(v.dtype)

    def rounded_queries(self, q: Tensor) -> Tensor:
        """Return queries as they are multiplied with this cache's keys, in their own type."""
        return q.to(self.dtype).to(q.dtype)

    def _write(self, k_new: Tensor, v_new: Tensor, slots: Tensor) -> None:
        self.keys.flatten(0, 1)[slots] = k_new.to(self.dtype)
        self.values.flatten(0, 1)[slots] = v_new.to(self.dtype)


class Int8KVCache(ReferenceKVCache):
    """Keys and values as int8, with scales and offsets per token or per channel (quant/kv.py).

    slices: int8 rows that represent a query row; 0 keeps queries as they are. scales: per channel; None: per token.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], slices: int, scales: KVScales | None, device: torch.device
    ) -> None:
        super().__init__(shape, torch.int8, device)
        self.slices = slices
        self.channels = scales
        tokens = (*shape[:3], 2) if scales is None else (0, 0, 0, 2)
        self.key_scales = torch.empty(tokens, device=device)  # scale and offset per token and kv head
        self.value_scales = torch.empty(tokens, device=device)
        self.num_bytes += 2 * self.key_scales.numel() * self.key_scales.element_size()

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().read(slots)
        if self.channels is not None:
            own = self.channels
            return (
                kv.dequantize(keys, own.key_scales, own.key_offsets),
                kv.dequantize(values, own.value_scales, own.value_offsets),
            )
        key_scales, value_scales = self.key_scales.flatten(0, 1)[slots], self.value_scales.flatten(0, 1)[slots]
        return (
            kv.dequantize(keys, key_scales[..., :1], key_scales[..., 1:]),
            kv.dequantize(values, value_scales[..., :1], value_scales[..., 1:]),
        )

    def rounded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.channels is not None:
            own = self.channels
            return (
                _through_channels(k, own.key_scales, own.key_offsets),
                _through_channels(v, own.value_scales, own.value_offsets),
            )
        return _through_tokens(k), _through_tokens(v)

    def rounded_queries(self, q: Tensor) -> Tensor:
        if self.slices == 0:
            return q
        if self.channels is None:
            return kv.slices(q.float(), self.slices).to(q.dtype)
        # Scales per channel are applied to the query before it is written as slices.
        scales = self.channels.key_scales.repeat_interleave(q.shape[-2] // self.channels.key_scales.shape[0], dim=0)
        return kv.slices(q.float() * scales, self.slices).to(q.dtype) / scales.to(q.dtype)

    def _write(self, k_new: Tensor, v_new: Tensor, slots: Tensor) -> None:
        if self.channels is not None:
            own = self.channels
            self.keys.flatten(0, 1)[slots] = kv.quantize_channels(k_new, own.key_scales, own.key_offsets)
            self.values.flatten(0, 1)[slots] = kv.quantize_channels(v_new, own.value_scales, own.value_offsets)
            return
        for new, rows, scales in ((k_new, self.keys, self.key_scales), (v_new, self.values, self.value_scales)):
            integers, token_scales, token_offsets = kv.quantize_tokens(new)
            rows.flatten(0, 1)[slots] = integers
            scales.flatten(0, 1)[slots] = torch.stack([token_scales, token_offsets], dim=-1)


def _through_channels(x: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    return kv.dequantize(kv.quantize_channels(x, scales, offsets), scales, offsets).to(x.dtype)


def _through_tokens(x: Tensor) -> Tensor:
    values, scales, offsets = kv.quantize_tokens(x)
    return kv.dequantize(values, scales[..., None], offsets[..., None]).to(x.dtype)
