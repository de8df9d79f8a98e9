"""Masks and the rolling buffer of Mistral's reference inference. Masks are true where a query sees a key.

Prompts of different lengths are packed into one sequence without padding, and a block-diagonal mask keeps them apart. A
step has one of three masks, depending on what the rolling caches hold. No kernel reads these masks, because kernels
compare positions instead; tests compare the kernels with them.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from penstock.kernels.reference.attention import Scoring, attend_part, finish, visible_keys


def local_mask(query_len: int, key_len: int, window: int | None = None) -> Tensor:
    """Make a causal mask [query_len, key_len]. The last query sees the last key. A window counts the token itself."""
    at, key = torch.arange(key_len - query_len, key_len)[:, None], torch.arange(key_len)
    return (key <= at) if window is None else (key <= at) & (key > at - window)


def first_prefill_mask(query_lens: Sequence[int], cached_lens: Sequence[int], window: int | None) -> Tensor:
    """Mask packed prompts, each causal within its window, [T, T].

    Raises:
        ValueError: a sequence has cached tokens, which this mask would not show.
    """
    if any(cached_lens):
        raise ValueError(f"cached_lens: a first prefill begins at position 0 everywhere, and these are {cached_lens}")
    return _block_diagonal(local_mask(n, n, window) for n in query_lens)


def later_prefill_mask(query_lens: Sequence[int], cached_lens: Sequence[int], window: int | None) -> Tensor:
    """Mask chunks that follow cached tokens, [T, sum of keys].

    The keys of a sequence are its cached tokens (the last `window` of them) in order, then its new tokens, so there may
    be more keys than the cache holds.
    """
    held = [cached if window is None else min(cached, window) for cached in cached_lens]
    return _block_diagonal(local_mask(n, old + n, window) for n, old in zip(query_lens, held, strict=True))


def decode_mask(cached_lens: Sequence[int], window: int) -> Tensor:
    """Mask one new token per sequence, which is stored already, [B, B * window].

    The keys are the slots of all rolling caches; slots that are not filled yet are hidden. It does not matter where a
    full cache begins, because the query sees all of it.
    """
    slots = torch.arange(window)
    return _block_diagonal((slots < min(cached + 1, window))[None] for cached in cached_lens)


def _block_diagonal(blocks: Iterable[Tensor]) -> Tensor:
    return torch.block_diag(*blocks)  # type: ignore[no-untyped-call,no-any-return]


def unrotate(slots: Tensor, seq_len: int) -> Tensor:
    """Order the contents of W slots [W, ...] after seq_len tokens, oldest first: [min(seq_len, W), ...]."""
    window = len(slots)
    return slots[:seq_len] if seq_len < window else slots.roll(-(seq_len % window), dims=0)


class RollingBuffer:
    """Keys and values [W, Hkv, D] of one sequence: its last W tokens, token p in slot p mod W.

    The paged cache does the same with a block table that repeats one block. Slots that were never written are NaN.

    Attributes:
        seq_len: tokens stored so far.
    """

    def __init__(self, window: int, num_kv_heads: int, head_dim: int) -> None:
        self.window = window
        self.keys = torch.full((window, num_kv_heads, head_dim), float("nan"))
        self.values = self.keys.clone()
        self.seq_len = 0

    def positions(self) -> Tensor:
        """List the position of the token in each slot, [W]; -1 in slots that were never filled."""
        last = self.seq_len - 1
        return (last - (last - torch.arange(self.window)) % self.window).clamp(min=-1)

    def store(self, k: Tensor, v: Tensor) -> None:
        """Write new tokens [n, Hkv, D], or the last W of them if there are more."""
        at = torch.arange(self.seq_len, self.seq_len + len(k))[-self.window :] % self.window
        self.keys[at], self.values[at] = k[-self.window :], v[-self.window :]
        self.seq_len += len(k)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Attend to the unrotated cache and to the chunk itself, **then** store it: q [n, H, D] -> [n, H, D]."""
        keys, values = (torch.cat([unrotate(x, self.seq_len), y]) for x, y in ((self.keys, k), (self.values, v)))
        mask = later_prefill_mask([len(q)], [self.seq_len], self.window)
        self.store(k, v)
        return _attend(q, keys, values, mask, scoring)

    def prefill_in_place(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Compute the same as `prefill` from the slots in their stored order, with a mask made from positions."""
        new = torch.arange(self.seq_len, self.seq_len + len(q))
        mask = visible_keys(new[:, None], torch.cat([self.positions(), new]), self.window)
        out = _attend(q, torch.cat([self.keys, k]), torch.cat([self.values, v]), mask, scoring)
        self.store(k, v)
        return out

    def decode(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Store one token, **then** attend to the W slots: q [1, H, D] -> [1, H, D]."""
        mask = decode_mask([self.seq_len], self.window)
        self.store(k, v)
        return _attend(q, self.keys, self.values, mask, scoring)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    return finish(attend_part(q[None], keys[None], values[None], mask, scoring))[0][0]
