"""The tiling of the IncreFlashAttention operator, by its document: its rules, each digit of its key, its formulae."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from penstock import InvalidRequestError, NotSupportedError
from penstock.cli.main import main
from penstock_lab.planner.operator import (
    MODES,
    SPLIT_BELOW,
    OperatorCall,
    decode_tiling_key,
    encode_tiling_key,
    num_splits,
    plan_call,
)

PLAIN = OperatorCall([1000, 1000], 32, 4, 128, query="bfloat16", cache="bfloat16", output="bfloat16")


@pytest.mark.covers("A9")
def test_sequences_are_split_below_two_fifths_of_the_cores() -> None:
    """Guards against another threshold, one that is one off, or a product with 0.4 that is rounded across it."""
    assert SPLIT_BELOW == 0.4
    for cores, pairs in itertools.product(range(1, 129), range(1, 65)):
        splits = num_splits(pairs, cores)
        assert (splits > 1) == (10 * pairs < 4 * cores)
        if splits > 1:
            assert splits * pairs <= cores < (splits + 1) * pairs
    assert (num_splits(8, 20), num_splits(7, 20), num_splits(8, 21)) == (1, 2, 2)
    assert (num_splits(9, 20, split_below=0.5), num_splits(10, 20, split_below=0.5)) == (2, 1)
    tiling = plan_call(replace(PLAIN, lengths=[1000, 90]), 40)  # 8 pairs
    assert (tiling.splits, tiling.split_size) == (5, 200)
    assert tiling.parts(1000) == [(0, 200), (200, 400), (400, 600), (600, 800), (800, 1000)]
    assert (tiling.parts(450), tiling.parts(90)) == ([(0, 200), (200, 400), (400, 450)], [(0, 90)])
    # Blocks of (sequence, head, part): 20 full ones of the first sequence, and of the second one of 90 per head.
    assert len(tiling.starts) == 41
    assert tiling.starts[0] == 0
    assert tiling.starts[-1] == 2 * 4 * 5
    assert list(tiling.starts) == sorted(tiling.starts)


@pytest.mark.covers("A24", "A27")
def test_every_digit_of_the_key() -> None:
    """Guards against a digit at another place or of another value than the document's table: all 1,728 keys, against
    its sum of powers, and back."""
    seen = set()
    layouts = {"BNSD": 0, "BSH": 1, "BSND": 1}
    types, perf_modes = {"float16": 0, "bfloat16": 2, "int8": 3}, {"C1_V2": 0, "all-vector": 1, "C1_V1": 2}
    floats, flags = ("float16", "bfloat16"), (False, True)
    parameters = itertools.product(layouts, floats, types, types, flags, flags, flags, perf_modes, flags)
    for layout, query, cache, output, split, paged, per_token, perf_mode, prefix in parameters:
        choices: dict[str, Any] = {
            "split": split, "paged": paged, "per_token": per_token, "perf_mode": perf_mode, "prefix": prefix
        }  # fmt: skip
        key = encode_tiling_key(layout, (query, cache, output), **choices)
        assert key == (
            layouts[layout] + 10 * types[query] + 100 * types[cache] + 1000 * types[output] + 10_000 * types[query]
            + 100_000 * (split + 2 * paged + 4 * per_token)
            + perf_modes[perf_mode] * 1_000_000_000_000_000 + (1 + prefix) * 10_000_000_000_000_000
        )  # fmt: skip
        expected = {"layout": "BNSD" if layout == "BNSD" else "BSH", "query": query, "cache": cache, "output": output}
        assert decode_tiling_key(key) == expected | choices
        seen.add(key)
    assert len(seen) == 2 * 2 * 3 * 3 * 8 * 3 * 2
    assert max(seen) < 2**64
    for wrong in (
        0, -1, 10**15, 30000000000000000, 13000000000000000, 10000000000000002, 10000000000000010, 10000000000000100,
        10000000000800000, 10000000001000000, 10100000000000000, 110000000000000000, 10000000000010000,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="is not a tiling key"):
            decode_tiling_key(wrong)
    with pytest.raises(NotSupportedError, match="no digit for float32"):
        encode_tiling_key("BSH", ("float32", "float32", "float32"), perf_mode="C1_V2", split=False, paged=False,
                          per_token=False, prefix=False)  # fmt: skip
    with pytest.raises(InvalidRequestError, match="key: 'int4'"):
        replace(PLAIN, cache="int4")


@pytest.mark.covers("A8", "A27")
def test_the_units_are_recorded_in_the_key() -> None:
    """Guards against a template that is chosen and then not the one of the key: vector units only where the device has
    no others, or without blocks and groups and in float16 throughout; the third ratio on request."""
    one_head = replace(PLAIN, num_heads=4, query="float16", cache="float16", output="float16")
    cases: list[tuple[OperatorCall, dict[str, Any], str]] = [
        (one_head, {}, "all-vector"),
        (replace(one_head, block_size=128), {}, "C1_V2"),
        (replace(one_head, num_heads=8), {}, "C1_V2"),
        (replace(one_head, query="bfloat16"), {}, "C1_V2"),
        (replace(one_head, cache="int8"), {}, "C1_V2"),
        (replace(one_head, output="int8"), {}, "C1_V2"),
        (PLAIN, {"vectors_only": True}, "all-vector"),
        (PLAIN, {"perf_mode": "C1_V1"}, "C1_V1"),
    ]
    for call, options, expected in cases:
        tiling = plan_call(call, 20, **options)
        assert tiling.perf_mode == expected == decode_tiling_key(tiling.key)["perf_mode"]
        assert tiling.key // 10**15 % 10 == list(MODES).index(expected)
    with pytest.raises(InvalidRequestError, match="perf_mode"):
        plan_call(PLAIN, 20, vectors_only=True, perf_mode="C1_V2")


@pytest.mark.covers("A25")
def test_the_nine_formulae_of_the_workspace() -> None:
    """Guards against a factor that is missing or of another buffer: each of the nine by hand, G = 8, D = 128, SInner =
    1024 keys."""
    quantised = replace(PLAIN, cache="int8", block_size=128)
    assert plan_call(quantised, 24).workspace == {
        "mm1ResGm": 3 * 8 * 1024 * 4 * 24,
        "vec1ResGm": 3 * 8 * 1024 * 2 * 24,
        "mm2ResGm": 3 * 8 * 128 * 4 * 24,
        "vec2ResGm": 3 * 8 * 128 * 4 * 24,
        "queryPreProcessResGm": 3 * 8 * 128 * 1 * 24,
        "accumOutGm": 2 * 4 * 8 * 3 * 128 * 4,  # 8 pairs on 24 cores: 3 splits
        "logSumExpGm": 2 * 4 * 8 * 3 * 8 * 4,
        "bmm1CallBackDataGm": 64,
        "bmm2CallBackDataGm": 64,
    }
    fast = plan_call(replace(quantised, inner_precise=1), 24).workspace
    assert (fast["mm1ResGm"], fast["queryPreProcessResGm"]) == (2 * 8 * 1024 * 4 * 24, 2 * 8 * 128 * 24)
    tiling = plan_call(PLAIN, 20)  # 8 pairs on 20 cores are not split; not paged, not int8
    assert list(tiling.workspace.values()) == [655360, 327680, 81920, 81920, 0, 0, 0, 0, 0]
    assert tiling.workspace_bytes == 1146880


@pytest.mark.covers("A25", "A26", "A27")
def test_a_plan_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against figures that only a program can get: key, units, splits, workspace and on-chip blocks."""
    assert main(["plan", "demo", "--hardware", "ascend-910b", "--batch", "1", "32"]) == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    printed = {row[0]: row[1:] for row in rows if len(row) == 3}
    assert printed["key"] == ["10000000000322221", "10000000000222221"]
    assert printed["splits"] == ["10", "1"]
    assert printed["mm1ResGm"] == [str(3 * 2688 * 4 * 20)] * 2
    assert printed["accumOutGm"] == [str(2 * 3 * 10 * 32 * 4), "0"]
    assert printed["bmm2PageAttentionDataBuff"] == ["64", "160896"]
