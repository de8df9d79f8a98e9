"""Targets for operations on rows, for adapters, for the router and for logits."""

import ctypes
import itertools
from dataclasses import dataclass

import numpy as np

from penstock.kernels.cpu.library import PenstockLora
from penstock.kernels.tensors import FLOAT32, INT32, INT64, UINT8, Array, ArrayType
from tools.fuzz_native.products import ACTIVATIONS, OTHER_ACTIVATIONS
from tools.fuzz_native.target import OK, OUT_OF_RANGE, PRECISION, TYPES, Fuzz, same_bits

EPS = 1e-5


def rms_norm(fuzz: Fuzz) -> None:
    _norm(fuzz, "rms_norm", adds=False, centred=False)


def add_rms_norm(fuzz: Fuzz) -> None:
    _norm(fuzz, "add_rms_norm", adds=True, centred=False)


def layer_norm(fuzz: Fuzz) -> None:
    _norm(fuzz, "layer_norm", adds=False, centred=True)


def add_layer_norm(fuzz: Fuzz) -> None:
    _norm(fuzz, "add_layer_norm", adds=True, centred=True)


def _norm(fuzz: Fuzz, name: str, *, adds: bool, centred: bool) -> None:
    rows, n, dtype = fuzz.rows(), fuzz.size(1), fuzz.dtype()
    x, h, weight, bias = fuzz.floats(rows, n).values, fuzz.normal(rows, n).values, fuzz.normal(n), None
    if centred and fuzz.chance(0.5):
        bias = fuzz.normal(n)

    def compute(chosen: Array) -> Array:
        inputs = [fuzz.array(x[chosen])] + ([fuzz.array(h[chosen])] if adds else [])
        out = fuzz.out((len(chosen), n), dtype)
        biases = [bias] if centred else []
        fuzz.call(name, *inputs, weight, *biases, EPS, len(chosen), n, out, TYPES[dtype])
        return out.values

    found = fuzz.same_alone(compute, rows)
    with np.errstate(all="ignore"):
        total = (x + h if adds else x).astype(np.float64)
        total = total - total.mean(axis=1, keepdims=True) if centred else total
        expected = total / np.sqrt((total**2).mean(axis=1, keepdims=True) + EPS) * weight.values
        expected = expected if bias is None else expected + bias.values
        moderate = np.abs(x).max(axis=1, initial=0) < 1e15  # the squares of larger numbers overflow float32
    fuzz.close_to(found[moderate], expected[moderate], 4 * PRECISION[dtype])


def add(fuzz: Fuzz) -> None:
    x, h = (fuzz.floats(fuzz.size(), fuzz.rows()) for _ in range(2))
    count = min(x.values.size, h.values.size)
    with np.errstate(all="ignore"):
        expected = x.values.reshape(-1)[:count] + h.values.reshape(-1)[:count]
    fuzz.call("add", x, h, count)
    same_bits(x.values.reshape(-1)[:count], expected)


def add_gated(fuzz: Fuzz) -> None:
    rows, n = fuzz.rows(), fuzz.size(1)
    x, h, gates = fuzz.floats(rows, n).values, fuzz.normal(rows, n).values, fuzz.normal(rows).values

    def compute(chosen: Array) -> Array:
        given = fuzz.array(x[chosen])
        fuzz.call("add_gated", given, fuzz.array(h[chosen]), fuzz.array(gates[chosen]), len(chosen), n)
        return given.values

    found = fuzz.same_alone(compute, rows)
    with np.errstate(all="ignore"):
        expected = x.astype(np.float64) + h / (1 + np.exp(-gates.astype(np.float64)))[:, None]
    moderate = np.abs(x).max(axis=1, initial=0) < 1e15
    fuzz.close_to(found[moderate], expected[moderate], 4 * PRECISION[FLOAT32])


def round_(fuzz: Fuzz) -> None:
    count, dtype = fuzz.size() * fuzz.rows(), fuzz.dtype()
    x, out = fuzz.floats(count), fuzz.out((count,), dtype)
    fuzz.call("round", x, count, out, TYPES[dtype])
    with np.errstate(all="ignore"):
        same_bits(out.values, x.values.astype(dtype))


