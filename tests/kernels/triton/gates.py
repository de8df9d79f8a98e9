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

from penstock.kernels.metadata import AttentionParams, CacheSpec, Heads, RotaryParams, RouterParams
from penstock.kernels.ops import LoraTable, Packing
from penstock.kernels.sampling import SamplingTensors
from penstock.kernels.scheme import Scheme
from penstock.kernels.triton import attention, experts, int4, lora, norms, products, rotary, rows, sampling
from penstock.kernels.triton.cache import TritonCache
from penstock.kernels.triton.experts import Experts
from penstock.kernels.triton.launch import compiling
from penstock.kernels.triton.packed import TritonLinear, assemble, tensors_of
from penstock.kernels.triton.quantize import operand
from penstock.kernels.triton.work import Items, PlannedMetadata, Work, many_rows

BF16, F32 = torch.bfloat16, torch.float32
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
EIGHT = tuple(range(512, 4097, 512))
GATED_INT8 = Packing((), Scheme.parse("int8"), gated=True)
Case = tuple[str, Callable[[], Any]]


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def linear(n: int, k: int, packing: Packing, dtype: torch.dtype = BF16) -> TritonLinear:
    parts = tensors_of((n, k), packing, dtype, bias=True).items()
    state = {name: meta(*size, dtype=kind) for name, (size, kind) in parts}
    return assemble((n, k), packing, dtype, "meta", state)


def product(rows: int, packing: Packing, dtype: torch.dtype = BF16) -> None:
    gated = packing.gated
    weight = linear(8192 if gated else 4096, 4096, packing, dtype)
    out = meta(rows, 4096, dtype=dtype if gated else F32)
    products.product(operand(meta(rows, 4096, dtype=dtype), weight), weight, out, activation="silu", gated=gated)


def int4_product(rows: int, scheme: str) -> None:
    weight = linear(4096, 4096, Packing((), Scheme.parse(scheme)))
    int4.product(operand(meta(rows, 4096), weight), weight, meta(rows, 4096, dtype=F32))


def experts_of_a_layer() -> None:
    x, chosen = meta(4, 2048), (meta(4, 8, dtype=torch.int64), meta(4, 8, dtype=F32))
    table = meta(3, 128, dtype=torch.int64)
    for scheme in (None, Scheme.parse("int4")):
        up, down = (linear(*size, Packing((), scheme)) for size in ((1536, 2048), (2048, 768)))
        tables = Experts(up, table), Experts(down, table)
        experts.experts(x, *tables, chosen, "silu", meta(4, 2048, dtype=F32), weigh_inputs=False)


def adapters(rows: int, dtype: torch.dtype = BF16) -> None:
    """Four adapters of a rank of up to 64, for q, k and v."""
    a, b, scales = meta(4, 3, 64, 4096, dtype=dtype), meta(4, 384, 64, 16, dtype=dtype), meta(4, 6144, dtype=F32)
    words = meta(4, dtype=torch.int32)
    table = lora.Adapters.of(LoraTable(a, b, scales, scales, words, words, (4096, 5120, 6144), (4096,)))
    items, hidden = meta(rows, 4, dtype=torch.int32), meta(rows, 3, 64, dtype=F32)
    lora.shrink(meta(rows, 4096, dtype=dtype), table, items, hidden)
    lora.expand(hidden, table, items, meta(rows, 6144, dtype=F32))


def row_cases() -> Iterator[Case]:
    x, h, weight, out = meta(4, 4096, dtype=F32), meta(4, 4096, dtype=F32), meta(4096, dtype=F32), meta(4, 4096)
    yield "rms norm", lambda: norms.norm(x, h, weight, None, 1e-5, out, centred=False)
    yield "layer norm", lambda: norms.norm(x, None, weight, weight, 1e-5, out, centred=True)
    heads, q = Heads(32, 8, 128), (meta(4, 32, 128), meta(4, 8, 128), meta(4, 8, 128))
    qkv, positions, table = meta(4, 6144, dtype=F32), meta(4, dtype=torch.int64), meta(99, 128, dtype=F32)
    each, whole = meta(128, dtype=F32), meta(4096, dtype=F32)
    yield "rotary", lambda: rotary.rotary_qkv(qkv, positions, RotaryParams(heads, table, each, each), q)
    yield (
        "rotary of heads normed together",
        lambda: rotary.rotary_qkv(qkv, positions, RotaryParams(heads, table, whole, None), q),
    )
    yield "experts", experts_of_a_layer
    logits, chosen = meta(4, 128, dtype=F32), (meta(4, 8, dtype=torch.int64), meta(4, 8, dtype=F32))
    yield "router", lambda: experts.route(logits, RouterParams(8), *chosen)
    yield "softcap", lambda: rows.apply("softcap", x, x, 30.0)
    yield "embedding", lambda: rows.embed(positions, meta(999, 4096), 1.0, x)
    yield "sum of parts", lambda: rows.add_parts(meta(8, 4, 4096, dtype=F32), weight, weight, x)


