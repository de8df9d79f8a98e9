"""Mixtures of experts: the router, and the products of each row's own experts.

A pair is a row and one of its experts: number row * k + place among the k that the router gave the row.

`route_rows`: a program owns a row of logits, and finds its experts one after the other.
`list_pairs`: a program owns an expert, and lists the pairs that chose it, in ascending order.
`weigh_pairs`: a program owns BLOCK elements of a pair's input.
`expert_rows`: a program owns COLUMNS outputs of up to ROWS pairs of one expert, over all of K.
`add_pairs`: a program owns BLOCK outputs of a row, and adds its pairs in ascending order of their experts.

Which pairs are in a program has no influence on bits: each is a row of a product (products.py, int4.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from penstock.kernels.metadata import RouterParams
from penstock.kernels.triton import rows
from penstock.kernels.triton.configurations import tile
from penstock.kernels.triton.elements import NEVER, divide, sigmoid
from penstock.kernels.triton.int4 import group_outputs, name_of
from penstock.kernels.triton.launch import ANEW, Scratch, launch
from penstock.kernels.triton.packed import TritonLinear
from penstock.kernels.triton.products import kind_of, outputs
from penstock.kernels.triton.quantize import operand

BLOCK = 1024


@triton.jit
def first_best(values, candidates, at, E: tl.constexpr):
    """Find the lowest index of the largest candidate; NaN counts as the smallest, so that an index is always found."""
    values = tl.where(candidates & (values == values), values, NEVER)
    best = tl.max(values, axis=0)
    return tl.min(tl.where(candidates & (values == best), at, E), axis=0), best


@triton.jit
def route_rows(
    logits, bias, expert_scale, ids, weights, scale, min_sum, threshold,
    E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, SCORES: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    free = at < E
    x = tl.load(logits + row * E + at, mask=free, other=NEVER)
    scores = x
    if SCORES == "softmax":
        scores = tl.exp(x - tl.max(x, axis=0))
        scores = divide(scores, tl.sum(scores, axis=0))
    elif SCORES == "sigmoid":
        scores = sigmoid(x)
    choice = scores
    if bias is not None:
        choice = scores + tl.load(bias + at, mask=free, other=0.0)
    if SCORES == "chosen_sigmoid":
        scores = sigmoid(x)
    if GROUPS > 1:
        free = free & best_groups(choice, at, E, GROUPS, TOP_GROUPS, GROUP_TOP)
    found, total = tl.zeros([BLOCK], tl.float32), tl.zeros([], tl.float32)
    factors = tl.full([BLOCK], 1.0, tl.float32)
    for place in tl.static_range(K):
        index, best = first_best(choice, free, at, E)
        if SCORES == "sparsemixer":
            visible = free & (best - x <= threshold * tl.maximum(tl.abs(x), best))
            weight = divide(tl.full([], 1.0, tl.float32), tl.sum(tl.where(visible, tl.exp(x - best), 0.0), axis=0))
        else:
            weight = tl.sum(tl.where(at == index, scores, 0.0), axis=0)
        total = total + weight
        found = tl.where(at == place, weight, found)
        if expert_scale is not None:
            factors = tl.where(at == place, tl.load(expert_scale + index), factors)
        tl.store(ids + row * K + place, index.to(tl.int64))
        free = free & (at != index)
    if RENORMALIZE:
        found = divide(found, tl.maximum(total, min_sum, propagate_nan=tl.PropagateNan.ALL))
    tl.store(weights + row * K + at, found * scale * factors, mask=at < K)


@triton.jit
def best_groups(choice, at, E: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr):
    """Tell which experts are in the best groups."""
    size: tl.constexpr = E // GROUPS
    sums = tl.full(at.shape, NEVER, tl.float32)  # of group i at place i
    for group in tl.static_range(GROUPS):
        free = at // size == group
        total = tl.zeros([], tl.float32)
        for _ in tl.static_range(GROUP_TOP):
            index, best = first_best(choice, free, at, E)
            total = total + best
            free = free & (at != index)
        sums = tl.where(at == group, total, sums)
    free, chosen = at < GROUPS, at < 0
    for _ in tl.static_range(TOP_GROUPS):
        index, _best = first_best(sums, free, at, E)
        free = free & (at != index)
        chosen = chosen | (at // size == index)
    return chosen


@triton.jit(do_not_specialize=["pairs", "capacity"])
def list_pairs(ids, lists, counts, pairs, capacity, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    count = tl.zeros([], tl.int32)
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        own = (tl.load(ids + at, mask=at < pairs, other=-1) == expert).to(tl.int32)
        place = count + tl.cumsum(own, axis=0) - 1
        tl.store(lists + expert * capacity + place, at, mask=own > 0)
        count = count + tl.sum(own, axis=0)
    tl.store(counts + expert, count)


@triton.jit
def weigh_pairs(x, weights, out, N, K: tl.constexpr, BLOCK: tl.constexpr):
    pair, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + pair // K * N + at, mask=at < N).to(tl.float32) * tl.load(weights + pair)
    tl.store(out + pair * N + at, value.to(out.dtype.element_ty), mask=at < N)


@triton.jit
def add_pairs(branches, ids, weights, out, N, K: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, PLACES)
    far: tl.constexpr = 2**31
    experts = tl.load(ids + row * K + place, mask=place < K, other=far)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(0, K):
        expert = tl.min(experts, axis=0)
        index = tl.min(tl.where(experts == expert, place, PLACES), axis=0)
        experts = tl.where(place == index, far, experts)
        branch = tl.load(branches + (row * K + index) * N + at, mask=at < N, other=0.0)
        if weights is not None:
            branch = tl.load(weights + row * K + index) * branch
        total = total + branch
    tl.store(out + row * N + at, total, mask=at < N)


@triton.jit
def pointer_of(table, index, KIND: tl.constexpr):
    """Read a pointer from a table."""
    return tl.multiple_of(tl.load(table + index).to(tl.pointer_type(KIND)), 16)


@triton.jit(do_not_specialize=["M", "capacity"])
def expert_rows(
    x, table, lists, counts, x_scales, starts, out, M, N, K, length, quads, capacity, experts,
    SHARE: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, LEAVES: tl.constexpr, WHOLE: tl.constexpr,
    SLICES: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """SHARE: so many neighbouring pairs have one row of x. table: addresses of values, scales and biases."""
    expert, m0 = tl.program_id(2), tl.program_id(1) * ROWS
    count = tl.load(counts + expert)
    if m0 < count:
        rn, rm = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), m0 + tl.arange(0, ROWS)
        is_pair = rm < count
        pair = tl.load(lists + expert * capacity + rm, mask=is_pair, other=0).to(tl.int64)
        scales = None if x_scales is None else x_scales + pair // SHARE
        w = pointer_of(table, expert, KIND)
        bias = pointer_of(table, 2 * experts + expert, tl.float32) if BIASED else None
        if SIZE > 0:
            w_scales = pointer_of(table, experts + expert, tl.bfloat16)
            value = group_outputs(
                x + pair // SHARE * K, is_pair, w, w_scales, bias, scales, starts, rn, M, N, length, quads,
                ROWS, COLUMNS, SIZE, LEAVES, ACTIVATION,
            )  # fmt: skip
        else:
            w_scales = pointer_of(table, experts + expert, tl.float32) if SCALED else None
            operand = m0 * SLICES + tl.arange(0, ROWS * SLICES)
            of_operand = tl.load(lists + expert * capacity + operand // SLICES, mask=operand < count * SLICES, other=0)
            x_rows = x + (of_operand.to(tl.int64) // SHARE * SLICES + operand % SLICES) * K
            value = outputs(
                x_rows, operand < count * SLICES, w, w_scales, bias, scales, is_pair, starts, rn, M, N, K, length,
                ROWS, COLUMNS, DEPTH, LEAVES, WHOLE, SLICES, GATED, ACTIVATION,
            )  # fmt: skip
        to = out + pair[None, :] * N + rn[:, None]
        tl.store(to, value.to(out.dtype.element_ty), mask=is_pair[None, :] & (rn < N)[:, None])


def route(
    logits: torch.Tensor, params: RouterParams, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each row into ids and weights."""
    experts = logits.shape[1]
    params.check(experts)
    launch(
        route_rows,
        (len(logits),),
        *(logits, params.bias, params.expert_scale, ids, weights, params.scale, params.min_sum, params.threshold),
        E=experts,
        K=params.top_k,
        BLOCK=triton.next_power_of_2(experts),
        SCORES=params.scores,
        GROUPS=params.groups,
        TOP_GROUPS=params.top_groups,
        GROUP_TOP=params.group_top,
        RENORMALIZE=params.renormalize,
        warps=1,
    )
    return ids, weights


