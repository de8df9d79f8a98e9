"""Attention over a paged cache, whose bits depend on a row's own query and keys alone.

Positions are cut into tiles of TILE and spans of SPAN, both at absolute places. Within a span, tiles are folded in
ascending order into a state (m, l, o): m is the running maximum, p is relative to it, o accumulates in the tensor
cores. A span begins at (-inf, 0, 0), and spans are folded into the row's state in ascending order. Sinks have spans of
their own, which come first. Hence one program may compute all spans of many rows, or each span may have its own
program, with the same bits. Scores are in units of log2.

Rows of a kv head are token * G + g, with G query heads per kv head. An item is some neighbouring rows of a sequence.
Keys and values of new tokens are stored before (cache.py), so every position is read from the cache.

`split_queries`: a program owns one query of an int8 cache: its rows of int8, and their scale.
`attend_span`: a program owns one span of one kv head for an item of few rows, and writes the span's state.
`fold_spans`: a program owns one kv head of such an item: it folds the spans and divides.
`attend_rows`: a program owns one kv head of an item of many rows, over all of its spans.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.metadata import AttentionParams
from penstock.kernels.triton import cache as paged
from penstock.kernels.triton.cache import TritonCache
from penstock.kernels.triton.configurations import tile as configuration
from penstock.kernels.triton.device import TILE
from penstock.kernels.triton.elements import NEVER, divide, mma, round_to_integer, tanh
from penstock.kernels.triton.launch import ANEW, Scratch, launch
from penstock.kernels.triton.sizes import SPAN
from penstock.kernels.triton.work import PlannedMetadata, kind_of, states_at_once

LOG2E = math.log2(math.e)
LOG2 = tl.constexpr(math.log(2))
RATIO = tl.constexpr(1 / 254)  # between a slice and the one before
SMALLEST_ROW = tl.constexpr(2.0**-118)
SEES_ALL = 2**30  # a window


@triton.jit
def pair_tree(p, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Sum p [ROWS, TILE] over its columns as one tree: pairs, then columns 8 apart, then 2 and 4 apart.

    a + b has one result in any layout; in that of the tensor cores, all but the last two steps stay within a thread.
    """
    tl.static_assert(TILE == 128)
    p = tl.sum(p.reshape(ROWS, 16, 4, 2), axis=3)
    p = tl.sum(p.reshape(ROWS, 2, 8, 4), axis=1)
    p = tl.sum(p.reshape(ROWS, 2, 4, 4), axis=1)
    p = tl.sum(p.reshape(ROWS, 2, 2, 4), axis=1)
    p = tl.sum(p.reshape(ROWS, 2, 4), axis=1)
    p = tl.sum(p.reshape(ROWS, 2, 2), axis=1)
    return tl.sum(p, axis=1)


@triton.jit
def finite(m):
    """Return what is subtracted from scores: 0 where all of them are -inf."""
    return tl.where(m == NEVER, 0.0, m)


@triton.jit
def fold(m, l, o, sm, sl, so):
    """Fold the state of a span into the state of a row."""
    n = tl.maximum(m, sm)
    a, b = tl.exp2(m - finite(n)), tl.exp2(sm - finite(n))
    return n, l * a + sl * b, o * a[:, None] + so * b[:, None]


