"""Attention in plain torch: over any set of positions, the fold of two such parts, and the paged cache of a layer.

native/attention/attention.h specifies it. A part is the contribution of some keys to each query row: the greatest score
m, the sum l of p = e^(s - m), and the sum o of p v. Parts of disjoint sets of keys fold into one part, in any grouping;
the division by l comes once, at the end. The tiles of a long sequence, cached and new tokens, a shared prefix, and the
splits of flash decoding are all parts. They are computed in the type of the queries, so float64 queries make an oracle.

Paged attention computes sequences with one new token together, every other sequence by itself. The contents of free
slots do not matter: a position that no query sees is not read, or enters as p = 0 and v = 0. Products are computed in
float32, or in float64 if queries or cache are float64. Queries are rounded to the cache's type. Probabilities are not,
because the unit in which they are rounded depends on the tile; a tolerance covers that.

Letters: B sequences, n query rows and S keys per sequence; H, Hkv, D as in kernels/ops.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.attention.items import first_seen
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, CacheSpec, check_block_ids
from penstock.kernels.reference import quantized_kv as kv

MINUS_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """The arithmetic of scores, as in kernels.metadata.AttentionParams, with the bias written out.

    Attributes:
        bias: of a shape that broadcasts to [B, H, n, S]; None: no bias.
        bias_before_scale: add the bias before scaling, not after.
    """

    scale: float
    softcap: float | None = None
    bias: Tensor | None = None
    bias_before_scale: bool = False


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
        """Make the part of an empty set of keys for queries [B, n, H, D]: the identity of the fold."""
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
    """Compute scores [B, H, n, S], -inf where hidden; arguments as in attend_part."""
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
    """Sum p v, [B, n, H, D], for p [B, H, n, S] and v [B, S, Hkv, D]."""
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
    """Combine two parts into that of both sets of keys. Where b saw nothing, a is returned bit for bit."""
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


def _finite(greatest: Tensor) -> Tensor:
    """Choose the value to subtract from scores: 0 where all are -inf, so that e^(-inf - 0) = 0."""
    return greatest.masked_fill(greatest == MINUS_INFINITY, 0.0)


Quantised = tuple[Tensor, Tensor, Tensor]  # integers, scales, offsets


class ReferenceKVCache:
    """Keys and values of one layer in a float type."""

    def __init__(self, spec: CacheSpec, device: torch.device) -> None:
        self.dtype = spec.dtype
        shape = (spec.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        self.keys = torch.empty(shape, dtype=spec.dtype, device=device)
        self.values = torch.empty(shape, dtype=spec.dtype, device=device)
        self.num_bytes = 2 * self.keys.numel() * self.keys.element_size()

    def store(self, k_new: Tensor, v_new: Tensor, slots: Tensor) -> None:
        """Write the new tokens [T, Hkv, D] to their slots [T]; a token with a negative slot is not stored."""
        if bool((slots < 0).any()):
            kept = slots >= 0
            k_new, v_new, slots = k_new[kept], v_new[kept], slots[kept]
        self._write(k_new, v_new, slots)

    def block(self, block_id: int) -> list[Tensor]:
        """View the memory of a block, in parts. Raise ValueError if the cache does not have the block."""
        check_block_ids(len(self.keys), block_id)
        return [self.keys[block_id], self.values[block_id]]

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
        """Round k and v as `read` would return them once they are stored, in their own type."""
        return k.to(self.dtype).to(k.dtype), v.to(self.dtype).to(v.dtype)

    def rounded_queries(self, q: Tensor) -> Tensor:
        """Round queries as they are when multiplied with this cache's keys, in their own type."""
        return q.to(self.dtype).to(q.dtype)

    def _write(self, k_new: Tensor, v_new: Tensor, slots: Tensor) -> None:
        self.keys.flatten(0, 1)[slots] = k_new.to(self.dtype)
        self.values.flatten(0, 1)[slots] = v_new.to(self.dtype)