def softcap(fuzz: Fuzz) -> None:
    x, cap = fuzz.floats(fuzz.size() * fuzz.rows()), 30.0
    expected = cap * np.tanh(x.values.astype(np.float64) / cap)
    fuzz.call("softcap", x, cap, x.values.size)
    fuzz.close_to(x.values, expected)


def scale(fuzz: Fuzz) -> None:
    x = fuzz.floats(fuzz.size() * fuzz.rows())
    with np.errstate(all="ignore"):
        expected = x.values * np.float32(0.3)
    fuzz.call("scale", x, 0.3, x.values.size)
    same_bits(x.values, expected)


def xielu(fuzz: Fuzz) -> None:
    count, dtype = fuzz.size() * fuzz.rows(), fuzz.dtype()
    x, out = fuzz.floats(count), fuzz.out((count,), dtype)
    fuzz.call("xielu", x, count, 0.9, 1.2, 0.5, -1e-6, out, TYPES[dtype])
    moderate = np.abs(x.values) < 1e15
    t = x.values[moderate].astype(np.float64)
    low = np.minimum(t, -1e-6)
    expected = 0.5 * t + np.where(t > 0, 0.9 * t**2, 1.2 * (np.expm1(low) - t))
    fuzz.close_to(out.values[moderate], expected, 4 * PRECISION[dtype])


def activate(fuzz: Fuzz) -> None:
    rows, columns, gated, dtype = fuzz.rows(), fuzz.size(1), fuzz.chance(0.5), fuzz.dtype()
    x = fuzz.floats(rows, columns * (1 + gated)).values
    activation = fuzz.random.choice((*ACTIVATIONS, *OTHER_ACTIVATIONS))

    def compute(chosen: Array) -> Array:
        given, out = fuzz.array(x[chosen]), fuzz.out((len(chosen), columns), dtype)
        fuzz.call("activate", given, len(chosen), x.shape[1], activation, int(gated), out, TYPES[dtype])
        return out.values

    found = fuzz.same_alone(compute, rows)
    if activation in ACTIVATIONS:
        with np.errstate(all="ignore"):
            expected = ACTIVATIONS[activation](x[:, :columns].astype(np.float64))
            expected = expected * x[:, columns:] if gated else expected
        fuzz.close_to(found, expected, PRECISION[dtype])


@dataclass
class Lora:
    """Random adapters and the slots of some rows, with the arrays of struct; b as [slots, max_rank, n]."""

    struct: PenstockLora
    slots: Array
    expected: int  # the status of a call: sometimes a slot is out of range
    a: Array
    b: Array
    factors: Array
    offsets: Array
    ranks: Array
    scaled: Array

    @property
    def pieces(self) -> list[slice]:
        ends = self.struct.piece_ends[: self.struct.pieces]
        return [slice(begin, end) for begin, end in itertools.pairwise((0, *ends))]