@dataclass(frozen=True)
class Experts:
    """The weights of a layer's experts, which are alike.

    Attributes:
        like: the first one.
        table: [3, experts] int64, the addresses of values, scales and biases.
    """

    like: TritonLinear
    table: torch.Tensor

    @classmethod
    def of(cls, weights: Sequence[TritonLinear]) -> "Experts":
        """Make the table, which the weights have to outlive."""
        parts = [[weight.values, weight.scales, weight.bias] for weight in weights]
        table = [
            [0 if tensor is None else tensor.data_ptr() for tensor in column] for column in zip(*parts, strict=True)
        ]
        return cls(weights[0], torch.tensor(table, dtype=torch.int64, device=weights[0].values.device))

    @property
    def count(self) -> int:
        return self.table.shape[1]


def experts(
    x: torch.Tensor,
    gate_up: Experts,
    down: Experts,
    chosen: tuple[torch.Tensor, torch.Tensor],
    activation: str,
    out: torch.Tensor,
    scratch: Scratch = ANEW,
    *,
    weigh_inputs: bool,
) -> torch.Tensor:
    """Add each row's experts into out [M, hidden] float32, as kernels/ops.py says."""
    (ids, weights), (count, hidden), k = chosen, x.shape, chosen[0].shape[1]
    lists = scratch.empty((gate_up.count, count), torch.int32, x.device)
    counts = scratch.empty((gate_up.count,), torch.int32, x.device)
    launch(list_pairs, (gate_up.count,), ids, lists, counts, count * k, count, BLOCK=BLOCK, warps=4)
    if weigh_inputs:
        weighed = scratch.empty((count * k, hidden), x.dtype, x.device)
        grid = count * k, triton.cdiv(hidden, BLOCK)
        launch(weigh_pairs, grid, x, weights, weighed, hidden, K=k, BLOCK=BLOCK, warps=4)
        x = weighed
    width = gate_up.like.shape[0] // 2
    gated = scratch.empty((count * k, width), x.dtype, x.device)
    if gate_up.like.has_fused_gate:
        _products(x, gate_up, lists, counts, gated, activation, scratch, share=count * k // len(x), gated=True)
    else:
        both = scratch.empty((count * k, 2 * width), torch.float32, x.device)
        _products(x, gate_up, lists, counts, both, "", scratch, share=count * k // len(x))
        rows.apply("gate", both, gated, activation=activation)
    branches = scratch.empty((count * k, out.shape[1]), torch.float32, x.device)
    _products(gated, down, lists, counts, branches, "", scratch, share=1)
    grid, places = (count, triton.cdiv(out.shape[1], BLOCK)), triton.next_power_of_2(k)
    arguments = branches, ids, None if weigh_inputs else weights, out, out.shape[1]
    launch(add_pairs, grid, *arguments, K=k, PLACES=places, BLOCK=BLOCK, warps=4)
    return out


def _products(
    x: torch.Tensor,
    weights: Experts,
    lists: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    activation: str,
    scratch: Scratch,
    *,
    share: int,
    gated: bool = False,
) -> None:
    """Compute the products of all pairs into out [pairs, columns]; rows of x are shared by `share` pairs each."""
    like, values = weights.like, operand(x, weights.like, scratch)
    name = name_of(like) if like.group_size else "product" + kind_of(like, gated)
    found = tile(name, max(1, len(out) * values.slices // weights.count), out.shape[1])
    tokens, capacity = found.rows // values.slices, lists.shape[1]
    kinds: dict[torch.dtype, Any] = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.int8: tl.int8}
    launch(
        expert_rows,
        (triton.cdiv(out.shape[1], found.columns), triton.cdiv(capacity, tokens), weights.count),
        *(values.values, weights.table, lists, counts, values.scales, like.starts, out, len(x), out.shape[1]),
        *(like.shape[1], like.length, like.leaf_quads if like.group_size else 0, capacity, weights.count),
        SHARE=share,
        KIND=kinds.get(like.values.dtype, tl.int16),
        SCALED=like.scales is not None,
        BIASED=like.bias is not None,
        SIZE=like.group_size,
        ROWS=tokens,
        COLUMNS=found.columns,
        DEPTH=found.depth,
        LEAVES=like.leaves,
        WHOLE=like.starts is None and like.length % found.depth == 0,
        SLICES=values.slices,
        GATED=gated,
        ACTIVATION=activation,
        warps=found.warps,
        stages=found.stages,
    )
