"""Find the fastest tiles of the kernels on the GPU of this machine, for penstock/kernels/triton/configurations.py.

    python tools/gpu_tune.py [--out gpu_tune.json]

It times candidates for the shapes of an 8B model, a few minutes in all, and prints the table of the architecture as
Python. A tile that gives other bits than the first one is named: no tile may.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also if a Penstock is installed

from penstock.kernels.triton.configurations import MANY, Tile, table_of
from penstock.kernels.triton.int4 import name_of
from penstock.kernels.triton.launch import architecture
from penstock.kernels.triton.products import kind_of
from penstock_lab.bench.device import seconds
from tools.gpu_check import BF16, HEADS, INT8, Call, Product, Sequences, bits, compile_ahead

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB of a program
CLOSE = 1.03  # a tile that also serves a wider product may be slower than the best one by this
L2_BYTES = 150 * 2**20
SMALL = Product("small", 2048, 2048)
ATTENDED, DOWN, QKV = Product("o", 4096, 4096), Product("down", 4096, 14336), Product("qkv", 6144, 4096)
UP, HEAD = Product("gate_up", 28672, 4096, gated=True), Product("head", 128256, 4096)
SCHEMES = ("int8", "int4", "int4-a16")
QUANTISED = [
    Product(name, n, k, scheme, gated=name == "gate_up")
    for scheme in SCHEMES
    for name, n, k in (("down", 4096, 14336), ("qkv", 6144, 4096), ("gate_up", 28672, 4096))
]
FORMS = [
    SMALL,
    ATTENDED,
    DOWN,
    QKV,
    HEAD,
    UP,
    Product("o", 4096, 4096, leaves=8),
    Product("down", 4096, 14336, leaves=8),
]
ROWS = (16, 32, 64, 128, 256, 512, 2048)
DECODED = ((1, 1024), (8, 1024), (32, 8192))
PROMPT = 4096


@dataclass(frozen=True)
class Target:
    """Something to time with different tiles. name: its tiles in the table; wide: its number of columns."""

    name: str
    label: str
    rows: int
    wide: int
    candidates: tuple[Tile, ...]
    make: Callable[[str], list[Call]]


def shared_bytes(tile: Tile, size: int, operands: int) -> int:
    return (tile.rows + operands * tile.columns) * tile.depth * size * tile.stages


def of_few(rows: int, size: int, gated: bool) -> Iterator[Tile]:
    for columns, warps in ((16, 2), (32, 2), (32, 4), (64, 4), (128, 8)):
        if rows * columns <= 128 * 128 and not (gated and rows * columns > 64 * 128):
            for depth in (64, 128, 256, 512):
                for stages in (3, 5):
                    yield Tile(min(rows, 128), columns, depth // size * 2, warps, stages)


def of_many(rows: int, gated: bool) -> Iterator[Tile]:
    sizes = {64: (64,), 128: (64, 128), 256: (64, 128), 512: (64, 128), 2048: (128,)}
    for height in sizes.get(rows, ()):
        for columns in (64, 128, 256):
            if not (gated and columns > 128):
                for depth in (64, 128):
                    for stages in (3, 4, 6):
                        yield Tile(height, columns, depth, 8 if height * columns > 64 * 128 else 4, stages, blocks=True)


def candidates(form: Product, rows: int, most: int) -> tuple[Tile, ...]:
    """List tiles that fit into shared memory and leave some of it free for nobody."""
    size, operands = (
        1 if form.scheme == "int8" else 2,
        2 if form.gated and not str(form.scheme).startswith("int4") else 1,
    )
    if str(form.scheme).startswith("int4"):
        tall = tuple(tall for tall in (16, 32, 64, 128) if tall <= rows and tall >= min(rows, 64))
        found = [
            Tile(height, columns, 256, warps, stages)
            for height in tall
            for columns, warps in ((32, 2), (64, 4), (64, 8), (128, 8))
            for stages in (2, 4)
        ]
        return tuple(tile for tile in found if shared_bytes(tile, 2, 1) <= most * 1024)
    few = list(of_few(rows, size, form.gated)) if rows <= 128 else []
    many = (
        list(of_many(rows, form.gated))
        if size == 2
        else [
            Tile(tile.rows, tile.columns, 2 * tile.depth, tile.warps, tile.stages, blocks=True)
            for tile in of_many(rows, form.gated)
        ]
    )
    fitting = [tile for tile in few + many if 24 * 1024 <= shared_bytes(tile, size, operands) <= (most - 2) * 1024]
    return tuple(fitting)


def products(most: int) -> Iterator[Target]:
    def make(form: Product, rows: int, device: str) -> list[Call]:
        first = form.weight(device)
        copies = 1 if device == "meta" or rows > 512 else max(1, min(8, L2_BYTES // first.num_bytes))
        x = torch.empty(rows, form.k, dtype=BF16, device=device)
        if device != "meta":
            x.normal_()
        return [form.call(x, weight) for weight in (first, *(form.weight(device, seed) for seed in range(1, copies)))]

    for form in (*FORMS, *QUANTISED):
        weight = form.weight("meta")
        name = name_of(weight) if weight.group_size else "product" + kind_of(weight, form.gated)
        for rows in ROWS:
            if not (form.name == "head" and rows > 128) and not (form.scheme and rows == 256):
                wide = form.n // (2 if form.gated and not weight.group_size else 1)
                yield Target(
                    name, f"{form.name} {form.kind}", rows, wide, candidates(form, rows, most),
                    partial(make, form, rows),
                )  # fmt: skip


def attention() -> Iterator[Target]:
    def make(batch: int, length: int, new: int, kind: torch.dtype, device: str) -> list[Call]:
        sequences = Sequences([length] * batch, HEADS, kind, device)
        return [sequences.call(dict.fromkeys(range(batch), (length - new, length)))]

    for kind, suffix in ((BF16, ""), (INT8, " int8")):
        spans = tuple(Tile(16, 128, 128, warps, stages) for warps in (2, 4, 8) for stages in (1, 2, 3, 4, 5))
        for batch, length in DECODED:
            label = f"{batch} x {length}"
            yield Target(f"attend_span{suffix}", label, 128, 1, spans, partial(make, batch, length, 1, kind))
        heights = ((64, 4), (64, 8), (128, 8)) if kind == BF16 else ((16, 4), (32, 4), (64, 4), (64, 8))
        rows = tuple(Tile(height, 128, 128, warps, stages) for height, warps in heights for stages in (1, 2, 3, 4))
        yield Target(f"attend_rows{suffix}", "prompt", 128, 1, rows, partial(make, 1, PROMPT, PROMPT, kind))


def use(target: Target, tile: Tile) -> None:
    table = table_of(architecture())
    small = [choice for choice in table[target.name] if not choice[2].blocks][-1:]
    table[target.name] = ((MANY, MANY, tile), *small)


def compiled(target: Target, tile: Tile) -> Call:
    def call() -> Any:
        use(target, tile)
        return target.make("meta")[0]()

    return call


def measure(targets: list[Target]) -> list[dict[str, Any]]:
    """Time all candidates of all targets."""
    found = []
    for target in targets:
        calls, first, times = target.make("cuda"), None, []
        before = table_of(architecture())[target.name]
        for tile in target.candidates:
            use(target, tile)
            try:
                value = calls[0]()
                first = value.clone() if first is None else first
                if not torch.equal(bits(value), bits(first)):
                    print(f"OTHER BITS: {target.name} {target.label} {target.rows} {tile}")
                    continue
                some = calls[: 2 if target.rows > 500 else None]
                times.append((1e6 * seconds(torch.device("cuda"), some, 3), tile))
            except Exception as error:  # too large for the card
                print(f"{target.name} {target.label} {target.rows} {tile}: {str(error)[:100]}")
            table_of(architecture())[target.name] = before
        times.sort(key=lambda pair: pair[0])
        best = [(round(us, 2), str(tile)) for us, tile in times[:4]]
        found.append({"target": target, "times": times})
        print(f"{target.name:16} {target.label:12} {target.rows:5}  " + "; ".join(f"{us} {tile}" for us, tile in best))
        sys.stdout.flush()
    return found


def chosen(found: list[dict[str, Any]]) -> dict[str, list[tuple[int, int, Tile]]]:
    """Choose one tile for each name, number of rows and of columns: the one with the least sum of relative times."""
    table: dict[str, list[tuple[int, int, Tile]]] = {}
    for name in dict.fromkeys(item["target"].name for item in found):
        own = [item for item in found if item["target"].name == name]
        heights = sorted({item["target"].rows for item in own})
        for rows in heights:
            entries: list[tuple[int, Tile, dict[Tile, float]]] = []
            for wide in sorted({item["target"].wide for item in own if item["target"].rows == rows}):
                costs: dict[Tile, float] = {}
                same = [item for item in own if (item["target"].rows, item["target"].wide) == (rows, wide)]
                for item in same:
                    for us, tile in item["times"]:
                        costs[tile] = costs.get(tile, 0.0) + us / item["times"][0][0] / len(same)
                common = {tile: cost for tile, cost in costs.items() if cost >= 0.999}
                best = min(common, key=lambda tile: common[tile])
                if entries and entries[-1][2].get(best, 9.0) <= CLOSE * min(entries[-1][2].values()):
                    entries.pop()
                entries.append((wide, best, common))
            limits = [wide for wide, _, _ in entries[:-1]] + [MANY]
            most = MANY if rows == heights[-1] else rows
            table.setdefault(name, []).extend((most, limit, e[1]) for limit, e in zip(limits, entries, strict=True))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="gpu_tune.json", help="where all times go (default: %(default)s)")
    parser.add_argument("--only", default="", help="only targets whose name contains this")
    arguments = parser.parse_args()
    began = time.perf_counter()
    most = SHARED[90]
    targets = [target for target in (*attention(), *products(most)) if arguments.only in target.name]
    jobs = {
        (target.name, target.label.split()[-1], tile): (f"{target.name} {tile}", partial(compiled, target, tile))
        for target in targets
        for tile in target.candidates
    }
    failed = compile_ahead(jobs.values())
    print(f"compiled {len(jobs)} in {time.perf_counter() - began:.0f} s; {len(failed)} failed", flush=True)
    found = measure(targets)
    print(f"{time.perf_counter() - began:.0f} s")
    for name, choices in chosen(found).items():
        print(f'    "{name}": (')
        for rows, wide, tile in choices:
            limits = ("MANY" if rows == MANY else rows, "MANY" if wide == MANY else wide)
            numbers = f"{tile.rows}, {tile.columns}, {tile.depth}, {tile.warps}, {tile.stages}"
            print(f"        ({limits[0]}, {limits[1]}, Tile({numbers}{', blocks=True' if tile.blocks else ''})),")
        print("    ),")
    text = [
        {"name": item["target"].name, "label": item["target"].label, "rows": item["target"].rows,
         "times": [(round(us, 2), str(tile)) for us, tile in item["times"]]}
        for item in found
    ]  # fmt: skip
    Path(arguments.out).write_text(json.dumps(text))


if __name__ == "__main__":
    main()
