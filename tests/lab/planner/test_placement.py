"""Placements on chips, and the budgets of an attention operator: the numbers of the documents that they come from."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock import InvalidRequestError
from penstock.cli.main import main
from penstock.models.config_json import parse_model_config
from penstock_lab.planner.machines import OnChip
from penstock_lab.planner.operator import (
    FLOAT_BYTES,
    MODES,
    SOFTMAX_OPERATIONS,
    UNIFIED_BUFFER,
    UPDATE_OPERATIONS,
    check_buffers,
    schedule,
    tiles,
)
from penstock_lab.planner.placement import (
    FOLDER,
    Placement,
    PlacementPlan,
    load_placement,
    operation_bytes,
    plan_placement,
    read_placement,
)
from tests.kernels.packed import levels
from tests.lab.planner.test_plan import FALCON, written

MIB = 2**20
FALCON_40B = FALCON | {
    "hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8, "num_hidden_layers": 60, "vocab_size": 65024,
    "max_position_embeddings": 2048,
}  # fmt: skip
MODEL = parse_model_config(FALCON_40B)
SHAPES = {
    "attention.qkv_proj": ((9216, 8192),), "attention.o_proj": ((8192, 8192),), "mlp.up_proj": ((32768, 8192),),
    "mlp.down_proj": ((8192, 32768),),
}  # fmt: skip


def falcon(**changes: Any) -> PlacementPlan:
    placement = replace(load_placement("falcon-40b-galaxy"), **changes)
    return plan_placement(MODEL, operation_bytes(MODEL, SHAPES, placement.head_pad), placement)


@pytest.mark.skipif(not levels(), reason="no native library")
@pytest.mark.covers("F26", "F27", "F28", "F29")
def test_falcons_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a number that differs from those of Tenstorrent's document, 32 rows of 2048 tokens, and against
    one that is not counted: what it calls "roughly 83.5 GB" are 83.67 GB, and a model of two layers has fewer."""
    directory = written(tmp_path, FALCON_40B)
    words = ["plan", directory, "--hardware", "wormhole-galaxy", "--tensor-parallel-size", "8"]
    assert main([*words, "--placement", "falcon-40b-galaxy"]) == 0
    printed = capsys.readouterr().out
    written(tmp_path, FALCON_40B | {"num_hidden_layers": 2})
    assert main([*words, "--placement", "falcon-40b-galaxy", "--json"]) == 0
    layer, ends = 2 * (9216 + 8192 + 2 * 32768 + 4) * 8192, 2 * (65024 + 512 + 65024 + 2) * 8192
    assert json.loads(capsys.readouterr().out)["placement"]["weight_bytes"] == 2 * layer + ends
    assert abs(60 * layer + ends - 83.5e9) < 0.003 * 83.5e9
    for text in (
        "60 epochs, one per layer",
        "64 MiB per K, 128 MiB per layer, 7680 MiB in all",
        "SRAM of the attention's chips: 1920 MiB",
        "83.7 GB, 1.39 GB per layer (82.6 GB on the chips)",
    ):
        assert text in printed


@pytest.mark.covers("F26", "F29")
def test_what_each_chip_holds() -> None:
    """Guards against a fracture that is counted whole on every chip, or by another number of chips."""
    plan = falcon()
    assert not plan.problems
    attention, mlp = plan.epochs[0]
    assert (len(attention.chips), len(mlp.chips)) == (16, 8)
    assert attention.cache_bytes_per_chip == 8 * MIB  # one of the 16 tensors [1, 32, 2048, 64] of a layer
    assert sum(len(epoch[0].chips) for epoch in plan.epochs[:60]) == 960  # tensors in all
    assert mlp.weight_bytes_per_chip == 128 * MIB
    assert plan.sram()[0] == 8 * MIB + 16 * MIB
    assert plan.sram()[16] == 16 * MIB
    assert plan.dram()[16] == 60 * 128 * MIB


@pytest.mark.covers("F27", "F28")
def test_one_byte_over_the_budget_is_refused_by_name() -> None:
    """Guards against a chip whose memory is over its budget, and against a refusal that does not say where."""
    most = falcon().sram()[0]
    assert not falcon(sram_per_chip=most).problems
    (problem,) = falcon(sram_per_chip=most - 1).problems
    assert problem.startswith(f"layers.0.attention needs {most} bytes of SRAM on chip 0, 1 more than its {most - 1}")
    held = falcon().dram()[16]
    assert not falcon(dram_per_chip=held).problems
    (problem,) = falcon(dram_per_chip=held - 1).problems
    assert "layers.0.mlp" in problem
    assert f"DRAM on chip 16, 1 more than its {held - 1}" in problem
    resident = falcon(weights="resident")
    assert resident.problems == (
        f"layers.0.mlp needs {128 * MIB} bytes of SRAM on chip 16, {8 * MIB} more than its {120 * MIB}",
    )
    assert resident.streamed_bytes == 0


