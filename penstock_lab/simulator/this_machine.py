"""Measure this machine once, for `penstock plan`: how fast products read and multiply weights of each type, and how
long a step takes beside its products.

Every round measures each case once, until the medians of the first and the second half of the rounds agree. So the
load of other processes affects all cases alike, and a machine that does not settle is reported as unsettled. No torch.
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

from penstock import EngineConfig, EngineError
from penstock.config import KV_CACHE_SLICES, TRITON
from penstock.kernels.cpu.host import free_memory_bytes, resident_bytes
from penstock.kernels.cpu.library import ABI
from penstock.kernels.cpu.ops import CpuKVCache, CpuOps
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, CacheSpec, Heads
from penstock.kernels.ops import PackedLinear, Packing
from penstock.kernels.scheme import Scheme
from penstock.kernels.tensors import BFLOAT16, FLOAT32, INT8, UINT8, Tensor, address_of, empty
from penstock_lab.bench import available_threads
from penstock_lab.bench.machine import KINDS
from penstock_lab.bench.native import limit_read
from penstock_lab.bench.samples import READ, spread
from penstock_lab.planner.machines import ALL_OTHERS, MANY_ROWS, TYPES, Hardware, read_hardware
from penstock_lab.planner.planned import PlannedModel
from penstock_lab.simulator.costs import LinearCosts
from penstock_lab.simulator.recorded import measure_costs

SHAPES = ((5632, 2048), (2048, 5632), (2048, 2048))  # up, down and output projections of a layer
MEASURED_ROWS = (8, 32)  # numbers of rows between those bound by reading and those bound by multiplying
RING_BYTES = 128 * 2**20  # size of the copies of a weight; larger than the caches
READ_BYTES = 256 * 2**20
MIN_ROUNDS, MAX_ROUNDS = 8, 40
SETTLED = 0.03  # relative difference of two medians
PROBE = "read"
FILE_COMMENT = "# Measured by `penstock bench machine`; measure again when the machine changes.\n"

Ring = list[tuple[tuple[int, int], PackedLinear]]  # weights with their shapes
Case = Callable[[], float]  # runs once, and returns bytes or operations per second
BLOCK_SIZE = 16
PROMPT_LEN, PROMPT_HEADS = 2048, Heads(8, 2, 64)  # a quarter of a layer's heads: the same speed, measured in less time
STREAMS, CONTEXT, STREAM_HEADS = 8, 1024, Heads(32, 8, 64)
CACHE_TYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int8": INT8}


@dataclass(frozen=True, slots=True)
class Measurement:
    """The rates of all rounds, by case.

    Attributes:
        unsettled: for cases that have not settled, the relative change of the median from the first half to the second.
    """

    rates: dict[str, list[float]]
    unsettled: dict[str, float]

    def median(self, name: str) -> float:
        return statistics.median(self.rates[name])

    def spreads(self) -> dict[str, list[float | None]]:
        """List p10 and p90 of each case, by name."""
        return {name: [spread(rates)["p10"], spread(rates)["p90"]] for name, rates in self.rates.items()}


def measure_machine(
    threads: int | None = None, costs: Callable[[dict[str, Any]], LinearCosts] = measure_costs
) -> dict[str, Any]:
    """Measure this machine: fields of planner.machines.Hardware, and the cases that are `unsettled`.

    threads: cores that compute; None: all.
    costs: measures the steps of a model, here the demo's.
    """
    count = threads or available_threads()
    found = measure_in_rounds(_cases(count))
    reads = {kind: found.median(f"{kind} read") for kind in TYPES} | {ALL_OTHERS: found.median(PROBE)}
    operations = {kind: found.median(f"{kind} multiply") for kind in TYPES}
    attends = {
        name: {kind: found.median(f"{kind} attend {name}") for kind in CACHE_TYPES} for name in ("prompt", "streams")
    }
    step_s, sequence_s = _host_seconds(costs({"model": "demo", "threads": count}), reads, operations)
    figures: dict[str, Any] = {
        "name": "this",
        "source": f"measured here with {count} threads, in {len(found.rates[PROBE])} rounds",
        "memory_bytes": resident_bytes() + free_memory_bytes(),
        "read_bytes_per_s": reads,
        "operations_per_s": operations,
        "rows_bytes_per_s": {
            kind: {rows: found.median(f"{kind} {rows} rows") for rows in MEASURED_ROWS} for kind in TYPES
        },
        **{f"attend_{name}_operations_per_s": rates for name, rates in attends.items()},
        "step_s": step_s,
        "sequence_s": sequence_s,
        "spread": found.spreads(),
    }
    read_hardware(figures)
    return figures | {"unsettled": found.unsettled}


def measure_gpu(device: str) -> dict[str, Any]:
    """Measure the limits of a GPU, as measure_machine does those of this machine: copies, and products by cuBLAS.

    Raises:
        InvalidRequestError: there is no such GPU, or it cannot be used.
    """
    from penstock_lab.bench.ops import on_gpu  # which imports torch

    _, limits, about = on_gpu(device)
    kinds = dict(zip(TYPES, KINDS, strict=False))  # int4 is multiplied as int8
    cases: dict[str, Case] = {PROBE: lambda: 1e9 * limits.probe()[READ]}
    cases |= {f"{name} multiply": partial(lambda kind: 1e9 * limits.probe(kind)[kind], kinds[name]) for name in kinds}
    found = measure_in_rounds(cases)
    return {
        "name": about["processor"][:64],
        "source": f"copies and cuBLAS's products, measured on {device} in {len(found.rates[PROBE])} rounds",
        "kernels": TRITON,
        "memory_bytes": about["memory_bytes"],
        "read_bytes_per_s": {ALL_OTHERS: found.median(PROBE)},
        "operations_per_s": {name: found.median(f"{name} multiply") for name in kinds},
        "spread": found.spreads(),
        "unsettled": found.unsettled,
    }


def as_hardware(figures: dict[str, Any]) -> Hardware:
    """Read measured figures as if they came from a hardware file."""
    return read_hardware(_kept(figures))


def _kept(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if name != "unsettled"}


def write_machine(figures: dict[str, Any], path: Path) -> Hardware:
    """Write the figures as a hardware file, and return it as it will be read."""
    kept, hardware = _kept(figures), as_hardware(figures)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_file = path.with_suffix(".part")
    partial_file.write_text(FILE_COMMENT + yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")
    partial_file.replace(path)
    return hardware


def measure_in_rounds(cases: dict[str, Case]) -> Measurement:
    """Measure all cases once per round until the rates of each have settled, or for MAX_ROUNDS."""
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for case in cases.values():
        case()  # touches its memory for the first time
    unsettled: dict[str, float] = {}
    for number in range(1, MAX_ROUNDS + 1):
        for name, case in cases.items():
            rates[name].append(case())
        if number >= MIN_ROUNDS:
            changes = {name: _change(some) for name, some in rates.items()}
            unsettled = {name: change for name, change in changes.items() if abs(change) > SETTLED}
            if not unsettled:
                break
    return Measurement(rates, unsettled)


def _change(rates: list[float]) -> float:
    """Compute the relative change of the median from the first half to the second."""
    half = len(rates) // 2
    return statistics.median(rates[half:]) / statistics.median(rates[:half]) - 1.0


def _cases(threads: int) -> dict[str, Case]:
    """Make the cases of this machine.

    Each type of weight is read (with one row) and multiplied (with few and with many rows). The other cases read plain
    memory and compute attention.
    """
    wide, narrow = CpuOps(FLOAT32, threads=threads), CpuOps(BFLOAT16, threads=threads)
    cases: dict[str, Case] = {PROBE: _probe(narrow)}
    for kind in TYPES:
        ops = wide if kind == "float32" else narrow
        ring = _ring(ops, None if kind in ("float32", "bfloat16") else Scheme.parse(kind))
        large = [item for item in ring if item[0] in SHAPES[:2]]
        cases[f"{kind} read"] = _products(ops, 1, large, per_operation=False)
        for rows in MEASURED_ROWS:
            cases[f"{kind} {rows} rows"] = _products(ops, rows, large[:4], per_operation=False)
        cases[f"{kind} multiply"] = _products(ops, MANY_ROWS, ring[: len(SHAPES)], per_operation=True)
    return cases | attention_cases(wide, narrow)


def _ring(ops: CpuOps, scheme: Scheme | None) -> Ring:
    """Make weights of all SHAPES in sample, which together are larger than the caches."""
    generator, packing = np.random.default_rng(0), Packing((), scheme, False)
    layer = [
        (shape, ops.pack_linear((generator.random(shape, dtype=np.float32) - 0.5).astype(ops.element), packing=packing))
        for shape in SHAPES
    ]
    ring = list(layer)
    for _ in range(RING_BYTES // sum(weight.num_bytes for _, weight in layer)):
        ring += [(shape, _copy(ops, weight, shape, packing)) for shape, weight in layer]
    return ring


def _copy(ops: CpuOps, packed: PackedLinear, shape: tuple[int, int], packing: Packing) -> PackedLinear:
    state = {}
    for name, tensor in packed.state().items():
        state[name] = empty(tuple(tensor.shape), tensor.dtype)
        state[name][...] = tensor
    return ops.restore_linear(shape, state, packing)


def _products(ops: CpuOps, rows: int, ring: Ring, *, per_operation: bool) -> Case:
    """Make a case that measures the weight bytes, or the operations, per second of products with a ring's weights.

    They are recorded as a program, as in a decode step: with Python between them, the memory would pause. What is timed
    is the second of two runs, because for its first millisecond a program is slower, and a step takes far longer.
    """
    operands = {k: np.full((rows, k), 0.01, np.float32).astype(ops.element) for _, k in SHAPES}
    results = {n: empty((rows, n), FLOAT32) for n, _ in SHAPES}
    work = sum(2 * rows * n * k if per_operation else weight.num_bytes for (n, k), weight in ring)

    def multiply_all() -> Tensor:
        for (n, k), weight in ring:
            ops.linear(operands[k], weight, out=results[n])
        return results[ring[-1][0][0]]

    _, program = ops.record(lambda _: multiply_all(), ())
    if program is None:
        raise EngineError("products cannot be recorded; this is a bug in Penstock")
    run = program.run

    def rate() -> float:
        run(())
        started = time.perf_counter()
        run(())
        return work / (time.perf_counter() - started)

    return rate


def _probe(ops: CpuOps) -> Case:
    """Make a case that reads a ring of memory with the fastest of the native loops."""
    memory = empty((READ_BYTES,), UINT8)
    memory[...] = 1
    at = address_of(memory)
    loops = range(ABI.constants["READ_LOOPS"])
    fastest = min(loops, key=lambda loop: min(limit_read(ops, loop, at, READ_BYTES) for _ in range(3)))

    def read() -> float:
        return READ_BYTES / limit_read(ops, fastest, address_of(memory), READ_BYTES)

    return read


def _host_seconds(costs: LinearCosts, reads: dict[str, float], operations: dict[str, float]) -> tuple[float, float]:
    """Compute the time of a step and of each sequence beside products: the demo's costs less its products."""
    demo = PlannedModel.read(EngineConfig.from_options(model="demo"))
    config = demo.resolved()
    products = demo.sizes(config.numerics.scheme, None).products.values()
    read = sum(size / reads[kind] for item in products for kind, size in item.num_bytes.items())
    multiply = sum(count / operations[kind] for item in products for kind, count in item.operations.items())
    return max(0.0, costs.step - read), max(0.0, costs.sequence - multiply)


