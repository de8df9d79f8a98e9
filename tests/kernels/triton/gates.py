"""Compiles the kernels for an architecture, without a GPU, and prints what came out as JSON: one line per kernel.

A process of its own, because Triton either interprets all kernels of a process or compiles them:
python -m tests.kernels.triton.gates 80 90
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from penstock.kernels.ops import Packing
from penstock.kernels.scheme import Scheme
from penstock.kernels.triton import products
from penstock.kernels.triton.launch import compiling
from penstock.kernels.triton.packed import TritonLinear, assemble, shapes
from penstock.kernels.triton.quantize import operand

BF16, F32 = torch.bfloat16, torch.float32
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
EIGHT = tuple(range(512, 4097, 512))
Case = tuple[str, Callable[[], Any]]


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def linear(n: int, k: int, packing: Packing, dtype: torch.dtype = BF16) -> TritonLinear:
    state = {name: meta(*size, dtype=kind) for name, (size, kind) in shapes((n, k), packing, dtype, bias=True).items()}
    return assemble((n, k), packing, dtype, "meta", state)


def product(rows: int, packing: Packing, dtype: torch.dtype = BF16) -> None:
    gated = packing.gated
    weight = linear(8192 if gated else 4096, 4096, packing, dtype)
    out = meta(rows, 4096, dtype=dtype if gated else F32)
    products.product(operand(meta(rows, 4096, dtype=dtype), weight), weight, out, activation="silu", gated=gated)


def cases(architecture: int) -> Iterator[Case]:
    """Every kernel in every configuration of its table, at the sizes of an 8B model.

    sm_86 and sm_89 have the table of sm_120 and the instructions of sm_80, so the largest tiles suffice there.
    """
    for rows in (64, 4096) if architecture in (86, 89) else (16, 32, 64, 128, 4096):
        yield f"product of {rows} rows", lambda rows=rows: product(rows, Packing())
        if rows != 128:
            yield f"gated product of {rows} rows", lambda rows=rows: product(rows, Packing(gated=True))
            yield f"product of {rows} rows in leaves", lambda rows=rows: product(rows, Packing(EIGHT))
            yield f"int8 product of {rows} rows", lambda rows=rows: product(rows, Packing((), Scheme.parse("int8")))
    yield "int8-x3 product", lambda: product(16, Packing(EIGHT, Scheme.parse("int8-x3")))
    yield "float32 product", lambda: product(16, Packing(), F32)


def report(kernel: Any) -> dict[str, Any]:
    """Describe a compiled kernel."""
    ptx, ttgir = kernel.asm["ptx"], kernel.asm["ttgir"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0]
    synchronous = set(re.findall(r"#(\w+) = #ttg.nvidia_mma<\{versionMajor = 2", ttgir))  # layouts of mma.sync
    operands = re.findall(r"xbf16, #ttg.dot_op<\{opIdx = \d, parent = #(\w+), kWidth = (\d+)", ttgir)
    instructions = re.findall(r"((?:wgmma\.mma_async|mma)\.sync\.aligned\S+)\s*\n?\s*\{([^}]*)\}([^;]*);", ptx)
    return {
        "kernel": kernel.metadata.name,
        "registers": int(registers),
        "stack": int(stack),
        "shared": kernel.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "tcgen05": ptx.count("tcgen05.mma"),
        "mma": len(re.findall(r"\bmma\.sync", ptx)),
        "kwidths": sorted({int(width) for parent, width in operands if parent in synchronous}),
        "not in place": sum(
            name.startswith("mma") and accumulator.split() != rest[rest.rindex("{") + 1 :].strip(" }\n").split()
            for name, accumulator, rest in instructions
        ),
        "contracted": len(re.findall(r"\bfma\.rn\.f32", ptx)),
    }


def compile_for(architecture: int) -> list[dict[str, Any]]:
    found = []
    for name, build in cases(architecture):
        with compiling(architecture) as compiler:
            build()
        found += [{"case": name, "architecture": architecture} | report(kernel) for kernel in compiler.kernels]
    return found


if __name__ == "__main__":
    for architecture in map(int, sys.argv[1:]):
        for line in compile_for(architecture):
            print(json.dumps(line))
