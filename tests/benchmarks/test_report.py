"""What is read off the samples: ratios, bounds, marks, and that the picture shows the table's numbers."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.base import Record
from benchmarks.picture import draw, read_table
from benchmarks.report import Cell, find_ratio, make_cell, make_rows, to_json, write_markdown
from benchmarks.store import Store
from benchmarks.workloads import FIGURES, WORKLOADS, Workload, parse_workloads

# W1t, W4s, W4t, ...: the first figure of a workload in seconds or in tokens
FIGURE = {figure.name.partition(" ")[0] + figure.unit[0]: figure for figure in reversed(FIGURES)}
WORK = Workload("W1", 1, 4, 10)
MACHINE = {"processor": "CPU", "features": ["avx2"], "cores": 2, "threads": 2}
RUN = {"build": "penstock abc", "model": "tiny", "machine": MACHINE}


def sample(engine: str, seconds: float, marks: str = "", **more: Any) -> dict[str, Any]:
    place = {"engine": engine, "precision": "bf16", "workload": WORK.name, "size": WORK.size, "round": 0}
    decoded = {"later_tokens": 9, "later_s": seconds * 0.9, "limits": [{"read": 10.0}, {"read": 30.0}]}
    return {**place, "seconds": seconds, "marks": marks, **decoded, **more}


def test_the_ratio_is_to_the_best_other_engine():
    """Guards against a ratio the wrong way round where lower is better, and to the worst instead of the best."""
    cells = {"penstock": Cell(median=12.0), "vllm": Cell(median=4.0), "openvino": Cell(median=6.0)}
    assert find_ratio(FIGURE["W1t"], cells) == (2.0, False)
    assert find_ratio(FIGURE["W5s"], cells) == (4.0 / 12.0, False)


def test_an_ended_engine_is_a_bound_only_if_no_other_finished():
    ended = make_cell(FIGURE["W1t"], WORK, [{"marks": "", "cap": 5.0}])
    assert ended.median == 2.0  # at best ten tokens in five seconds
    assert find_ratio(FIGURE["W1t"], {"penstock": Cell(median=8.0), "vllm": ended}) == (4.0, True)
    both = {"penstock": Cell(median=8.0), "vllm": ended, "openvino": Cell(median=4.0)}
    assert find_ratio(FIGURE["W1t"], both) == (2.0, False)
    assert make_cell(FIGURE["W4t"], WORK, [{"marks": "", "cap": 5.0}]).text() == "ended"
    assert find_ratio(FIGURE["W4t"], {"penstock": Cell(median=8.0), "vllm": Cell(cap=5.0)}) == (None, False)


def test_marked_samples_count_only_where_there_are_no_others():
    """Guards against a disturbed figure without its mark."""
    mixed = make_cell(FIGURE["W1t"], WORK, [sample("vllm", 1.0, "*"), sample("vllm", 2.0), sample("vllm", 2.5)])
    assert mixed.text() == "4.50 (4.00-5.00)"
    marked = make_cell(FIGURE["W1t"], WORK, [sample("vllm", 1.0, "*"), sample("vllm", 2.0, "~")])
    assert marked.text() == "7.50 (5.00-10.0)*~"


def test_markdown_picture_and_json_say_the_same(tmp_path: Path):
    store = Store(tmp_path, RUN)
    store.add_facts("vllm", "bf16", {"version": "1", "weights": "bf16", "notes": "a|b"})
    for one in (sample("penstock", 1.0), sample("vllm", 2.0), sample("openvino", 0.0, error="x")):
        store.add_sample(one)
    engines = ["penstock", "vllm", "openvino"]
    rows = make_rows(store, engines, [WORK])
    page = write_markdown(rows, engines, store)
    assert "| W1 one stream, tokens/s | bf16 | 10.0 | 5.00 | error | 2.00 |" in page
    assert "| W1 decode at equal memory speed, tokens/GB | bf16 | 0.50 | 0.25 | error | 2.00 |" in page
    assert "OpenVINO GenAI, bf16: error: `x`" in page
    caption, bars = read_table(page)
    assert [(bar.engine, bar.median, bar.label) for bar in bars] == [("Penstock", 10.0, "10.0"), ("vLLM", 5.0, "5.00")]
    picture = draw(caption, bars)
    assert ">5.00<" in picture
    assert "tiny, random weights" in picture
    assert to_json(rows, store)["rows"][0]["ratio"] == 2.0


def test_a_stream_of_the_wrong_length_is_not_a_measurement():
    record = Record(streams=2, output=2)
    for stream in (0, 1, 0):
        record.token(stream, 7)
    with pytest.raises(RuntimeError, match=r"streams of \[1\] tokens instead of 2"):
        record.figures()
    record.token(1, 7)
    figures = record.figures()
    assert figures["later_tokens"] == 2  # those after both streams had one
    assert 0 < figures["first_s"] <= figures["seconds"]


def test_every_engine_and_round_gets_the_prompts_it_should():
    """Guards against prompts that differ between engines, or repeat so that a cache answers them."""
    work = WORKLOADS["W5"]
    assert work.prompts(1000, 0) == work.prompts(1000, 0)
    first, second = work.prompts(1000, 0)[:2]
    assert first[: work.shared] == second[: work.shared]
    assert first != second
    assert first[: work.shared] != work.prompts(1000, 1)[0][: work.shared]


def test_workloads_are_parsed_with_their_sizes():
    assert [work.name for work in parse_workloads("")] == ["W1", "W2", "W3", "W4", "W5", "W6"]
    assert parse_workloads("W7") == [WORKLOADS["W3"]]
    assert parse_workloads("W5=4x16+2+3, W1") == [WORKLOADS["W1"], Workload("W5", 4, 2, 3, shared=16)]
    for wrong in ("W8", "W3=8", "W3=0x1+1", "W7x"):
        with pytest.raises(ValueError, match="workloads"):
            parse_workloads(wrong)
