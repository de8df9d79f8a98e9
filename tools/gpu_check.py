"""Check the kernels for GPUs on the GPU of this machine: results, bits and speed.

    python tools/gpu_check.py [--stages compile,operations] [--out gpu_check.json]

It runs from a checkout, without a network and without installing Penstock, and takes at most 8 minutes. Each stage is a
process of its own with a limit of time, so that one that crashes or hangs does not take the others' results with it.
It prints a table and writes everything to a JSON file: docs/gpu.md says where to send it.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also if a Penstock is installed

from penstock.kernels.metadata import AttentionMetadata, AttentionParams, CacheSpec, Heads
from penstock.kernels.ops import LoraTable, Packing
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.scheme import Scheme
from penstock.kernels.triton.cache import TritonCache
from penstock.kernels.triton.launch import compiling
from penstock.kernels.triton.ops import TritonOps
from penstock.kernels.triton.packed import TritonLinear, assemble, tensors_of
from penstock_lab.bench.ops import Selection, measure_ops
from tools import gpu_engines

ROOT = Path(__file__).resolve().parent.parent
BF16, F32, INT8 = torch.bfloat16, torch.float32, torch.int8
Row = dict[str, Any]
Call = Callable[[], Any]
HIDDEN, WIDTH, QKV, VOCAB = 4096, 14336, 6144, 128256  # of an 8B model
HEADS = Heads(32, 8, 128)


# --- what is computed -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """A product with a weight of one form. leaves: 1 or 8."""

    name: str
    n: int
    k: int
    scheme: str | None = None
    leaves: int = 1
    gated: bool = False
    dtype: torch.dtype = BF16

    @property
    def kind(self) -> str:
        return f"{self.scheme or 'bf16'}{'-gated' if self.gated else ''}"

    @property
    def packing(self) -> Packing:
        ends = () if self.leaves == 1 else tuple(range(self.k // 8, self.k + 1, self.k // 8))
        return Packing(ends, Scheme.parse(self.scheme), self.gated)

    def weight(self, device: str, seed: int = 0) -> TritonLinear:
        """Make a weight of random values; its scales, too, because packing takes longer than a product."""
        torch.manual_seed(seed)
        state = {}
        for name, (size, kind) in tensors_of((self.n, self.k), self.packing, self.dtype, bias=False).items():
            tensor = torch.empty(size, dtype=kind, device=device)
            if device != "meta" and kind.is_floating_point:
                tensor.normal_().mul_(self.k**-0.5)
            elif device != "meta":
                tensor.view(torch.uint8).random_()
            state[name] = tensor
        return assemble((self.n, self.k), self.packing, self.dtype, device, state)

    def call(self, x: torch.Tensor, weight: TritonLinear) -> Call:
        ops = TritonOps(self.dtype, x.device)
        return partial(ops.gated_linear, x, weight, "silu") if self.gated else partial(ops.linear, x, weight)


SHAPES = (
    Product("qkv", QKV, HIDDEN),
    Product("o", HIDDEN, HIDDEN),
    Product("o", HIDDEN, HIDDEN, leaves=8),
    Product("gate_up", 2 * WIDTH, HIDDEN, gated=True),
    Product("down", HIDDEN, WIDTH),
    Product("down", HIDDEN, WIDTH, leaves=8),
    Product("head", VOCAB, HIDDEN),
    *(Product("gate_up", 2 * WIDTH, HIDDEN, scheme, gated=True) for scheme in ("int8", "int4", "int4-a16")),
    *(Product("down", HIDDEN, WIDTH, scheme) for scheme in ("int8", "int4", "int4-a16")),
)
FORMS = (
    Product("bf16", 1536, HIDDEN),
    Product("bf16", 1536, HIDDEN, leaves=8),
    Product("bf16 gated", 3072, HIDDEN, gated=True),
    Product("float32", 768, 1024, dtype=F32),
    *(Product(scheme, 1536, HIDDEN, scheme) for scheme in ("int8", "int8-x2", "int8-x3", "int4", "int4-a16")),
    Product("int8", 1536, HIDDEN, "int8", leaves=8),
    Product("int8 gated", 3072, HIDDEN, "int8", gated=True),
    Product("int4", 1536, HIDDEN, "int4", leaves=8),
)
SHOWN = ("m", "n", "k", "heads", "seqs", "tokens", "ms", "gb_s", "gflop_s", "bw_fraction", "flop_fraction", "torch_ms")


PIECES = (4096, 5120, QKV)  # where q, k and v end
RANKS = (64, 16, 33, 1)  # of adapters


def adapters(dtype: torch.dtype, device: str) -> LoraTable:
    """Make random adapters of q, k and v, the second of which has factors and offsets."""
    count, most = len(RANKS), max(RANKS)
    shapes = (count, 3, most, HIDDEN), (count, QKV // 16, most, 16), (count, QKV), (count, QKV)
    kinds = dtype, dtype, F32, F32
    tensors = [torch.empty(size, dtype=kind, device=device) for size, kind in zip(shapes, kinds, strict=True)]
    for tensor in tensors if device != "meta" else ():
        tensor.normal_().mul_(HIDDEN**-0.5)
    words = [torch.tensor(values, dtype=torch.int32, device=device) for values in (RANKS, (0, 1, 0, 0))]
    return LoraTable(*tensors, *words, PIECES, (HIDDEN,))


def adapt(table: LoraTable, x: torch.Tensor, y: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
    """Add to y what the adapter of each row of x says, in place."""
    ops = TritonOps(x.dtype, x.device)
    items = torch.from_numpy(ops.group_rows(slots)).to(x.device)
    hidden = torch.empty(len(x), len(PIECES), max(RANKS), device=x.device)
    return ops.lora_expand(ops.lora_shrink(x, table, items, out=hidden), table, items, y)


class Sequences:
    """The cache of a layer that is full of random numbers, and steps over it."""

    def __init__(self, lengths: list[int], heads: Heads, kind: torch.dtype, device: str, dtype: torch.dtype = BF16):
        self.heads, self.device, self.dtype, self.lengths = heads, device, dtype, lengths
        self.ops = TritonOps(dtype, device)
        counts = [-(-length // 128) for length in lengths]
        order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
        self.table = np.full((len(lengths), max(counts)), -1, np.int32)
        for row, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
            self.table[row, :count] = order[end - count : end]
        slices = 0 if kind != INT8 else 2
        spec = CacheSpec(sum(counts), 128, heads.num_kv_heads, heads.head_dim, kind, slices)
        self.cache = TritonCache.new(spec, torch.device(device))
        if device != "meta":
            for part in (part for block in range(spec.num_blocks) for part in self.cache.block(block)):
                part.normal_() if part.is_floating_point() else part.view(torch.uint8).random_()

    def draw(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, self.heads.head_dim, device=self.device).to(self.dtype)

    def metadata(self, new: dict[int, tuple[int, int]]) -> AttentionMetadata:
        """Let sequences go on from one position to another."""
        starts = np.cumsum([0, *(stop - start for start, stop in new.values())]).astype(np.int32)
        slots = [self.slots(row, *ends) for row, ends in new.items()]
        lengths = np.array([stop for _, stop in new.values()], np.int32)
        return AttentionMetadata(starts, lengths, self.table[list(new)], np.concatenate(slots), 128, None)

    def slots(self, row: int, start: int, stop: int) -> np.ndarray:
        at = np.arange(start, stop)
        return self.table[row][at // 128].astype(np.int64) * 128 + at % 128

    def call(self, new: dict[int, tuple[int, int]]) -> Call:
        """Attend for random tokens."""
        tokens = sum(stop - start for start, stop in new.values())
        planned = self.ops.plan(self.metadata(new), self.heads, self.cache)
        q = self.draw(tokens, self.heads.num_heads)
        k, v = (self.draw(tokens, self.heads.num_kv_heads) for _ in range(2))
        return partial(self.ops.attend, q, k, v, self.cache, planned, AttentionParams(self.heads.head_dim**-0.5))


# --- compiling and timing ---------------------------------------------------------------------------------------------


def jobs() -> Iterator[tuple[str, Callable[[], Call]]]:
    """List what the stages below will launch: functions that make a call with tensors on the device "meta"."""

    def product(form: Product, rows: int) -> Call:
        return form.call(torch.empty(rows, form.k, dtype=form.dtype, device="meta"), form.weight("meta"))

    def attention(lengths: list[int], new: int, heads: Heads, kind: torch.dtype, dtype: torch.dtype) -> Call:
        sequences = Sequences(lengths, heads, kind, "meta", dtype)
        return sequences.call({row: (length - new, length) for row, length in enumerate(lengths)})

    for form in FORMS:
        for rows in (16, 32, 64, 128, 512):
            yield f"{form} {rows}", partial(product, form, rows)
    for form in SHAPES:
        for rows in (16, 32, 64, 128, 512):
            yield f"{form} {rows}", partial(product, form, rows)

    def adapted(dtype: torch.dtype, rows: int) -> Call:
        x, y = torch.empty(rows, HIDDEN, dtype=dtype, device="meta"), torch.empty(rows, QKV, device="meta")
        return partial(adapt, adapters(dtype, "meta"), x, y, np.zeros(rows, np.int32))

    for dtype, rows in itertools.product((BF16, F32), (16, 512)):
        yield f"adapters {dtype} {rows}", partial(adapted, dtype, rows)
    for heads, kind, dtype in ATTENTION:
        for new in (1, 9, 300):
            yield f"attention {heads} {kind} {new}", partial(attention, [1500, 700], new, heads, kind, dtype)


ATTENTION = (
    (HEADS, BF16, BF16),
    (HEADS, INT8, BF16),
    (Heads(32, 8, 64), BF16, BF16),
    (Heads(8, 2, 256), BF16, BF16),
    (Heads(8, 2, 96), BF16, BF16),
    (Heads(8, 2, 64), F32, F32),
)
_jobs: list[tuple[str, Callable[[], Call]]] = []


def _compile(index: int, architecture: int) -> str | None:
    """Compile the kernels of a job, and the functions that launch them. Return an error."""
    from triton.backends.nvidia.driver import CudaLauncher

    name, build = _jobs[index]
    try:
        with compiling(architecture) as compiler:
            build()()
        for kernel in compiler.kernels:
            CudaLauncher(kernel.src, kernel.metadata)
    except Exception as error:
        return f"{name}: {type(error).__name__}: {str(error)[-300:]}"
    return None


def compile_ahead(jobs: Iterable[tuple[str, Callable[[], Call]]]) -> list[str]:
    """Compile jobs into Triton's cache, in a process per core. Return the errors."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    _jobs[:] = jobs
    arguments = [(index, int(found.replace(".", ""))) for index in range(len(_jobs))]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        return [error for error in pool.starmap(_compile, arguments, chunksize=1) if error]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ||found - expected|| / ||expected||."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# --- stages -----------------------------------------------------------------------------------------------------------


