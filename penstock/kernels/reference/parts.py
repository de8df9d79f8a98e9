"""Attention over any set of positions, and the fold of two such parts, as specified in native/attention/attention.h.

A part is the contribution of some keys to each query row: the greatest score m, the sum l of p = e^(s - m), and the sum
o of p v. Parts of disjoint sets of keys fold into one part, in any grouping; the division by l comes once, at the end.
The tiles of a long sequence, cached and new tokens, a shared prefix, and the splits of flash decoding are all parts.

Everything is computed in the type of the queries, so float64 queries make an oracle.

Letters: B sequences, n query rows and S keys per sequence; H, Hkv, D as in kernels/ops.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.kernels.attention.layout import SPAN_TILES, TILE

MINUS_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """How scores are made, as in kernels.metadata.AttentionParams, with the bias written out.

    Attributes:
        bias: of a shape that broadcasts to [B, H, n, S]; None: no bias.
        bias_before_scale: add the bias before scaling, not after.
    """

    scale: float
    softcap: float | None = None
    bias: Tensor | None = None
    bias_before_scale: bool = False

    def columns(self, keys: slice) -> "Scoring":
        """Return the scoring of these keys only."""
        return self if self.bias is None else replace(self, bias=_columns(self.bias, keys))


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The contribution of some keys to each row.

    Attributes:
        greatest: m, [B, n, H]; -inf where a row sees none of the keys.
        total: l, [B, n, H].
        mixed: o, [B, n, H, D].
    """

    greatest: Tensor
    total: Tensor
    mixed: Tensor

    @classmethod
    def nothing(cls, q: Tensor) -> "Part":
        """Return the part of an empty set of keys for queries [B, n, H, D]: the identity of the fold."""
        return cls(q.new_full(q.shape[:3], MINUS_INFINITY), q.new_zeros(q.shape[:3]), torch.zeros_like(q))


def attend_part(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scoring: Scoring) -> Part:
    """Compute the part of keys k and values v [B, S, Hkv, D] for queries q [B, n, H, D], all of one type.

    visible: bool, of a shape that broadcasts to [B, H, n, S]; None: every row sees every key. A hidden key counts as
        p = 0 and v = 0, whatever its memory holds. A visible value that is not finite makes a NaN.
    """
    if k.shape[1] == 0:
        return Part.nothing(q)
    p, greatest = probabilities(scores(q, k, visible, scoring))
    mixed = mix(p, v, visible)
    return Part(greatest.transpose(1, 2), p.sum(dim=-1).transpose(1, 2), mixed)


def scores(q: Tensor, k: Tensor, visible: Tensor | None, scoring: Scoring) -> Tensor:
    """Return scores [B, H, n, S], -inf where hidden; arguments as in attend_part."""
    num_seqs, n, num_heads, head_dim = q.shape
    group = num_heads // k.shape[2]
    # Heads that share keys are stacked as rows of one product: [B, Hkv, G * n, D] x [B, Hkv, D, S].
    rows = q.transpose(1, 2).reshape(num_seqs, -1, group * n, head_dim)
    s = (rows @ k.permute(0, 2, 3, 1)).view(num_seqs, num_heads, n, -1)
    if scoring.bias is not None and scoring.bias_before_scale:
        s += scoring.bias
    s *= scoring.scale
    if scoring.softcap is not None:
        s = torch.tanh(s / scoring.softcap) * scoring.softcap
    if scoring.bias is not None and not scoring.bias_before_scale:
        s += scoring.bias
    return s if visible is None else s.masked_fill_(~visible, MINUS_INFINITY)


def probabilities(s: Tensor) -> tuple[Tensor, Tensor]:
    """Turn scores [..., S] into p = e^(s - m) **in place**; return p and m [...]."""
    greatest = s.amax(dim=-1)
    return s.sub_(_finite(greatest)[..., None]).exp_(), greatest


