"""Measure this machine once, for `penstock plan`: how fast products read and multiply weights of each type, and what a
step takes beside them.

All cases take turns, round after round, until the medians of the first and the second half of the rounds agree: so what
another process costs falls on all of them, and a machine that does not settle is called unsettled. No torch.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from penstock.bench.samples import spread
from penstock.bench.simulator.calibrate import measure_costs
from penstock.bench.simulator.costs import LinearCosts
from penstock.config import EngineConfig, available_threads
from penstock.kernels.cpu.abi import ABI
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.ops import PackedLinear, Packing
from penstock.kernels.tensors import BFLOAT16, FLOAT32, UINT8, address_of, empty
from penstock.planner.machines import ALL_OTHERS, TYPES, Hardware, read_hardware
from penstock.planner.memory import free_memory_bytes, resident_bytes
from penstock.quant.scheme import Scheme
from penstock.weights.planned import PlannedModel

SHAPE = (5632, 2048)  # of the feed-forward branch of a 1.1B Llama
MANY_ROWS = 256  # of a product that multiplies more than it reads
RING_BYTES = 128 * 2**20  # of copies of a weight, larger than the caches
READ_BYTES = 256 * 2**20
MIN_ROUNDS, MAX_ROUNDS = 8, 40
SETTLED = 0.03  # relative difference of two medians
PROBE = "read"
FILE_COMMENT = "# Measured by `penstock bench machine`; measure again when the machine changes.\n"

Case = Callable[[], float]  # takes a turn, and returns bytes or operations per second


@dataclass(frozen=True, slots=True)
class Measurement:
    """The rates of all rounds, by case, and whether they settled."""

    rates: dict[str, list[float]]
    settled: bool

    def median(self, name: str) -> float:
        return statistics.median(self.rates[name])


def measure_machine(
    threads: int | None = None, costs: Callable[[dict[str, Any]], LinearCosts] = measure_costs
) -> dict[str, Any]:
    """Return the figures of this machine, as fields of planner.machines.Hardware, and `settled`.

    threads: cores that compute; None: all.
    costs: measures the steps of a model, here the demo's.
    """
    count = threads or available_threads()
    found = take_turns(_cases(count))
    reads = {kind: found.median(f"{kind} read") for kind in TYPES} | {ALL_OTHERS: found.median(PROBE)}
    operations = {kind: found.median(f"{kind} multiply") for kind in TYPES}
    step_s, sequence_s = _host_seconds(costs({"model": "demo", "threads": count}), reads, operations)
    figures: dict[str, Any] = {
        "name": "this",
        "source": f"measured here with {count} threads, in {len(found.rates[PROBE])} rounds",
        "memory_bytes": resident_bytes() + free_memory_bytes(),
        "read_bytes_per_s": reads,
        "operations_per_s": operations,
        "step_s": step_s,
        "sequence_s": sequence_s,
        "spread": {name: [spread(rates)["p10"], spread(rates)["p90"]] for name, rates in found.rates.items()},
    }
    read_hardware(figures)
    return figures | {"settled": found.settled}


def write_machine(figures: dict[str, Any], path: Path) -> Hardware:
    """Write the figures as a hardware file, and return it as it will be read."""
    kept = {name: value for name, value in figures.items() if name != "settled"}
    hardware = read_hardware(kept)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_file = path.with_suffix(".part")
    partial_file.write_text(FILE_COMMENT + yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")
    partial_file.replace(path)
    return hardware


def take_turns(cases: dict[str, Case]) -> Measurement:
    """Let all cases take turns until each one's rates have settled, or MAX_ROUNDS are over."""
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for case in cases.values():
        case()  # touches its memory for the first time
    for number in range(1, MAX_ROUNDS + 1):
        for name, case in cases.items():
            rates[name].append(case())
        if number >= MIN_ROUNDS and all(_is_settled(some) for some in rates.values()):
            return Measurement(rates, True)
    return Measurement(rates, False)


def _is_settled(rates: list[float]) -> bool:
    half = len(rates) // 2
    first, second = statistics.median(rates[:half]), statistics.median(rates[half:])
    return abs(first - second) <= SETTLED * max(first, second)


def _cases(threads: int) -> dict[str, Case]:
    """Return how fast each type of weight is read, with one row, and multiplied, with many; and memory itself."""
    wide, narrow = CpuOps(FLOAT32, threads=threads), CpuOps(BFLOAT16, threads=threads)
    generator = np.random.default_rng(0)
    weight = (generator.random(SHAPE, dtype=np.float32) - 0.5).astype(np.float32)
    cases: dict[str, Case] = {PROBE: _probe(narrow)}
    for kind in TYPES:
        ops = wide if kind == "float32" else narrow
        scheme = None if kind in ("float32", "bfloat16") else Scheme.parse(kind)
        values = weight.astype(ops.element)
        first = ops.pack_linear(values, packing=Packing((), scheme, False))
        ring = [first] + [_copy(ops, first, Packing((), scheme, False)) for _ in range(RING_BYTES // first.num_bytes)]
        for name, rows in (("read", 1), ("multiply", MANY_ROWS)):
            x = (generator.random((rows, SHAPE[1]), dtype=np.float32) - 0.5).astype(ops.element)
            work = first.num_bytes if rows == 1 else 2 * rows * SHAPE[0] * SHAPE[1]
            calls = len(ring) if rows == 1 else 1
            cases[f"{kind} {name}"] = partial(_rate, ops, x, ring, calls, work)
    return cases


def _copy(ops: CpuOps, packed: PackedLinear, packing: Packing) -> PackedLinear:
    state = {}
    for name, tensor in packed.state().items():
        state[name] = empty(tuple(tensor.shape), tensor.dtype)
        state[name][...] = tensor
    return ops.restore_linear(SHAPE, state, packing)


def _rate(ops: CpuOps, x: Any, ring: list[PackedLinear], calls: int, work: int) -> float:
    """Return what products of x with some weights of a ring do per second."""
    out = empty((len(x), SHAPE[0]), FLOAT32)
    started = time.perf_counter()
    for weight in ring[:calls]:
        ops.linear(x, weight, out=out)
    return calls * work / (time.perf_counter() - started)


def _probe(ops: CpuOps) -> Case:
    """Return what reads a ring of memory with the fastest of the native loops."""
    memory = empty((READ_BYTES,), UINT8)
    memory[...] = 1
    at = address_of(memory)
    loops = range(ABI.constants["READ_LOOPS"])
    fastest = min(loops, key=lambda loop: min(ops.limit_read(loop, at, READ_BYTES) for _ in range(3)))

    def read() -> float:
        return READ_BYTES / ops.limit_read(fastest, address_of(memory), READ_BYTES)

    return read


def _host_seconds(costs: LinearCosts, reads: dict[str, float], operations: dict[str, float]) -> tuple[float, float]:
    """Return what a step and each of its sequences take beside products: the demo model's, less its own products."""
    demo = PlannedModel.read(EngineConfig.from_options(model="demo"))
    config = demo.resolved()
    products = demo.sizes(config.numerics.scheme, None).products.values()
    read = sum(size / reads[kind] for item in products for kind, size in item.num_bytes.items())
    multiply = sum(count / operations[kind] for item in products for kind, count in item.operations.items())
    return max(0.0, costs.step - read), max(0.0, costs.sequence - multiply)
