"""From logits to ids, and to log-probabilities, in the order of kernels/sampling.py.

`hide`: a program owns BLOCK ids of a row with a bitmap, and sets the logits of those whose bits are 0 to -inf.
`adjust_pairs`: a program owns BLOCK pairs (row, id), and changes their logits: mask, bias or penalties.
`cut_row`: a program owns a row: it finds the last id that min_p, top_k and top_p keep.
`pick_part`: a program owns BLOCK ids of a row, and finds the best of them, with noise; and whether they are healthy.
`pick`: a program owns a row, and finds the best of its parts.
`sum_part`: a program owns BLOCK ids of a row: their largest logit, and the sum of e^(x - largest).
`log_part`: a program owns BLOCK log-probabilities of a row.
`score_row`: a program owns a row: the rank of an id, and the likeliest ids.

Ids are ordered by their logits, as integers of the same order, the highest first, and the lowest id first among equal
ones. Counts are integers and probabilities are summed as integers of 2^-40, so no sum that decides an id has an order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.sampling import MULTIPLIERS, NO_TOKEN, ROUNDS, WEYL, SamplingTensors, TokenScores
from penstock.kernels.triton.elements import NEVER, divide
from penstock.kernels.triton.launch import ANEW, INTERPRETED, Scratch, launch

BLOCK = 256 if INTERPRETED else 4096  # ids of a program
DIGITS = 16  # values of a digit by which a cut is searched for: 8 digits make a logit
MAX_SEARCHED = 64  # likeliest ids that are found one by one; for more, all are sorted
SEARCHED = 512 if INTERPRETED else 1024  # ids at a time in such a search
UNIT = tl.constexpr(2.0**40)  # of a probability, relative to the largest
NONE = tl.constexpr(NO_TOKEN)
A0, A1 = (tl.constexpr(number) for number in MULTIPLIERS)
W0, W1 = (tl.constexpr(number) for number in WEYL)
TIMES = tl.constexpr(ROUNDS)


@triton.jit(do_not_specialize=["V", "words"])
def hide(logits, rows, bits, V, words, BLOCK: tl.constexpr):
    at, index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    word = tl.load(bits + index * words + at // 32, mask=at < V, other=0)
    is_hidden = (at < V) & ((word >> (at % 32)) & 1 == 0)
    tl.store(logits + tl.load(rows + index) * V + at, tl.full([BLOCK], NEVER, tl.float32), mask=is_hidden)


@triton.jit(do_not_specialize=["P", "V"])
def adjust_pairs(logits, pairs, first, second, counts, P, V, BLOCK: tl.constexpr, OPERATION: tl.constexpr):
    """OPERATION: "mask"; "bias", first [P]; "repetition", first [M]; "counts", first, second [M], counts [P]."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < P
    row = tl.load(pairs + 2 * index, mask=inside, other=0)
    at = logits + row * V + tl.load(pairs + 2 * index + 1, mask=inside, other=0)
    x = tl.load(at, mask=inside, other=0.0)
    if OPERATION == "mask":
        x = tl.full([BLOCK], NEVER, tl.float32)
    elif OPERATION == "bias":
        x = x + tl.load(first + index, mask=inside, other=0.0)
    elif OPERATION == "repetition":
        penalty = tl.load(first + row, mask=inside, other=1.0)
        x = tl.where(x > 0.0, divide(x, penalty), x * penalty)
    else:
        x = x - tl.load(first + row, mask=inside, other=0.0) * tl.load(counts + index, mask=inside, other=0.0)
        x = x - tl.load(second + row, mask=inside, other=0.0)
    tl.store(at, x, mask=inside)


