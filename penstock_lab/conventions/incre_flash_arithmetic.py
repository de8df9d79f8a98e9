"""The arithmetic of conventions/incre_flash.py: on the engine's native operator, or in plain torch.

Both take the same `Work`. The native operator reads keys and values from a cache in a layout of its own, so each call
copies them there first; then it computes what it computes in the engine, bit for bit. Letters are as in incre_flash.py.
"""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from penstock.kernels.cpu.library import load_library
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, CacheSpec, KVScales
from penstock.kernels.reference import attention as parts
from penstock.kernels.reference import quantized_kv as kv
from penstock.kernels.reference.attention import Part, Scoring
from penstock_lab.conventions.tiled_attention import attend_tiles, combine

KeyValue = Tensor | Sequence[Tensor]
Prefix = tuple[Tensor, Tensor] | None  # keys and values, [1, S, Nkv, D]
NATIVE_BLOCK = 16
GREATEST_OFFSET = 2.0**15  # up to which an int8 token that is scaled and quantised again is the same token
_native = threading.Lock()  # the native operator makes one call at a time


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of each sequence b: starts[b] .. stops[b] - 1 of `count`, addressed by the block table if any."""

    starts: Sequence[int]
    stops: Sequence[int]
    count: int
    block_table: Tensor | None = None
    block_size: int = 0

    @property
    def lengths(self) -> list[int]:
        return [stop - start for start, stop in zip(self.starts, self.stops, strict=True)]

    def of_sequence(self, b: int) -> slice:
        return slice(self.starts[b], self.stops[b])

    def tokens_of(self, x: KeyValue, b: int) -> Tensor:
        """Take sequence b's part of x [B, S, ...], of a list of [S, ...], or of blocks [num_blocks, block_size, ...].

        The result is contiguous, so that torch adds in the same order wherever the tokens were.
        """
        here = self.of_sequence(b)
        if self.block_table is None:
            return x[b][here].contiguous()
        assert isinstance(x, Tensor)
        blocks = self.block_table[b, : -(-here.stop // self.block_size)].long()
        return x[blocks].flatten(0, 1)[here].contiguous()


@dataclass(frozen=True, slots=True)
class Band:
    """The tokens of a sequence that the new token sees: from `pre` before a token to `next` after it.

    Attributes:
        pre, next: None: no limit. Negative numbers move the other way.
        from_end: counted from the last token of the sequence, not from its first.
    """

    pre: int | None = None
    next: int | None = None
    from_end: bool = True

    def of_length(self, length: int) -> tuple[int, int]:
        """Compute the first visible position of a sequence, and the one after the last."""
        at = length - 1 if self.from_end else 0
        first = 0 if self.pre is None else min(max(at - self.pre, 0), length)
        stop = length if self.next is None else max(min(at + self.next + 1, length), first)
        return first, stop

    @property
    def window(self) -> int | None:
        """Count the tokens in sight of a sequence that is cut off after the last visible one; None: all of them."""
        return None if self.pre is None else max(self.pre + min(self.next or 0, 0) + 1, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Keys or values as they are stored: an element x represents (x + offset) * scale.

    Attributes:
        tokens: as incre_flash.py reads them; for one sequence, [1, S, Nkv, D].
        scale, offset: float32, [Nkv, D]; with by_token, one per slot, or one per slot and head: the cache's slots, and
            for one sequence [S, 1 or Nkv, 1].
    """

    tokens: KeyValue
    scale: Tensor
    offset: Tensor
    by_token: bool = False

    @property
    def is_int8(self) -> bool:
        return any(item.dtype == torch.int8 for item in self.tokens)

    def of_sequence(self, slots: Slots, b: int) -> "Stored":
        scale, offset = self.scale, self.offset
        if self.by_token:
            scale, offset = (slots.tokens_of(x, b)[..., None] for x in (scale, offset))
            if scale.ndim == 2:
                scale, offset = scale[:, None], offset[:, None]
        return Stored(slots.tokens_of(self.tokens, b)[None], scale, offset, self.by_token)

    def part(self, tokens: slice) -> "Stored":
        """Take some tokens of one sequence."""
        assert isinstance(self.tokens, Tensor)
        scale, offset = (self.scale[tokens], self.offset[tokens]) if self.by_token else (self.scale, self.offset)
        return Stored(self.tokens[:, tokens], scale, offset, self.by_token)

    def scales(self, num_heads: int) -> tuple[Tensor, Tensor]:
        """Shape the scales of tokens as [S or 1, 1 or Nkv, 1] and of query heads as [N or 1, D or 1]. One of the two
        is 1."""
        one = self.scale.new_ones(1, 1, 1)
        if self.by_token:
            return self.scale, one[0]
        return one, self.scale.repeat_interleave(num_heads // len(self.scale), dim=0)

    def whole(self) -> Tensor:
        """Compute what one sequence's tokens represent, [S, Nkv, D] float32; only the tokens of a float cache keep
        their type."""
        assert isinstance(self.tokens, Tensor)
        return self.tokens[0] if not self.is_int8 else (self.tokens[0].float() + self.offset) * self.scale


@dataclass(frozen=True, slots=True, eq=False)
class IntegerQuery:
    """The numbers of a call whose query is int8, and its product with the keys exact.

    Attributes:
        scale: [B, N] float32, the value of a unit of the product: of the query, times that of the keys.
        weight_scale: probabilities are multiplied with it and rounded to int8; None: they become slices.
        result_scale: the value of a unit of the product of probabilities and values, with a weight_scale.
    """

    scale: Tensor
    weight_scale: Tensor | None = None
    result_scale: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A call whose arguments have been read.

    Attributes:
        q: [B, N, D].
        visible: [B, S] bool, the mask by slot; None: the band alone hides.
        scoring: with a bias [B or 1, N, 1, S].
        slices: int8 rows of a row that is multiplied with int8.
        split_size: tokens of each part of a sequence that is computed by itself; 0: sequences are not split.
        integers: None unless the query is int8.
    """

    q: Tensor
    k: Stored
    v: Stored
    slots: Slots
    band: Band
    visible: Tensor | None
    scoring: Scoring
    slices: int
    prefix: Prefix
    split_size: int = 0
    integers: IntegerQuery | None = None


# --- in plain torch --------------------------------------------------------------------------------------------------


def attend(work: Work) -> tuple[Tensor, Tensor]:
    """Compute rows [B, N, D] and lse [B, N], in float32, or in float64 for a float64 query."""
    q, slots, scoring = work.q, work.slots, work.scoring
    q = q.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    done = []
    for b, length in enumerate(slots.lengths):
        here, bias = slots.of_sequence(b), scoring.bias
        if bias is not None:
            bias = bias[b % len(bias), None, :, :, here].to(q.dtype)
        own_k, own_v = (x.of_sequence(slots, b) for x in (work.k, work.v))
        first, stop = work.band.of_length(length)
        seen = torch.zeros(length, dtype=torch.bool)
        seen[first:stop] = True
        if work.visible is not None:
            seen &= work.visible[b, here]
        row = _Row(q[b, None, None], own_k, own_v, seen[None, None, None], replace(scoring, bias=bias))
        done.append(_finish(row, work, b, length))
    out, lse = (torch.cat(items).squeeze(1) for items in zip(*done, strict=True))
    if work.prefix is not None:  # all rows attend to it as one sequence, so it is read once and not B times
        keys, values = (x.to(q.dtype) for x in work.prefix)
        before, before_lse = parts.finish(parts.attend_part(q[None], keys, values, None, Scoring(scoring.scale)))
        out, lse = combine(torch.stack([before[0], out]), torch.stack([before_lse[0], lse]))
    return out, lse


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """One sequence: q [1, 1, N, D], its keys and values, and visible and bias that broadcast to [1, N, 1, S]."""

    q: Tensor
    k: Stored
    v: Stored
    visible: Tensor
    scoring: Scoring

    def part(self, tokens: slice) -> "_Row":
        bias = self.scoring.bias
        scoring = replace(self.scoring, bias=None if bias is None else bias[..., tokens])
        return _Row(self.q, self.k.part(tokens), self.v.part(tokens), self.visible[..., tokens], scoring)


def _finish(row: _Row, work: Work, b: int, length: int) -> tuple[Tensor, Tensor]:
    """Compute one sequence, whole, or in parts that are combined as the operator's flash decoding does."""
    if not 0 < work.split_size < length:
        return parts.finish(_part(row, work, b))
    edges = [*range(0, length, work.split_size), length]
    splits = [parts.finish(_part(row.part(slice(*edge)), work, b)) for edge in pairwise(edges)]
    return combine(*(torch.stack(items) for items in zip(*splits, strict=True)))


def _part(row: _Row, work: Work, b: int) -> Part:
    """Compute one sequence's part.

    int8 keys and values are not dequantised. The few rows multiplied with them are rewritten instead (the document's
    AntiQuant): scales of channels go into the query or the result, scales of tokens into the scores or the
    probabilities, and the query and the probabilities become int8 slices.
    """
    q, k, v, visible, scoring = row.q, row.k, row.v, row.visible, row.scoring
    keys, values = k.tokens, v.tokens
    assert isinstance(keys, Tensor)
    assert isinstance(values, Tensor)
    if keys.shape[1] == 0:
        return Part.nothing(q)
    if keys.dtype != torch.int8:
        return attend_tiles(q, keys.to(q.dtype), values.to(q.dtype), visible, scoring)
    num_heads, whole = q.shape[2], work.integers
    if whole is not None:
        scores = _integer_scores(q, keys, visible, scoring, whole.scale[b])
    else:
        per_token, per_head = k.scales(num_heads)
        rows = kv.slices(q.float() * per_head, work.slices)
        scores = parts.scores(rows, (keys.float() + k.offset) * per_token, visible, scoring)
    p, greatest = parts.probabilities(scores)
    if whole is not None and whole.weight_scale is not None:
        assert whole.result_scale is not None
        weights = (p * whole.weight_scale).round().clamp(-128, 127)
        mixed = parts.mix(weights, values.float(), visible) * whole.result_scale
    else:
        per_token, per_head = v.scales(num_heads)
        of_heads = per_token[..., 0].T.repeat_interleave(num_heads // per_token.shape[1], dim=0)[:, None]  # [N, 1, S]
        weights = torch.where(visible, p * of_heads, 0.0)  # the scales of hidden tokens may be anything
        offset = v.offset.where(v.offset.isfinite(), 0.0)
        mixed = parts.mix(kv.slices(weights, work.slices), values.float() + offset, visible) * per_head
    return Part(greatest.transpose(1, 2), p.sum(dim=-1).transpose(1, 2), mixed)


def _integer_scores(q: Tensor, keys: Tensor, visible: Tensor, scoring: Scoring, unit: Tensor) -> Tensor:
    """Compute scores [1, N, 1, S] of an int8 query: an exact product, then everything else. unit: [N]."""
    scores = parts.scores(q, keys.float(), None, Scoring(1.0)) * unit[:, None, None]
    if scoring.bias is not None and scoring.bias_before_scale:
        scores += scoring.bias
    scores *= scoring.scale
    if scoring.bias is not None and not scoring.bias_before_scale:
        scores += scoring.bias
    return scores.masked_fill_(~visible, parts.MINUS_INFINITY)


# --- on the native operator ------------------------------------------------------------------------------------------


def native_obstacle(work: Work) -> tuple[str, str] | None:
    """Find the first argument that the native operator has no use for, and say why; None: it computes this call."""
    head_dim, types = work.q.shape[2], (torch.float16, torch.bfloat16, torch.float32)
    reasons = (
        ("query", "int8, or a float type of at most 32 bits", work.integers is None and work.q.dtype in types),
        ("query", "an even head dim", head_dim % 2 == 0),
        ("pse_shift", "no bias that is given as a tensor", work.scoring.bias is None),
        ("atten_mask", "no mask", work.visible is None),
        ("num_cores", "a split of its own", work.split_size == 0),
        ("key_antiquant", "scales of tensors, heads or channels", not (work.k.by_token or work.v.by_token)),
        ("key_antiquant", f"scales above 0, offsets up to {GREATEST_OFFSET:g}, and no -128", _is_symmetric(work)),
        ("backend", "native kernels, which are not installed", load_library() is not None),
    )
    return next(((param, text) for param, text, fits in reasons if not fits), None)


def _is_symmetric(work: Work) -> bool:
    """Tell whether int8 tokens come back when they are scaled and quantised again."""
    for x in (work.k, work.v):
        if x.is_int8 and not x.by_token:
            usable = bool((x.scale.isfinite() & (x.scale > 0) & (x.offset.abs() <= GREATEST_OFFSET)).all())
            if not usable or any(bool((item == -128).any()) for item in x.tokens):
                return False
    return True


def attend_native(work: Work, *, fast: bool) -> tuple[Tensor, Tensor]:
    """Compute rows [B, N, D] and lse [B, N] with Ops.attend, each sequence's last visible token being the new one.

    fast: bfloat16 is computed as in a bfloat16 model; otherwise everything is computed in float32.
    """
    is_int8 = work.k.is_int8
    dtype = torch.bfloat16 if fast and work.q.dtype == torch.bfloat16 and not is_int8 else torch.float32
    seen = [work.band.of_length(length) for length in work.slots.lengths]
    stops = [stop if first < stop else 0 for first, stop in seen]
    rows = [[x.of_sequence(work.slots, b).whole()[:stop] for x in (work.k, work.v)] for b, stop in enumerate(stops)]
    num_kv_heads, head_dim = work.k.scale.shape
    prefix = [torch.zeros(0, num_kv_heads, head_dim)] * 2 if work.prefix is None else [x[0] for x in work.prefix]
    shared = len(prefix[0]) // NATIVE_BLOCK * NATIVE_BLOCK  # whole blocks of the prefix are stored once
    own = [[torch.cat([before[shared:], x]) for before, x in zip(prefix, pair, strict=True)] for pair in rows]
    lengths = [len(prefix[0]) + stop for stop in stops]
    own_blocks = [-(-(length - shared) // NATIVE_BLOCK) for length in lengths]
    first_blocks = [shared // NATIVE_BLOCK + sum(own_blocks[:b]) for b in range(len(lengths))]

    scales = None
    if is_int8:
        scales = KVScales(*(x.float().contiguous() for x in (work.k.scale, work.k.offset, work.v.scale, work.v.offset)))
    blocks = max(shared // NATIVE_BLOCK + sum(own_blocks), 1)
    kind = torch.int8 if is_int8 else dtype
    spec = CacheSpec(blocks, NATIVE_BLOCK, num_kv_heads, head_dim, kind, work.slices if is_int8 else 0, scales)
    places = [torch.arange(shared)]
    places += [first * NATIVE_BLOCK + torch.arange(len(pair[0])) for first, pair in zip(first_blocks, own, strict=True)]
    tokens = [torch.cat([prefix[i][:shared], *(pair[i] for pair in own)]).to(dtype).contiguous() for i in range(2)]

    alive = [b for b, length in enumerate(lengths) if length > 0]
    newest = [[(own[b][i] if len(own[b][i]) else prefix[i])[-1:] for b in alive] for i in range(2)]
    columns = max((-(-length // NATIVE_BLOCK) for length in lengths), default=0)
    table = torch.full((len(lengths), max(columns, 1)), -1, dtype=torch.int32)
    for b, (first, count) in enumerate(zip(first_blocks, own_blocks, strict=True)):
        ids = [*range(shared // NATIVE_BLOCK), *range(first, first + count)]
        table[b, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    meta = AttentionMetadata(
        query_start_loc=torch.tensor([0, *(length > 0 for length in lengths)]).cumsum(0).int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.full((len(alive),), -1, dtype=torch.int64),  # nothing reads the new tokens later
        block_size=NATIVE_BLOCK,
        sliding_window=work.band.window,
    )
    shape = len(lengths), work.q.shape[1]
    out, lse = torch.zeros(*shape, head_dim), torch.full(shape, parts.MINUS_INFINITY)
    if not alive:
        return out, lse
    with _native:
        ops = native_ops(dtype)
        cache = ops.new_kv_cache(spec)
        ops.store_kv(cache, tokens[0], tokens[1], torch.cat(places))
        new_k, new_v = (torch.cat(items).to(dtype).contiguous() for items in newest)
        log_sums = torch.empty(len(alive), shape[1])
        q, params = work.q[alive].to(dtype).contiguous(), AttentionParams(work.scoring.scale)
        found = ops.attend(q, new_k, new_v, cache, meta, params, lse=log_sums)
    out[alive], lse[alive] = found.view(len(alive), *out.shape[1:]).float(), log_sums
    return out, lse


@lru_cache(maxsize=2)
def native_ops(dtype: torch.dtype) -> CpuOps:
    """Make the native kernels that calls computed in this type share, with a thread for each CPU."""
    return CpuOps(dtype, threads=len(os.sched_getaffinity(0)))