@triton.jit
def nothing(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Make the state of no keys."""
    return tl.full([ROWS], NEVER, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)


@triton.jit
def product(x, y, accumulator, DEPTH: tl.constexpr):
    """Add x [.., DEPTH] y to an accumulator. In float32, 32 elements of DEPTH at a time: registers hold no more."""
    if x.dtype == tl.float32 and DEPTH > 32:
        pieces: tl.constexpr = DEPTH // 32
        index = tl.arange(0, pieces)
        xs = x.reshape(x.shape[0], pieces, 32)
        ys = y.reshape(pieces, 32, y.shape[1])
        for piece in tl.static_range(pieces):
            x_piece = tl.sum(tl.where((index == piece)[None, :, None], xs, 0.0), axis=1)  # the others are zeros
            y_piece = tl.sum(tl.where((index == piece)[:, None, None], ys, 0.0), axis=0)
            accumulator = mma(x_piece, y_piece, accumulator)
    else:
        accumulator = mma(x, y, accumulator)
    return accumulator


@triton.jit
def split(x, SLICES: tl.constexpr):
    """Write rows x as slices of int8 and a scale (reference/quantized_kv.split). The third may be zeros."""
    greatest = tl.max(tl.abs(x), axis=1)
    usable = (greatest >= SMALLEST_ROW) & (greatest < float("inf"))
    steps = tl.full([x.shape[0]], 127.0, tl.float32)
    rest = x * tl.where(usable, divide(steps, tl.where(usable, greatest, 1.0)), 0.0)[:, None]
    a = round_to_integer(rest)
    rest = (rest - a) * 254.0
    b = round_to_integer(rest)
    c = tl.zeros_like(b)
    if SLICES == 3:
        c = round_to_integer((rest - b) * 254.0)
    scale = tl.where(usable, divide(greatest, steps), tl.where(greatest < float("inf"), 0.0, float("nan")))
    return a, b, c, scale


@triton.jit
def sliced_product(a, b, c, x, SLICES: tl.constexpr):
    """Multiply slices by int8 numbers x: exact integers, weighted by their slices in float32."""
    zeros = tl.zeros([a.shape[0], x.shape[1]], tl.int32)
    y = mma(a, x, zeros).to(tl.float32) + mma(b, x, zeros).to(tl.float32) * RATIO
    if SLICES == 3:
        y = y + mma(c, x, zeros).to(tl.float32) * (RATIO * RATIO)
    return y


@triton.jit
def split_queries(
    q, slices, numbers, channels,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """numbers: the scale of a query's integers, and their sum (or, with scales per channel, what the offsets add)."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    x = tl.load(q + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    finite_row = tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), axis=0) == 0
    if channels is not None:
        own = channels + (row % H) // (H // HKV) * D + d
        x = x * tl.load(own, mask=d < D, other=0.0)
    a, b, c, scale = split(x[None, :], SLICES)
    total = tl.sum(a.to(tl.int32), axis=1).to(tl.float32) + tl.sum(b.to(tl.int32), axis=1).to(tl.float32) * RATIO
    total = total + tl.sum(c.to(tl.int32), axis=1).to(tl.float32) * (RATIO * RATIO)
    if channels is not None:
        kept = (a + b * RATIO + c * (RATIO * RATIO)) * scale[:, None]
        total = tl.sum(kept * tl.load(own + HKV * D, mask=d < D, other=0.0)[None, :], axis=1)
    to = slices + row * (SLICES * D) + d[None, :]
    tl.store(to, a.to(tl.int8), mask=(d < D)[None, :])
    tl.store(to + D, b.to(tl.int8), mask=(d < D)[None, :])
    if SLICES == 3:
        tl.store(to + 2 * D, c.to(tl.int8), mask=(d < D)[None, :])
    one = tl.arange(0, 1)
    tl.store(numbers + row * 2 + one, tl.where(finite_row, scale, float("nan")))
    tl.store(numbers + row * 2 + 1 + one, total)


@triton.jit
def read_queries(
    q, numbers, row, inside, keys,
    D: tl.constexpr, WIDTH: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Read the queries of rows, in the cache's type; for an int8 cache as slices, their scale and their sum."""
    d = tl.arange(0, WIDTH)
    mask = inside[:, None] & (d < D)[None, :]
    if SLICES == 0:
        a = tl.load(q + row[:, None] * D + d[None, :], mask=mask, other=0.0).to(keys.dtype.element_ty)
        b, c, scale, total = a, a, row, row  # not used
    else:
        at = q + row[:, None] * (SLICES * D) + d[None, :]
        a = tl.load(at, mask=mask, other=0)
        b = tl.load(at + D, mask=mask, other=0)
        c = b
        if SLICES == 3:
            c = tl.load(at + 2 * D, mask=mask, other=0)
        scale = tl.load(numbers + row * 2, mask=inside, other=0.0)
        total = tl.load(numbers + row * 2 + 1, mask=inside, other=0.0)
    return a, b, c, scale, total


@triton.jit
def shaped(s, slope, at, position, scale, softcap, SOFTCAP: tl.constexpr, BEFORE: tl.constexpr):
    """Scale products, and add their biases. Without a soft cap or biases, the scale is a part of log2."""
    if SOFTCAP or slope is not None:
        if slope is not None:
            bias = slope[:, None] * (at[None, :] - position[:, None]).to(tl.float32)
            if BEFORE:
                s = s + bias
        s = s * scale
        if SOFTCAP:
            s = tanh(divide(s, tl.full([1, 1], 0.0, tl.float32) + softcap)) * softcap
        if slope is not None:
            if not BEFORE:
                s = s + bias
    return s


@triton.jit
def attend_tile(
    queries, cache, base, head, bounds, slope, m, l, o, numbers,
    HKV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, SLICES: tl.constexpr, SOFTCAP: tl.constexpr, BEFORE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the tile of positions from `base` into the state of a span. MASKED: some row may not see some of it."""
    a, b, c, q_scale, q_total = queries
    keys, values, token_scales, blocks, table = cache
    first, last, position, length = bounds
    scale, softcap, log2 = numbers
    d, t = tl.arange(0, WIDTH), tl.arange(0, TILE)
    at = base + t
    here = at < length
    block = tl.maximum(tl.load(table + base // BLOCK), 0).to(tl.int64)  # a padding row has none, and is not read
    place = (block * HKV + head) * BLOCK
    offset = base % BLOCK + t
    k_at = keys + (place + offset)[None, :] * D + d[:, None]  # whatever is beyond `length` stays in its column of s
    if WIDTH == D:
        k = tl.load(k_at)
    else:
        k = tl.load(k_at, mask=(d < D)[:, None], other=0)
    if SLICES > 0:
        s = sliced_product(a, b, c, k, SLICES)
        if token_scales is not None:
            own = token_scales + (place + offset) * 2
            s = s + tl.load(own + 1, mask=here, other=0.0)[None, :] * q_total[:, None]
            s = s * tl.load(own, mask=here, other=0.0)[None, :] * q_scale[:, None]
        else:
            s = s * q_scale[:, None] + q_total[:, None]
    else:
        s = product(a, k, tl.zeros([ROWS, TILE], tl.float32), WIDTH)
    s = shaped(s, slope, at, position, scale, softcap, SOFTCAP, BEFORE)
    if MASKED:
        seen = (at[None, :] >= first[:, None]) & (at[None, :] <= last[:, None])
        s = tl.where(seen, s, NEVER)
    n = tl.maximum(m, tl.max(s, axis=1) * log2)
    factor = tl.exp2(m - finite(n))
    p = tl.exp2(tl.fma(s, tl.zeros_like(s) + log2, tl.zeros_like(s) - finite(n)[:, None]))
    l = l * factor + pair_tree(p, ROWS, TILE)
    o = o * factor[:, None]
    if SLICES > 0:
        v_at = values + place * D + d[None, :] * BLOCK + offset[:, None]  # any integer times p = 0 is 0
        if WIDTH == D:
            v = tl.load(v_at)
        else:
            v = tl.load(v_at, mask=(d < D)[None, :], other=0)
        if token_scales is not None:
            other = own + blocks.to(tl.int64) * HKV * BLOCK * 2
            p = p * tl.load(other, mask=here, other=0.0)[None, :]
            if MASKED:
                p = tl.where(seen, p, 0.0)  # a scale may be NaN
            shift = pair_tree(p * tl.load(other + 1, mask=here, other=0.0)[None, :], ROWS, TILE)
        else:
            shift = tl.zeros([ROWS], tl.float32)
        pa, pb, pc, p_scale = split(p, SLICES)
        y = sliced_product(pa.to(tl.int8), pb.to(tl.int8), pc.to(tl.int8), v, SLICES)
        o = o + (y * p_scale[:, None] + shift[:, None])
    else:
        v_at = values + (place + offset)[:, None] * D + d[None, :]
        if MASKED:
            v = tl.load(v_at, mask=here[:, None] & (d < D)[None, :], other=0)
        elif WIDTH == D:
            v = tl.load(v_at)
        else:
            v = tl.load(v_at, mask=(d < D)[None, :], other=0)
        o = product(p.to(v.dtype), v, o, TILE)
    return n, l, o


@triton.jit
def locate(
    items, query_start, lengths, index,
    G: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Find an item's sequence, its length, the token of each row (-1: none), its position, and the last one of all."""
    sequence, first_row = tl.load(items + 2 * index), tl.load(items + 2 * index + 1)
    start = tl.load(query_start + sequence)
    new = tl.load(query_start + sequence + 1) - start
    length = tl.load(lengths + sequence)
    r = first_row + tl.arange(0, ROWS)
    inside = r < new * G
    position = tl.where(inside, length - new + r // G, -1)
    earliest = length - new + first_row // G
    latest = tl.minimum(length - 1, length - new + (first_row + ROWS - 1) // G)
    return sequence, start + r // G, r % G, inside, position, earliest, latest, length


@triton.jit
def first_seen(position, window, sinks, CHUNKED: tl.constexpr):
    """Return the first position that is seen from one, sinks apart."""
    if CHUNKED:
        first = position // window * window
    else:
        first = position - window + 1
    return tl.maximum(first, sinks)


@triton.jit(do_not_specialize=["blocks", "tokens", "table_stride", "window", "sinks", "spans"])
def attend_span(
    q, q_numbers, keys, values, token_scales, items, query_start, lengths, tables, slopes, states, sums,
    blocks, tokens, table_stride, window, sinks, spans, scale, softcap, log2,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, SOFTCAP: tl.constexpr, BEFORE: tl.constexpr,
    CHUNKED: tl.constexpr, SINK_QUERIES: tl.constexpr,
):  # fmt: skip
    slot, head, index = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    G: tl.constexpr = H // HKV
    sequence, token, g, inside, position, earliest, latest, length = locate(items, query_start, lengths, index, G, ROWS)
    sink_spans = tl.cdiv(tl.minimum(sinks, latest + 1), SPAN)
    if slot < sink_spans:
        low, first, last = slot * SPAN, position * 0, tl.minimum(position, sinks - 1)
        end = tl.minimum(sinks, latest + 1)
    else:
        begin = first_seen(earliest, window, sinks, CHUNKED)
        low = (begin // SPAN + slot - sink_spans) * SPAN
        first, last, end = first_seen(position, window, sinks, CHUNKED), position, latest + 1
    if low < end:
        row = token.to(tl.int64) * H + head * G + g
        own = row
        if SINK_QUERIES:
            own = row + tl.where(slot < sink_spans, tokens, 0).to(tl.int64) * H
        queries = read_queries(q, q_numbers, own, inside, keys, D, WIDTH, SLICES)
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + head * G + g)
        cache = keys, values, token_scales, blocks, tables + sequence.to(tl.int64) * table_stride
        bounds, numbers = (first, last, position, length), (scale, softcap, log2)
        m, l, o = nothing(ROWS, WIDTH)
        lowest = tl.maximum(low, tl.where(slot < sink_spans, 0, begin_tile(earliest, window, sinks, TILE, CHUNKED)))
        for base in range(lowest, tl.minimum(low + SPAN, end), TILE):
            m, l, o = attend_tile(
                queries, cache, base, head, bounds, slope, m, l, o, numbers,
                HKV, D, BLOCK, TILE, WIDTH, ROWS, SLICES, SOFTCAP, BEFORE, True,
            )  # fmt: skip
        r, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
        to = ((index * HKV + head) * spans + slot) * ROWS + r
        tl.store(sums + to * 2, m, mask=inside)
        tl.store(sums + to * 2 + 1, l, mask=inside)
        tl.store(states + to[:, None] * D + d[None, :], o, mask=inside[:, None] & (d < D)[None, :])


@triton.jit
def begin_tile(earliest, window, sinks, TILE: tl.constexpr, CHUNKED: tl.constexpr):
    """Return where the first tile that an item sees begins, sinks apart."""
    return first_seen(earliest, window, sinks, CHUNKED) // TILE * TILE


@triton.jit
def finish(
    m, l, o, out, lse, channels, sink_logits, row, at_head, kv_head, inside,
    HKV: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Divide the state of rows, and write the rows and their log-sum-exp."""
    d = tl.arange(0, WIDTH)
    if channels is not None:
        own = channels + (2 * HKV + kv_head) * D + d
        o = o + l[:, None] * tl.load(own + HKV * D, mask=d < D, other=0.0)[None, :]
        o = o * tl.load(own, mask=d < D, other=0.0)[None, :]
    blind = l == 0.0
    if sink_logits is not None:
        sink = tl.load(sink_logits + at_head) * (1.0 / LOG2)
        m, l, o = fold(m, l, o, sink, tl.full(l.shape, 1.0, tl.float32), tl.zeros_like(o))
        blind = l == 0.0
    result = divide(o, tl.where(blind, 1.0, l)[:, None]) + 0.0  # no -0
    to = out + row[:, None] * D + d[None, :]
    tl.store(
        to, tl.where(blind[:, None], 0.0, result).to(out.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :]
    )
    if lse is not None:
        tl.store(lse + row, tl.where(blind, NEVER, (m + tl.log2(tl.where(blind, 1.0, l))) * LOG2), mask=inside)


@triton.jit(do_not_specialize=["window", "sinks", "spans"])
def fold_spans(
    states, sums, items, query_start, lengths, channels, sink_logits, out, lse, window, sinks, spans,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, SPAN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    CHUNKED: tl.constexpr,
):  # fmt: skip
    head, index = tl.program_id(0), tl.program_id(1).to(tl.int64)
    G: tl.constexpr = H // HKV
    _, token, g, inside, _, earliest, latest, _ = locate(items, query_start, lengths, index, G, ROWS)
    sink_spans = tl.cdiv(tl.minimum(sinks, latest + 1), SPAN)
    begin = first_seen(earliest, window, sinks, CHUNKED)
    count = sink_spans + tl.maximum(tl.cdiv(latest + 1, SPAN) - begin // SPAN, 0)
    r, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    m, l, o = nothing(ROWS, WIDTH)
    for slot in range(0, count):
        at = ((index * HKV + head) * spans + slot) * ROWS + r
        sm = tl.load(sums + at * 2, mask=inside, other=NEVER)
        sl = tl.load(sums + at * 2 + 1, mask=inside, other=0.0)
        so = tl.load(states + at[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        m, l, o = fold(m, l, o, sm, sl, so)
    row, at_head = token.to(tl.int64) * H + head * G + g, head * G + g
    finish(m, l, o, out, lse, channels, sink_logits, row, at_head, head, inside, HKV, D, WIDTH)


@triton.jit
def attend_tiles(
    queries, cache, begin, end, head, bounds, slope, m, l, o, sm, sl, so, numbers,
    HKV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, SOFTCAP: tl.constexpr, BEFORE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Fold tiles into the state of a span, and each span that is complete into that of the rows."""
    for base in range(begin, end, TILE):
        sm, sl, so = attend_tile(
            queries, cache, base, head, bounds, slope, sm, sl, so, numbers,
            HKV, D, BLOCK, TILE, WIDTH, ROWS, SLICES, SOFTCAP, BEFORE, MASKED,
        )  # fmt: skip
        if (base + TILE) % SPAN == 0:
            m, l, o = fold(m, l, o, sm, sl, so)
            sm, sl, so = nothing(ROWS, WIDTH)
    return m, l, o, sm, sl, so


@triton.jit(do_not_specialize=["blocks", "tokens", "table_stride", "window", "sinks"])
def attend_rows(
    q, q_numbers, keys, values, token_scales, items, query_start, lengths, tables, slopes, channels, sink_logits,
    out, lse, blocks, tokens, table_stride, window, sinks, scale, softcap, log2,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, SOFTCAP: tl.constexpr, BEFORE: tl.constexpr,
    CHUNKED: tl.constexpr, SINKS: tl.constexpr, SINK_QUERIES: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    G: tl.constexpr = H // HKV
    sequence, token, g, inside, position, earliest, latest, length = locate(items, query_start, lengths, index, G, ROWS)
    row, at_head = token.to(tl.int64) * H + head * G + g, head * G + g
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + at_head)
    cache = keys, values, token_scales, blocks, tables + sequence.to(tl.int64) * table_stride
    numbers = scale, softcap, log2
    m, l, o = nothing(ROWS, WIDTH)
    sm, sl, so = nothing(ROWS, WIDTH)
    if SINKS:
        own = row
        if SINK_QUERIES:
            own = row + tokens.to(tl.int64) * H
        queries = read_queries(q, q_numbers, own, inside, keys, D, WIDTH, SLICES)
        bounds = position * 0, tl.minimum(position, sinks - 1), position, length
        m, l, o, sm, sl, so = attend_tiles(
            queries, cache, 0, tl.minimum(sinks, latest + 1), head, bounds, slope, m, l, o, sm, sl, so, numbers,
            HKV, D, BLOCK, TILE, SPAN, WIDTH, ROWS, SLICES, SOFTCAP, BEFORE, True,
        )  # fmt: skip
        m, l, o = fold(m, l, o, sm, sl, so)
        sm, sl, so = nothing(ROWS, WIDTH)
    queries = read_queries(q, q_numbers, row, inside, keys, D, WIDTH, SLICES)
    bounds = first_seen(position, window, sinks, CHUNKED), position, position, length
    begin = begin_tile(earliest, window, sinks, TILE, CHUNKED)
    middle = begin
    if not (WINDOWED or SINKS):
        middle = (earliest + 1) // TILE * TILE
        m, l, o, sm, sl, so = attend_tiles(
            queries, cache, begin, middle, head, bounds, slope, m, l, o, sm, sl, so, numbers,
            HKV, D, BLOCK, TILE, SPAN, WIDTH, ROWS, SLICES, SOFTCAP, BEFORE, False,
        )  # fmt: skip
    m, l, o, sm, sl, so = attend_tiles(
        queries, cache, middle, latest + 1, head, bounds, slope, m, l, o, sm, sl, so, numbers,
        HKV, D, BLOCK, TILE, SPAN, WIDTH, ROWS, SLICES, SOFTCAP, BEFORE, True,
    )  # fmt: skip
    m, l, o = fold(m, l, o, sm, sl, so)
    finish(m, l, o, out, lse, channels, sink_logits, row, at_head, head, inside, HKV, D, WIDTH)


def attend(
    q: Tensor,
    new: tuple[Tensor, Tensor],
    cache: TritonCache,
    meta: PlannedMetadata,
    params: AttentionParams,
    out: Tensor,
    lse: Tensor | None,
    scratch: Scratch = ANEW,
) -> Tensor:
    """Store new keys and values, then attend for queries q [T, H, D] or [2, T, H, D] into out [T, H * D]."""
    tokens, num_heads, head_dim = q.shape[-3:]
    spec, work = cache.spec, meta.work
    paged.store(cache, *new, work.slots)
    shape = {"H": num_heads, "HKV": spec.num_kv_heads, "D": head_dim}
    width = max(32 if spec.slices else 16, triton.next_power_of_2(head_dim))
    has_sink_queries, q_numbers = q.ndim == 4, None
    if spec.slices:
        rows = q.numel() // head_dim
        slices = scratch.empty((rows, spec.slices, head_dim), torch.int8, q.device)
        q_numbers = scratch.empty((rows, 2), torch.float32, q.device)
        operands = q, slices, q_numbers, cache.channel_scales
        launch(split_queries, (rows,), *operands, **shape, WIDTH=width, SLICES=spec.slices, warps=1)
        q = slices
    plain = params.softcap is None and params.alibi_slopes is None
    log2 = params.scale * LOG2E if plain else LOG2E
    windowed = meta.sliding_window is not None
    window, sinks = meta.sliding_window if windowed else SEES_ALL, meta.num_sink_tokens
    places = work.query_start, work.lengths
    numbers = params.scale, params.softcap or 0.0, log2
    constants = shape | {"SPAN": SPAN, "WIDTH": width, "CHUNKED": meta.chunked}
    form = {
        "BLOCK": spec.block_size,
        "TILE": TILE,
        "SLICES": spec.slices,
        "SOFTCAP": params.softcap is not None,
        "BEFORE": params.bias_before_scale,
        "SINK_QUERIES": has_sink_queries,
    }
    stored = cache.keys, cache.values, cache.token_scales
    kind, ends = kind_of(cache), (cache.channel_scales, params.sink_logits, out, lse)
    steps = len(cache.keys), tokens, work.table.shape[1], window, sinks
    if (few := work.few) is not None:
        wide = " wide" if few.rows > 16 else ""
        tile = configuration(f"attend_span{wide}{kind}", head_dim)
        count = min(len(few.items), states_at_once(spec, few))
        shape_of_states = count, spec.num_kv_heads, few.spans, few.rows
        states = scratch.empty((*shape_of_states, head_dim), torch.float32, q.device)
        sums = scratch.empty((*shape_of_states, 2), torch.float32, q.device)
        for first in range(0, len(few.items), count):
            items = few.items[first : first + count]
            grid = few.spans, spec.num_kv_heads, len(items)
            arguments = q, q_numbers, *stored, items, *places, work.table, params.alibi_slopes
            options = constants | form | {"ROWS": few.rows, "warps": tile.warps, "stages": tile.stages}
            launch(attend_span, grid, *arguments, states, sums, *steps, few.spans, *numbers, **options)
            options = constants | {"ROWS": few.rows, "warps": 4}
            launch(fold_spans, grid[1:], states, sums, items, *places, *ends, window, sinks, few.spans, **options)
    if (many := work.many) is not None:
        tile = configuration(f"attend_rows{kind}", head_dim)
        arguments = q, q_numbers, *stored, many.items, *places, work.table, params.alibi_slopes
        options = constants | form | {"ROWS": many.rows, "SINKS": sinks > 0, "WINDOWED": windowed}
        options |= {"warps": tile.warps, "stages": tile.stages}
        launch(attend_rows, (len(many.items), spec.num_kv_heads), *arguments, *ends, *steps, *numbers, **options)
    return out