def attend(few_rows: int = 0, head_dim: int = 128, kind: torch.dtype = BF16, sinks: int = 0, **params: Any) -> None:
    """Attention for items of few rows, if a number is given, otherwise for items of many."""
    device, int32, dtype = torch.device("meta"), torch.int32, F32 if kind == F32 else BF16
    cache = TritonCache.new(CacheSpec(8, 128, 8, head_dim, kind, 2 * (kind == torch.int8)), device)
    q = meta(*[2][: bool(sinks)], 64, 32, head_dim, dtype=dtype)
    k = meta(64, 8, head_dim, dtype=dtype)
    items = meta(4, 2, dtype=int32)
    places = meta(5, dtype=int32), meta(4, dtype=int32), meta(4, 9, dtype=int32), meta(64, dtype=torch.int64)
    few = Items(items, few_rows, 2) if few_rows else None
    work = Work(*places, few, None if few_rows else Items(items, many_rows(cache)))
    window = 1000 if sinks else None
    step = PlannedMetadata(*places, block_size=128, sliding_window=window, num_sink_tokens=sinks, work=work)
    out, lse = meta(64, 32 * head_dim, dtype=dtype), meta(64, 32, dtype=F32)
    attention.attend(q, (k, k), cache, step, AttentionParams(head_dim**-0.5, **params), out, lse)


def attention_cases(architecture: int) -> Iterator[Case]:
    yield "attention", attend
    if architecture in (80, 86, 90):  # one for each table
        yield "attention of few rows", lambda: attend(16)
    if architecture == 86:
        yield "attention with heads of 256", lambda: attend(head_dim=256)
    if architecture == 90:
        yield "attention of some rows", lambda: attend(64)
        yield "attention of few rows with int8", lambda: attend(16, kind=torch.int8)
        yield "attention with int8", lambda: attend(kind=torch.int8)
        yield "attention of few rows in float32", lambda: attend(16, kind=F32)
        yield "attention with sinks", lambda: attend(sinks=4, sink_logits=meta(32, dtype=F32))


def sampling_cases(architecture: int) -> Iterator[Case]:
    logits, ids, numbers = meta(4, 128256, dtype=F32), meta(4, dtype=torch.int64), meta(4, dtype=F32)
    pairs, key = meta(9, 2, dtype=torch.int64), meta(4, 3, dtype=torch.int64)
    allowed = meta(2, dtype=torch.int64), meta(2, 4008, dtype=torch.int32)
    given = SamplingTensors(numbers, ids, numbers, numbers, key, pairs, (pairs, meta(9, dtype=F32)), allowed=allowed)
    yield "sampling", lambda: sampling.choose(logits, given)
    if architecture != 90:
        return
    counts = numbers, numbers, pairs, meta(9, dtype=F32)
    greedy = SamplingTensors(numbers, repetition=(numbers, pairs), counts=counts)
    yield "greedy sampling", lambda: sampling.choose(logits, greedy)
    yield "log-probabilities", lambda: sampling.token_scores(logits, ids, 5)


def cases(architecture: int) -> Iterator[Case]:
    """Every kernel in every configuration of its table, at the sizes of an 8B model.

    The largest tiles suffice where nothing was measured yet: those are what may not fit.
    """
    for count in (16, 32, 64, 128, 4096) if architecture == 90 else (64, 4096):
        yield f"product of {count} rows", lambda count=count: product(count, Packing())
        if count != 128:
            yield f"gated product of {count} rows", lambda count=count: product(count, Packing(gated=True))
            yield f"product of {count} rows in leaves", lambda count=count: product(count, Packing(EIGHT))
            yield f"int8 product of {count} rows", lambda count=count: product(count, Packing((), Scheme.parse("int8")))
        if count > 128:
            yield f"gated int8 product of {count} rows", lambda count=count: product(count, GATED_INT8)
    for count in (16, 64) if architecture == 90 else (64,):
        yield f"int4 product of {count} rows", lambda count=count: int4_product(count, "int4")
        yield f"int4-a16 product of {count} rows", lambda count=count: int4_product(count, "int4-a16")
    for count in (16, 4096):
        yield f"adapters of {count} rows", lambda count=count: adapters(count)
    yield from attention_cases(architecture)
    yield from sampling_cases(architecture)
    if architecture == 90:
        yield from row_cases()
        yield "int8-x3 product", lambda: product(16, Packing(EIGHT, Scheme.parse("int8-x3")))
        yield "float32 product", lambda: product(16, Packing(), F32)
        yield "float32 adapters", lambda: adapters(4096, F32)
        yield "float32 adapters of few rows", lambda: adapters(16, F32)


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
