"""The pages that tools write or that name much: other engines' names, and the plans of common models."""

import argparse
import re
import shlex

import pytest

from penstock.cli.main import COMMANDS, added_commands, build_parser
from penstock.config import hint
from penstock_lab.planner.machines import load_hardware
from tests.pages import ROOT
from tools import model_table, vllm_page

OLLAMA = ROOT / "docs" / "from_ollama.md"
PAGES = [OLLAMA, vllm_page.PAGE, model_table.PAGE]
SHORT_FLAGS = ("ngl", "c", "np", "t", "m")  # of llama.cpp, on the page


def options(command: str) -> set[str]:
    """Return the flags of a command."""
    parser = build_parser([command])
    action = next(item for item in parser._actions if isinstance(item, argparse._SubParsersAction))
    return set(action.choices[command]._option_string_actions)


def test_the_page_for_vllm_is_that_of_the_tables() -> None:
    """Guards against an option that was renamed, added or removed since the page was written, and against a name of
    vLLM about which nothing is said."""
    assert vllm_page.PAGE.read_text(encoding="utf-8") == vllm_page.page(), "run python tools/vllm_page.py --write"
    with pytest.raises(ValueError, match="--no-such-flag: give advice"):
        vllm_page.flag_rows({"Group": "dtype no-such-flag"}, {"--dtype"}, {})
    with pytest.raises(ValueError, match="no_such_field: neither"):
        vllm_page.field_rows("no_such_field", set())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_flags_on_the_pages_exist(page) -> None:
    """Guards against advice to type what there is not."""
    commands = COMMANDS.keys() | added_commands().keys()
    text = page.read_text(encoding="utf-8")
    for line in re.findall(r"`(penstock [^`\n]+)`", text):
        words = shlex.split(line)
        assert words[1] in commands or words[1].startswith("--"), line
        flags = {word for word in words[2:] if word.startswith("-")}
        assert words[1].startswith("--") or flags <= options(words[1]), line
    known = set().union(*map(options, ("serve", "generate", "chat")))
    for row in re.findall(r"^\|.*\| ([^|]+) \|$", text, re.MULTILINE):  # the last column is Penstock's
        for flag in re.findall(r"`(--[a-z][a-z-]*)", row):
            assert flag in known, flag


def test_short_flags_of_llama_cpp_are_answered() -> None:
    for flag in SHORT_FLAGS:
        assert hint(flag, []), flag


def test_the_plans_of_common_models_are_on_the_page() -> None:
    """Guards against a page of yesterday's plans: three of its rows are planned again, and all models are there."""
    machines = [load_hardware(name) for name in model_table.MACHINES]
    text, models = model_table.PAGE.read_text(encoding="utf-8"), model_table.models()
    assert len(models) == 20
    assert text.startswith(model_table.head(machines))
    assert text.endswith(model_table.TAIL)
    rows = [line for line in text.splitlines() if "/" in line and line.startswith("| ")]
    assert [row.split()[1] for row in rows] == [model["name"] for model in models]
    for name in ("HuggingFaceTB/SmolLM2-135M-Instruct", "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-30B-A3B"):
        model = next(model for model in models if model["name"] == name)
        assert model_table.row(model, machines) in text, "run python tools/model_table.py --write"
