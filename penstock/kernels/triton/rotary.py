"""From the product of q, k and v to all three: their norms, the scale of q, the rotation, and the rounding.

`rotate`: a program owns HEADS neighbouring heads of one token, all of q, of k, or of v. It reads each element's partner
in the rotation from memory again, so that elements need not move between threads.
"""

import torch
import triton
import triton.language as tl

from penstock.kernels.metadata import RotaryParams
from penstock.kernels.triton.elements import divide
from penstock.kernels.triton.launch import launch

HEADS = 8  # of a program, unless all heads are normed together


@triton.jit
def part(
    row, out, chunk, norm, cos_sin, scale, position, eps,
    COUNT: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Compute heads chunk * HEADS .. of COUNT heads that begin at `row`."""
    head, d = chunk * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (head < COUNT) & (d < D)
    at, partner = head * D + d, head * D + tl.where(d < HALF, d + HALF, d - HALF)
    turns = inside & (d < 2 * HALF)
    x = tl.load(row + at, mask=inside, other=0.0)
    y = tl.load(row + partner, mask=turns, other=0.0)
    if norm is not None:
        squares = tl.sum(x * x, axis=1)[:, None]
        if TOGETHER:
            mean = divide(tl.sum(squares, axis=0)[:, None], tl.full([1, 1], COUNT * D, tl.float32))
            x = divide(x, tl.sqrt_rn(mean + eps)) * tl.load(norm + at, mask=inside, other=0.0)
            y = divide(y, tl.sqrt_rn(mean + eps)) * tl.load(norm + partner, mask=turns, other=0.0)
        else:
            root = tl.sqrt_rn(divide(squares, tl.full([1, 1], D, tl.float32)) + eps)
            x = divide(x, root) * tl.load(norm + d, mask=d < D, other=0.0)
            y = divide(y, root) * tl.load(norm + partner - head * D, mask=turns, other=0.0)
    if scale is not None:
        factor = tl.load(scale + position)
        x = x * factor
        y = y * factor
    if cos_sin is not None:
        angle = cos_sin + position * (2 * HALF) + tl.where(d < HALF, d, d - HALF)
        cos = tl.load(angle, mask=d < 2 * HALF, other=1.0)
        sin = tl.load(angle + HALF, mask=d < 2 * HALF, other=0.0)
        x = tl.where(d < HALF, x * cos - y * sin, tl.where(d < 2 * HALF, x * cos + y * sin, x))
    tl.store(out + at, x.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["last"])
def rotate(
    qkv, positions, cos_sin, q_norm, k_norm, v_norm, q_scale, q_out, k_out, v_out, eps, last,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    Q_TOGETHER: tl.constexpr, K_TOGETHER: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    token, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.minimum(tl.load(positions + token), last)
    row, to = qkv + token * ((H + KV * HKV) * D), token * (HKV * D)
    q_chunks: tl.constexpr = (H + HEADS - 1) // HEADS
    k_chunks: tl.constexpr = (HKV + HEADS - 1) // HEADS
    if chunk < q_chunks:
        q = q_out + token * (H * D)
        part(row, q, chunk, q_norm, cos_sin, q_scale, position, eps, H, D, HALF, HEADS, BLOCK, Q_TOGETHER)
    elif chunk < q_chunks + k_chunks:
        keys, chunk = row + H * D, chunk - q_chunks
        part(keys, k_out + to, chunk, k_norm, cos_sin, None, position, eps, HKV, D, HALF, HEADS, BLOCK, K_TOGETHER)
    else:
        values, chunk = row + (H + (KV - 1) * HKV) * D, chunk - q_chunks - k_chunks
        part(values, v_out + to, chunk, v_norm, None, None, position, eps, HKV, D, 0, HEADS, BLOCK, False)


def rotary_qkv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    params: RotaryParams,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    only_q: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split, norm, scale and rotate q, k and v into out. only_q: k and v are left out, whatever `out` says.

    A position after the last one of the tables counts as the last one.
    """
    heads, head_dim = params.heads, params.heads.head_dim

    def together(weight: torch.Tensor | None, count: int) -> bool:
        return weight is not None and count > 1 and len(weight) == count * head_dim

    q_together, k_together = together(params.q_norm, heads.num_heads), together(params.k_norm, heads.num_kv_heads)
    own = triton.next_power_of_2(heads.num_heads) if q_together or k_together else HEADS
    chunks = triton.cdiv(heads.num_heads, own) + (0 if only_q else 2 * triton.cdiv(heads.num_kv_heads, own))
    table = params.q_scale if params.cos_sin is None else params.cos_sin
    tables = params.cos_sin, params.q_norm, params.k_norm, params.v_norm, params.q_scale
    launch(
        rotate,
        (len(qkv), chunks),
        qkv,
        positions,
        *tables,
        *out,
        params.eps,
        2**31 - 1 if table is None else len(table) - 1,
        H=heads.num_heads,
        HKV=heads.num_kv_heads,
        D=head_dim,
        HALF=0 if params.cos_sin is None else params.cos_sin.shape[1] // 2,
        HEADS=own,
        BLOCK=triton.next_power_of_2(head_dim),
        Q_TOGETHER=q_together,
        K_TOGETHER=k_together,
        KV=1 if params.values_are_keys else 2,
        warps=8 if own > HEADS else 4,
    )
    return out
