"""The paged cache of one layer in plain torch: two tensors [num_blocks, block_size, Hkv, D]."""

import torch
from torch import Tensor


class ReferenceKVCache:
    """Keys and values of one layer, [num_blocks, block_size, Hkv, D] each, of one type."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.num_bytes = 2 * self.keys.numel() * self.keys.element_size()

    def store(self, k_new: Tensor, v_new: Tensor, slots: Tensor) -> None:
        """Write the new tokens [T, Hkv, D] to their slots [T]; those with a negative slot are not kept."""
        if bool((slots < 0).any()):
            kept = slots >= 0
            k_new, v_new, slots = k_new[kept], v_new[kept], slots[kept]
        self._write(k_new, v_new, slots)

    def load(self, block_tables: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of B sequences at positions [B, S] -> [B, S, Hkv, D] each; 0 at negative positions."""
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
        """Keys and values at slots of any shape [...] -> [..., Hkv, D] each."""
        return self.keys.flatten(0, 1)[slots], self.values.flatten(0, 1)[slots]

    def rounded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As `read` would give these back, in their own type."""
        return k.to(self.dtype).to(k.dtype), v.to(self.dtype).to(v.dtype)

    def rounded_queries(self, q: Tensor) -> Tensor:
        """As this cache's keys meet them, in their own type."""
        return q.to(self.dtype).to(q.dtype)

    def _write(self, k_new: Tensor, v_new: Tensor, slots: Tensor) -> None:
        self.keys.flatten(0, 1)[slots] = k_new.to(self.dtype)
        self.values.flatten(0, 1)[slots] = v_new.to(self.dtype)
