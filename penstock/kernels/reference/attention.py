"""Paged attention in plain torch: sequences with one new token are computed together, every other sequence by itself.

The contents of free slots do not matter: a position that no query sees is not read, or enters as p = 0 and v = 0.

Products are computed in float32, or in float64 if queries or cache are float64. Queries are rounded to the cache's
type. Probabilities are not, because the unit in which they are rounded depends on the tile; a tolerance covers that.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.kernels.metadata import AttentionMetadata, AttentionParams
from penstock.kernels.reference.cache import ReferenceKVCache
from penstock.kernels.reference.parts import Scoring, attend_part, finish

QUERY_ROWS = 256  # query rows scored at once; bounds the score matrix of a long prompt
CACHED_ROWS = 2**15  # cached tokens gathered at once; bounds the copies for many sequences


def attend(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    cache: ReferenceKVCache,
    meta: AttentionMetadata,
    params: AttentionParams,
) -> tuple[Tensor, Tensor]:
    """Attend q [T, H, D] to cached and new keys [T, Hkv, D]: rows [T, H, D], lse [T, H]. Store the new tokens.

    Raises:
        ValueError: as in AttentionMetadata.check_blocks.
    """
    meta.check_blocks(cache.keys.shape[0])
    dtype = torch.float64 if torch.float64 in (q.dtype, cache.dtype) else torch.float32
    q = cache.rounded_queries(q.to(dtype))
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
        out[new], lse[new] = _attend_group(q[new], keys, values, at, torch.cat([old, at], dim=1), meta, params)
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
    """Return the cached positions that B sequences see, [B, C]: sinks, then the `span` before the first new token.

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
    keys: Tensor,
    values: Tensor,
    at: Tensor,
    key_at: Tensor,
    meta: AttentionMetadata,
    params: AttentionParams,
) -> tuple[Tensor, Tensor]:
    """Attend for B sequences with n new tokens each -> rows [B, n, H, D], lse [B, n, H].

    q [B, n, H, D] at positions [B, n]; keys and values [B, S, Hkv, D] at positions [B, S], negative where no key is.
    The last n keys are those of the new tokens.
    """
    n, num_keys = q.shape[1], keys.shape[1]
    cuts = meta.sliding_window is not None and meta.num_sink_tokens == 0  # later rows' windows exclude the first keys
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    for top in range(0, n, QUERY_ROWS):
        rows = slice(top, min(top + QUERY_ROWS, n))
        low = max(0, num_keys - n + top + 1 - (meta.sliding_window or 0)) if cuts else 0
        seen = slice(low, num_keys - n + rows.stop)
        row_at, column_at = at[:, None, rows, None], key_at[:, None, None, seen]  # broadcast to [B, 1, n', S']
        visible = visible_keys(row_at, column_at, meta.sliding_window, meta.num_sink_tokens)
        scoring = _scoring(params, row_at, column_at, q.dtype)
        part = attend_part(q[:, rows], keys[:, seen], values[:, seen], visible, scoring)
        out[:, rows], lse[:, rows] = finish(part, params.sink_logits)
    return out, lse


def visible_keys(at: Tensor, key_at: Tensor, window: int | None, num_sink_tokens: int = 0) -> Tensor:
    """Return which keys a query sees, given positions that broadcast against each other: those up to its own, within
    the window or among the sinks. A key at a negative position does not exist."""
    visible = (key_at >= 0) & (key_at <= at)
    return visible if window is None else visible & ((key_at > at - window) | (key_at < num_sink_tokens))


def _scoring(params: AttentionParams, at: Tensor, key_at: Tensor, dtype: torch.dtype) -> Scoring:
    """Return the scoring with the ALiBi bias written out, from positions [B, 1, n, 1] and [B, 1, 1, S]."""
    bias = None
    if params.alibi_slopes is not None:
        bias = params.alibi_slopes.to(dtype)[:, None, None] * (key_at - at).to(dtype)  # [B, H, n, S]
    return Scoring(params.scale, params.softcap, bias, params.bias_before_scale)