@pytest.mark.covers("F25", "F30")
def test_overrides_overlaps_and_a_head_that_is_left_out() -> None:
    """Guards against two operations on one chip at once, a chip that is not there, a pattern that is ignored, and a
    head that is always placed."""
    moved = falcon(overrides=(("layers.*.mlp", (24, 25, 26, 27)), ("layers.7.*", (0, 1))))
    assert moved.epochs[3][1].chips == (24, 25, 26, 27)
    assert moved.problems[0] == "layers.7.attention and layers.7.mlp overlap on chip 0"
    (problem,) = falcon(overrides=(("layers.60.mlp", (24,)),)).problems
    assert problem.startswith("overrides: the pattern layers.60.mlp matches no operation; they are layers.0.attention")
    assert falcon(chips=30).problems == ("lm_head: there is no chip 31, only 0 to 29",)
    without = falcon(chips_of={name: chips for name, chips in falcon().placement.chips_of.items() if name != "lm_head"})
    assert not without.problems
    assert len(without.epochs) == 60
    assert without.figures()["lm_head"].startswith("NOP")
    assert falcon().epochs[-1][0].weight_bytes == 2 * 8192 * 65536  # 65024 tokens and 512 more
    nowhere = falcon(chips_of={"attention": tuple(range(16)), "mlp": ()})
    assert nowhere.problems[0] == "layers.0.mlp is on no chip"


@pytest.mark.covers("F30")
def test_any_operation_is_placed_by_a_pattern() -> None:
    """Guards against an operation that stays on its branch's chips, whose weights are counted on both or on neither,
    and against a pattern that matches nothing and is ignored."""
    moved = falcon(overrides=(
        ("layers.*.attend", (0, 1)), ("layers.[5-9].mlp.down_proj", (16, 17)), ("*.rotary", (2,)), ("lm_head.3", (9,)),
    ))  # fmt: skip
    assert not moved.problems
    assert [(item.name, item.chips, item.weight_bytes, item.cache_bytes // MIB) for item in moved.epochs[7]] == [
        ("layers.7.attention", tuple(range(16)), 2 * (9216 + 8192) * 8192, 0),
        ("layers.7.attention.attend", (0, 1), 0, 128), ("layers.7.attention.rotary", (2,), 0, 0),
        ("layers.7.mlp", tuple(range(16, 24)), 2 * 32768 * 8192, 0),
        ("layers.7.mlp.down_proj", (16, 17), 2 * 32768 * 8192, 0),
    ]  # fmt: skip
    assert moved.epochs[60][0].chips == (24, 25, 26, 9, 28, 29, 30, 31)
    assert moved.weight_bytes == falcon().weight_bytes
    assert ("mlp.down_proj", 5, 9) in [
        (item["operation"], item["first_epoch"], item["last_epoch"]) for item in moved.figures()["areas"]
    ]
    assert falcon(overrides=(("*.up_proj", (3,)), ("layers.*.mlp", (16,)))).epochs[0][1].chips == (16,)
    for pattern, chips, problem in (
        (
            "layers.*.wq",
            (0,),
            r"layers\.\*\.wq matches no operation; they are .*; in a layer attention\.add, .*mlp\.up_",
        ),
        ("layers.2.mlp.up_proj", (3,), "layers.2.attention and layers.2.mlp.up_proj overlap on chip 3"),
        ("lm_head.3", (24,), "lm_head: its 8 pieces need a chip each"),
        ("*.down_proj", (40,), "layers.0.mlp.down_proj: there is no chip 40"),
    ):
        assert re.search(problem, falcon(overrides=((pattern, chips),)).problems[0])


@pytest.mark.covers("F30")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sram": 1}, "unknown field sram; known are"),
        ({"attention": {"chips": "0-"}}, "attention.chips: '0-' is not allowed; it must be chips"),
        ({"attention": {"chips": "5-2"}}, "attention.chips"),
        ({"mlp": None}, "mlp must be given"),
        ({"rows": -1}, "rows: -1 is not allowed"),
        ({"weights": "cached"}, "weights"),
        ({"overrides": "all"}, "overrides must be a list"),
        ({"lm_head": {"chips": 1, "fracture": 8}}, "lm_head"),
    ],
)
def test_a_wrong_file_is_refused(changes: dict[str, Any], message: str) -> None:
    """Guards against a field that is misspelt and ignored."""
    right = yaml.safe_load((FOLDER / "falcon-40b-galaxy.yaml").read_text())
    assert isinstance(read_placement(right), Placement)
    with pytest.raises(InvalidRequestError, match=message):
        read_placement(right | changes)


# --- the attention operator ----------------------------------------------------------------------------------------

CHIP = OnChip(cores=20, buffer_bytes=192 * 1024, matrix_flops=16e12, vector_flops=0.25e12, vectors_per_matrix=2)