@triton.jit
def order(x):
    """Map float32 to integers 0 .. 2^32 - 1 of the same order, as int64; -0 is 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -1 - bits, bits + 2147483648)


@triton.jit
def heated(logits, at, V, temperature):
    return divide(
        tl.load(logits + at, mask=at < V, other=float("-inf")), tl.zeros_like(at).to(tl.float32) + temperature
    )


@triton.jit
def weights(x, key, at, largest, level, last, V, MASS: tl.constexpr):
    """Weigh the ids that a cut keeps: by 1, or by their probabilities."""
    kept = (at < V) & ((key > level) | ((key == level) & (at <= last)))
    weight = tl.where(kept, 1, 0).to(tl.int64)
    if MASS:
        weight = tl.where(kept, (tl.exp(x - largest) * UNIT).to(tl.int64), 0)
    return weight


@triton.jit
def narrowed(
    logits, V, temperature, largest, level, last, wanted, share,
    SIZE: tl.constexpr, DIGITS: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """Keep the first of the kept ids whose weights reach `wanted`, or a share of all of their probabilities."""
    total = tl.zeros([], tl.int64)
    for start in range(0, V, SIZE):
        at = start + tl.arange(0, SIZE)
        x = heated(logits, at, V, temperature)
        total += tl.sum(weights(x, order(x), at, largest, level, last, V, MASS), axis=0)
    if MASS:
        wanted = tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    wanted = tl.maximum(tl.minimum(wanted, total), 1)
    # Digit by digit: the key at which the weights, added from the highest key on, reach `wanted`.
    found, above, digit = tl.zeros([], tl.int64), tl.zeros([], tl.int64), tl.arange(0, DIGITS)
    for place in range(8):
        shift = 28 - 4 * place
        sums = tl.zeros([DIGITS], tl.int64)
        for start in range(0, V, SIZE):
            at = start + tl.arange(0, SIZE)
            x = heated(logits, at, V, temperature)
            key = order(x)
            weight = weights(x, key, at, largest, level, last, V, MASS)
            weight = tl.where((key >> (shift + 4)) == found, weight, 0)
            own = ((key >> shift) & (DIGITS - 1))[:, None] == digit[None, :]
            sums += tl.sum(tl.where(own, weight[:, None], 0), axis=0)
        higher = above + tl.sum(tl.where(digit[None, :] > digit[:, None], sums[None, :], 0), axis=1)
        next_digit = tl.max(tl.where(higher + sums >= wanted, digit, 0), axis=0).to(tl.int64)
        above = tl.sum(tl.where(digit == next_digit, higher, 0), axis=0)
        found = found * DIGITS + next_digit
    # Equal logits have equal weights: keep so many of them that the rest of `wanted` is reached.
    rest, count, new_last = wanted - above, tl.zeros([], tl.int64), tl.zeros([], tl.int64) - 1
    for start in range(0, V, SIZE):
        at = start + tl.arange(0, SIZE)
        x = heated(logits, at, V, temperature)
        key = order(x)
        weight = tl.where(key == found, weights(x, key, at, largest, level, last, V, MASS), 0)
        before = count + tl.cumsum(weight, axis=0) - weight
        new_last = tl.maximum(new_last, tl.max(tl.where((weight > 0) & (before < rest), at, -1), axis=0))
        count += tl.sum(weight, axis=0)
    return found, new_last


@triton.jit(do_not_specialize=["V"])
def cut_row(logits, temperatures, top_k, top_p, min_p, cuts, V, SIZE: tl.constexpr, DIGITS: tl.constexpr):
    """cuts [M, 2] int64: the last key that is kept, and the last id with that key."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        logits += row * V
        largest = tl.full([], NEVER, tl.float32)
        for start in range(0, V, SIZE):
            largest = tl.maximum(largest, tl.max(heated(logits, start + tl.arange(0, SIZE), V, temperature), axis=0))
        level, last = tl.zeros([], tl.int64) - 1, tl.zeros([], tl.int64) + V
        if min_p is not None:
            share = tl.load(min_p + row)
            if share > 0.0:
                level = order(largest + tl.minimum(tl.log(share), 0.0))
        if top_k is not None:
            count = tl.load(top_k + row)
            if count < V:
                level, last = narrowed(
                    logits, V, temperature, largest, level, last, count, largest, SIZE, DIGITS, False
                )
        if top_p is not None:
            part = tl.load(top_p + row)
            if part < 1.0:
                level, last = narrowed(
                    logits, V, temperature, largest, level, last, tl.zeros([], tl.int64), part, SIZE, DIGITS, True
                )
        tl.store(cuts + row * 2, level)
        tl.store(cuts + row * 2 + 1, last)


@triton.jit
def noise(seed, choice, position, block):
    """Compute -log(-log(u)) of four neighbouring ids, for Philox4x32-10's counters (choice, position, block, 0)."""
    zero = tl.zeros(block.shape, tl.uint32)
    c0, c1, c2, c3 = zero + choice.to(tl.uint32), zero + position.to(tl.uint32), block.to(tl.uint32), zero
    k0, k1 = zero + (seed & 0xFFFFFFFF).to(tl.uint32), zero + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(TIMES):
        p0, p1 = c0.to(tl.uint64) * A0, c2.to(tl.uint64) * A1
        c0, c2 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = (p1 & 0xFFFFFFFF).to(tl.uint32), (p0 & 0xFFFFFFFF).to(tl.uint32)
        k0, k1 = k0 + W0, k1 + W1
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3)).reshape(block.shape[0] * 4)
    u = ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
    return -tl.log(-tl.log(u))


