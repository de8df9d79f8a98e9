"""Mixtures of experts: routers of every kind, and experts with weights of every kind."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="an extra")

from penstock.kernels.metadata import RouterParams
from penstock.kernels.ops import Packing, TensorRows
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.scheme import Scheme
from penstock.kernels.triton import experts
from penstock.kernels.triton.experts import Experts
from penstock.kernels.triton.packed import pack
from tests.kernels.triton.compare import DEVICE, bits, close, draw

BF16, F32 = torch.bfloat16, torch.float32
ROUTERS: list[dict[str, Any]] = [
    {"top_k": 2},
    {"top_k": 3, "renormalize": True, "scale": 2.5},
    {
        "top_k": 3,
        "scores": "sigmoid",
        "bias": draw(12),
        "groups": 4,
        "top_groups": 2,
        "min_sum": 1e-20,
        "renormalize": True,
    },
    {"top_k": 2, "scores": "sparsemixer", "threshold": 0.2},
    {"top_k": 3, "expert_scale": draw(12)},
]


def route(logits: Tensor, params: RouterParams) -> tuple[Tensor, Tensor]:
    shape = len(logits), params.top_k
    return experts.route(logits, params, torch.empty(shape, dtype=torch.int64), torch.empty(shape))


@pytest.mark.parametrize("options", ROUTERS)
def test_router(options: dict[str, Any]) -> None:
    """Guards against a bias in the weights, an expert of a group that was not chosen, and a tie won by the last. A row
    of NaN still names experts that exist."""
    params, logits = RouterParams(**options), draw(4, 12)
    logits[1, 5] = logits[1, 9] = 4.0
    ids, weights = route(logits, params)
    expected_ids, expected_weights = ReferenceOps(F32, DEVICE).route(logits, params)
    assert torch.equal(ids, expected_ids)
    close(weights, expected_weights)
    spoilt = logits.clone()
    spoilt[0] = float("nan")
    ids, alone = route(spoilt, params)
    assert torch.equal(bits(alone[1:]), bits(weights[1:]))
    assert len(set(ids[0].tolist())) == params.top_k
    assert ((ids >= 0) & (ids < 12)).all()


@pytest.mark.parametrize(
    ("scheme", "ends", "weigh"),
    [(None, (), False), (None, (7, 24), True), ("int8-x2", (), False), ("int4", (), False), ("int4-a16", (), True)],
)
def test_experts(scheme: str | None, ends: tuple[int, ...], weigh: bool) -> None:
    """Guards against a pair that gets another expert, row, scale or weight; an expert that nobody chose; and bits
    that depend on who else chose an expert."""
    ops, parsed = ReferenceOps(BF16, DEVICE), Scheme.parse(scheme)
    x, logits = draw(3, 40, dtype=BF16), draw(3, 4)
    logits[:, 2] = -9.0
    chosen = ops.route(logits, RouterParams(3))
    up = [draw(48, 40, seed=e) * 0.2 for e in range(4)], [draw(48, seed=e) for e in range(4)]
    down = [draw(20, 24, seed=e) * 0.2 for e in range(4)], [draw(20, seed=e) for e in range(4)]
    packings = Packing((), parsed, gated=True), Packing(ends, parsed)
    oracle = [
        [ops.pack_linear(weight, bias, packing) for weight, bias in zip(*each, strict=True)]
        for each, packing in zip((up, down), packings, strict=True)
    ]
    expected = ops.experts(x, oracle[0], oracle[1], chosen, "silu", weigh_inputs=weigh)
    packed = [
        [pack(TensorRows(weight), bias, packing, BF16, DEVICE) for weight, bias in zip(*each, strict=True)]
        for each, packing in zip((up, down), packings, strict=True)
    ]
    tables = Experts.of(packed[0]), Experts.of(packed[1])

    def compute(x: Tensor, chosen: tuple[Tensor, Tensor]) -> Tensor:
        return experts.experts(x, *tables, chosen, "silu", torch.empty(len(x), 20), weigh_inputs=weigh)

    found = compute(x, chosen)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    alone = compute(x[1:2], (chosen[0][1:2].contiguous(), chosen[1][1:2].contiguous()))
    assert torch.equal(bits(alone), bits(found[1:2]))
    if scheme is None and not weigh:  # in ascending order of the experts, which is not that of the router
        ids, weights = (item.gather(1, chosen[0].argsort(1)) for item in chosen)
        parts = [compute(x, (ids[:, i : i + 1].contiguous(), weights[:, i : i + 1].contiguous())) for i in range(3)]
        assert torch.equal(bits((parts[0] + parts[1]) + parts[2]), bits(found))
