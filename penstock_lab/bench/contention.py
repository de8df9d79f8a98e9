"""Measure the products of a decode step while another process takes one of the cores.

python -m penstock_lab.bench.contention [--rows M ...] [--threads N]

The products of a 1.1B Llama's decoder layers run alone and beside a process that keeps one core busy, alternately, with
the kernels and with torch's F.linear. Prints the medians, their ratio, and whether the bits stayed the same.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.ops import REDUCTION_LEAVES, PackedLinear
from penstock_lab.bench import available_threads
from penstock_lab.bench.products import DOWN_1B, O_PROJ_1B, packed_copies, uniform
from penstock_lab.bench.startup import python_process

LAYERS = 8  # 350 MB of weights, more than any cache holds
QKV, GATE_UP = (2560, 2048), (11264, 2048)
PRODUCTS = ((QKV, 1), (O_PROJ_1B, REDUCTION_LEAVES), (GATE_UP, 1), (DOWN_1B, REDUCTION_LEAVES))
ROUNDS = 7
STEPS = 12  # steps per round
BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint('busy', flush=True)\nwhile True: pass"


def decode_products(ops: CpuOps, rows: int) -> Iterator[tuple[Tensor, PackedLinear, Tensor, Tensor]]:
    """Yield the products of LAYERS layers: activations, packed weight, plain weight and memory for the result."""
    generator = torch.Generator().manual_seed(0)
    for (n, k), leaves in PRODUCTS:
        weight, x = (uniform(shape, torch.bfloat16, generator) for shape in ((n, k), (rows, k)))
        for packed in packed_copies(ops, weight, "bf16", leaves=leaves, count=LAYERS):
            yield x, packed, weight.clone(), torch.empty((rows, n))


def time_steps(call: Callable[[], None]) -> list[float]:
    """Time each of STEPS calls, in milliseconds."""
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - started))
    return times


def compare(rows: int, threads: int) -> None:
    """Measure with one number of rows, and print the figures."""
    ops, core = CpuOps(torch.bfloat16, threads=threads), max(os.sched_getaffinity(0))
    products = list(decode_products(ops, rows))

    def ours() -> None:
        for x, packed, _, out in products:
            ops.linear(x, packed, out=out)

    def torchs() -> None:
        for x, _, weight, _ in products:
            functional.linear(x, weight)

    calls = {"ours": ours, "torch": torchs}
    times: dict[tuple[str, bool], list[float]] = {(name, busy): [] for name in calls for busy in (False, True)}
    ours()
    expected, same = [out.clone() for *_, out in products], True
    for busy in (False, True) * ROUNDS:
        with python_process("-c", BUSY, str(core)) if busy else nullcontext() as output:
            if output is not None:
                output.readline()  # wait until the process is busy
            for name, call in calls.items():
                times[name, busy] += time_steps(call)
        same &= all(torch.equal(before, out) for before, (*_, out) in zip(expected, products, strict=True))
    for name in calls:
        (alone, beside), (mean_alone, mean_beside) = (
            [middle(times[name, busy]) for busy in (False, True)] for middle in (statistics.median, statistics.mean)
        )
        print(
            f"M = {rows}, {name}: alone {alone:.1f} ms, with a busy process on core {core} {beside:.1f} ms: "
            f"{beside / alone:.2f} times (of means: {mean_beside / mean_alone:.2f})"
        )
    print(f"M = {rows}, the bits of the results are {'the same' if same else 'DIFFERENT'}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the products of a decode step beside a busy process.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=available_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        for rows in args.rows:
            compare(rows, args.threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