@triton.jit(do_not_specialize=["V", "parts"])
def pick_part(raw, logits, temperatures, noise_key, cuts, best, where, flags, V, parts, BLOCK: tl.constexpr):
    """flags: bit 0 if a logit is NaN or +inf, bit 1 if one is above -inf."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = part * BLOCK + tl.arange(0, BLOCK)
    seen = tl.load(raw + row * V + at, mask=at < V, other=float("-inf"))
    wrong = tl.max(tl.where(seen < float("inf"), 0, 1), axis=0)
    flag = wrong + 2 * tl.max(tl.where(seen > float("-inf"), 1, 0), axis=0)
    x = tl.load(logits + row * V + at, mask=at < V, other=float("-inf"))
    temperature = tl.load(temperatures + row)
    if noise_key is not None:
        if temperature > 0.0:
            x = divide(x, tl.full([BLOCK], 0.0, tl.float32) + temperature)
            if cuts is not None:
                key, level = order(x), tl.load(cuts + 2 * row)
                kept = (key > level) | ((key == level) & (at <= tl.load(cuts + 2 * row + 1)))
                x = tl.where(kept, x, float("-inf"))
            own = noise_key + 3 * row
            blocks = part * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
            x = x + noise(tl.load(own), tl.load(own + 1), tl.load(own + 2), blocks)
    x = tl.where(x == x, x, float("-inf"))
    greatest = tl.max(x, axis=0)
    tl.store(best + row * parts + part, greatest)
    tl.store(where + row * parts + part, tl.min(tl.where(x == greatest, at, 2147483647), axis=0))
    tl.store(flags + row * parts + part, flag)


@triton.jit(do_not_specialize=["parts"])
def pick(best, where, flags, ids, healthy, parts, PARTS: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    inside, here = at < parts, row * parts + at
    values = tl.load(best + here, mask=inside, other=float("-inf"))
    greatest = tl.max(values, axis=0)
    candidates = tl.load(where + here, mask=inside, other=2147483647)
    chosen = tl.min(tl.where(values == greatest, candidates, 2147483647), axis=0)
    tl.store(ids + row, tl.where(greatest == float("-inf"), NONE, chosen).to(tl.int64))
    flag = tl.load(flags + here, mask=inside, other=0)
    wrong, some = tl.max(flag & 1, axis=0), tl.max(flag & 2, axis=0)
    tl.store(healthy + row, (wrong == 0) & (some > 0))


@triton.jit(do_not_specialize=["V", "parts"])
def sum_part(logits, largest, sums, V, parts, BLOCK: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * V + at, mask=at < V, other=float("-inf"))
    greatest = tl.max(x, axis=0)
    tl.store(largest + row * parts + part, greatest)
    tl.store(sums + row * parts + part, tl.sum(tl.exp(x - tl.where(greatest == NEVER, 0.0, greatest)), axis=0))


@triton.jit(do_not_specialize=["V", "parts"])
def log_part(logits, largest, sums, out, V, parts, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    part, row, index = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, PARTS)
    maxima = tl.load(largest + row * parts + index, mask=index < parts, other=float("-inf"))
    greatest = tl.max(maxima, axis=0)
    shares = tl.load(sums + row * parts + index, mask=index < parts, other=0.0)
    total = tl.sum(shares * tl.exp(maxima - tl.where(greatest == NEVER, 0.0, greatest)), axis=0)
    at = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * V + at, mask=at < V, other=0.0)
    tl.store(out + row * V + at, (x - greatest) - tl.log(total), mask=at < V)


@triton.jit(do_not_specialize=["V", "num_top"])
def score_row(logprobs, given, ids, scores, ranks, V, num_top, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logprobs += row * V
    token = tl.maximum(tl.load(given + row), 0)
    own = tl.load(logprobs + token)
    rank = tl.full([], 1, tl.int32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logprobs + at, mask=at < V, other=float("-inf"))
        rank += tl.sum(tl.where(x > own, 1, 0), axis=0)
    tl.store(ranks + row, rank.to(tl.int64))
    to = row * (num_top + 1)
    tl.store(ids + to, token)
    tl.store(scores + to, own)
    value, last = tl.full([], float("inf"), tl.float32), tl.full([], -1, tl.int32)
    for place in range(0, num_top):
        best, where = tl.full([], float("-inf"), tl.float32), tl.full([], 2147483647, tl.int32)
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(logprobs + at, mask=at < V, other=0.0)
            left = (at < V) & ((x < value) | ((x == value) & (at > last)))
            greatest = tl.max(tl.where(left, x, float("-inf")), axis=0)
            first = tl.min(tl.where(left & (x == greatest), at, 2147483647), axis=0)
            is_better = (greatest > best) | ((where == 2147483647) & (first < where))
            best, where = tl.where(is_better, greatest, best), tl.where(is_better, first, where)
        value, last = best, where
        chosen = tl.where(where == 2147483647, 0, where)  # none of a row of NaN
        tl.store(ids + to + 1 + place, chosen.to(tl.int64))
        tl.store(scores + to + 1 + place, tl.load(logprobs + chosen))


def adjust(logits: Tensor, params: SamplingTensors, scratch: Scratch = ANEW) -> Tensor:
    """Return logits with bitmaps, mask, bias and penalties: a copy if there are any."""
    changes = []
    if params.masked is not None:
        changes.append(("mask", params.masked, None, None, None))
    if params.bias is not None:
        changes.append(("bias", params.bias[0], params.bias[1], None, None))
    if params.repetition is not None:
        changes.append(("repetition", params.repetition[1], params.repetition[0], None, None))
    if params.counts is not None:
        frequency, presence, pairs, counts = params.counts
        changes.append(("counts", pairs, frequency, presence, counts))
    changes = [change for change in changes if len(change[1])]
    work = logits
    if changes or params.allowed is not None:
        work = scratch.empty(tuple(logits.shape), logits.dtype, logits.device).copy_(logits)
    if params.allowed is not None:
        rows, bits = params.allowed
        vocab, words = logits.shape[1], bits.shape[1]
        launch(hide, (triton.cdiv(vocab, BLOCK), len(rows)), work, rows, bits, vocab, words, BLOCK=BLOCK, warps=8)
    for operation, pairs, *numbers in changes:
        grid = (triton.cdiv(len(pairs), 128),)
        sizes = len(pairs), logits.shape[1]
        launch(adjust_pairs, grid, work, pairs, *numbers, *sizes, BLOCK=128, OPERATION=operation, warps=1)
    return work


def choose(logits: Tensor, params: SamplingTensors, scratch: Scratch = ANEW) -> tuple[Tensor, Tensor]:
    """Choose one id for each row of logits [M, V] float32, and test whether the row is healthy."""
    rows, vocab = logits.shape
    parts, device = triton.cdiv(vocab, BLOCK), logits.device
    work, cuts = adjust(logits, params, scratch), None
    limits = params.top_k, params.top_p, params.min_p
    if params.noise_key is not None and any(limit is not None for limit in limits):
        cuts = scratch.empty((rows, 2), torch.int64, device)
        arguments = work, params.temperature, *limits, cuts, vocab
        launch(cut_row, (rows,), *arguments, SIZE=SEARCHED, DIGITS=DIGITS, warps=8)
    best = scratch.empty((rows, parts), torch.float32, device)
    where, flags = (scratch.empty((rows, parts), torch.int32, device) for _ in range(2))
    sources = logits, work, params.temperature, params.noise_key, cuts
    launch(pick_part, (parts, rows), *sources, best, where, flags, vocab, parts, BLOCK=BLOCK, warps=8)
    ids = torch.empty(rows, dtype=torch.int64, device=device)
    healthy = torch.empty(rows, dtype=torch.bool, device=device)
    found = best, where, flags, ids, healthy, parts
    launch(pick, (rows,), *found, PARTS=triton.next_power_of_2(parts), warps=1)
    return ids, healthy


def log_softmax(logits: Tensor, out: Tensor, scratch: Scratch = ANEW) -> Tensor:
    """Compute log-probabilities [M, V] of logits."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, BLOCK)
    largest, sums = (scratch.empty((rows, parts), torch.float32, logits.device) for _ in range(2))
    launch(sum_part, (parts, rows), logits, largest, sums, vocab, parts, BLOCK=BLOCK, warps=8)
    arguments = logits, largest, sums, out, vocab, parts
    launch(log_part, (parts, rows), *arguments, BLOCK=BLOCK, PARTS=triton.next_power_of_2(parts), warps=8)
    return out


