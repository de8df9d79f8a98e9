"""Attention over all tiles of a sequence, one after the other, and the combination of finished splits, in plain torch.

The reference backend scores all keys of a row at once; native kernels and the operators that are described here work
in tiles. A tile is a part (kernels/reference/attention.py), and parts fold in any grouping.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from penstock.kernels.attention.items import SPAN_TILES, TILE
from penstock.kernels.reference.attention import MINUS_INFINITY, Part, Scoring, attend_part, fold


def attend_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    scoring: Scoring,
    *,
    tile: int = TILE,
    span_tiles: int = SPAN_TILES,
) -> Part:
    """Compute attend_part tile by tile, with key j at position j. Tiles fold in ascending order into spans, and spans
    in ascending order into the result."""
    state = Part.nothing(q)
    for first in range(0, k.shape[1], tile * span_tiles):
        span = Part.nothing(q)
        for keys in tiles(first, min(first + tile * span_tiles, k.shape[1]), tile):
            part = attend_part(
                q, k[:, keys], v[:, keys], shown(visible, keys), replace(scoring, bias=shown(scoring.bias, keys))
            )
            span = fold(span, part)
        state = fold(state, span)
    return state


def combine(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Combine finished splits [K, ..., D] and their lse [K, ...] as flash decoding does, with the factors
    scale_j = e^lse_j / sum of e^lse. The greatest lse is subtracted first; a split that saw nothing has lse -inf."""
    greatest = lses.amax(dim=0)
    weights = torch.exp(lses - greatest.masked_fill(greatest == MINUS_INFINITY, 0.0))
    total = weights.sum(dim=0)
    out = (outs * weights[..., None]).sum(dim=0) / total.masked_fill(total == 0, 1.0)[..., None]
    return out, greatest + torch.log(total)


def tiles(first: int, last: int, tile: int) -> Iterator[slice]:
    """Yield first .. last - 1 in pieces of `tile`."""
    for start in range(first, last, tile):
        yield slice(start, min(start + tile, last))


def shown(visible: Tensor | None, keys: slice) -> Tensor | None:
    """Select keys of a table that broadcasts to [B, H, n, S]."""
    return visible if visible is None or visible.shape[-1] == 1 else visible[..., keys]