@pytest.mark.covers("A26")
def test_the_blocks_of_the_unified_buffer() -> None:
    """Guards against a block of another size than the operator's document gives it, and a buffer that is too small."""
    assert [size // 1024 for size in UNIFIED_BUFFER.values()][:6] == [32, 16, 16, 8, 32, 32]
    assert check_buffers(CHIP.buffer_bytes) == 160896
    assert check_buffers(160896) == 160896
    with pytest.raises(InvalidRequestError, match="bmm2PageAttentionDataBuff ends at 160896, 1 bytes beyond 160895"):
        check_buffers(160895)


ENDS = {  # of each block, counted by hand from the sizes of the document
    "inputQue1": 32768, "inputQue2": 49152, "outputQue1": 65536, "outputQue2": 73728, "tmpBuff1": 106496,
    "tmpBuff2": 139264, "tmpBuff3": 141312, "antiqScaleBuff": 143360, "antiqOffsetBuff": 145408, "qAmaxBuff": 147712,
    "softmaxResAmaxBuff": 150016, "qRowSumBuff": 152320, "softmaxResRowSumBuff": 154624, "softmaxMaxBuff": 156672,
    "softmaxExpBuff": 158720, "softmaxSumBuff": 160768, "bmm1PageAttentionDataBuff": 160832,
    "bmm2PageAttentionDataBuff": 160896,
}  # fmt: skip


@pytest.mark.covers("A26")
def test_each_block_ends_where_the_document_ends_it() -> None:
    """Guards against two blocks with each other's size: the sum is right, and tiles are cut for the wrong block."""
    for name, end in ENDS.items():
        with pytest.raises(InvalidRequestError, match=rf" {name} ends at {end}, 1 bytes beyond"):
            check_buffers(end - 1)


@pytest.mark.covers("A7", "A20", "A26")
@given(group=st.integers(1, 300), head_dim=st.integers(1, 512), block=st.integers(1, 2**17))
def test_tiles_stay_within_their_block(group: int, head_dim: int, block: int) -> None:
    """Guards against a portion of scores, or of results, that is larger than the block that holds it."""
    try:
        found = tiles(group, head_dim, block)
    except InvalidRequestError:
        assert block < FLOAT_BYTES * max(128, head_dim)
        return
    columns = block // FLOAT_BYTES // max(found.keys, head_dim)  # rows that fit: "ub / columns" of the document
    # A row has 32 bytes in each block of maxima and sums, which are 2 KiB: 64 rows, as many as a group may have.
    assert found.rows == min(group, columns, 64) >= 1
    assert found.rows * 32 <= UNIFIED_BUFFER["softmaxMaxBuff"] == UNIFIED_BUFFER["softmaxSumBuff"]
    assert found.rows * found.keys * FLOAT_BYTES <= block
    assert found.rows * head_dim * FLOAT_BYTES <= block
    assert (found.portions - 1) * found.rows < group <= found.portions * found.rows
    assert found.keys % 128 == 0


@pytest.mark.covers("A27")
def test_the_ratio_of_the_units() -> None:
    """Guards against a schedule in which units wait for nothing, or all work is done twice."""
    both, alone, half = (schedule(CHIP, 8, 128, 4096, mode) for mode in MODES)
    assert half.vector_seconds == pytest.approx(2 * both.vector_seconds)
    assert half.matrix_seconds == both.matrix_seconds > 0 == alone.matrix_seconds
    for found in (both, half):
        longer, all_of_it = max(found.matrix_seconds, found.vector_seconds), found.matrix_seconds + found.vector_seconds
        first = all_of_it / found.tiles
        assert found.seconds == pytest.approx(first + (found.tiles - 1) * longer / found.tiles)
    assert alone.seconds > both.seconds  # a group of 8 rows is work for the matrix unit
    assert schedule(CHIP, 8, 128, 1, "C1_V2").tiles == 1


@pytest.mark.covers("A27")
def test_a_schedule_calculated_by_hand() -> None:
    """Guards against a rate that is doubled or halved in every mode alike: 8 rows, 4 tiles of 1024 keys."""
    both, alone, half = (schedule(CHIP, 8, 128, 4096, mode) for mode in MODES)
    assert both.tiles == 4
    multiply = 4 * 8 * 1024 * 128  # per tile: a multiplication and an addition, with keys and with values
    vector = SOFTMAX_OPERATIONS * 8 * 1024 + UPDATE_OPERATIONS * 8 * 128
    assert both.matrix_seconds == pytest.approx(4 * multiply / 16e12)
    assert both.vector_seconds == pytest.approx(4 * vector / (2 * 0.25e12))
    assert half.vector_seconds == pytest.approx(4 * vector / 0.25e12)
    assert alone.seconds == pytest.approx(4 * (vector + multiply) / (2 * 0.25e12))
