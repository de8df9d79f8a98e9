"""Attention over all tiles of a sequence, one after the other, and the combination of finished splits, in plain torch.

The reference backend scores all keys of a row at once; native kernels and the operators that are described here work
in tiles. A tile is a part (kernels/reference/attention.py), and parts fold in any grouping.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from penstock.errors import check_choice, unsupported
from penstock.kernels.attention.items import SPAN_TILES, TILE
from penstock.kernels.reference import attention
from penstock.kernels.reference.attention import MINUS_INFINITY, Part, Scoring, attend_part, fold

KeySet = tuple[Tensor, Tensor, Tensor | None]  # keys and values [B, n, Hkv, D], and what is visible of them


def attend_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    scoring: Scoring,
    *,
    tile: int = TILE,
    span_tiles: int = SPAN_TILES,
    loops: int = 1,
) -> Part:
    """Compute attend_part tile by tile, with key j at position j. Tiles fold in ascending order into spans, and spans
    in ascending order into the result. loops: 2 gathers the statistics of all tiles first, as in attend_parts."""
    check_choice("loops", loops, (1, 2))
    if loops == 2:
        every = tiles(0, k.shape[1], tile)
        if scoring.bias is not None:
            raise unsupported("loops", "scores with a bias are computed in one loop")
        return attend_parts(q, [(k[:, keys], v[:, keys], shown(visible, keys)) for keys in every], scoring, loops=2)
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


def attend_parts(q: Tensor, sets: Sequence[KeySet], scoring: Scoring, *, loops: int = 1) -> Part:
    """Attend to several sets of keys and values.

    loops: 1 folds one set after the other into what there is, which is rescaled each time; 2 finds the maximum of the
        scores of all sets in a first loop, and multiplies with the values in a second one. No sum is rescaled then, but
        the scores of all sets are kept between the loops.

    Raises:
        InvalidRequestError: loops is neither 1 nor 2.
    """
    check_choice("loops", loops, (1, 2))
    if loops == 1:
        state = Part.nothing(q)
        for k, v, visible in sets:
            state = fold(state, attend_part(q, k, v, visible, scoring))
        return state
    greatest = Part.nothing(q).greatest.transpose(1, 2)
    scores = [attention.scores(q, k, visible, scoring) for k, _, visible in sets]
    for s in scores:
        greatest = torch.maximum(greatest, s.amax(dim=-1))
    total, mixed = torch.zeros_like(greatest), torch.zeros_like(q)
    for s, (_, v, visible) in zip(scores, sets, strict=True):
        p = torch.exp(s - greatest.masked_fill(greatest == MINUS_INFINITY, 0.0)[..., None])
        total = total + p.sum(dim=-1)
        mixed = mixed + attention.mix(p, v, visible)
    return Part(greatest.transpose(1, 2), total.transpose(1, 2), mixed)


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
