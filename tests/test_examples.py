"""Every script of examples/ runs as it stands there, and shows what it says; so do other projects' clients."""

import json
import runpy
import subprocess
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


LOOP: tuple[tuple[str, dict[str, Any], int, tuple[str, ...]], ...] = (  # question, options, calls, answer
    ("What is 3 + 4?", {"tool_choice": {"type": "function", "function": {"name": "add"}}}, 1, ("3 + 4 = 7.",)),
    ("What is the weather in Paris and Oslo?", {"tool_choice": "required"}, 2, ("Paris: 18", "Oslo: 4")),
    ("What is 12 + 30, and what is the weather in Oslo?", {}, 2, ("12 + 30 = 42.", "Oslo: 4 degrees, rain")),
    ("Add 21, 13, 40 and 5.", {"parallel_tool_calls": False}, 3, ("is 79.",)),
    ("What is 21 + 13?", {}, 1, ("21 + 13 = 34.",)),
    ("What is the weather in Paris?", {}, 1, ("Paris: 18 degrees, sun",)),
    ("Thank you!", {"tool_choice": "none"}, 0, ("",)),
)  # fmt: skip


def streamed_message(stream: Any) -> dict[str, Any]:
    """Return the message that the deltas of a stream say, as a client puts it together."""
    content = ""
    calls: dict[int, Any] = {}
    for chunk in stream:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for part in delta.tool_calls or ():
            empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            call = calls.setdefault(part.index, empty)
            call["id"] += part.id or ""
            call["function"]["name"] += part.function.name or ""
            call["function"]["arguments"] += part.function.arguments or ""
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    return message | ({"tool_calls": [calls[index] for index in sorted(calls)]} if calls else {})


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_loop_of_ten_calls_ends_with_the_right_answers(url: str, streamed: bool) -> None:
    """Guards against a loop in which a call, a result or their order is lost: one conversation, whole or streamed, of
    calls that are named, required, parallel, single, the model's own choice, and forbidden."""
    agent = runpy.run_path(str(ROOT / "examples" / "agent.py"))
    tools, functions = [agent["tool"](name) for name in agent["FUNCTIONS"]], agent["FUNCTIONS"]
    messages: list[Any] = []
    with official_client(url) as client:
        for question, options, num_calls, shown in LOOP:
            messages.append({"role": "user", "content": question})
            made = 0
            while True:
                asked = {"model": "demo", "messages": messages, "tools": tools, "temperature": 0, "stream": streamed}
                done: Any = client.chat.completions.create(**asked, **(options if not made else {}))
                message = streamed_message(done) if streamed else done.choices[0].message.to_dict()
                messages.append(message)
                for call in message.get("tool_calls") or []:
                    result = functions[call["function"]["name"]](**json.loads(call["function"]["arguments"]))
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)})
                    made += 1
                if not message.get("tool_calls"):
                    break
                assert made <= num_calls, messages
            assert made == num_calls, messages
            assert message["content"], messages
            assert all(part in message["content"] for part in shown), (question, message)
    assert sum(message["role"] == "tool" for message in messages) == 10


def test_a_batch_of_files(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the half of batch_jsonl.py that the terminal does not show."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "One day", "n": 1}\n\n', encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["batch_jsonl.py", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")])
    runpy.run_path(str(ROOT / "examples" / "batch_jsonl.py"), run_name="__main__")
    assert (tmp_path / "out.jsonl").read_text(encoding="utf-8").startswith('{"prompt": "One day", "n": 1, "text": ')


@pytest.mark.parametrize("name", ["anthropic", "coding_agent", "ollama", "openai"])
def test_client(name: str, url: str) -> None:
    """Guards against a client that no longer works; the others need packages of their own: `make clients`."""
    if name != "coding_agent":
        pytest.importorskip(name)
    folder = ROOT / "tools" / "clients"
    command = [sys.executable, folder / "features.py", folder / "examples" / f"{name}.py", url]
    done = subprocess.run(command, capture_output=True, text=True)
    found = {line["feature"]: line["error"] for line in map(json.loads, done.stdout.splitlines())}
    assert found, done.stderr
    assert set(found.values()) == {None}, found