def mix(p: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """Return the sums of p v, [B, n, H, D], for p [B, H, n, S] and v [B, S, Hkv, D]."""
    if bool(v.isfinite().all()):
        return _mix(p, v)
    seen = torch.ones_like(p) if visible is None else visible.to(p.dtype).expand_as(p)
    not_finite = _mix(seen, (~v.isfinite()).to(p.dtype)) > 0
    return _mix(p, v.masked_fill(~v.isfinite(), 0.0)).masked_fill(not_finite, float("nan"))


def _mix(p: Tensor, v: Tensor) -> Tensor:
    num_seqs, num_heads, n, _ = p.shape
    rows = p.reshape(num_seqs, v.shape[2], -1, p.shape[3])  # [B, Hkv, G * n, S]
    return (rows @ v.transpose(1, 2)).view(num_seqs, num_heads, n, -1).transpose(1, 2)


def fold(a: Part, b: Part) -> Part:
    """Return the part of both sets of keys. Where b saw nothing, a is returned bit for bit."""
    greatest = torch.maximum(a.greatest, b.greatest)
    keep, add = (torch.exp(part.greatest - _finite(greatest)) for part in (a, b))
    total = a.total * keep + b.total * add
    mixed = a.mixed * keep[..., None] + b.mixed * add[..., None]
    same = b.total == 0
    return Part(
        torch.where(same, a.greatest, greatest),
        torch.where(same, a.total, total),
        torch.where(same[..., None], a.mixed, mixed),
    )


def finish(part: Part, sink_logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Divide by l, and return rows [B, n, H, D] and log(sum of e^s) [B, n, H]; zeros and -inf where nothing is seen.

    sink_logits: [H], which enter the sum and have no value.
    """
    if sink_logits is not None:
        sinks = sink_logits.to(part.total.dtype).expand_as(part.total)
        part = fold(part, Part(sinks, torch.ones_like(sinks), torch.zeros_like(part.mixed)))
    blind = part.total == 0
    total = part.total.masked_fill(blind, 1.0)
    out = (part.mixed / total[..., None]).masked_fill(blind[..., None], 0.0)
    return out, part.greatest + torch.log(part.total)


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
            part = attend_part(q, k[:, keys], v[:, keys], _shown(visible, keys), scoring.columns(keys))
            span = fold(span, part)
        state = fold(state, span)
    return state


def attend_two_loops(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scoring: Scoring, *, tile: int = TILE
) -> Part:
    """Compute the same sums in two loops: the first finds m and l over all tiles, the second reads the values. No o is
    rescaled, but the scores of all tiles are kept between the loops."""
    greatest, kept = Part.nothing(q).greatest.transpose(1, 2), []
    for keys in tiles(0, k.shape[1], tile):
        kept.append((keys, scores(q, k[:, keys], _shown(visible, keys), scoring.columns(keys))))
        greatest = torch.maximum(greatest, kept[-1][1].amax(dim=-1))
    weights = [torch.exp(s - _finite(greatest)[..., None]) for _, s in kept]
    total = torch.stack([p.sum(dim=-1) for p in weights]).sum(dim=0) if kept else torch.zeros_like(greatest)
    mixed = torch.zeros_like(q)
    for (keys, _), p in zip(kept, weights, strict=True):
        mixed = mixed + mix(p, v[:, keys], _shown(visible, keys))
    return Part(greatest.transpose(1, 2), total.transpose(1, 2), mixed)


def combine(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Combine finished splits [K, ..., D] and their lse [K, ...] as flash decoding does, with the factors
    scale_j = e^lse_j / sum of e^lse. The greatest lse is subtracted first; a split that saw nothing has lse -inf."""
    greatest = lses.amax(dim=0)
    weights = torch.exp(lses - _finite(greatest))
    total = weights.sum(dim=0)
    out = (outs * weights[..., None]).sum(dim=0) / total.masked_fill(total == 0, 1.0)[..., None]
    return out, greatest + torch.log(total)


def tiles(first: int, last: int, tile: int) -> Iterator[slice]:
    """Yield first .. last - 1 in pieces of `tile`."""
    for start in range(first, last, tile):
        yield slice(start, min(start + tile, last))


def _shown(visible: Tensor | None, keys: slice) -> Tensor | None:
    return None if visible is None else _columns(visible, keys)


def _columns(table: Tensor, keys: slice) -> Tensor:
    """Select keys of a table that broadcasts to [B, H, n, S]."""
    return table if table.shape[-1] == 1 else table[..., keys]


def _finite(greatest: Tensor) -> Tensor:
    """Return the value to subtract from scores: 0 where all are -inf, so that e^(-inf - 0) = 0."""
    return greatest.masked_fill(greatest == MINUS_INFINITY, 0.0)
