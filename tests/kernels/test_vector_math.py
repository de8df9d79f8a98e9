"""The elementary functions of vector_math.inc.h, compiled for each instruction level, against float64."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from .packed import levels

NATIVE = Path(__file__).parents[2] / "penstock" / "kernels" / "cpu" / "native"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
LEVEL_FLAGS = [[], ["-mavx2", "-mfma"], ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]]
SOURCE = """
#include "vector_math.inc.h"
using namespace penstock;
#define EACH(name, result) \\
    extern "C" void name(const float* x, float* y, long n) { \\
        for (long i = 0; i < n; i += LANES) { \\
            const F32x16 a = load(x + i); \\
            store(y + i, result); \\
        } \\
    }
EACH(test_exp, exp(a))
EACH(test_log, log(a))
EACH(test_tanh, tanh(a))
EACH(test_erf, erf(a))
EACH(test_exp_minus_line, exp_minus_line(minus_abs(a)))
EACH(test_exp_to_zero, exp_to_zero(minus_abs(a)))
EACH(test_erfc_positive, erfc_positive(abs(a)))
EACH(test_sum, F32x16(reduce_sum(a)))
EACH(test_max, F32x16(reduce_max(a)))
EACH(test_first, load_first(x + i, 5, -3.0f))
"""


def exp_minus_line(x: torch.Tensor) -> torch.Tensor:
    """e^x - 1 - x in float64, near 0 by its series, because there the terms cancel."""
    series = x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x / 120)))
    return torch.where(x.abs() < 1e-3, series, torch.expm1(x) - x)


EXACT = {
    "exp": torch.exp,
    "exp_to_zero": lambda x: torch.exp(-x.abs()),
    "log": torch.log,
    "tanh": torch.tanh,
    "erf": torch.special.erf,
    "exp_minus_line": lambda x: exp_minus_line(-x.abs()),
    "erfc_positive": lambda x: torch.special.erfc(x.abs()),
}
ULPS = {"exp": 1.0, "exp_to_zero": 1.0, "exp_minus_line": 16.0, "log": 1.0, "tanh": 2.0, "erf": 2.0}
ULPS["erfc_positive"] = 8.0  # and x^2
ZERO_BELOW = {"exp_to_zero": 1.7e-38, "erfc_positive": 2e-39}  # smaller results may be 0

Functions = list[ctypes.CDLL]


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Functions:
    """One library for each level that this machine has, of those with float code of their own."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("vector_math")
    source = folder / "functions.cpp"
    source.write_text(SOURCE)
    common = [COMPILER, "-std=c++17", "-O2", "-Wno-psabi", "-ffp-contract=off", "-fPIC", "-shared", f"-I{NATIVE}"]
    libraries = []
    for flags in LEVEL_FLAGS[: len(levels())]:
        path = folder / f"functions{len(libraries)}.so"
        subprocess.run([*common, *flags, str(source), "-o", str(path)], check=True)
        libraries.append(ctypes.CDLL(str(path)))
    return libraries


def apply(library: ctypes.CDLL, name: str, x: np.ndarray) -> np.ndarray:
    y = np.full_like(x, np.nan)
    getattr(library, f"test_{name}")(
        ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_long(len(x))
    )
    return y


def sample() -> np.ndarray:
    """Float32 values of every exponent and sign, with infinities, NaN and subnormals, and more where exp lives."""
    everywhere = np.arange(0, 2**32, 65_521, dtype=np.uint64).astype(np.uint32).view(np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.0, -1.0], dtype=np.float32)
    dense = [np.linspace(-end, end, 40_000, dtype=np.float32) for end in (105, 2)]
    x = np.concatenate([everywhere, special, *dense])
    return np.resize(x, -(-len(x) // 16) * 16)


@pytest.mark.parametrize("name", EXACT)
def test_functions_within_their_bounds(functions: Functions, name: str) -> None:
    """Guards against a wrong coefficient, a lost subnormal, and limits that come out as NaN."""
    x = sample()
    exact = EXACT[name](torch.from_numpy(x).double()).numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = exact.astype(np.float32)
    for library in functions:
        result = apply(library, name, x)
        assert np.array_equal(np.isnan(result), np.isnan(exact))
        finite = np.isfinite(nearest)
        assert np.array_equal(result[np.isinf(nearest)], nearest[np.isinf(nearest)])
        ulps = np.abs(result[finite] - exact[finite]) / np.spacing(np.abs(nearest[finite])).astype(np.float64)
        allowed = ULPS[name] + (np.square(x[finite], dtype=np.float64) if name == "erfc_positive" else 0)
        lost = (result[finite] == 0) & (exact[finite] < ZERO_BELOW.get(name, 0.0))
        assert bool(((ulps <= allowed) | lost).all())


@pytest.mark.parametrize("name", EXACT)
def test_levels_agree_to_the_bit(functions: Functions, name: str) -> None:
    """Guards against a fused multiply-add, or another instruction's idea of an edge, on one level."""
    x = sample()
    first, *others = (apply(library, name, x) for library in functions)
    for other in others:
        either = (first.view(np.uint32) == other.view(np.uint32)) | (np.isnan(first) & np.isnan(other))
        assert bool(either.all())


def test_sums_are_one_tree(functions: Functions) -> None:
    """Guards against a tree that follows the width of the registers: the stated one, with another's rounding."""
    x = np.random.default_rng(0).standard_normal((200, 16), dtype=np.float32)
    halves = x
    while halves.shape[1] > 1:
        halves = halves[:, : halves.shape[1] // 2] + halves[:, halves.shape[1] // 2 :]
    for library in functions:
        assert np.array_equal(apply(library, "sum", x.ravel())[::16], halves[:, 0])
        assert np.array_equal(apply(library, "max", x.ravel())[::16], x.max(axis=1))


def test_the_first_lanes_and_the_rest(functions: Functions) -> None:
    """Guards against lanes past the end that keep what lies in memory."""
    x = np.arange(16, dtype=np.float32)
    for library in functions:
        assert apply(library, "first", x).tolist() == [0, 1, 2, 3, 4] + [-3] * 11