class Int8KVCache(ReferenceKVCache):
    """Keys and values as int8, with scales and offsets per token or per channel (quantized_kv.py).

    With 0 slices, queries are not rounded.
    """

    def __init__(self, spec: CacheSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self.slices = spec.slices
        own, self.channels = spec.scales, None  # scales and offsets of keys, and of values
        if own is not None:
            self.channels = (own.key_scales, own.key_offsets), (own.value_scales, own.value_offsets)
        tokens = (*self.keys.shape[:3], 2) if spec.scales is None else (0, 0, 0, 2)
        self.key_scales = torch.empty(tokens, device=device)  # scale and offset per token and kv head
        self.value_scales = torch.empty(tokens, device=device)
        self.num_bytes += 2 * self.key_scales.numel() * self.key_scales.element_size()

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().read(slots)
        if self.channels is None:
            of_keys, of_values = (x.flatten(0, 1)[slots].chunk(2, -1) for x in (self.key_scales, self.value_scales))
        else:
            of_keys, of_values = self.channels
        return kv.dequantize(keys, *of_keys), kv.dequantize(values, *of_values)

    def block(self, block_id: int) -> list[Tensor]:
        found = super().block(block_id)
        return found if self.channels is not None else [*found, self.key_scales[block_id], self.value_scales[block_id]]

    def rounded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return kv.dequantize(*self._quantize(k, 0)).to(k.dtype), kv.dequantize(*self._quantize(v, 1)).to(v.dtype)

    def rounded_queries(self, q: Tensor) -> Tensor:
        if self.slices == 0:
            return q
        if self.channels is None:
            return kv.slices(q.float(), self.slices).to(q.dtype)
        # Scales per channel are applied to the query before it is written as slices.
        key_scales: Tensor = self.channels[0][0]
        scales: Tensor = key_scales.repeat_interleave(q.shape[-2] // key_scales.shape[0], dim=0)
        return kv.slices(q.float() * scales, self.slices).to(q.dtype) / scales.to(q.dtype)

    def _write(self, k_new: Tensor, v_new: Tensor, slots: Tensor) -> None:
        places = (self.keys, self.key_scales), (self.values, self.value_scales)
        for index, (x, (rows, scales)) in enumerate(zip((k_new, v_new), places, strict=True)):
            integers, *numbers = self._quantize(x, index)
            rows.flatten(0, 1)[slots] = integers
            if self.channels is None:
                scales.flatten(0, 1)[slots] = torch.cat(numbers, dim=-1)

    def _quantize(self, x: Tensor, index: int) -> Quantised:
        """Quantise keys (index 0) or values (1): integers, with scales and offsets as kv.dequantize takes them."""
        if self.channels is not None:
            return kv.quantize_channels(x, *self.channels[index]), *self.channels[index]
        integers, scales, offsets = kv.quantize_tokens(x)
        return integers, scales[..., None], offsets[..., None]


QUERY_ROWS = 256  # query rows scored at once; bounds the score matrix of a long prompt
CACHED_ROWS = 2**15  # cached tokens gathered at once; bounds the copies for many sequences


def attend(
    q: Tensor, k_new: Tensor, v_new: Tensor, cache: ReferenceKVCache, meta: AttentionMetadata, params: AttentionParams
) -> tuple[Tensor, Tensor]:
    """Attend q [T, H, D] or [2, T, H, D] to cached and new keys [T, Hkv, D]: rows [T, H, D], lse [T, H]. Store the new
    tokens.

    Raises:
        ValueError: as in AttentionMetadata.check_blocks.
    """
    meta.check_blocks(cache.keys.shape[0])
    dtype = torch.float64 if torch.float64 in (q.dtype, cache.dtype) else torch.float32
    q = cache.rounded_queries(q.to(dtype))
    q, sink_q = q if q.ndim == 4 else (q, q)
    k_new, v_new = k_new.to(dtype), v_new.to(dtype)
    k_seen, v_seen = cache.rounded(k_new, v_new)  # as they will be read back
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
    starts = meta.query_start_loc.long()
    for rows, n, span in _groups(meta):
        first_new = meta.seq_lens[rows].long() - n
        old = _old_positions(first_new, span, meta)  # [B, C]
        k_old, v_old = cache.load(meta.block_table[rows], old)
        new = starts[rows][:, None] + torch.arange(n, device=q.device)  # [B, n], into the packed tokens
        keys = torch.cat([k_old.to(dtype), k_seen[new]], dim=1)  # [B, C + n, Hkv, D]
        values = torch.cat([v_old.to(dtype), v_seen[new]], dim=1)
        at = first_new[:, None] + torch.arange(n, device=q.device)
        key_at = torch.cat([old, at], dim=1)
        out[new], lse[new] = _attend_group(q[new], sink_q[new], keys, values, at, key_at, meta, params)
    cache.store(k_new, v_new, meta.slot_mapping)
    return out, lse


def _groups(meta: AttentionMetadata) -> Iterator[tuple[list[int], int, int]]:
    """Yield (sequences, new tokens of each, most cached tokens that any of them sees, not counting sinks).

    A sequence with one new token shares a group with others of about its length; any other sequence is alone.
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


def _old_positions(first_new: Tensor, span: int, meta: AttentionMetadata) -> Tensor:
    """List the cached positions that B sequences see, [B, C]: sinks, then the `span` before the first new token.

    A negative position does not exist, or is in the span already.
    """
    device = first_new.device
    recent = first_new[:, None] + torch.arange(-span, 0, device=device)
    if meta.sliding_window is None or meta.num_sink_tokens == 0:
        return recent
    sinks = torch.arange(meta.num_sink_tokens, device=device).expand(len(first_new), -1)
    return torch.cat([sinks.masked_fill(sinks >= first_new[:, None] - span, -1), recent], dim=1)


def _attend_group(
    q: Tensor,
    sink_q: Tensor,
    keys: Tensor,
    values: Tensor,
    at: Tensor,
    key_at: Tensor,
    meta: AttentionMetadata,
    params: AttentionParams,
) -> tuple[Tensor, Tensor]:
    """Attend for B sequences with n new tokens each -> rows [B, n, H, D], lse [B, n, H].

    q and sink_q [B, n, H, D] are at the positions [B, n]; keys and values [B, S, Hkv, D] at positions [B, S],
    negative where no key is. The last n keys are those of the new tokens.
    """
    n, num_keys = q.shape[1], keys.shape[1]
    cuts = meta.sliding_window is not None and meta.num_sink_tokens == 0  # later rows' windows exclude the first keys
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    for top in range(0, n, QUERY_ROWS):
        rows = slice(top, min(top + QUERY_ROWS, n))
        low = max(0, num_keys - n + top + 1 - (meta.sliding_window or 0)) if cuts else 0
        seen = slice(low, num_keys if meta.bidirectional else num_keys - n + rows.stop)
        row_at, column_at = at[:, None, rows, None], key_at[:, None, None, seen]  # broadcast to [B, 1, n', S']
        window = meta.sliding_window, meta.num_sink_tokens
        visible = visible_keys(row_at, column_at, *window, chunked=meta.chunked, bidirectional=meta.bidirectional)
        scoring = _scoring(params, row_at, column_at, q.dtype)
        seen_keys = keys[:, seen], values[:, seen]
        if meta.num_sink_tokens:
            is_sink = column_at < meta.num_sink_tokens
            sinks = attend_part(sink_q[:, rows], *seen_keys, visible & is_sink, scoring)
            part = fold(sinks, attend_part(q[:, rows], *seen_keys, visible & ~is_sink, scoring))
        else:
            part = attend_part(q[:, rows], *seen_keys, visible, scoring)
        out[:, rows], lse[:, rows] = finish(part, params.sink_logits)
    return out, lse


def visible_keys(
    at: Tensor,
    key_at: Tensor,
    window: int | None,
    num_sink_tokens: int = 0,
    *,
    chunked: bool = False,
    bidirectional: bool = False,
) -> Tensor:
    """Mark the keys that a query sees, given positions that broadcast against each other: those up to its own, within
    the window or among the sinks (chunked, bidirectional: as in AttentionMetadata). A key at a negative position does
    not exist."""
    visible = key_at >= 0
    if not bidirectional:
        visible = visible & (key_at <= at)
    elif window is not None:
        visible = visible & (key_at < at + window)
    if window is None:
        return visible
    return visible & ((key_at >= first_seen(at, window, chunked=chunked)) | (key_at < num_sink_tokens))


def _scoring(params: AttentionParams, at: Tensor, key_at: Tensor, dtype: torch.dtype) -> Scoring:
    """Write out the bias of a scoring, from positions [B, 1, n, 1] and [B, 1, 1, S]."""
    distance, bias = key_at - at, None
    if params.alibi_slopes is not None:
        bias = params.alibi_slopes.to(dtype)[:, None, None] * distance.to(dtype)  # [B, H, n, S]
    elif params.distance_bias is not None:
        reach = params.distance_bias.shape[1] // 2
        bias = params.distance_bias.to(dtype).T[distance[:, 0].clamp(-reach, reach) + reach].movedim(-1, 1)
    return Scoring(params.scale, params.softcap, bias, params.bias_before_scale)
