"""Every script of examples/ runs as it stands there, and shows what it says."""

import json
import runpy
import sys
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.official import official_client
from tests.pages import ROOT, serving

FILES = sorted((ROOT / "examples").glob("*.py"))
SHOWN = {  # what the output of a script has to hold
    "agent": "assistant ",
    "batch_jsonl": '"id": 3, "prompt": "The dog"',
    "chat": "3 + 4 = 7",
    "generate": "'The dog' -> ",
    "logits_processor": "forbidden: ",
    "logprobs": "rank 1",
    "low_level_engine": "step 20: abort endless: True",
    "openai_client": "3 + 4 = 7",
    "prefix_cache": "  0 of ",
    "quantize_and_convert": "packed, ",
    "seeds_and_sampling": "the same tokens in a batch: True",
    "stream": "One day: ",
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Yield the address of a server of the demo model."""
    with serving() as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_example(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ROOT / "examples" / f"{name}.py"
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 40
    if name in ("agent", "openai_client"):
        monkeypatch.setenv("PENSTOCK_URL", request.getfixturevalue("url"))
    monkeypatch.setattr(sys, "argv", [str(file)])
    runpy.run_path(str(file), run_name="__main__")
    assert SHOWN[name] in capsys.readouterr().out


@pytest.mark.covers("C21")
def test_an_agent_gets_the_calls_that_it_demands(url: str) -> None:
    """Guards against calls of the official client, whole or streamed, that weights which know no tools can spoil."""
    agent = runpy.run_path(str(ROOT / "examples" / "agent.py"))
    tools: Any = [agent["tool"](name) for name in agent["FUNCTIONS"]]
    asked: Any = {"model": "demo", "messages": [{"role": "user", "content": "What is 3 + 4?"}], "tools": tools}
    calls: list[Any] = []
    with official_client(url) as client:
        for name in ("add", "weather"):
            named: Any = {"type": "function", "function": {"name": name}}
            turns = agent["converse"](client, "What is 3 + 4?", most_turns=1, tool_choice=named)
            calls += [(call["function"]["name"], call["function"]["arguments"]) for call in turns[1]["tool_calls"]]
            assert calls[-1][0] == name
            assert turns[2]["role"] == "tool"
        for seed in range(8):
            one: Any = {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed, "max_tokens": 200}
            stream = client.chat.completions.create(**asked, **one, stream=True)
            parts = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
            assert {part.index for part in parts} == {0}
            functions = [part.function for part in parts if part.function is not None]
            calls.append((functions[0].name, "".join(function.arguments or "" for function in functions)))
        silent = client.chat.completions.create(**asked, tool_choice="none", max_tokens=40).choices[0].message
    assert not silent.tool_calls
    assert silent.content
    assert len(calls) == 10
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), agent["tool"](name)["function"]["parameters"])


@pytest.mark.parametrize(
    ("question", "num_calls", "shown"),
    [
        ("What is 3 + 4?", 1, "7"),
        ("What is the weather in Paris?", 1, "18 degrees"),
        ("What is the weather in Paris and Oslo?", 2, "4 degrees"),
        ("Add 2, 3, 4, 5 and 6.", 4, "20"),
        ("What is 12 + 30, and what is the weather in Oslo?", 2, "42"),
    ],
)
def test_an_agent_finds_the_answer(url: str, question: str, num_calls: int, shown: str) -> None:
    """Guards against a round trip in which a result, its order or a call is lost: ten calls, alone and together."""
    agent = runpy.run_path(str(ROOT / "examples" / "agent.py"))
    with official_client(url) as client:
        messages = agent["converse"](client, question)
    assert sum(message["role"] == "tool" for message in messages) == num_calls
    assert shown in messages[-1]["content"]


def test_a_batch_of_files(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the half of batch_jsonl.py that the terminal does not show."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "One day", "n": 1}\n\n', encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["batch_jsonl.py", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")])
    runpy.run_path(str(ROOT / "examples" / "batch_jsonl.py"), run_name="__main__")
    assert (tmp_path / "out.jsonl").read_text(encoding="utf-8").startswith('{"prompt": "One day", "n": 1, "text": ')
