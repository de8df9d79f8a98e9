"""Attention masks of packed sequences, written out: true where a query sees a key.

Prompts of different lengths stand behind each other in one long sequence, and a block-diagonal mask keeps them apart;
nothing is padded. A step of Mistral's inference has one of three forms, by what its rolling cache holds. No kernel of
ours reads such a mask (positions say the same); this is what they are held against.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def local_mask(query_len: int, key_len: int, window: int | None = None) -> Tensor:
    """[query_len, key_len]: causal from the bottom right (the last query sees the last key), within a window that
    includes the token itself."""
    at = torch.arange(key_len - query_len, key_len)[:, None]
    key = torch.arange(key_len)
    return (key <= at) if window is None else (key <= at) & (key > at - window)


def first_prefill_mask(query_lens: Sequence[int], cached_lens: Sequence[int], window: int | None) -> Tensor:
    """[T, T]: prompts packed behind each other, each causal within its window. Nothing may be cached.

    Raises:
        ValueError: a sequence has cached tokens, which this mask would not show.
    """
    if any(cached_lens):
        raise ValueError(f"cached_lens: a first prefill begins at position 0 everywhere, and these are {cached_lens}")
    return _block_diagonal([local_mask(n, n, window) for n in query_lens])


def later_prefill_mask(query_lens: Sequence[int], cached_lens: Sequence[int], window: int | None) -> Tensor:
    """[T, sum of keys]: chunks behind what is cached. The keys of a sequence are its cached tokens (the last `window`
    of them), in order, then its new ones; so there are more of them than the cache holds."""
    held = [cached if window is None else min(cached, window) for cached in cached_lens]
    return _block_diagonal([local_mask(n, old + n, window) for n, old in zip(query_lens, held, strict=True)])


def decode_mask(cached_lens: Sequence[int], window: int) -> Tensor:
    """[B, B * window]: one new token a sequence, stored already. The keys are the slots of all rolling caches, those
    that are not filled yet hidden; where a full cache begins does not matter, because the query sees all of it."""
    slots = torch.arange(window)
    return _block_diagonal([(slots < min(cached + 1, window))[None] for cached in cached_lens])


def _block_diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """Each block behind and below the one before it, nothing visible elsewhere."""
    rows, columns = (sum(block.shape[dim] for block in blocks) for dim in (0, 1))
    mask = torch.zeros(rows, columns, dtype=torch.bool)
    row = column = 0
    for block in blocks:
        mask[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return mask
