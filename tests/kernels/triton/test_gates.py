"""What Triton's compiler makes of every kernel for six architectures, without a GPU (gates.py)."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="an extra")

KIB = 1024
SHARED = {80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}  # of a program
FEW_BYTES = 64  # of a thread, that may be in memory: a few registers of the largest tiles

WRITTEN = {"attend_span": 64, "attend_rows": 128}  # fused multiply-adds: one for each score of a thread
FEW_QUERIES = {  # fewer than the 64 rows of wgmma, whose bits they have
    "attention of few rows",
    "attention of few rows with int8",
    "attention with int8",
}


@pytest.mark.parametrize("architecture", SHARED)
def test_tiles_fit_into_shared_memory(architecture: int) -> None:
    """Guards against a tile of a table that the cases below do not compile."""
    from penstock.kernels.triton.configurations import table_of

    for name, choices in table_of(architecture).items():
        size = 4 if "float32" in name else 1 if "int8" in name else 2
        for _, _, tile in choices if name.startswith("product") else ():
            length = tile.rows + tile.columns * (2 if "gated" in name else 1)
            assert length * tile.depth * size * tile.stages < SHARED[architecture], (name, tile)


def is_narrow(case: str) -> bool:
    """Tell whether a product has so few rows that tiles of fewer than 64 columns are faster than wgmma."""
    return "product of" in case and "4096 rows" not in case


@pytest.fixture(scope="module", params=sorted(SHARED))
def kernels(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.kernels.triton.gates", str(request.param)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_kernels(kernels: list[dict[str, Any]]) -> None:
    """Guards against what a GPU would punish, and the interpreter cannot see: registers kept in memory, a program that
    does not fit, slow instructions on Hopper; and against sums in another order: an accumulator that is copied between
    instructions, a bfloat16 operand whose K is permuted, and a multiply-add that the compiler fused."""
    assert len(kernels) >= 12
    wrong = []
    for found in kernels:
        architecture, case = found["architecture"], found["case"]
        fine = {
            "no spills": found["stack"] <= FEW_BYTES * (1 + ("float32" in case)),
            "shared memory": found["shared"] <= SHARED[architecture],
            "wgmma": architecture != 90
            or found["mma"] == 0
            or found["case"] in FEW_QUERIES
            or is_narrow(found["case"]),
            "in place": found["not in place"] == 0,
            "kWidth": found["kwidths"] in ([], [2]),
            "contraction": found["contracted"] <= WRITTEN.get(found["kernel"], 0) or "float32" in case,
        }
        wrong += [(name, found) for name, is_fine in fine.items() if not is_fine]
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong)