def compile_all() -> list[Row]:
    """Compile everything that the other stages launch."""
    failed = compile_ahead(jobs())
    return [{"name": "compiled", "jobs": len(_jobs), "failed": failed}]


def rates() -> Iterator[Row]:
    """Time products and attention beside the limits of the card and torch: `penstock bench ops --device cuda`."""
    shapes = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    kinds, types = ("linear", "attend_decode", "attend_prefill"), ("bf16", "int8", "int4")
    found = measure_ops(Selection(kinds, types, (1, 32, 128, 2048), shapes, [HEADS], device="cuda"), progress=silent)
    yield {"name": "limits"} | {name: value for name, value in found["machine"].items() if name != "spread"}
    for row in found["rows"]:
        name = f"{row['op']} {row['dtype']}, {row['leaves']} leaves"
        yield {"name": name} | {key: row[key] for key in SHOWN if row.get(key) is not None}


@contextlib.contextmanager
def silent(name: str, total: int) -> Iterator[Callable[[int], None]]:
    yield lambda count: None


def operations() -> list[Row]:
    """Run the tests of the kernels on the GPU: every operation against the reference, and rows among others."""
    files = sorted((ROOT / "tests/kernels/triton").glob("test_*.py"))
    names = [path.relative_to(ROOT) for path in files if path.name not in ("test_gates.py", "test_hardware.py")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *names]
        try:
            import xdist  # noqa: F401

            command += ["-n", str(os.cpu_count()), "--maxprocesses=16", "-p", "no:benchmark"]
        except ImportError:
            print("without pytest-xdist, the tests run one after the other")
        environment = os.environ | {"PENSTOCK_TEST_DEVICE": "cuda"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        print(done.stdout[-20000:], done.stderr[-3000:])
        cases = list(ElementTree.parse(report).iter("testcase"))
    wrong = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    failures = {f"{case.get('classname')}::{case.get('name')}": "".join(case.itertext())[-1500:] for case in wrong}
    return [{"name": "tests", "passed": len(cases) - len(wrong), "failed": failures}]


def rows_of_products() -> Iterator[Row]:
    """Compare products of 1 to 1,100 rows bit by bit, and with float64 or the reference."""
    for form in FORMS:
        torch.manual_seed(1)
        x = torch.randn(1100, form.k, device="cuda") * torch.exp2(torch.randint(-6, 7, (1100, form.k), device="cuda"))
        x, rows = x.to(form.dtype), torch.randn(form.n, form.k, device="cuda") * form.k**-0.5
        weight = TritonOps(form.dtype).pack_linear(rows, None, form.packing)
        ops = ReferenceOps(form.dtype, "cuda")
        with torch.device("cuda"):
            oracle = ops.pack_linear(rows, None, form.packing)
            some = x[:70]
            expected = ops.gated_linear(some, oracle, "silu") if form.gated else ops.linear(some, oracle)
        error = {"reference": relative(form.call(x[:70], weight)(), expected)}
        if form.scheme is None and not form.gated:
            error["float64"] = relative(form.call(x, weight)(), x.double() @ rows.to(form.dtype).double().T)
        x[3] = float("nan")
        whole = bits(form.call(x[:70], weight)())
        differing = []
        for count in (*range(1, 71), 100, 127, 128, 129, 200, 256, 513, 1100):
            found = bits(form.call(x[:count], weight)())[:70]
            backwards = bits(form.call(x[:count].flip(0), weight)()).flip(0)[:70]
            sane = torch.arange(len(found), device="cuda") != 3  # NaN has many bits
            wrong = (found != whole[: len(found)]) | (backwards != whole[: len(found)])
            if bool(wrong[sane].any()):
                differing.append(count)
        yield {"name": f"{form.name}, {form.leaves} leaves", "error": error, "rows_that_differ": differing}


def rows_of_adapters() -> Iterator[Row]:
    """Compare what adapters add to 1 to 1,100 rows bit by bit, and with float64."""
    slots = np.random.default_rng(0).integers(-1, len(RANKS), 1100).astype(np.int32)
    for dtype in (BF16, F32):
        torch.manual_seed(4)
        table = adapters(dtype, "cuda")
        x, y = torch.randn(1100, HIDDEN, device="cuda").to(dtype), torch.randn(1100, QKV, device="cuda")
        whole, exact = adapt(table, x, y.clone(), slots), y.double()
        for slot, rank in enumerate(RANKS):
            rows = torch.from_numpy(slots == slot).cuda()
            if table.scaled[slot]:
                exact[rows] = exact[rows] * table.factors[slot] + table.offsets[slot]
            hidden = torch.einsum("mk,prk->pmr", x[rows].double(), table.a[slot, :, :rank].double())
            b = table.b[slot, :, :rank].double().transpose(0, 1).flatten(1)
            parts = zip(hidden, b.split((4096, 1024, 1024), dim=1), strict=True)
            exact[rows] += torch.cat([some @ part for some, part in parts], dim=1)
        differing = []
        for count in (*range(1, 71), 100, 127, 128, 129, 200, 256, 257, 513, 1100):
            order = np.random.default_rng(count).permutation(1100)[:count]
            at = torch.from_numpy(order).cuda()
            if not torch.equal(bits(adapt(table, x[at], y[at], slots[order])), bits(whole[at])):
                differing.append(count)
        yield {"name": f"adapters, {dtype}", "error": relative(whole, exact), "rows_that_differ": differing}


def rows_of_attention() -> Iterator[Row]:
    """Compare attention of whole prompts, chunks, drafts and single tokens bit by bit, and with float64."""
    for heads, kind, dtype in ATTENTION:
        torch.manual_seed(2)
        prompt = Prompt(1500, heads, kind, dtype)
        whole = prompt.attend(0)
        steps = (0, 1, 63, 127, 128, 129, 500, 511, 512, 513, 1023, 1024, 1279, 1499)
        parts = {
            "chunk": (1200, 1500, 0),
            "chunk beside others": (1111, 1500, 5),
            "drafts": (1497, 1500, 0),
            "drafts beside others": (1488, 1500, 1),
            **{f"token {at}": (at, at + 1, 0) for at in steps},
        }
        differing = {
            name: int((bits(prompt.attend(*part)) != bits(whole[part[0] : part[1]])).sum())
            for name, part in parts.items()
        }
        yield {
            "name": f"{kind} {heads}".replace("torch.", ""),
            "error": relative(whole, prompt.exact()),
            "elements_that_differ": {name: count for name, count in differing.items() if count},
            "comparisons": len(differing),
        }


class Prompt:
    """A sequence of random queries, keys and values, and another one that has a NaN."""

    def __init__(self, length: int, heads: Heads, kind: torch.dtype, dtype: torch.dtype) -> None:
        self.sequences, self.length = Sequences([length, 700], heads, kind, "cuda", dtype), length
        self.rules = AttentionParams(heads.head_dim**-0.5)
        self.q = self.sequences.draw(length, heads.num_heads)
        self.k, self.v = (self.sequences.draw(length, heads.num_kv_heads) for _ in range(2))

    def attend(self, start: int, stop: int | None = None, others: int = 0) -> torch.Tensor:
        """Attend for positions of the sequence, beside so many tokens of the other one."""
        stop = stop or self.length
        new = {0: (start, stop)} | ({1: (700 - others, 700)} if others else {})
        q, k, v = (torch.cat([x[start:stop], x[:others]]) for x in (self.q, self.k, self.v))
        q[stop - start :] = float("nan")
        step = self.sequences.metadata(new)
        return self.sequences.ops.attend(q, k, v, self.sequences.cache, step, self.rules)[: stop - start]

    def exact(self) -> torch.Tensor:
        """Attend for all positions in float64."""
        slots = torch.from_numpy(self.sequences.slots(0, 0, self.length)).cuda()
        group = self.q.shape[1] // self.k.shape[1]
        k, v = (x.double().repeat_interleave(group, 1) for x in self.sequences.ops.load_kv(self.sequences.cache, slots))
        later = torch.ones(self.length, self.length, dtype=torch.bool, device="cuda").triu(1)
        scores = torch.einsum("qhd,khd->hqk", self.q.double(), k) * self.rules.scale
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v).flatten(1)