def _lora(fuzz: Fuzz, dtype: ArrayType) -> Lora:
    n, k = fuzz.size(1), fuzz.random.choice((fuzz.size(1, 129), fuzz.size(1)))
    rank, slots, pieces = fuzz.size(1, 33), fuzz.random.randint(1, 3), fuzz.random.randint(1, 4)
    leaves, rows = fuzz.random.choice((1, 2, 4, 8)), fuzz.random.choice((0, 1, 2, 3, 5, 70))
    a, b = fuzz.normal(slots, pieces, rank, k, dtype=dtype), fuzz.normal(slots, -(-n // 16), rank, 16, dtype=dtype)
    factors, offsets = fuzz.normal(slots, n), fuzz.normal(slots, n)
    ranks, scaled = (fuzz.array(fuzz.numbers.integers(0, high, slots, dtype=INT32)) for high in (rank + 1, 2))
    struct = PenstockLora(n=n, k=k, max_rank=rank, slots=slots, pieces=pieces, leaves=leaves, type=TYPES[dtype])
    struct.piece_ends[:pieces] = [*sorted(fuzz.random.randint(0, n) for _ in range(pieces - 1)), n]
    struct.leaf_ends[:leaves] = [*sorted(fuzz.random.randint(0, k) for _ in range(leaves - 1)), k]
    struct.a, struct.b, struct.factors, struct.offsets = (part.address for part in (a, b, factors, offsets))
    struct.ranks, struct.scaled = ranks.address, scaled.address
    of_rows, expected = fuzz.numbers.integers(-1, slots, rows, dtype=INT32), OK
    if rows and fuzz.chance(0.2):
        of_rows[fuzz.random.randrange(rows)], expected = fuzz.random.choice((-2, slots, 2**31 - 1)), OUT_OF_RANGE
    columns = b.values.transpose(0, 2, 1, 3).reshape(slots, rank, -1)[:, :, :n].astype(np.float64)
    of_slots = (part.values for part in (factors, offsets, ranks, scaled))
    return Lora(struct, of_rows, expected, a.values.astype(np.float64), columns, *of_slots)


def lora_shrink(fuzz: Fuzz) -> None:
    dtype = fuzz.dtype()
    lora = _lora(fuzz, dtype)
    rows, struct = len(lora.slots), lora.struct
    x, shape = fuzz.floats(rows, struct.k, dtype=dtype).values, (struct.pieces, struct.max_rank)

    def compute(chosen: Array) -> Array:
        hidden, slots = fuzz.array(np.full((len(chosen), *shape), np.float32(7))), fuzz.array(lora.slots[chosen])
        given, at = fuzz.array(x[chosen]), ctypes.addressof(struct)
        fuzz.call("lora_shrink", at, slots, len(chosen), given, hidden, expected=lora.expected)
        return hidden.values

    expected = np.full((rows, *shape), 7.0)  # as before: no adapter, a rank that the adapter lacks, or a wrong slot
    if lora.expected:
        same_bits(compute(np.arange(rows)), expected)
        return
    found = fuzz.same_alone(compute, rows)
    with np.errstate(all="ignore"):
        for row, slot in enumerate(lora.slots):
            if slot >= 0:
                own = lora.a[slot, :, : lora.ranks[slot]]
                expected[row, :, : lora.ranks[slot]] = own @ x[row].astype(np.float64)
        moderate = (np.abs(x.astype(np.float32)) < 1e3).all(axis=1)
    fuzz.close_to(found[moderate], expected[moderate], 2 * PRECISION[FLOAT32])


def lora_expand(fuzz: Fuzz) -> None:
    lora = _lora(fuzz, fuzz.dtype())
    rows, struct = len(lora.slots), lora.struct
    stride = struct.n + fuzz.random.choice((0, 0, 1, 16))
    hidden, y = fuzz.normal(rows, struct.pieces, struct.max_rank).values, fuzz.floats(rows, stride).values

    def compute(chosen: Array) -> Array:
        out, slots, given = fuzz.array(y[chosen]), fuzz.array(lora.slots[chosen]), fuzz.array(hidden[chosen])
        at = ctypes.addressof(struct)
        fuzz.call("lora_expand", at, slots, len(chosen), given, out, stride, expected=lora.expected)
        return out.values

    if lora.expected:
        same_bits(compute(np.arange(rows)), y)
        return
    found, expected = fuzz.same_alone(compute, rows), y.astype(np.float64)
    with np.errstate(all="ignore"):
        for row, slot in enumerate(lora.slots):
            if slot >= 0 and lora.scaled[slot]:
                expected[row, : struct.n] = expected[row, : struct.n] * lora.factors[slot] + lora.offsets[slot]
            for piece, columns in enumerate(lora.pieces if slot >= 0 else ()):
                rank = lora.ranks[slot]
                expected[row, columns] += hidden[row, piece, :rank] @ lora.b[slot, :rank, columns]
    fuzz.close_to(found[:, : struct.n], expected[:, : struct.n])
    same_bits(found[:, struct.n :], y[:, struct.n :])


def norm_heads(fuzz: Fuzz) -> None:
    rows, heads, size = fuzz.rows(), fuzz.random.randint(1, 5), fuzz.size(1, 129)
    columns = heads * size + fuzz.random.choice((0, 1, 40))
    x, weight = fuzz.floats(rows, columns).values, fuzz.normal(heads, size)

    def compute(chosen: Array) -> Array:
        given = fuzz.array(x[chosen])
        fuzz.call("norm_heads", given, weight, EPS, len(chosen), columns, heads, size)
        return given.values

    found = fuzz.same_alone(compute, rows)
    with np.errstate(all="ignore"):
        normed = x[:, : heads * size].astype(np.float64).reshape(rows, heads, size)
        normed = normed - normed.mean(axis=2, keepdims=True)
        normed = normed / np.sqrt((normed**2).mean(axis=2, keepdims=True) + EPS) * weight.values
        moderate = np.abs(x).max(axis=1, initial=0) < 1e15
    fuzz.close_to(found[moderate, : heads * size], normed.reshape(rows, heads * size)[moderate], 4 * PRECISION[FLOAT32])
    same_bits(found[:, heads * size :], x[:, heads * size :])


def embedding(fuzz: Fuzz) -> None:
    rows, n, table_rows, dtype = fuzz.rows(), fuzz.size(1, 129), fuzz.size(1, 129), fuzz.dtype()
    (ids, expected), table = fuzz.ids(rows, limit=table_rows), fuzz.floats(table_rows, n, dtype=dtype)
    out = fuzz.out((rows, n))
    fuzz.call("embedding", ids, table, TYPES[dtype], table_rows, rows, n, 2.0, out, expected=expected)
    with np.errstate(all="ignore"):
        if not expected:
            same_bits(out.values, table.values[ids.values].astype(np.float32) * np.float32(2))
    if expected:
        same_bits(out.values, np.zeros((rows, n)))  # refused before anything is written


def rotary_qkv(fuzz: Fuzz) -> None:
    rows, kv_heads, head_dim = fuzz.rows(), fuzz.random.choice((1, 2)), 2 * fuzz.random.randint(1, 40)
    heads, dtype = kv_heads * fuzz.random.choice((1, 3)), fuzz.dtype()
    positions, rotary = fuzz.size(1), 2 * fuzz.random.randint(1, head_dim // 2)
    norms = fuzz.random.choice(((0, 0), (head_dim, head_dim), (heads * head_dim, kv_heads * head_dim)))
    values_are_keys, v_norm = fuzz.chance(0.2), fuzz.random.choice((None, fuzz.normal(head_dim)))
    qkv = fuzz.floats(rows, (heads + (1 if values_are_keys else 2) * kv_heads) * head_dim).values
    (at, expected), cos_sin = fuzz.ids(rows, limit=positions), fuzz.normal(positions, rotary)
    cos_sin, q_scale = fuzz.random.choice((cos_sin, None)), fuzz.random.choice((fuzz.normal(positions), None))
    weights = [item for size in norms for item in (fuzz.normal(size) if size else None, size)]
    if cos_sin is None and q_scale is None:
        expected = 0  # no position is looked up

    def compute(chosen: Array) -> Array:
        outs = [fuzz.out((len(chosen), count * head_dim), dtype) for count in (heads, kv_heads, kv_heads)]
        fuzz.call(
            "rotary_qkv", fuzz.array(qkv[chosen]), fuzz.array(at.values[chosen]), cos_sin, q_scale, positions,
            rotary, len(chosen), heads, kv_heads, head_dim, *weights, v_norm, int(values_are_keys), 1e-6, *outs,
            TYPES[dtype], expected=expected,
        )  # fmt: skip
        return np.concatenate([out.values for out in outs], axis=1)

    if expected:
        compute(np.arange(rows))
        return
    found = fuzz.same_alone(compute, rows)
    if v_norm is not None:
        return
    values = qkv[:, -kv_heads * head_dim :]
    fuzz.close_to(found[:, (heads + kv_heads) * head_dim :], values.astype(np.float64), PRECISION[dtype])


def route(fuzz: Fuzz) -> None:
    rows, experts = fuzz.rows(), fuzz.random.choice((1, 2, 3, 8, 60, 64))
    top_k, renormalize = fuzz.random.randint(1, min(experts, 8)), fuzz.chance(0.5)
    logits = fuzz.floats(rows, experts)
    ids, weights = fuzz.out((rows, top_k), INT64), fuzz.out((rows, top_k))
    groups = fuzz.random.choice([item for item in (1, 2, 3, 4, 8) if experts % item == 0])
    top_groups = fuzz.random.choice([item for item in range(1, groups + 1) if item * experts // groups >= top_k])
    kind = fuzz.random.choice((0, 1, 2, 3))
    bias, expert_scale = (fuzz.random.choice((None, fuzz.floats(experts))) for _ in range(2))
    numbers = int(renormalize), fuzz.random.choice((0.0, 1e-12)), 1.0, expert_scale, 0.02, ids, weights
    plain = (kind, bias, groups, expert_scale) == (0, None, 1, None)
    group_top = fuzz.random.randint(1, experts // groups)
    fuzz.call("route", logits, rows, experts, top_k, kind, bias, groups, top_groups, group_top, *numbers)
    for row in range(rows):
        assert len({*ids.values[row].tolist()}) == top_k, "route: an expert is chosen twice"
        assert ((ids.values[row] >= 0) & (ids.values[row] < experts)).all(), "route: no such expert"
        scores = logits.values[row].astype(np.float64)
        if not (plain and (np.abs(scores) < 80).all()):  # probabilities that round to zero are equal
            continue
        assert np.array_equal(ids.values[row], np.argsort(-scores, kind="stable")[:top_k]), "route: not the largest"
        shares = np.exp(scores - scores.max())[ids.values[row]]
        shares /= shares.sum() if renormalize else np.exp(scores - scores.max()).sum()
        fuzz.close_to(weights.values[row], shares)


def log_softmax(fuzz: Fuzz) -> None:
    rows, vocab = fuzz.rows(), fuzz.size(1)
    logits = fuzz.floats(rows, vocab).values

    def compute(chosen: Array) -> Array:
        given = fuzz.array(logits[chosen])
        out = given if fuzz.chance(0.5) else fuzz.out((len(chosen), vocab))
        fuzz.call("log_softmax", given, len(chosen), vocab, out)
        return out.values

    found = fuzz.same_alone(compute, rows)
    moderate = (np.abs(logits) < 1e4).all(axis=1)
    x = logits[moderate].astype(np.float64)
    fuzz.close_to(found[moderate], x - np.log(np.exp(x).sum(axis=1, keepdims=True)), 1e-5)


def finite_rows(fuzz: Fuzz) -> None:
    rows, vocab = fuzz.rows(), fuzz.size(1)
    logits, out = fuzz.floats(rows, vocab), fuzz.out((rows,), UINT8)
    if rows and fuzz.chance(0.2):
        logits.values[0] = -np.inf
    fuzz.call("finite_rows", logits, rows, vocab, out)
    x = logits.values
    right = ~np.isnan(x).any(axis=1) & ~(x == np.inf).any(axis=1) & (x > -np.inf).any(axis=1)
    assert np.array_equal(out.values, right.astype(np.uint8)), f"finite_rows: {out.values} where {right} is right"


TARGETS = {
    "rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "layer_norm": layer_norm, "add_layer_norm": add_layer_norm,
    "norm_heads": norm_heads, "add": add, "add_gated": add_gated, "round": round_, "scale": scale, "softcap": softcap,
    "xielu": xielu, "embedding": embedding, "rotary_qkv": rotary_qkv, "route": route, "log_softmax": log_softmax,
    "finite_rows": finite_rows, "activate": activate, "lora_shrink": lora_shrink, "lora_expand": lora_expand,
}  # fmt: skip
