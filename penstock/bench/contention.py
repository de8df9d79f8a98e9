"""The cost of a decode step's products when another process takes one of the cores.

python -m penstock.bench.contention [--rows M ...]

The products of a 1.1B Llama's decoder layers run alone and beside a process that keeps one core busy, in turns; the
same for torch's F.linear. Prints medians and their ratio, and whether the bits were the same.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from penstock.bench.products import packed_copies
from penstock.config import available_threads
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.ops import REDUCTION_LEAVES, PackedLinear

LAYERS = 8  # 350 MB of weights, more than any cache
PRODUCTS = ((2560, 2048, 1), (2048, 2048, REDUCTION_LEAVES), (11264, 2048, 1), (2048, 5632, REDUCTION_LEAVES))
ROUNDS = 7
STEPS = 12  # per turn
BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint('busy', flush=True)\nwhile True: pass"


class DecodeProducts:
    """The weights of some layers, packed and plain, and activations for each product."""

    def __init__(self, ops: CpuOps, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._ops = ops
        self._work: list[tuple[Tensor, PackedLinear, Tensor, Tensor]] = []
        for n, k, leaves in PRODUCTS:
            weight = (torch.rand((n, k), generator=generator) - 0.5).bfloat16()
            x = (torch.rand((rows, k), generator=generator) - 0.5).bfloat16()
            for packed in packed_copies(ops, weight, "bf16", leaves=leaves, count=LAYERS):
                self._work.append((x, packed, weight.clone(), torch.empty((rows, n))))

    def ours(self) -> None:
        for x, packed, _, out in self._work:
            self._ops.linear(x, packed, out=out)

    def torchs(self) -> None:
        for x, _, weight, _ in self._work:
            functional.linear(x, weight)

    def results(self) -> list[Tensor]:
        """Return copies of the results of the last run of `ours`."""
        return [out.clone() for *_, out in self._work]


@contextmanager
def busy_process(core: int) -> Iterator[None]:
    """Run a process that keeps that core busy."""
    with subprocess.Popen([sys.executable, "-c", BUSY, str(core)], stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is not None:
                process.stdout.readline()
            yield
        finally:
            process.kill()


def seconds(call: Callable[[], None]) -> list[float]:
    """Return the seconds of each of STEPS calls."""
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return times


def compare(rows: int, threads: int) -> None:
    """Measure and print one number of rows."""
    products = DecodeProducts(CpuOps(torch.bfloat16, threads=threads), rows)
    core = max(os.sched_getaffinity(0))
    calls = {"ours": products.ours, "torch": products.torchs}
    times: dict[tuple[str, bool], list[float]] = {(name, busy): [] for name in calls for busy in (False, True)}
    products.ours()
    expected, same = products.results(), True
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name, False] += seconds(call)
        with busy_process(core):
            for name, call in calls.items():
                times[name, True] += seconds(call)
                same &= all(torch.equal(a, b) for a, b in zip(expected, products.results(), strict=True))
    for name in calls:
        alone, beside = (1e3 * statistics.mean(times[name, busy]) for busy in (False, True))
        middle = [1e3 * statistics.median(times[name, busy]) for busy in (False, True)]
        print(
            f"M = {rows}, {name}: alone {middle[0]:.1f} ms, with a busy process on core {core} {middle[1]:.1f} ms: "
            f"{middle[1] / middle[0]:.2f} times (of means: {beside / alone:.2f})"
        )
    print(f"M = {rows}, our bits are {'the same' if same else 'DIFFERENT'}")


def main() -> int:
    parser = argparse.ArgumentParser(description="The products of a decode step beside a busy process.")
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
