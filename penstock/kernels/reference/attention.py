"""Paged attention in plain torch: one sequence after the other, readable rather than fast.

The cache of a layer is two tensors [num_blocks, block_size, Hkv, D]. A position that no query may see is never read
from it, so whatever a free slot holds cannot matter.
"""

import torch
from torch import Tensor

from penstock.kernels.ops import AttentionMetadata

QUERY_ROWS = 256  # query rows scored at once: bounds the score matrix of a long prompt


class ReferenceKVCache:
    """Keys and values of one layer, [num_blocks, block_size, Hkv, D] each."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.num_bytes = 2 * self.keys.numel() * self.keys.element_size()

    def store(self, k_new: Tensor, v_new: Tensor, slots: Tensor) -> None:
        """Write the new tokens [T, Hkv, D] to their slots [T]; those with slot -1 are not kept."""
        if bool((slots < 0).any()):
            kept = slots >= 0
            k_new, v_new, slots = k_new[kept], v_new[kept], slots[kept]
        self.keys.flatten(0, 1)[slots] = k_new
        self.values.flatten(0, 1)[slots] = v_new

    def load(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at these slots [S] -> [S, Hkv, D] each."""
        return self.keys.flatten(0, 1)[slots], self.values.flatten(0, 1)[slots]


def attend(
    q: Tensor, k_new: Tensor, v_new: Tensor, cache: ReferenceKVCache, meta: AttentionMetadata, scale: float
) -> Tensor:
    """q [T, H, D], k_new and v_new [T, Hkv, D] -> [T, H, D] float32; the new tokens are stored."""
    k_new, v_new = k_new.to(cache.keys.dtype), v_new.to(cache.values.dtype)
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    starts, seq_lens = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
    for index, seq_len in enumerate(seq_lens):
        new = slice(starts[index], starts[index + 1])
        num_cached = seq_len - (new.stop - new.start)
        first = 0 if meta.sliding_window is None else max(0, num_cached + 1 - meta.sliding_window)
        k_old, v_old = cache.load(_slots(meta.block_table[index], first, num_cached, meta.block_size))
        keys = torch.cat([k_old, k_new[new]]).float()  # [S, Hkv, D], at positions first ..
        values = torch.cat([v_old, v_new[new]]).float()
        out[new] = _attend_sequence(q[new].float(), keys, values, num_cached - first, meta.sliding_window, scale)
    cache.store(k_new, v_new, meta.slot_mapping)
    return out


def _slots(block_table: Tensor, first: int, end: int, block_size: int) -> Tensor:
    """Slots of the positions first .. end-1 of one sequence."""
    positions = torch.arange(first, end, device=block_table.device)
    return block_table[positions // block_size].long() * block_size + positions % block_size


def _attend_sequence(q: Tensor, keys: Tensor, values: Tensor, offset: int, window: int | None, scale: float) -> Tensor:
    """One sequence: q [n, H, D], keys and values [S, Hkv, D], all float32 -> [n, H, D].

    Query i stands where key offset + i does; it sees that key and those before it, within the window.
    """
    n, num_heads, head_dim = q.shape
    num_kv_heads, group = keys.shape[1], num_heads // keys.shape[1]
    out = torch.empty_like(q)
    for top in range(0, n, QUERY_ROWS):
        rows = slice(top, min(top + QUERY_ROWS, n))
        low = 0 if window is None else max(0, offset + top + 1 - window)
        high = offset + rows.stop
        # Heads that share keys are stacked as rows of one product: [Hkv, G * n', D] x [Hkv, D, S'].
        grouped = q[rows].view(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)  # [Hkv, G, n', D]
        scores = grouped.flatten(1, 2) @ keys[low:high].permute(1, 2, 0) * scale
        scores = scores.view(num_kv_heads, group, -1, high - low)  # [Hkv, G, n', S']
        if rows.stop - rows.start > 1:
            at = torch.arange(offset + rows.start, high, device=q.device)[:, None]
            seen = torch.arange(low, high, device=q.device)[None, :]
            hidden = seen > at if window is None else (seen > at) | (seen <= at - window)
            scores = scores.masked_fill(hidden, float("-inf"))
        mixed = scores.softmax(dim=-1).flatten(1, 2) @ values[low:high].transpose(0, 1)  # [Hkv, G * n', D]
        out[rows] = mixed.view(grouped.shape).permute(2, 0, 1, 3).flatten(1, 2)
    return out
