"""A rolling buffer: the last W tokens of one sequence in W slots, token p in slot p mod W (Mistral's cache).

The paged cache does the same with a block table that repeats one block; this is the plain form.
"""

import torch
from torch import Tensor

from penstock.conventions.masks import decode_mask, later_prefill_mask
from penstock.kernels.reference.attention import visible_keys
from penstock.kernels.reference.parts import Scoring, attend_part, finish


def unrotate(slots: Tensor, seq_len: int) -> Tensor:
    """What W slots [W, ...] hold after seq_len tokens, oldest first: [min(seq_len, W), ...]."""
    window = len(slots)
    if seq_len < window:
        return slots[:seq_len]
    pointer = seq_len % window  # the oldest token, which the next one overwrites
    return slots if pointer == 0 else torch.cat([slots[pointer:], slots[:pointer]])


class RollingBuffer:
    """Keys and values [W, Hkv, D] of one sequence. Memory that was never written is not read.

    Attributes:
        seq_len: tokens stored so far.
    """

    def __init__(self, window: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> None:
        self.window = window
        self.keys = torch.full((window, num_kv_heads, head_dim), float("nan"), dtype=dtype)
        self.values = self.keys.clone()
        self.seq_len = 0

    def positions(self) -> Tensor:
        """The token in each slot, [W]; -1 in slots that were never filled."""
        slots = torch.arange(self.window)
        last = self.seq_len - 1
        held = last - (last - slots) % self.window
        return torch.where(held >= 0, held, -1)

    def store(self, k: Tensor, v: Tensor) -> None:
        """Write new tokens [n, Hkv, D]; of more than W, only those that are not overwritten at once."""
        n = len(k)
        kept = slice(max(0, n - self.window), n)
        slots = torch.arange(self.seq_len, self.seq_len + n)[kept] % self.window
        self.keys[slots], self.values[slots] = k[kept], v[kept]
        self.seq_len += n

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """A chunk attends to the cache and to itself, **then** it is stored: q [n, H, D] -> [n, H, D]."""
        keys = torch.cat([unrotate(self.keys, self.seq_len), k])
        values = torch.cat([unrotate(self.values, self.seq_len), v])
        mask = later_prefill_mask([len(q)], [self.seq_len], self.window)
        self.store(k, v)
        return _attend(q, keys, values, mask, scoring)

    def prefill_in_place(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """The same, with the slots as they lie: positions say who sees whom, and nothing is rotated."""
        new = torch.arange(self.seq_len, self.seq_len + len(q))
        mask = visible_keys(new[:, None], torch.cat([self.positions(), new]), self.window)
        out = _attend(q, torch.cat([self.keys, k]), torch.cat([self.values, v]), mask, scoring)
        self.store(k, v)
        return out

    def decode(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """One token is stored, **then** it attends to the W slots: q [1, H, D] -> [1, H, D]."""
        mask = decode_mask([self.seq_len], self.window)
        self.store(k, v)
        return _attend(q, self.keys, self.values, mask, scoring)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    return finish(attend_part(q[None], keys[None], values[None], mask, scoring))[0][0]
