"""The rule of the tensor cores, with which the other tests multiply."""

import numpy as np
import pytest

pytest.importorskip("triton", reason="an extra")

from tests.kernels.triton.hardware import AMPERE, HOPPER, Rule, multiply


def one(a: list[float], b: list[float], accumulator: float, rule: Rule) -> float:
    left, right = np.array([a], dtype=np.float32), np.array([b], dtype=np.float32).T
    return float(multiply(left, right, np.array([[accumulator]], dtype=np.float32), rule)[0, 0])


def test_terms_are_truncated_and_not_rounded() -> None:
    """Guards against an ordinary sum: 2^-25 of the largest term survives, and less than that is cut off, whatever the
    number of terms. The result is cut to 24 bits, too."""
    small = 2.0**-12
    assert one([1.0] + [0.0] * 15, [1.0] + [0.0] * 15, 0.0, HOPPER) == 1.0
    assert one([small, 1.0], [small, 1.0], 0.0, HOPPER) == 1.0  # 2^-24 more, cut to float32
    assert one([small] * 15 + [1.0], [small] * 15 + [1.0], 0.0, HOPPER) == 1.0 + 7 * 2.0**-23  # 15 / 2 steps
    assert one([small / 4] * 15 + [1.0], [small] * 15 + [1.0], 0.0, HOPPER) == 1.0  # each below 2^-25
    assert one([1.0], [-1.0], 1.0 + 2.0**-23, HOPPER) == 2.0**-23


def test_a_step_has_the_length_of_the_architecture() -> None:
    """Guards against one rule for all: on Ampere, the second eight products are added to a rounded sum."""
    small = 2.0**-12
    a = [small, 1.0] + [0.0] * 6 + [small] + [0.0] * 7
    assert one(a, a, 0.0, HOPPER) == 1.0 + 2.0**-23
    assert one(a, a, 0.0, AMPERE) == 1.0


@pytest.mark.parametrize("rule", [HOPPER, AMPERE])
def test_the_error_is_that_of_float32(rule: Rule) -> None:
    """Guards against a mistake with signs or exponents, which random numbers show; and NaN stays in its row."""
    random = np.random.default_rng(0)
    a = (random.standard_normal((5, 64)) * 2.0 ** random.integers(-9, 9, (5, 64))).astype(np.float32)
    b = random.standard_normal((64, 7)).astype(np.float32)
    a, b = ((x.view(np.uint32) & 0xFFFF0000).view(np.float32) for x in (a, b))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    error = np.abs(multiply(a, b, np.zeros((5, 7), np.float32), rule) - exact)
    assert (error <= 1e-6 * (np.abs(a).astype(np.float64) @ np.abs(b))).all()
    a[2, 3] = np.nan
    found = multiply(a, b, np.zeros((5, 7), np.float32), rule)
    assert np.isnan(found[2]).all()
    assert np.isfinite(np.delete(found, 2, axis=0)).all()
