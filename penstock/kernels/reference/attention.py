"""Paged attention in plain torch: sequences of one new token together, every other one by itself.

The cache of a layer is two tensors [num_blocks, block_size, Hkv, D]. Whatever a free slot holds cannot matter: a
position that no query may see is not read, or enters as p = 0 and v = 0.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.kernels.ops import AttentionMetadata

QUERY_ROWS = 256  # query rows scored at once: bounds the score matrix of a long prompt
CACHED_ROWS = 2**15  # cached tokens gathered at once: bounds the copies for many sequences


class ReferenceKVCache:
    """Keys and values of one layer, [num_blocks, block_size, Hkv, D] each."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.num_bytes = 2 * self.keys.numel() * self.keys.element_size()

    def store(self, k_new: Tensor, v_new: Tensor, slots: Tensor) -> None:
        """Write the new tokens [T, Hkv, D] to their slots [T]; those with a negative slot are not kept."""
        if bool((slots < 0).any()):
            kept = slots >= 0
            k_new, v_new, slots = k_new[kept], v_new[kept], slots[kept]
        self.keys.flatten(0, 1)[slots] = k_new
        self.values.flatten(0, 1)[slots] = v_new

    def load(self, block_tables: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of B sequences at positions [B, S] -> [B, S, Hkv, D] each; 0 at negative positions."""
        absent = positions < 0
        inside = positions.masked_fill(absent, 0)
        block_size = self.keys.shape[1]
        slots = block_tables.long().gather(1, inside // block_size) * block_size + inside % block_size
        slots.masked_fill_(absent, 0)
        keys, values = self.keys.flatten(0, 1)[slots], self.values.flatten(0, 1)[slots]
        if bool(absent.any()):
            keys[absent] = 0
            values[absent] = 0
        return keys, values


def attend(
    q: Tensor, k_new: Tensor, v_new: Tensor, cache: ReferenceKVCache, meta: AttentionMetadata, scale: float
) -> Tensor:
    """q [T, H, D], k_new and v_new [T, Hkv, D] -> [T, H, D] float32; the new tokens are stored."""
    k_new, v_new = k_new.to(cache.keys.dtype), v_new.to(cache.values.dtype)
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    starts = meta.query_start_loc.long()
    for rows, n, span in _groups(meta):
        old_positions = (meta.seq_lens[rows].long() - n)[:, None] + torch.arange(-span, 0, device=q.device)  # [B, span]
        k_old, v_old = cache.load(meta.block_table[rows], old_positions)
        new = starts[rows][:, None] + torch.arange(n, device=q.device)  # [B, n], into the packed tokens
        keys = torch.cat([k_old, k_new[new]], dim=1).float()  # [B, span + n, Hkv, D]
        values = torch.cat([v_old, v_new[new]], dim=1).float()
        padding = (old_positions < 0).sum(dim=1)
        out[new] = _attend_group(q[new].float(), keys, values, padding, meta.sliding_window, scale)
    cache.store(k_new, v_new, meta.slot_mapping)
    return out


def _groups(meta: AttentionMetadata) -> Iterator[tuple[list[int], int, int]]:
    """(sequences, new tokens of each, most cached tokens that any of them sees).

    Sequences of one new token share a group with others of about their length; any other is alone.
    """
    counts, seq_lens = meta.query_start_loc.diff().tolist(), meta.seq_lens.tolist()
    farthest = max(seq_lens, default=0) if meta.sliding_window is None else meta.sliding_window - 1
    spans = [min(seq_len - count, farthest) for seq_len, count in zip(seq_lens, counts, strict=True)]
    together: list[int] = []
    for row in sorted(range(len(counts)), key=spans.__getitem__):
        if counts[row] > 1:
            yield [row], counts[row], spans[row]
        elif counts[row] == 1:
            if together and (len(together) + 1) * spans[row] > CACHED_ROWS:
                yield together, 1, spans[together[-1]]
                together = []
            together.append(row)
    if together:
        yield together, 1, spans[together[-1]]


def _attend_group(q: Tensor, keys: Tensor, values: Tensor, padding: Tensor, window: int | None, scale: float) -> Tensor:
    """B sequences of n new tokens: q [B, n, H, D], keys and values [B, S, Hkv, D], all float32 -> [B, n, H, D].

    The keys end with the sequence's last token, so query i stands where key S - n + i does; the first padding[b] keys
    do not exist, and are 0.

    A key that a row does not see must enter as p = 0 and v = 0, and 0 * NaN is not 0. So where a value is not finite,
    each row is computed alone, over exactly the keys it sees.
    """
    num_seqs, n, num_heads, head_dim = q.shape
    num_kv_heads, group = keys.shape[2], num_heads // keys.shape[2]
    offset = keys.shape[1] - n
    out = torch.empty_like(q)
    together = QUERY_ROWS if n == 1 or bool(values.isfinite().all()) else 1
    for top in range(0, n, together):
        rows = slice(top, min(top + together, n))
        low = 0 if window is None else max(0, offset + top + 1 - window)
        high = offset + rows.stop
        # Heads that share keys are stacked as rows of one product: [B, Hkv, G * n', D] x [B, Hkv, D, S'].
        grouped = q[:, rows].view(num_seqs, -1, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        scores = grouped.flatten(2, 3) @ keys[:, low:high].permute(0, 2, 3, 1) * scale
        scores = scores.view(num_seqs, num_kv_heads, group, -1, high - low)
        scores = scores.masked_fill(_hidden(offset, rows, range(low, high), padding, window), float("-inf"))
        mixed = scores.softmax(dim=-1).flatten(2, 3) @ values[:, low:high].transpose(1, 2)
        out[:, rows] = mixed.view(grouped.shape).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out


def _hidden(offset: int, rows: slice, seen: range, padding: Tensor, window: int | None) -> Tensor:
    """Which keys each query row does not see: [B, 1, 1, n', S']."""
    at = torch.arange(offset + rows.start, offset + rows.stop, device=padding.device)[:, None]
    key = torch.arange(seen.start, seen.stop, device=padding.device)
    hidden = key > at if window is None else (key > at) | (key <= at - window)
    return (hidden | (key < padding[:, None, None])).view(len(padding), 1, 1, rows.stop - rows.start, len(seen))
