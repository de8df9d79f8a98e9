"""`penstock explain`: what is drawn is what the masks, the attention and the stages of the engine do."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli.main import main
from penstock.kernels.attention.items import TILE
from penstock_lab.conventions.rolling import decode_mask, first_prefill_mask, later_prefill_mask
from penstock_lab.planner import explain
from penstock_lab.planner.explain import PARTLY, SKIPPED, WHOLE, mask, receptive_field

MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 32768, "sliding_window": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture
def mistral(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL))
    return str(tmp_path)


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["explain", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.covers("M6")
def test_the_table_of_the_receptive_field(mistral: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a line that is left out, a window of another layer, and layers above one without a window that
    seem to see less than it."""
    assert main(["explain", mistral]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line.split() for line in lines[lines.index("layer   window    reach") + 1 :][:32]]
    assert table == [[str(layer), "4096", str(layer * 4095 + 1)] for layer in range(1, 33)]
    found = figures(capsys, mistral, "--window", "5", "--num-layers", "3")["receptive_field"]
    assert [row["reach"] for row in found] == [5, 9, 13]
    found = figures(capsys, mistral, "--window", "0", "--num-layers", "2")["receptive_field"]
    assert [(row["window"], row["reach"]) for row in found] == [(None, None)] * 2
    assert [row.reach for row in receptive_field((3, None, 3))] == [3, None, None]
    assert [row.reach for row in receptive_field((8, 8, 8), chunked=True)] == [8, 8, 8]


@pytest.mark.covers("M6", "M12", "M22", "M23")
def test_masks_are_those_of_the_reference_inference(mistral: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a drawn mask that is another than the one the kernels are compared with, and against a count of
    padding that leaves tokens out."""

    def drawn(seen: Any) -> list[str]:
        return ["".join("x" if item else "." for item in row) for row in seen.tolist()]

    for window in (None, 3, 4):
        found = figures(capsys, mistral, "--window", str(window or 0), "--chunk", "4")
        assert found["packed"] == drawn(first_prefill_mask([3, 4, 5], [0, 0, 0], window))
        for item, start in zip(found["chunks"], (0, 4, 8), strict=False):
            size = min(4, 11 - start)
            assert item["mask"] == drawn(later_prefill_mask([size], [start], window))
        assert found["chunks"][3]["mask"] == (drawn(decode_mask([11], window)) if window else ["x" * 12])
        packed = 6 + 10 + 15
        seen = int(first_prefill_mask([3, 4, 5], [0, 0, 0], window).sum())
        assert found["padding"] == {"padded": 75, "packed": packed, "in_window": seen}
    assert main(["explain", mistral]) == 0
    out = capsys.readouterr().out
    assert "; a window of 4, as the model's is too wide to draw\n" in out
    assert "dot products: 75 padded, 31 packed, 44 wasted\n" in out
    assert main(["explain", mistral, "--window", "4"]) == 0
    assert "; a window of 4\n" in capsys.readouterr().out


@pytest.mark.covers("M6")
@pytest.mark.parametrize("window", [None, 1, 64, 65, 100, 128, 200])
@pytest.mark.parametrize(("chunked", "sinks"), [(False, 0), (True, 0), (False, 4), (False, 64)])
def test_tiles_are_those_that_a_query_sees(window: int | None, chunked: bool, sinks: int) -> None:
    """Guards against a tile that is drawn as skipped although a query sees a key of it, or the other way round."""
    rules, at, size = {"chunked": chunked, "sinks": sinks}, np.arange(6 * TILE), TILE
    seen = mask(at, at, window, **rules)
    for query in range(6):
        for key in range(6):
            part = seen[query * size : (query + 1) * size, key * size : (key + 1) * size]
            expected = WHOLE if part.all() else PARTLY if part.any() else SKIPPED
            found = explain._tile(query, key, window, rules)
            assert found == expected or (sinks and (found, expected) == (PARTLY, WHOLE)), (query, key)


@pytest.mark.covers("M6", "M20", "M21")
def test_the_timeline_of_a_pipeline(mistral: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against stages that begin before their input, and a bubble that is not that of the picture."""
    words = ["--pipeline-parallel-size", "3", "--micro-batches", "2"]
    found = figures(capsys, mistral, *words)["pipeline"]
    assert [line["layers"] for line in found["stages"]] == [[1, 11], [12, 22], [23, 32]]
    order = [line["micro_batches"] for line in found["stages"]]
    assert order == [["0", "1", "-", "-"], ["-", "0", "1", "-"], ["-", "-", "0", "1"]]
    assert found["bubble"] == sum(row.count("-") for row in order) / 12 == (3 - 1) / (2 + 3 - 1)
    assert list(found["bubbles"].values()) == sorted(found["bubbles"].values(), reverse=True)
    assert main(["explain", mistral, *words]) == 0
    assert "stage 2, layers 12 to 22:   - 0 1 -\n" in capsys.readouterr().out
    assert main(["explain", mistral, "--micro-batches", "65"]) == 2
    assert "micro_batches: 65 is not allowed; it must be" in capsys.readouterr().err.replace(
        "--micro-batches", "micro_batches"
    )
