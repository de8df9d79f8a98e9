"""Coded weights of every format that Penstock reads, with random codes, and their products by definition, in numpy."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np

from penstock.kernels.coding import CodedRows, Coding
from penstock.kernels.ops import TensorRows
from penstock.kernels.tensors import NAMES

E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # halves
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def fp8_levels(dtype: type) -> tuple[float, ...]:
    return tuple(np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64).tolist())


FORMATS = {
    coding.name: coding
    for coding in (
        Coding("Q4_0", 4, zero=8),
        Coding("Q4_1", 4, mins=True),
        Coding("Q5_0", 6, zero=16),
        Coding("Q5_1", 6, mins=True),
        Coding("Q8_0", 8, zero=128),
        Coding("Q2_K", 4, 16, 256, steps=True, mins=True, step_mins=True),
        Coding("Q3_K", 4, 16, 256, zero=4, steps=True),
        Coding("Q4_K", 4, 32, 256, steps=True, mins=True, step_mins=True),
        Coding("Q5_K", 6, 32, 256, steps=True, mins=True, step_mins=True),
        Coding("Q6_K", 6, 16, 256, zero=32, steps=True),
        Coding("IQ4_NL", 4, levels=IQ4_NL),
        Coding("IQ4_XS", 4, 32, 256, levels=IQ4_NL, steps=True),
        Coding("AWQ", 4, 128, 128, mins=True),
        Coding("GPTQ", 4, 64, 64, zero=8, order=True),
        Coding("GPTQ-8", 8, 32, 32, mins=True, scale_dtype="bfloat16"),
        Coding("MXFP4", 4, levels=E2M1, scale_dtype="bfloat16"),
        Coding("NVFP4", 4, 16, 16, levels=E2M1, column_scales=True),
        Coding("W8A8", 8, 32, None, zero=128, column_scales=True),
        Coding("W4A16", 4, 32, None, zero=8, column_scales=True),
        Coding("FP8", 8, 128, 128, levels=fp8_levels(ml_dtypes.float8_e4m3fn), scale_dtype="float32"),
        Coding("FP8-E5M2", 8, 32, None, levels=fp8_levels(ml_dtypes.float8_e5m2), column_scales=True),
        Coding("NF4", 4, 64, 64, levels=NF4, scale_dtype="float32"),
    )
}
CODE_RANGES = {"Q2_K": 4, "Q3_K": 8, "Q5_0": 32, "Q5_1": 32, "Q5_K": 32, "Q6_K": 64}  # codes that a format has


def random_rows(coding: Coding, n: int, k: int, seed: int = 0, *, extreme: bool = False) -> CodedRows:
    """Return a weight of random codes. extreme: the codes, steps and step_mins are the ends of their ranges."""
    rng = np.random.default_rng([seed, n, k])
    parts = {}
    for name, (shape, dtype) in coding.parts((n, k)).items():
        if name == "codes":
            array = rng.integers(0, CODE_RANGES.get(coding.name, 2**coding.bits), shape)
            if extreme:
                array = np.where(array % 2, CODE_RANGES.get(coding.name, 2**coding.bits) - 1, 0)
            if coding.levels:
                array[~(np.abs(np.array(coding.levels)[array]) <= 448)] = 0
        elif name == "order":
            array = rng.permutation(k)
        elif name in ("steps", "step_mins"):
            low, high = (-128, 127) if name == "steps" else (0, 255)
            array = rng.choice([low, high], shape) if extreme else rng.integers(low, high + 1, shape)
        else:
            array = rng.uniform(0.5, 2, shape) * 2.0 ** (-14 if coding.steps else -8) * (-1 if name == "mins" else 1)
        parts[name] = TensorRows(array.astype(NAMES[dtype]))
    return CodedRows(coding, parts)


def leaf_ends(coding: Coding, k: int, leaves: int) -> tuple[int, ...]:
    """Return ends of leaves that are multiples of the block."""
    block = coding.block or 1
    return (*(round(k * leaf / leaves / block) * block for leaf in range(1, leaves)), k)


def sliced(x: np.ndarray, slices: int) -> tuple[list[np.ndarray], np.ndarray]:
    """One leaf of rows [m, ..] -> integers, slice after slice, and the rows' scales [m, 1]."""
    greatest = np.abs(x).max(axis=1, keepdims=True, initial=0)
    scale = greatest / np.float32(127)
    rest = x * np.divide(np.float32(127), greatest, out=np.zeros_like(greatest), where=greatest > 0)
    result = []
    for _ in range(slices):
        result.append(np.rint(rest))
        rest = (rest - result[-1]) * np.float32(254)
    return [part.astype(np.int64) for part in result], scale


def as_tree(leaves: list[np.ndarray]) -> np.ndarray:
    while len(leaves) > 1:
        pairs = [leaves[i : i + 2] for i in range(0, len(leaves), 2)]
        leaves = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return leaves[0]


def product(weight: CodedRows, x: np.ndarray, ends: Sequence[int], slices: int) -> np.ndarray:
    """Multiply x [m, k] float32 by a weight of integer levels, as kernels/coding.py says: [m, n] float32."""
    coding, n = weight.coding, weight.shape[0]
    parts = weight.read_parts(0, n)
    if coding.order:
        x = x[:, parts["order"]]
    codes = parts["codes"]
    levels = np.array(coding.levels, np.int64)[codes] if coding.levels else codes.astype(np.int64) - coding.zero
    leaves = []
    for start, end in itertools.pairwise((0, *ends)):
        rows, row_scale = sliced(x[:, start:end], slices)
        if coding.joins(slices):
            rows = [254 * rows[0] + rows[1]]
        totals = [np.zeros((len(x), n), np.float32) for _ in rows]
        for first in range(start, end, coding.block or max(end, 1)):
            stop, block = min(first + (coding.block or end), end), first // (coding.block or end)
            for total, row in zip(totals, rows, strict=True):
                products, minima = np.zeros((len(x), n), np.int64), np.zeros((len(x), n), np.int64)
                for k in range(first, stop, coding.group):
                    where, group = slice(k, min(k + coding.group, stop)), k // coding.group
                    operands = row[:, where.start - start : where.stop - start]
                    step = parts["steps"][:, group].astype(np.int64) if coding.steps else 1
                    products += operands @ levels[:, where].T * step
                    step_min = parts["step_mins"][:, group].astype(np.int64) if coding.step_mins else 1
                    minima += operands.sum(axis=1, keepdims=True) * step_min
                scale = parts["scales"][:, block].astype(np.float32) if coding.block else np.float32(1)
                total += products.astype(np.float32) * scale
                if coding.mins:
                    total += minima.astype(np.float32) * parts["mins"][:, block].astype(np.float32)
        leaf = totals[0]
        for total, ratio in zip(totals[1:], (254, 254 * 254), strict=False):
            leaf = leaf + total * (np.float32(1) / np.float32(ratio))
        if coding.joins(slices):
            leaf = leaf * (np.float32(1) / np.float32(254))
        leaves.append(leaf * row_scale)
    result = as_tree(leaves)
    return result * parts["column_scales"] if coding.column_scales else result


def of_type(coding: Coding, scale_dtype: str) -> Coding:
    return replace(coding, scale_dtype=scale_dtype)
