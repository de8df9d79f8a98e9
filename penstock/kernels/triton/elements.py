"""Functions of elements that kernels share. Each has one result for one value, whatever program computes it."""

import triton
import triton.language as tl

CLAMP = tl.constexpr(7.0)  # of clamped_silu
NEVER = tl.constexpr(float("-inf"))


@triton.jit
def mma(a, b, accumulator):
    """Add a product to an accumulator: for bfloat16 and int8 on the tensor cores, for float32 by fused multiply-adds.

    Every product is a chain of these over ascending K, which gives one result for every tile (docs/gpu.md).
    """
    return tl.dot(a, b, accumulator, input_precision="ieee", out_dtype=accumulator.dtype)


@triton.jit
def divide(x, y):
    """Divide with correct rounding; `/` is approximate."""
    return tl.div_rn(x, tl.zeros_like(x) + y)


@triton.jit
def round_to_integer(x):
    """Round |x| < 2^22 to the nearest integer, ties to even, still float32."""
    magic: tl.constexpr = 12582912.0  # 1.5 * 2^23
    return (x + magic) - magic


@triton.jit
def tanh(x):
    """Compute tanh(x): a series near 0, where the quotient would cancel."""
    square = x * x
    near = x * (1.0 + square * (-0.33333334 + square * (0.13333334 + square * (-0.053968254 + square * 0.021869488))))
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0.0, -far, far))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Compute an activation of kernels/ops.py, or the value itself for ""."""
    if ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.70710678))
    elif ACTIVATION == "gelu_tanh":
        x = 0.5 * x * (1.0 + tanh(0.7978846 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "relu2":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        x = x * x
    elif ACTIVATION == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "tanh":
        x = tanh(x)
    elif ACTIVATION == "clamped_silu":
        x = tl.minimum(x, CLAMP, propagate_nan=tl.PropagateNan.ALL)
        x = x / (1.0 + tl.exp(-1.702 * x))
    else:
        tl.static_assert(ACTIVATION == "")
    return x


@triton.jit
def gate(x, up, ACTIVATION: tl.constexpr):
    """Compute activation(x) * up as gated_linear does."""
    if ACTIVATION == "clamped_silu":
        up = tl.clamp(up, -CLAMP, CLAMP, propagate_nan=tl.PropagateNan.ALL) + 1.0
    return activate(x, ACTIVATION) * up