def token_scores(logits: Tensor, given: Tensor, num_top: int, scratch: Scratch = ANEW) -> TokenScores:
    """Score the given ids [M] and the num_top likeliest ones."""
    rows, vocab = logits.shape
    logprobs = scratch.empty((rows, vocab), torch.float32, logits.device)
    log_softmax(logits, logprobs, scratch)
    count = min(num_top, vocab)
    ids = torch.empty(rows, 1 + count, dtype=torch.int64, device=logits.device)
    scores = torch.empty(rows, 1 + count, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(rows, dtype=torch.int64, device=logits.device)
    searched = count if count <= MAX_SEARCHED else 0
    own_ids, own_scores = (ids, scores) if searched else (ids[:, :1].contiguous(), scores[:, :1].contiguous())
    launch(score_row, (rows,), logprobs, given, own_ids, own_scores, ranks, vocab, searched, BLOCK=BLOCK, warps=8)
    if searched == count:
        return TokenScores(own_ids, own_scores, ranks)
    best, order = logprobs.sort(dim=1, descending=True, stable=True)  # of equal ones the lowest id first
    found_ids = torch.cat([own_ids, order[:, :count]], dim=1)
    return TokenScores(found_ids, torch.cat([own_scores, best[:, :count]], dim=1), ranks)
