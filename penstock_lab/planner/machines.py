"""Hardware: how much a device holds and how fast it reads, multiplies and sends, from a YAML file. No torch.

docs/planning.md has the fields. Files of this package are found by name; the name `this` stands for the measurements by
`penstock bench machine` here. Sizes and rates are plain numbers in bytes, operations (a multiply-add is two) and
seconds.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.config import TRITON
from penstock.errors import check_choice, check_str, fail, invalid
from penstock_lab.planner.yaml_file import MAX_BYTES, load, names_in, number, record, whole

FOLDER = Path(__file__).parent / "hardware"
THIS_MACHINE = "this"
TYPES = ("float32", "bfloat16", "int8", "int4", "int4-a16")
MULTIPLIES_IN = {"int4": "int8", "int4-a16": "bfloat16"}  # the type whose rate is used if a file has none for the key
MAX_RATE = 1e18  # largest rate, in bytes or operations per second
MAX_DEVICES = 2**16
MANY_ROWS = 256  # from this number of rows on, a product reaches operations_per_s
MAX_FEW_ROWS = MANY_ROWS - 1
LONGEST_S = 1e6
ALL_OTHERS = "other"  # the rate of all types not listed

RATES = (
    "read_bytes_per_s", "operations_per_s", "attend_prompt_operations_per_s", "attend_streams_operations_per_s",
)  # fmt: skip

Rates = dict[str, float]


@dataclass(frozen=True, slots=True)
class OnChip:
    """The units of an accelerator's core on which an attention operator is scheduled (planner/operator.py).

    Attributes:
        cores: number of groups of one matrix unit and its vector units.
        buffer_bytes: size of a vector unit's unified buffer.
        matrix_flops, vector_flops: operations per second of one unit.
        vectors_per_matrix: number of vector units for each matrix unit.
    """

    cores: int
    buffer_bytes: int
    matrix_flops: float
    vector_flops: float
    vectors_per_matrix: int


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of device, and how many of them a machine has.

    Attributes:
        source: where the figures come from.
        memory_bytes: memory of one device.
        read_bytes_per_s: rate of reading memory, by the type of the values; `other` is for all types not listed.
        operations_per_s: rate of products, by the type that is multiplied. Empty: no times are predicted.
        rows_bytes_per_s: rate of reading weights in a product, by type and number of rows. It covers products between
            one row, which is bound by reading, and many rows, which are bound by multiplying. {}: a product takes the
            longer of the two times.
        attend_prompt_operations_per_s, attend_streams_operations_per_s: rates of attention, by the type of the cache.
            {}: attention is as fast as products.
        link_bytes_per_s, link_latency_s: rate and latency between two devices, in one direction. 0 bytes: unknown.
        step_s, sequence_s: time outside products, for a step and for each of its sequences.
        sram_bytes: on-chip memory that a placement may use.
        kernels: whose memory is counted: cpu, or triton for GPUs that these kernels compute on.
        spread: p10 and p90 of each measured figure.
    """

    name: str
    source: str
    memory_bytes: int
    read_bytes_per_s: Rates = field(default_factory=dict)
    operations_per_s: Rates = field(default_factory=dict)
    rows_bytes_per_s: dict[str, dict[int, float]] = field(default_factory=dict)
    attend_prompt_operations_per_s: Rates = field(default_factory=dict)
    attend_streams_operations_per_s: Rates = field(default_factory=dict)
    devices: int = 1
    link_bytes_per_s: float = 0.0
    link_latency_s: float = 0.0
    step_s: float = 0.0
    sequence_s: float = 0.0
    sram_bytes: int = 0
    on_chip: OnChip | None = None
    kernels: str = "cpu"
    spread: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_str("name", self.name, max_length=64)
        check_str("source", self.source)
        check_choice("kernels", self.kernels, ("cpu", TRITON))
        for name in (*RATES, "rows_bytes_per_s"):
            for kind in getattr(self, name):
                check_choice(name, kind, (*TYPES, ALL_OTHERS))

    @property
    def has_rates(self) -> bool:
        """True if times can be predicted."""
        return bool(self.read_bytes_per_s) and bool(self.operations_per_s)

    def reading(self, kind: str) -> float:
        """Look up the bytes per second at which weights or a cache of a type are read."""
        rates = self.read_bytes_per_s
        return rates.get(kind) or rates.get(ALL_OTHERS) or max(rates.values())

    def multiplying(self, kind: str) -> float:
        """Look up the operations per second of products with weights of a type.

        Raises:
            InvalidRequestError: the file has no rate for the type.
        """
        rates = self.operations_per_s
        found = rates.get(kind) or rates.get(MULTIPLIES_IN.get(kind, kind)) or rates.get(ALL_OTHERS)
        if found is None:
            raise invalid("hardware", f"{self.name} has no operations_per_s for {kind}; it has {', '.join(rates)}")
        return found

    def product_seconds(self, kind: str, num_bytes: float, operations: float, rows: float) -> float:
        """Interpolate between measured row counts the seconds in which weights of a type multiply rows.

        operations: the operations for all rows.
        """
        many = operations / self.multiplying(kind)
        measured = self.rows_bytes_per_s.get(kind)
        if not measured or rows >= MANY_ROWS or not rows:
            return many
        points = [(1, num_bytes / self.reading(kind)), *((at, num_bytes / measured[at]) for at in sorted(measured))]
        points.append((MANY_ROWS, many / rows * MANY_ROWS))
        (low, fast), (high, slow) = next(pair for pair in pairwise(points) if rows <= pair[1][0])
        return fast + (slow - fast) * (max(rows, 1.0) - low) / (high - low)