def recorded_steps() -> Iterator[Row]:
    """Compare whole steps that are launched as graphs with steps that are not, and measure their time and memory.

    "recorded ms": of a step that is not recorded yet, of one that is captured, and of two that are launched as graphs.
    """
    from tests.kernels.triton import recorded

    yield from recorded.run("cuda", recorded.VARIANTS[:2])


STAGES: dict[str, tuple[Callable[[], Any], float]] = {  # with the most seconds that each may take
    "compile": (compile_all, 150),
    "operations": (operations, 150),
    "rows of products": (rows_of_products, 60),
    "rows of adapters": (rows_of_adapters, 60),
    "rows of attention": (rows_of_attention, 60),
    "bits of requests": (gpu_engines.bits_of_requests, 120),
    "steps": (gpu_engines.steps, 90),
    "recorded steps": (recorded_steps, 120),
    "rates": (rates, 120),
}


# --- running them -----------------------------------------------------------------------------------------------------


def run_stage(name: str, file: str) -> None:
    """Run a stage in this process, and write its rows as they come."""
    with open(file, "w") as out:
        try:
            for row in STAGES[name][0]():
                print(json.dumps(row), file=out, flush=True)
        except Exception:
            print(json.dumps({"name": "FAILED", "error": traceback.format_exc()[-2000:]}), file=out, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=",".join(STAGES), help="which, separated by commas (default: all)")
    parser.add_argument("--out", default="gpu_check.json", help="where the results go (default: %(default)s)")
    parser.add_argument("--run", nargs=2, metavar=("STAGE", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run_stage(*arguments.run)
        return
    import triton

    results: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "stages": {}}
    for name in arguments.stages.split(","):
        began = time.perf_counter()
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as file:
            command = [sys.executable, __file__, "--run", name, file.name]
            try:
                code: int | str = subprocess.run(command, timeout=STAGES[name][1], check=False).returncode
            except subprocess.TimeoutExpired:
                code = "out of time"
            rows = [json.loads(line) for line in file]
        taken = round(time.perf_counter() - began, 1)
        results["stages"][name] = {"seconds": taken, "exit": code, "rows": rows}
        print(f"\n{name}: {taken} s" + (f", {code}" if code else ""))
        for row in rows:
            print("  " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        Path(arguments.out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