def attention_cases(wide: CpuOps, narrow: CpuOps) -> dict[str, Callable[[], float]]:
    """Make the cases `TYPE attend prompt` and `TYPE attend streams` for each TYPE of cache.

    A case returns operations per second, counted as in planner/costs.py.
    wide, narrow: backends that compute in float32 and in bfloat16.
    """
    cases: dict[str, Callable[[], float]] = {}
    for kind, dtype in CACHE_TYPES.items():
        ops = wide if kind == "float32" else narrow
        slices = KV_CACHE_SLICES[str(ops.element)] if kind == "int8" else 0
        for name, heads, lengths in (
            ("prompt", PROMPT_HEADS, (1, 0, PROMPT_LEN)),
            ("streams", STREAM_HEADS, (STREAMS, CONTEXT - 1, 1)),
        ):
            sequences, cached, new = lengths
            spec = CacheSpec(sequences * (-(-(cached + new) // BLOCK_SIZE)), BLOCK_SIZE, heads.num_kv_heads,
                             heads.head_dim, dtype, slices)  # fmt: skip
            attend = _attention(ops, heads, CpuKVCache(spec), sequences, cached, new)
            pairs = sequences * (new * cached + new * (new + 1) / 2)
            operations = 4 * pairs * heads.num_heads * heads.head_dim * max(1, slices)
            cases[f"{kind} attend {name}"] = partial(_rate, attend, operations)
    return cases


def _attention(
    ops: CpuOps, heads: Heads, cache: CpuKVCache, sequences: int, cached: int, new: int
) -> Callable[[], Any]:
    """Make a call in which each sequence attends with `new` tokens after `cached` ones, in equally many blocks."""
    columns = cache.spec.num_blocks // sequences
    cache.memory[...] = 0
    table = np.arange(sequences * columns, dtype=np.int32).reshape(sequences, columns)
    positions = np.arange(cached, cached + new)
    slots = (table[:, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE).ravel()
    starts = np.arange(sequences + 1, dtype=np.int32) * new
    lengths = np.full(sequences, cached + new, dtype=np.int32)
    planned = ops.plan(AttentionMetadata(starts, lengths, table, slots, BLOCK_SIZE, None), heads, cache)
    generator = np.random.default_rng(0)
    q, k, v = (
        (generator.random((sequences * new, count, heads.head_dim), dtype=np.float32) - 0.5).astype(ops.element)
        for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    )
    out = np.empty((sequences * new, heads.num_heads * heads.head_dim), ops.element)
    params = AttentionParams(scale=heads.head_dim**-0.5)
    return lambda: ops.attend(q, k, v, cache, planned, params, out=out)


def _rate(attend: Callable[[], Any], operations: float) -> float:
    started = time.perf_counter()
    attend()
    return operations / (time.perf_counter() - started)