def cache_directory() -> Path:
    """Locate the directory that keeps measurements of this machine."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "penstock"


def this_file(device: str = "cpu") -> Path:
    """Name the file that `penstock bench machine` writes; for "cuda:1" it is cuda-1.yaml."""
    return cache_directory() / ("machine.yaml" if device == "cpu" else f"{device.replace(':', '-')}.yaml")


def names() -> list[str]:
    """List the hardware files of this package."""
    return names_in(FOLDER)


def load_hardware(text: str) -> Hardware:
    """Load hardware by its name or from a YAML file.

    Raises:
        InvalidRequestError: there is no such file, or one of its fields is unknown, missing or out of range.
    """
    path = this_file() if text == THIS_MACHINE else FOLDER / f"{text}.yaml" if text in names() else Path(text)
    advice = (
        "measure it with `penstock bench machine`" if text == THIS_MACHINE else f"names are this, {', '.join(names())}"
    )
    return load("hardware", text, path, read_hardware, advice)


def read_hardware(found: Any) -> Hardware:
    """Read the hardware that a mapping describes. Raise InvalidRequestError if it is invalid."""
    values = record(found, Hardware, "the file")
    for name in RATES:
        rates = values.get(name, {})
        rates = rates if isinstance(rates, Mapping) else {ALL_OTHERS: rates}
        values[name] = {str(kind): number(f"{name}.{kind}", rate, 1.0, MAX_RATE) for kind, rate in rates.items()}
    if "rows_bytes_per_s" in values:
        values["rows_bytes_per_s"] = _by_rows(values["rows_bytes_per_s"])
    for name, high in (("memory_bytes", MAX_BYTES), ("sram_bytes", MAX_BYTES), ("devices", MAX_DEVICES)):
        if name in values:
            values[name] = whole(name, values[name], 0 if name == "sram_bytes" else 1, high)
    for name in ("link_latency_s", "step_s", "sequence_s"):
        if name in values:
            values[name] = number(name, values[name], 0.0, LONGEST_S)
    if values.get("link_bytes_per_s"):  # 0: unknown
        values["link_bytes_per_s"] = number("link_bytes_per_s", values["link_bytes_per_s"], 1.0, MAX_RATE)
    if values.get("on_chip") is not None:
        values["on_chip"] = _on_chip(values["on_chip"])
    _check_spread(values.get("spread", {}))
    return Hardware(**values)


def _by_rows(found: Any) -> dict[str, dict[int, float]]:
    """Read rates by type and number of rows."""
    if not isinstance(found, Mapping) or not all(isinstance(rates, Mapping) for rates in found.values()):
        raise fail("rows_bytes_per_s", found, "a mapping of types to {rows: rate}")
    return {
        str(kind): {
            whole(f"rows_bytes_per_s.{kind}", rows, 2, MAX_FEW_ROWS): number(
                f"rows_bytes_per_s.{kind}", rate, 1.0, MAX_RATE
            )
            for rows, rate in rates.items()
        }
        for kind, rates in found.items()
    }


def _on_chip(found: Any) -> OnChip:
    values = record(found, OnChip, "on_chip")
    counts = {"cores": MAX_DEVICES, "buffer_bytes": MAX_BYTES, "vectors_per_matrix": MAX_DEVICES}
    for name, high in counts.items():
        values[name] = whole(f"on_chip.{name}", values[name], 1, high)
    for name in ("matrix_flops", "vector_flops"):
        values[name] = number(f"on_chip.{name}", values[name], 1.0, MAX_RATE)
    return OnChip(**values)


def _check_spread(found: Any) -> None:
    pairs = found.values() if isinstance(found, Mapping) else [None]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise fail("spread", found, "a mapping of figures to [p10, p90]")
    for name, pair in found.items():
        for value in pair:
            number(f"spread.{name}", value, 0.0, MAX_RATE)


def size_text(num_bytes: int) -> str:
    """Write bytes in MiB, or in GiB from 10 GiB on."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 10 * 2**30 else f"{num_bytes / 2**20:.1f} MiB"
