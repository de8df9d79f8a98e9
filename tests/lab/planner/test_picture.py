"""The picture of a plan: what is drawn is what was planned, in one file that stands for itself."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from penstock.cli.main import main
from penstock_lab.planner.picture import ROOM, page, picture, plan_page, table
from tests.lab.planner.test_placement import falcon
from tests.lab.planner.test_plan import LLAMA, needs_library, written

SVG = "{http://www.w3.org/2000/svg}"
GIB = 2**30


def device(name: str, total: int, budget: int) -> dict[str, Any]:
    sizes = {"weights": total // 2, "cache": total // 4, "workspace": total // 8, "runtime": total // 8}
    return {"name": name, "total_bytes": total, "budget_bytes": budget} | {
        f"{part}_bytes": size for part, size in sizes.items()
    }


def planned(**changes: Any) -> dict[str, Any]:
    step = {"phase": "decode", "batch": 1, "prompt_len": 0, "context": 64, "seconds": 0.01, "tokens_per_s": 100.0}
    parts = {"read": 0.006, "multiply": 0.003, "exchange": 0.003, "host": 0.001}
    return {
        "hardware": "mine", "devices": [device("device 0", GIB, 2 * GIB)], "fits": True, "smallest_change": None,
        "predictions": [{**step, "bound": "memory bandwidth", "parts": parts}], "what_if": {}, "largest": [],
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "max_model_len": 64,
    } | changes  # fmt: skip


def rects(svg: str, kind: str) -> list[dict[str, str]]:
    found = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    return [dict(item.attrib) for item in found if item.get("class") == kind]


def test_bars_are_as_long_as_what_they_show() -> None:
    """Guards against a bar that is not to scale, and a step whose parts overlap that follow one another."""
    svg = picture(planned())
    memory, read = [float(item["width"]) for item in rects(svg, "a") if float(item["height"]) != 11]
    assert memory == pytest.approx(ROOM / 4)  # half of one of two GiB
    assert read == pytest.approx(0.6 * ROOM)
    exchange = next(item for item in rects(svg, "c") if float(item["height"]) == 16 and float(item["width"]) > 100)
    host = rects(svg, "d")[-1]
    assert float(host["x"]) == pytest.approx(float(exchange["x"]) + float(exchange["width"]), abs=0.02)


def test_what_does_not_fit_is_seen() -> None:
    """Guards against a picture of a plan that does not fit which looks like one that does."""
    refused = planned(devices=[device("device 0", 3 * GIB, 2 * GIB)], fits=False, smallest_change="quantization = int8")
    svg = picture(refused)
    words = [item.text for item in ElementTree.fromstring(svg).iter(f"{SVG}text") if item.get("class") == "bad"]
    assert words == ["3072.0 MiB of 2048.0 MiB"]
    assert "It does not fit" in plan_page("m", refused)
    assert "With quantization = int8 it would." in plan_page("m", refused)


@pytest.mark.covers("F27", "F30")
def test_chips_and_epochs_of_a_placement() -> None:
    """Guards against an operation that is drawn on other chips, or in other epochs, than it is placed on."""
    figures = falcon(overrides=(("layers.7.mlp", (24, 25, 30)),)).figures()
    assert [(item["operation"], item["first_epoch"], item["last_epoch"]) for item in figures["areas"]] == [
        ("attention", 0, 59), ("mlp", 0, 6), ("mlp", 7, 7), ("mlp", 8, 59), ("lm_head", 60, 60),
    ]  # fmt: skip
    assert (len(figures["sram_bytes_by_chip"]), max(figures["sram_bytes_by_chip"])) == (32, 24 * 2**20)
    svg = picture(planned(placement=figures))
    titles = [title.text for title in ElementTree.fromstring(svg).iter(f"{SVG}title")]
    for text in ("attention: epochs 0 to 59, chips 0 to 15", "mlp: epochs 7 to 7, chips 24 to 25",
                 "mlp: epochs 7 to 7, chips 30 to 30", "lm_head: epochs 60 to 60, chips 24 to 31"):  # fmt: skip
        assert text in titles
    over = falcon(sram_per_chip=20 * 2**20).figures()
    assert "It is impossible: layers.0.attention needs" in picture(planned(placement=over))


def test_the_page_stands_for_itself() -> None:
    """Guards against a page that loads something, is white in the dark, or takes a model's name for HTML."""
    text = plan_page("<img src=x>", planned(hardware="<b>"))
    assert "<img" not in text
    assert "<b>" not in text
    assert text.count("prefers-color-scheme: dark") == 2
    addresses = set(re.findall(r"https?://[^\"' ]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<script|<link|@import|url\(", text)
    assert "<td>&lt;&amp;</td>" in table([["a", "<&"]])
    assert "{x}" in page("t", "a", "{x}")


@needs_library
def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a file that is written elsewhere, or only where everything fits."""
    words = ["plan", written(tmp_path, LLAMA), "--hardware", "h100-sxm", "--json"]
    for name, head in (("plan.html", "<!doctype html>"), ("plan.svg", "<svg xmlns")):
        assert main([*words, "--plot", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_text().startswith(head)
    assert main([*words, "--memory", "1MiB", "--plot", str(tmp_path / "small.svg")]) == 1
    assert 'class="bad"' in (tmp_path / "small.svg").read_text()
    capsys.readouterr()
    assert main([*words, "--plot", str(tmp_path / "none" / "plan.svg")]) == 2
    assert "--plot: cannot write" in capsys.readouterr().err
