"""Norms, rotary, embedding, routing and element-wise operations of the native library: formulas, rounding, levels, rows
that stand alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.metadata import Heads, RotaryParams
from penstock.kernels.reference import ReferenceOps

from .packed import TYPES, Native, Packed, levels, pack

F32, BF16 = torch.float32, torch.bfloat16
XIELU = (0.9, 1.2, 0.5, -1e-6)
UNIT = 2.0**-24  # the relative error of one float32 rounding
EPS = 1e-5


class Rows(Native):
    """The row operations on tensors."""

    def rms_norm(self, x: Tensor, weight: Tensor, dtype: torch.dtype = F32, eps: float = EPS) -> Tensor:
        out = torch.full_like(x, torch.nan, dtype=dtype)
        self._call("rms_norm", x, weight, eps, *x.shape, out, TYPES[dtype])
        return out

    def add_rms_norm(self, x: Tensor, h: Tensor, weight: Tensor, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor]:
        """Leaves x alone: the sum is new."""
        total, out = x.clone(), torch.full_like(x, torch.nan, dtype=dtype)
        self._call("add_rms_norm", total, h, weight, EPS, *x.shape, out, TYPES[dtype])
        return total, out

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype = F32, eps: float = EPS
    ) -> Tensor:
        out = torch.full_like(x, torch.nan, dtype=dtype)
        self._call("layer_norm", x, weight, bias, eps, *x.shape, out, TYPES[dtype])
        return out

    def add_layer_norm(
        self, x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype = F32
    ) -> tuple[Tensor, Tensor]:
        """Leaves x alone: the sum is new."""
        total, out = x.clone(), torch.full_like(x, torch.nan, dtype=dtype)
        self._call("add_layer_norm", total, h, weight, bias, EPS, *x.shape, out, TYPES[dtype])
        return total, out

    def add(self, x: Tensor, h: Tensor) -> Tensor:
        """Leaves x alone."""
        total = x.clone()
        self._call("add", total, h, x.numel())
        return total

    def round(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.full_like(x, torch.nan, dtype=dtype)
        self._call("round", x, x.numel(), out, TYPES[dtype])
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Leaves x alone."""
        scaled = x.clone()
        self._call("scale", scaled, factor, x.numel())
        return scaled

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """Leaves x alone."""
        capped = x.clone()
        self._call("softcap", capped, cap, x.numel())
        return capped

    def xielu(self, x: Tensor, dtype: torch.dtype = F32) -> Tensor:
        out = torch.full(x.shape, torch.nan, dtype=dtype)
        self._call("xielu", x, x.numel(), *XIELU, out, TYPES[dtype])
        return out

    def norm_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """Leaves x alone."""
        normed = x.clone()
        self._call("norm_heads", normed, weight, EPS, *x.shape, *weight.shape)
        return normed

    def rotary(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        heads: tuple[int, int, int],
        norms: tuple[Tensor, Tensor] | None = None,
        dtype: torch.dtype = F32,
        q_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_heads, num_kv_heads, head_dim = heads
        q_norm, k_norm = norms or (None, None)
        q, k, v = (
            torch.full((len(qkv), count, head_dim), torch.nan, dtype=dtype)
            for count in (num_heads, num_kv_heads, num_kv_heads)
        )
        sizes = (0 if q_scale is None else len(q_scale), 0) if cos_sin is None else cos_sin.shape
        self._call(
            "rotary_qkv", qkv, positions, cos_sin, q_scale, *sizes, len(qkv), *heads,
            q_norm, head_dim if q_norm is None else len(q_norm), k_norm, head_dim if k_norm is None else len(k_norm),
            None, 0, EPS, q, k, v, TYPES[dtype],
        )  # fmt: skip
        return q, k, v

    def packed_embedding(self, ids: Tensor, packed: Packed, scale: float = 1.0) -> Tensor:
        out = torch.full((len(ids), packed.weight.k), torch.nan)
        self._call("packed_embedding", ids, packed.address, len(ids), scale, out)
        return out

    def embedding(self, ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        out = torch.full((len(ids), table.shape[1]), torch.nan)
        self._call("embedding", ids, table, TYPES[table.dtype], len(table), len(ids), table.shape[1], scale, out)
        return out

    def route(self, logits: Tensor, top_k: int, renormalize: bool = False) -> tuple[Tensor, Tensor]:
        ids = torch.full((len(logits), top_k), -1)
        weights = torch.full((len(logits), top_k), torch.nan)
        self._call(
            "route", logits, *logits.shape, top_k, 0, None, 1, 1, 1, int(renormalize), 0, 1, None, 0, ids, weights
        )
        return ids, weights

    def _call(self, name: str, *arguments: Any) -> None:
        assert all(not isinstance(a, Tensor) or a.is_contiguous() for a in arguments)
        plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        assert getattr(self.library, f"penstock_{name}")(self.context, *plain) == 0


@pytest.fixture(params=levels())
def rows(request: pytest.FixtureRequest) -> Rows:
    return Rows(request.param)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def angles(positions: int, rotary_dim: int) -> Tensor:
    """cos_sin [positions, rotary_dim]."""
    turns = torch.outer(
        torch.arange(positions).double(), 100.0 ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    )
    return torch.cat([turns.cos(), turns.sin()], dim=1).float()


def bits(x: Tensor) -> Tensor:
    """Equal where the values are, down to the sign of zero; all NaN are one."""
    if not x.is_floating_point():
        return x
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32 if x.dtype == F32 else torch.int16)


def parts(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def same(a: Any, b: Any) -> bool:
    """Results, each a tensor or several, with equal bits."""
    return all(torch.equal(bits(one), bits(other)) for one, other in zip(parts(a), parts(b), strict=True))


def norm_error(n: int) -> float:
    """Relative: half that of the sum of squares (16 lanes, a tree), then mean, eps, root, inverse, two products."""
    return ((n / 16 + 6) / 2 + 6) * UNIT


def exact_norm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


SIZES = [1, 7, 16, 17, 100, 2048]


@pytest.mark.parametrize("n", SIZES)
def test_rms_norm_by_the_formula(rows: Rows, n: int) -> None:
    """Guards against eps outside the root, a mean over padding, and elements past the last whole vector."""
    x, weight = draw(5, n), draw(n, seed=1)
    for eps in (EPS, 0.5):
        exact = exact_norm(x, weight, eps)
        assert bool(((rows.rms_norm(x, weight, eps=eps) - exact).abs() <= exact.abs() * norm_error(n)).all())


@pytest.mark.parametrize("n", SIZES)
def test_add_rms_norm_is_an_addition_and_a_norm(rows: Rows, n: int) -> None:
    """Guards against a branch that is normed without the stream, or a sum that is not written back."""
    x, h, weight = draw(5, n), draw(5, n, seed=1), draw(n, seed=2)
    total, normed = rows.add_rms_norm(x, h, weight)
    assert torch.equal(total, x + h)
    assert same(normed, rows.rms_norm(total, weight))


def exact_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = EPS) -> Tensor:
    deviation = x.double() - x.double().mean(-1, keepdim=True)
    return exact_norm(deviation, weight, eps) + bias.double()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_layer_norm_by_the_formula(rows: Rows, n: int, offset: float) -> None:
    """Guards against a variance around zero, one from the mean of the squares (which a large mean cancels), lanes
    behind the end that count, eps outside of the root, and a bias before the weight."""
    x, weight, bias = draw(5, n) + offset, draw(n, seed=1), draw(n, seed=2)
    size = x.double().abs().mean(-1, keepdim=True)
    for eps in (EPS, 0.5):
        exact = exact_layer_norm(x, weight, bias, eps)
        scale = 1 / (x.double().var(-1, correction=0, keepdim=True) + eps).sqrt() * weight.double().abs()
        allowed = (exact - bias.double()).abs() * norm_error(n) + exact.abs() * UNIT
        allowed = allowed + 2 * size * (n / 16 + 8) * UNIT * scale  # the mean is off by so much
        assert bool(((rows.layer_norm(x, weight, bias, eps=eps) - exact).abs() <= allowed).all())
        without = rows.layer_norm(x, weight, None, eps=eps)
        assert torch.equal(without + bias, rows.layer_norm(x, weight, bias, eps=eps))


@pytest.mark.parametrize("n", SIZES)
def test_add_layer_norm_is_an_addition_and_a_norm(rows: Rows, n: int) -> None:
    """Guards against a mean of the stream alone, or a sum that is not written back."""
    x, h, weight, bias = draw(5, n), draw(5, n, seed=1), draw(n, seed=2), draw(n, seed=3)
    total, normed = rows.add_layer_norm(x, h, weight, bias)
    assert torch.equal(total, x + h)
    assert same(normed, rows.layer_norm(total, weight, bias))


def test_layer_norm_of_equal_elements_is_the_bias(rows: Rows) -> None:
    """Guards against a division by zero, and lanes behind the end that count as a deviation of -mean."""
    for n in (1, 7, 33, 64):  # 4.0 times these has an exact mean
        bias = draw(n)
        assert torch.equal(rows.layer_norm(torch.full((2, n), 4.0), torch.ones(n), bias), bias.expand(2, n))


def test_a_norm_of_zeros_is_zero(rows: Rows) -> None:
    """Guards against a division by zero where only eps keeps it away."""
    assert torch.equal(rows.rms_norm(torch.zeros(2, 40), torch.ones(40)), torch.zeros(2, 40))


@pytest.mark.parametrize("dim", [6, 32, 80, 128])
@pytest.mark.parametrize("rotated", ["all", "part", "none"])
@pytest.mark.parametrize("normed", [False, True])
def test_rotary_by_the_formula(rows: Rows, dim: int, rotated: str, normed: bool) -> None:
    """Guards against pairs taken as neighbours, a turned sign, a rest that is lost, and q's norm given to k."""
    heads = (3, 2, dim)
    tokens, rotary_dim = 5, {"all": dim, "part": dim // 2 // 2 * 2, "none": 0}[rotated]
    qkv, positions = draw(tokens, 7 * dim), torch.tensor([0, 3, 1, 7, 7])
    norms = (draw(dim, seed=1), draw(dim, seed=2)) if normed else None
    cos_sin = angles(8, rotary_dim) if rotary_dim else None
    q, k, v = rows.rotary(qkv, positions, cos_sin, heads, norms)
    before = qkv.view(tokens, 7, dim)
    assert torch.equal(v, before[:, 5:])
    for result, head, weight in ((q, before[:, :3], 0), (k, before[:, 3:5], 1)):
        x = head.double() if norms is None else exact_norm(head, norms[weight])
        table = torch.zeros(tokens, 1, 0).double() if cos_sin is None else cos_sin[positions, None].double()
        cos, sin = table.chunk(2, dim=-1)
        a, b, rest = x.split([rotary_dim // 2, rotary_dim // 2, dim - rotary_dim], dim=-1)
        exact = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
        size = torch.cat([(a * cos).abs() + (b * sin).abs(), (b * cos).abs() + (a * sin).abs(), rest.abs()], dim=-1)
        allowed = size * (2.01 * UNIT + (norm_error(dim) if normed else 0))
        assert bool(((result - exact).abs() <= allowed).all())


def test_rotary_is_the_reference_to_the_bit(rows: Rows) -> None:
    """Guards against fused products: without a norm there is one way to round, and plain torch has it."""
    qkv, positions, cos_sin = draw(9, 8 * 64), torch.arange(9) * 5, angles(50, 64)
    reference = ReferenceOps(BF16).rotary_qkv(qkv, positions, RotaryParams(Heads(4, 2, 64), cos_sin))
    assert same(rows.rotary(qkv, positions, cos_sin, (4, 2, 64), dtype=BF16), reference)


@pytest.mark.parametrize("dim", [1, 5, 33, 80, 129])
def test_rotary_without_a_table_only_splits(rows: Rows, dim: int) -> None:
    """Guards against heads of an odd size cut at half of it, or at a vector's end."""
    qkv = draw(3, 9 * dim)
    for dtype in (F32, BF16):
        parts = rows.rotary(qkv, torch.full((3,), -1), None, (5, 2, dim), dtype=dtype)
        assert torch.equal(torch.cat(parts, dim=1), qkv.view(3, 9, dim).to(dtype))


@pytest.mark.parametrize("dim", [6, 33, 64])
@pytest.mark.parametrize("heads", [(1, 1), (3, 2), (71, 1)])
def test_a_norm_of_all_heads_together(rows: Rows, dim: int, heads: tuple[int, int]) -> None:
    """Guards against a sum that ends with the first head, and against q's heads normed with k's. Each is an RMS norm
    of one long row, to the bit, and then rotated as ever."""
    num_heads, num_kv_heads = heads
    q_size, k_size = num_heads * dim, num_kv_heads * dim
    qkv, positions, cos_sin = draw(4, q_size + 2 * k_size), torch.arange(4), angles(4, dim // 2 // 2 * 2)
    norms = draw(q_size, seed=1), draw(k_size, seed=2)
    q, k, v = (x.contiguous() for x in qkv.split([q_size, k_size, k_size], dim=1))
    normed = torch.cat([rows.rms_norm(q, norms[0]), rows.rms_norm(k, norms[1]), v], dim=1)
    for table in (None, cos_sin):
        found = rows.rotary(qkv, positions, table, (*heads, dim), norms)
        assert same(found, rows.rotary(normed, positions, table, (*heads, dim)))


def test_a_norm_of_one_kind_leaves_the_other(rows: Rows) -> None:
    """Guards against k normed with q's weight or scale where only q has a norm of all its heads."""
    qkv, positions, weight = draw(4, 8 * 16), torch.arange(4), draw(64)
    plain = rows.rotary(qkv, positions, None, (4, 2, 16))
    only_q = rows.rotary(qkv, positions, None, (4, 2, 16), (weight, None))
    only_k = rows.rotary(qkv, positions, None, (4, 2, 16), (None, weight[:32].clone()))
    assert same(only_q[1:], plain[1:])
    assert same((only_k[0], only_k[2]), (plain[0], plain[2]))
    assert not same(only_q[0], plain[0])
    assert not same(only_k[1], plain[1])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("table", [True, False])
def test_queries_are_scaled_by_their_position(rows: Rows, table: bool, dtype: torch.dtype) -> None:
    """Guards against keys that are scaled too, and against a factor of another row. Powers of two round nothing."""
    qkv, positions, cos_sin = draw(4, 8 * 16), torch.tensor([2, 0, 3, 2]), angles(4, 8) if table else None
    factors = torch.tensor([1.0, 8.0, 2.0, 0.5])
    plain = rows.rotary(qkv, positions, cos_sin, (4, 2, 16), dtype=dtype)
    scaled = rows.rotary(qkv, positions, cos_sin, (4, 2, 16), dtype=dtype, q_scale=factors)
    assert same(scaled, (plain[0] * factors[positions, None, None].to(dtype), *plain[1:]))


@pytest.mark.parametrize("n", SIZES)
def test_sums_factors_rounding_and_soft_caps(rows: Rows, n: int) -> None:
    """Guards against a last vector left out, and against a cap that multiplies before it divides."""
    x, h = draw(5, n), draw(5, n, seed=1)
    assert torch.equal(rows.add(x, h), x + h)
    assert torch.equal(rows.scale(x, 0.3), x * 0.3)
    assert torch.equal(rows.round(x, F32), x)
    assert torch.equal(rows.round(x, BF16), x.bfloat16())
    for cap in (30.0, 0.5):
        exact = cap * torch.tanh(20 * x.double() / cap)
        assert bool(((rows.softcap(20 * x, cap) - exact).abs() <= exact.abs() * 8 * UNIT).all())


@pytest.mark.parametrize("n", SIZES)
def test_xielu_by_its_formula(rows: Rows, n: int) -> None:
    """Guards against one side taken for the other, and against terms that cancel near 0."""
    convex, concave, linear, bound = XIELU
    x = torch.cat([draw(5, n) * factor for factor in (3.0, 1e-3, 1e-7)])
    t = x.double()
    low = t.clamp(max=bound)
    curve = torch.where(low.abs() < 1e-3, low**2 / 2 + low**3 / 6 + low**4 / 24, torch.expm1(low) - low) + (low - t)
    exact = linear * t + torch.where(t > 0, convex * t**2, concave * curve)
    assert bool(((rows.xielu(x) - exact).abs() <= 20 * UNIT * t.abs().clamp(min=1) * (t.abs() - bound)).all())
    found = rows.xielu(torch.tensor([[torch.inf, torch.nan]]))[0]
    assert found[0] == torch.inf
    assert bool(found[1].isnan())


@pytest.mark.parametrize("size", [2, 7, 16, 40])
def test_heads_are_normed_one_by_one(rows: Rows, size: int) -> None:
    """Guards against another head's mean or weight, and against values that are normed, too."""
    x, weight = draw(3, 5 * size) + 10, draw(4, size)
    heads = x[:, : 4 * size].double().view(3, 4, size)
    centred = heads - heads.mean(dim=-1, keepdim=True)
    exact = centred / (centred.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight
    found = rows.norm_heads(x, weight)
    torch.testing.assert_close(found[:, : 4 * size].double(), exact.flatten(1), atol=1e-4, rtol=0)
    assert torch.equal(found[:, 4 * size :], x[:, 4 * size :])


def test_a_soft_cap_at_its_limits(rows: Rows) -> None:
    """Guards against an exponential that overflows: infinity is capped as well, and NaN stays."""
    x = torch.tensor([[float("-inf"), -3e38, -0.0, 0.0, 1e-30, 3e38, float("inf"), float("nan")]])
    found = rows.softcap(x, 30.0)[0]
    assert found[:7].tolist() == [-30, -30, 0, 0, x[0, 4].item(), 30, 30]
    assert bool(found[7].isnan())


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("n", [1, 7, 16, 100])
def test_embedding_takes_rows(rows: Rows, dtype: torch.dtype, n: int) -> None:
    """Guards against a row stride in the wrong unit."""
    table, ids = draw(11, n).to(dtype), torch.tensor([3, 0, 10, 3])
    assert torch.equal(rows.embedding(ids, table), table[ids].float())
    assert torch.equal(rows.embedding(ids, table, 62.5), table[ids].float() * 62.5)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("leaf_ends", [(5,), (130,), (3, 3, 70, 131)])
def test_embedding_from_a_packed_weight(rows: Rows, dtype: torch.dtype, leaf_ends: tuple[int, ...]) -> None:
    """Guards against the wrong panel, column or pair of a tied head, its padding between leaves, an odd last element,
    and bits that a table of the same rows would not give."""
    table = torch.randn(70, leaf_ends[-1], generator=torch.Generator().manual_seed(1)).to(dtype)
    table[3, 0], table[3, 1] = -0.0, torch.inf
    packed = pack(table.float().numpy(), "f32" if dtype == F32 else "bf16", leaf_ends=leaf_ends)
    ids = torch.tensor([0, 69, 31, 32, 3, 33, 3, *range(70)] * 9)
    for scale in (1.0, 62.5):
        found, expected = rows.packed_embedding(ids, packed, scale), rows.embedding(ids, table, scale)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    with pytest.raises(AssertionError):
        rows.packed_embedding(torch.tensor([70]), packed)


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 2), (8, 8), (16, 1), (60, 4), (128, 8)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_route_by_the_formula(rows: Rows, experts: int, top_k: int, renormalize: bool) -> None:
    """Guards against a softmax over the chosen only, padding that is chosen, and weights in another order."""
    logits = draw(20, experts) * 3
    ids, weights = rows.route(logits, top_k, renormalize)
    probabilities = logits.double().softmax(-1)
    exact, order = probabilities.sort(dim=-1, descending=True, stable=True)
    exact, order = exact[:, :top_k], order[:, :top_k]
    exact = exact / exact.sum(-1, keepdim=True) if renormalize else exact
    assert torch.equal(ids, order)
    reach = (logits.max(-1).values - logits.min(-1).values).double()[:, None]
    assert bool(((weights - exact).abs() <= exact * UNIT * 2 * (reach + experts / 16 + 16)).all())


def test_route_ties_go_to_the_lowest_id(rows: Rows) -> None:
    """Guards against a search from the end, or by lane: equal logits everywhere, also across vectors."""
    for experts in (3, 16, 40):
        assert rows.route(torch.zeros(2, experts), 3)[0].tolist() == [[0, 1, 2]] * 2
    logits = torch.zeros(1, 40)
    logits[0, [5, 21, 37, 38]] = 2.0
    assert rows.route(logits, 6)[0].tolist() == [[5, 21, 37, 38, 0, 1]]
    far = torch.tensor([[0.0, -500.0, -300.0, -float("inf")]])
    assert rows.route(far, 4)[0].tolist() == [[0, 1, 2, 3]]  # the last three have the probability 0


def test_a_row_without_a_softmax_routes_to_nan(rows: Rows) -> None:
    """Guards against a search that runs past the experts because nothing equals NaN."""
    infinity = float("inf")
    logits = draw(5, 20)
    alone = rows.route(logits, 3)
    logits[1, 7], logits[2, 7], logits[3] = torch.nan, infinity, -infinity
    ids, weights = rows.route(logits, 3)
    for row in (1, 2, 3):
        assert ids[row].tolist() == [0, 1, 2]
        assert bool(weights[row].isnan().all())
    for row in (0, 4):
        assert same((ids[row], weights[row]), (alone[0][row], alone[1][row]))


def operations(tokens: int, width: int, seed: int = 0) -> dict[str, Callable[[Rows, Tensor, torch.dtype], Any]]:
    """Each operation on the rows that an index names."""
    x, h, weight = draw(tokens, width, seed=seed), draw(tokens, width, seed=seed + 1), draw(width, seed=2)
    heads = (width // 16 - 4, 2, 16)
    cos_sin, positions, norms = angles(100, 12), torch.arange(tokens) % 90, (draw(16, seed=3), draw(16, seed=4))
    factors = draw(100, seed=8)
    table, bias, all_norms = draw(30, width), draw(width, seed=5), (draw(heads[0] * 16, seed=6), draw(32, seed=7))
    return {
        "rms_norm": lambda rows, i, dtype: rows.rms_norm(x[i], weight, dtype),
        "add_rms_norm": lambda rows, i, dtype: rows.add_rms_norm(x[i], h[i], weight, dtype),
        "layer_norm": lambda rows, i, dtype: rows.layer_norm(x[i], weight, bias, dtype),
        "add_layer_norm": lambda rows, i, dtype: rows.add_layer_norm(x[i], h[i], weight, bias, dtype),
        "add": lambda rows, i, dtype: rows.add(x[i], h[i]),
        "round": lambda rows, i, dtype: rows.round(x[i], dtype),
        "scale": lambda rows, i, dtype: rows.scale(x[i], 0.7),
        "softcap": lambda rows, i, dtype: rows.softcap(x[i], 0.7),
        "xielu": lambda rows, i, dtype: rows.xielu(x[i], dtype),
        "norm_heads": lambda rows, i, dtype: rows.norm_heads(x[i], draw(5, 16, seed=9)),
        "rotary_all": lambda rows, i, dtype: rows.rotary(x[i], positions[i], cos_sin, heads, all_norms, dtype),
        "rotary": lambda rows, i, dtype: rows.rotary(x[i], positions[i], cos_sin, heads, norms, dtype),
        "rotary_scaled": lambda rows, i, dtype: rows.rotary(x[i], positions[i], None, heads, norms, dtype, factors),
        "embedding": lambda rows, i, dtype: rows.embedding(positions[i] % 30, table.to(dtype), 1.3),
        "route": lambda rows, i, dtype: rows.route(x[i], 4, True),
    }


@pytest.mark.parametrize("name", operations(1, 112))
@pytest.mark.parametrize("width", [112, 2000])
def test_levels_agree_to_the_bit(name: str, width: int) -> None:
    """Guards against a fused multiply-add, or another order of a sum, on one level."""
    for dtype in (F32, BF16):
        results = []
        for level in levels():
            rows = Rows(level)
            results.append(operations(9, width)[name](rows, torch.arange(9), dtype))
        assert all(same(results[0], other) for other in results)


@pytest.mark.parametrize("name", operations(1, 112))
@pytest.mark.parametrize("level", levels())
def test_a_row_does_not_know_the_others(name: str, level: int) -> None:
    """Guards against a result that depends on the batch, the order of rows or the thread; 2048 wide, 16 rows and more
    are shared among threads."""
    operation = operations(70, 2048)[name]
    by_threads = [Rows(level, threads) for threads in (1, 2, 3)]
    alone = [operation(by_threads[0], torch.tensor([row]), BF16) for row in range(70)]

    @settings(max_examples=6)
    @given(st.permutations(range(70)), st.integers(1, 70), st.sampled_from(by_threads))
    def check(order: list[int], count: int, rows: Rows) -> None:
        together = parts(operation(rows, torch.tensor(order[:count]), BF16))
        for at, row in enumerate(order[:count]):
            assert same(tuple(item[at] for item in together), tuple(item[0] for item in parts(alone[row])))

    check()


def test_threads_share_no_scratch(rows: Rows) -> None:
    """Guards against probabilities of one row in another's memory: many rows, each with a search of its own."""
    logits = draw(4000, 100)
    alone = rows.route(logits, 8)
    together = Rows(levels()[-1], 3)
    for _ in range(3):
        assert same(together.route(logits, 8), alone)


ROUNDED = ["xielu", "rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "rotary", "rotary_all"]


@pytest.mark.parametrize("name", ROUNDED)
def test_bfloat16_is_the_float32_result_rounded_once(rows: Rows, name: str) -> None:
    """Guards against a rounding before the last operation."""
    operation = operations(20, 112)[name]
    wide, narrow = (parts(operation(rows, torch.arange(20), dtype)) for dtype in (F32, BF16))
    for a, b in zip(wide, narrow, strict=True):
        assert same(a.to(b.dtype), b)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_stays_in_its_row(rows: Rows, bad: float) -> None:
    """Guards against lanes that two rows share."""
    h, weight = draw(4, 35, seed=1), draw(35, seed=2)
    norms: list[Callable[[Tensor], Tensor]] = [
        lambda x: rows.add_rms_norm(x, h, weight)[1],
        lambda x: rows.add_layer_norm(x, h, weight, weight)[1],
    ]
    for norm in norms:
        x = draw(4, 35)
        before = norm(x)
        x[2, 33] = bad
        after = norm(x)
        assert bool(after[2].isnan().any())
        assert same(before[[0, 1, 3]], after[[0, 1, 3]])


def test_no_rows_are_no_work(rows: Rows) -> None:
    """Guards against a range that is not empty."""
    assert rows.rms_norm(torch.empty(0, 8), torch.ones(8)).shape == (0, 8)
    assert rows.layer_norm(torch.empty(0, 8), torch.ones(8), None).shape == (0, 8)
    assert rows.softcap(torch.empty(0, 8), 1.0).shape == (0, 8)
    assert rows.embedding(torch.empty(0, dtype=torch.int64), torch.ones(3, 8)).shape == (0, 8)
    assert rows.route(torch.empty(0, 8), 2)[0].shape == (0, 2)


def test_nothing_is_written_behind_the_last_element(rows: Rows) -> None:
    """Guards against a last vector that is stored whole."""
    x, weight = draw(5, 19), torch.ones(19)
    writers: list[tuple[Any, ...]] = [
        ("rms_norm", x, weight, EPS, 5, 19),
        ("layer_norm", x, weight, None, EPS, 5, 19),
        ("round", x, 5 * 19),
        ("xielu", x, 5 * 19, *XIELU),
    ]
    for dtype in (F32, BF16):
        for name, *arguments in writers:
            memory = torch.full((5 * 19 + 32,), 7.0, dtype=dtype)
            rows._call(name, *arguments, memory, TYPES[dtype])
            assert bool((memory[5 * 19 :] == 7.0).all())
            assert not bool((memory[: 5 * 19] == 7.0).any())
    wide = torch.full((5 * 19 + 32,), 7.0)
    rows._call("add", wide, x, 5 * 19)
    rows._call("softcap", wide, 0.5, 5 * 19)
    assert bool((wide[5 * 19 :] == 7.0).all())
    assert bool((wide[: 5 * 19].abs() <= 0.5).all())
