"""What Triton's compiler makes of every kernel for six architectures, without a GPU (gates.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path
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


COMPILED = """
import os, pathlib
from penstock.kernels.triton.launch import compilations, compiling
from penstock.kernels.triton.norms import norm_rows
from tests.kernels.triton.gates import row_cases
def start():
    with compiling(90):
        next(row_cases())[1]()
    norm_rows.device_caches.clear()  # as in a new process
    return compilations.count
print(start(), start())
for name in ("__grp__norm_rows.json", "norm_rows.json"):
    file, = pathlib.Path(os.environ["TRITON_CACHE_DIR"]).glob(f"*/{name}")
    file.write_bytes(file.read_bytes()[:99])
    print(start(), start())
"""


@pytest.mark.covers("F34")
def test_what_is_compiled_is_counted(tmp_path: Path) -> None:
    """Guards against a second start that compiles again what is in the cache, a counter that does not say so, and a
    damaged file of the cache that is fatal."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == ["1", "1", "2", "2", "3", "3"], done.stderr
    assert done.stderr.count("penstock: norm_rows is damaged in") == 2


def is_narrow(case: str) -> bool:
    """Tell whether a product has so few rows, or an adapter such a small rank, that tiles of fewer than 64 columns are
    faster than wgmma."""
    return case.startswith("adapters") or ("product of" in case and "4096 rows" not in case)


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
