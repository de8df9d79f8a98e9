"""The performance log: an entry stands beside the last one of the same machine, not of another."""

from typing import Any

from penstock_lab.bench.perf_log import entry, figures, last_values
from penstock_lab.bench.report import MACHINE


def result(processor: str, ms: float) -> dict[str, Any]:
    limits = {"read_gb_s": 30.0, "bf16_gflop_s": 400.0, "f32_gflop_s": 200.0, "int8_gop_s": 800.0}
    row = {
        "op": "linear", "dtype": "bf16", "leaves": 1, "m": 1, "n": 5632, "k": 2048, "ms": ms, "gb_s": 23 / ms,
        "gflop_s": 23 / ms, "torch_ms": 1.2, "bw_fraction": 0.9, "flop_fraction": 0.1,
    }  # fmt: skip
    half = {**row, "dtype": "int8", "ms": ms / 2}
    return {
        "machine": {**limits, "processor": processor, "threads": 2, "level": "avx512"},
        "command": "penstock bench ops",
        "torch": "2.13.0",
        "rows": [row, half],
    }


def test_an_entry_shows_the_figure_before_it() -> None:
    """Guards against: comparing with the wrong entry, or with none."""
    log = "# Log\n"
    log += entry(result("A", 0.8), log, "first")
    log += entry(result("B", 5.0), log, "another machine")
    log += entry(result("A", 0.7), log, "second")
    assert last_values(log, MACHINE.format_map(result("A", 1.0)["machine"]))["bf16 5632 x 2048, M = 1"].startswith(
        "0.700 ms"
    )
    line = next(line for line in log.splitlines()[::-1] if line.startswith("| bf16"))
    assert line.index("0.800 ms") < line.index("0.700 ms")
    assert "5.000" not in line


def test_int8_is_held_against_bf16_of_the_same_shape() -> None:
    """Guards against: a speed-up that divides by the wrong row."""
    assert dict(figures(result("A", 0.8)))["int8 5632 x 2048, M = 1"].endswith("2.00 x bf16")


def test_attention_is_logged_by_its_own_limit() -> None:
    """Guards against: decoding held against the multiply rate, and rows of attention that stop the log."""
    machine = result("A", 0.8)
    row = {
        "op": "attend_decode", "dtype": "bf16", "heads": 8, "kv_heads": 1, "head_dim": 128, "seqs": 1, "tokens": 32768,
        "threads": 2, "speedup": 1.9, "ms": 0.5, "bw_fraction": 0.9, "flop_fraction": 0.1, "torch_ms": 5.0,
    }  # fmt: skip
    machine["rows"] += [row, {**row, "op": "attend_prefill", "seqs": 1, "tokens": 4096, "speedup": None}]
    lines = dict(figures(machine))
    assert (
        lines["attend_decode bf16 8/1 heads of 128, 1 x 32768, 2 threads"] == "0.500 ms, 90% of reading, 10.00 x torch"
    )
    assert lines["attend_prefill bf16 8/1 heads of 128, 1 x 4096"] == "0.500 ms, 10% of multiplying, 10.00 x torch"
