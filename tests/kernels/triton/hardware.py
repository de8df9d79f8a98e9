"""The arithmetic of a GPU's tensor cores in Triton's interpreter, which has none of its own for bfloat16.

The rule is the one that MMA-Sim (arxiv.org/abs/2511.10909) found to give the bits of the hardware: an instruction adds
some products and the accumulator in one step. All terms are aligned to the largest exponent among them and truncated to
so many fractional bits; their exact sum is truncated to float32. Because the step of the hardware is fixed, the bits
depend on the order of K, and neither on tiles nor on which operand is the left one. That is what a test can check here,
and what an ordinary sum in the interpreter would hide or break.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

NOTHING = -(2**20)  # the exponent of zero, below that of any other number


@dataclass(frozen=True)
class Rule:
    """length: products per step. bits: fractional bits that a term keeps."""

    length: int
    bits: int


HOPPER = Rule(16, 25)  # also Blackwell
AMPERE = Rule(8, 24)  # also Ada: an instruction of 16 products is two steps

_rule = HOPPER


def use(rule: Rule) -> None:
    """Multiply by this rule from now on."""
    global _rule
    _rule = rule


def install() -> None:
    """Give the interpreter these products, and conversions to bfloat16 that round to nearest even.

    Raises:
        RuntimeError: triton was imported before, without TRITON_INTERPRET.
    """
    if not isinstance(tl.zeros, interpreter.InterpretedFunction):
        raise RuntimeError(
            "triton was imported before tests/kernels/triton/conftest.py, so that nothing is interpreted"
        )
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter._convert_float = _convert
    interpreter._patch_lang_tensor = _patch_tensor
    interpreter._patch_lang = _patch_once


def multiply(a: np.ndarray, b: np.ndarray, accumulator: np.ndarray, rule: Rule) -> np.ndarray:
    """Add a [M, K] times b [K, N], both float32 with the values of bfloat16, to an accumulator [M, N] float32."""
    left, left_exponents = _split(a)
    right, right_exponents = _split(b)
    total = accumulator
    for start in range(0, a.shape[1], rule.length):
        step = slice(start, start + rule.length)
        terms = left[:, step, None] * right[None, step, :]
        exponents = left_exponents[:, step, None] + right_exponents[None, step, :]
        significand, exponent = _split(total)
        largest = np.maximum(exponents.max(axis=1), exponent)
        terms = np.trunc(np.ldexp(terms, exponents - largest[:, None, :] + rule.bits)).sum(axis=1)
        terms += np.trunc(np.ldexp(significand, exponent - largest + rule.bits))
        total = _truncated(np.ldexp(terms, largest - rule.bits))
    finite = np.isfinite(a).all(axis=1)[:, None] & np.isfinite(b).all(axis=0)[None, :] & np.isfinite(accumulator)
    with np.errstate(all="ignore"):
        return np.where(finite, total, a @ b + accumulator).astype(np.float32)


def _split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split into significands, 1 <= |s| < 2 or 0, and exponents."""
    significand, exponent = np.frexp(np.where(np.isfinite(x), x, 0).astype(np.float64))
    return significand * 2, np.where(significand == 0, NOTHING, exponent - 1)


def _truncated(x: np.ndarray) -> np.ndarray:
    significand, exponent = np.frexp(x)
    return np.ldexp(np.trunc(significand * 2.0**24), exponent - 24).astype(np.float32)


def _chain(a: np.ndarray, b: np.ndarray, accumulator: np.ndarray) -> np.ndarray:
    """Multiply in float32, without tensor cores: one fused multiply-add after the other."""
    total = accumulator
    with np.errstate(all="ignore"):
        for k in range(a.shape[1]):
            exact = a[:, k, None].astype(np.float64) * b[None, k, :]
            total = (exact + total).astype(np.float32)
    return total


def _dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    if a.dtype.scalar == tl.int8:
        product = (a.data.astype(np.float64) @ b.data.astype(np.float64)).astype(np.int32) + d.data
    elif a.dtype.scalar == tl.bfloat16:
        product = multiply(_widened(a.data), _widened(b.data), d.data, _rule)
    else:
        product = _chain(a.data, b.data, d.data)
    return interpreter.TensorHandle(product, d.dtype.scalar)


def _widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


_convert_others = interpreter._convert_float


def _convert(x: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Convert as interpreter._convert_float does, whose results are bits."""
    if (source, target) == (tl.bfloat16, tl.float32):
        return _widened(np.ascontiguousarray(x)).view(np.uint32)
    if (source, target) == (tl.float32, tl.bfloat16):
        with np.errstate(all="ignore"):
            return np.ascontiguousarray(x).astype(ml_dtypes.bfloat16).view(np.uint16)
    return _convert_others(x, source, target, rounding)


_patch_others = interpreter._patch_lang_tensor


def _patch_tensor(tensor: Any, scope: Any) -> None:
    """Also let a scalar be a bound of `range`: it is an array of one element, which numpy 2.4 makes no integer of."""
    _patch_others(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


_patch_language = interpreter._patch_lang
_patched: set[Any] = set()


def _patch_once(function: Any) -> Any:
    """Let the language compute on arrays from a function's first call on. The interpreter does so for each call, and
    undoes it for each kernel, which takes half of the time of small tests."""
    if function not in _patched:
        _patched.add(function)
        _patch_language(function)
    return interpreter._LangPatchScope()
