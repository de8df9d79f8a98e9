"""`penstock serve` as users run it: the command, the demo model, the official client. One process for all tests."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock_lab.prove.servers import QUICK
from tests.official import anthropic_client, official_client, ollama_client
from tests.server.harness import WAIT_S, get, wait_until
from tests.server.test_sockets import post

USER: Any = [{"role": "user", "content": "Tell me a story."}]


class Served:
    """The running command."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "penstock.cli.main", "serve", "demo", "--port", "0", "--api-key", "k"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"serving demo at (http://\S+)  \(ready in", line)
        assert found, f"no ready line but {line!r}"
        headers = {"Authorization": "Bearer k"}
        self.http = httpx.Client(base_url=found.group(1), headers=headers, timeout=WAIT_S, **QUICK)
        self.openai = official_client(found.group(1), "k")

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.http.get("/status").json()
        return status

    def close(self) -> None:
        self.http.close()
        self.openai.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


def test_health_and_identity(served: Served) -> None:
    """Guards against a ready line that comes before the engine is ready."""
    assert served.http.get("/health").status_code == 200
    assert [model.id for model in served.openai.models.list()] == ["demo"]
    assert get(served.http.base_url.join("/status")).status_code == 401


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_server_process_maps_no_torch(served: Served) -> None:
    """Guards against torch in the HTTP process, however it got there. (The engine's: tests/test_without_torch.py)"""
    assert "torch" not in Path(f"/proc/{served.process.pid}/maps").read_text()


def test_three_choices_repeat_by_seed(served: Served) -> None:
    """Guards against choices that are copies of one another, or that a seed does not repeat."""
    first, again = (
        [
            choice.message.content
            for choice in served.openai.chat.completions.create(
                model="demo", messages=USER, n=3, seed=5, temperature=1, max_tokens=24
            ).choices
        ]
        for _ in range(2)
    )
    assert first == again
    assert len(set(first)) == 3


def test_stream_equals_whole_answer(served: Served) -> None:
    """Guards against text lost or doubled between the pieces of a stream, and usage that does not match."""
    options: Any = {"model": "demo", "messages": USER, "seed": 9, "max_tokens": 40}
    whole = served.openai.chat.completions.create(**options)
    with served.openai.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert (chunks[-1].usage.completion_tokens, whole.usage is not None) == (whole.usage.completion_tokens, True)


def test_stop_and_logprobs(served: Served) -> None:
    """Guards against a stop string that is shown, and against the chosen token missing among the reported ones."""
    answer = served.openai.completions.create(
        model="demo", prompt="Once upon a time", temperature=0, max_tokens=60, stop=["."], logprobs=2
    )
    choice = answer.choices[0]
    assert "." not in choice.text
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    tokens, tops = choice.logprobs.tokens or [], choice.logprobs.top_logprobs or []
    assert all(token in top and 2 <= len(top) <= 3 for token, top in zip(tokens, tops, strict=True))


def test_echo_scores_the_prompt(served: Served) -> None:
    """Guards against a prompt score that differs from what was reported when the same tokens were generated."""
    first = served.http.post(
        "/v1/completions",
        json={"prompt": "Once upon", "temperature": 0, "max_tokens": 6, "logprobs": 0, "return_token_ids": True},
    ).json()["choices"][0]
    ids = first["prompt_token_ids"] + first["token_ids"]
    expected = first["logprobs"]["token_logprobs"]
    for max_tokens in (1, 0):
        body = {"prompt": [ids], "max_tokens": max_tokens, "echo": True, "logprobs": 0}
        answer = served.http.post("/v1/completions", json=body).json()
        scored = answer["choices"][0]["logprobs"]["token_logprobs"]
        assert (len(scored), answer["usage"]["completion_tokens"]) == (len(ids) + max_tokens, max_tokens)
        assert scored[0] is None
        assert scored[len(first["prompt_token_ids"]) : len(ids)] == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_frees_the_engine(served: Served, stream: bool) -> None:
    """Guards against an engine that continues for a client that has disconnected."""
    body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "n": 4, "stream": stream}
    data = post(json.dumps(body).encode(), "Authorization: Bearer k\r\n")
    before = served.status()["aborted_total"]
    with socket.create_connection((served.http.base_url.host, served.http.base_url.port)) as sock:
        sock.sendall(data)
        wait_until(lambda: served.status()["running"] > 0)
    wait_until(lambda: served.status()["aborted_total"] == before + 1)
    wait_until(lambda: served.status()["running"] == 0)
    wait_until(lambda: (blocks := served.status()["kv_blocks"])["free"] == blocks["total"])


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"n": 10**9}, {"logit_bias": {"999999": 1}}, {"prompt": [10**6]}, {"max_tokens": 0}]
)
def test_bad_values_over_http(served: Served, bad: dict[str, Any]) -> None:
    """Guards against a value that only the engine process finds wrong, or dies of."""
    pid = served.status()["engine"]["pid"]
    response = served.http.post("/v1/completions", json={"prompt": "a", **bad})
    assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(bad)))
    assert served.status()["engine"]["pid"] == pid


def test_engine_death_and_return(served: Served) -> None:
    """Guards against a server that does not notice the death of its engine, a stream that does, and a timeline that
    does not."""
    call = {"model": "demo", "prompt": "Once", "max_tokens": 600, "seed": 3, "extra_body": {"ignore_eos": True}}
    whole = served.openai.completions.create(**call).choices[0].text
    before = served.status()["engine"]
    with served.openai.completions.create(**call, stream=True) as stream:
        first = next(stream)
        texts = [first.choices[0].text]
        os.kill(before["pid"], signal.SIGKILL)
        waited = served.openai.completions.create(model="demo", prompt="Once", max_tokens=2)
        texts += [chunk.choices[0].text for chunk in stream]
    assert "".join(texts) == whole
    assert waited.choices[0].text
    shown = served.http.get(f"/status/requests/{first.id}").json()
    parts = shown["choices"][0]["parts"]
    assert [part["kind"] for part in parts if part["kind"] in ("recovery", "recompute")] == ["recovery", "recompute"]
    assert sum(part["duration_s"] for part in parts) == pytest.approx(shown["wall_s"], rel=0.01)
    assert sum(part.get("generated_tokens", 0) for part in parts) == shown["completion_tokens"] == 600
    wait_until(lambda: served.http.get("/health").status_code == 200)
    after = served.status()["engine"]
    assert (after["restarts"], after["pid"] != before["pid"]) == (before["restarts"] + 1, True)


# in the order, and with the keys, that Ollama's client keeps of a schema
SUMMANDS = {
    "type": "object",
    "required": ["a", "b"],
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
}
ADD: dict[str, Any] = {"name": "add", "description": "Adds two numbers.", "parameters": SUMMANDS}
TEMPERATURE = 0.7  # with it, one other token in a prompt leads to other answers
Turn = tuple[
    str, list[dict[str, Any]], tuple[int, int]
]  # text, arguments of calls, tokens of the prompt and the answer


class ChatLoop:
    """A conversation over chat completions. Those over the other APIs have the same methods."""

    def __init__(self, served: Served) -> None:
        self.client, self.url = served.openai, str(served.http.base_url)
        self.items: list[Any] = []

    def say(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def ask(self, seed: int) -> Turn:
        tools: Any = [{"type": "function", "function": ADD}]
        answer = self.client.chat.completions.create(
            model="demo", messages=self.items, tools=tools, seed=seed, temperature=TEMPERATURE
        )
        message, usage = answer.choices[0].message, answer.usage
        self.items.append(message.model_dump(exclude_none=True))
        self.calls: list[Any] = message.tool_calls or []
        counts = (usage.prompt_tokens, usage.completion_tokens)
        return message.content or "", [json.loads(call.function.arguments) for call in self.calls], counts

    def tell(self, results: list[str]) -> None:
        for call, result in zip(self.calls, results, strict=True):
            self.items.append({"role": "tool", "tool_call_id": call.id, "content": result})


class ResponsesLoop(ChatLoop):
    def ask(self, seed: int) -> Turn:
        answer = self.client.responses.create(
            model="demo", input=self.items, tools=[{"type": "function", **ADD}], temperature=TEMPERATURE, store=False,
            extra_body={"seed": seed},
        )  # fmt: skip
        self.items += answer.output
        self.calls = [item for item in answer.output if item.type == "function_call"]
        counts = (answer.usage.input_tokens, answer.usage.output_tokens)
        return answer.output_text, [json.loads(call.arguments) for call in self.calls], counts

    def tell(self, results: list[str]) -> None:
        for call, result in zip(self.calls, results, strict=True):
            self.items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


class MessagesLoop(ChatLoop):
    def ask(self, seed: int) -> Turn:
        tool = {"name": "add", "description": ADD["description"], "input_schema": SUMMANDS}
        with anthropic_client(self.url, "k") as client:
            answer = client.messages.create(
                model="demo", messages=self.items, tools=[tool], max_tokens=500,
                extra_body={"seed": seed, "temperature": TEMPERATURE},
            )  # fmt: skip
        self.items.append({"role": "assistant", "content": answer.content})
        self.calls = [block for block in answer.content if block.type == "tool_use"]
        text = "".join(block.text for block in answer.content if block.type == "text")
        read = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
        return text, [call.input for call in self.calls], (read, answer.usage.output_tokens)

    def tell(self, results: list[str]) -> None:
        pairs = zip(self.calls, results, strict=True)
        blocks = [{"type": "tool_result", "tool_use_id": call.id, "content": result} for call, result in pairs]
        self.items.append({"role": "user", "content": blocks})


class OllamaLoop(ChatLoop):
    def ask(self, seed: int) -> Turn:
        options = {"seed": seed, "temperature": TEMPERATURE}
        with ollama_client(self.url, "k") as client:
            answer = client.chat(
                model="demo", messages=self.items, tools=[{"type": "function", "function": ADD}], options=options
            )
        self.items.append(answer.message)
        self.calls = list(answer.message.tool_calls or ())
        counts = (answer.prompt_eval_count, answer.eval_count)
        return answer.message.content or "", [dict(call.function.arguments) for call in self.calls], counts

    def tell(self, results: list[str]) -> None:
        for call, result in zip(self.calls, results, strict=True):
            self.items.append({"role": "tool", "tool_name": call.function.name, "content": result})


def test_ten_calls_over_four_apis(served: Served) -> None:
    """Guards against a conversation that has other tokens over another API: an agent that calls ten times, draws its
    tokens, and sends back what it got."""
    loops = [kind(served) for kind in (ChatLoop, ResponsesLoop, MessagesLoop, OllamaLoop)]
    num_calls = 0
    for number in range(10):
        for loop in loops:
            loop.say(f"What is {number} + 4?")
        for step in range(3):
            turns = [loop.ask(seed=10 * number + step) for loop in loops]
            assert turns == [turns[0]] * 4
            calls = turns[0][1]
            num_calls += len(calls)
            if not calls:
                break
            for loop in loops:
                loop.tell([str(call.get("a", 0) + call.get("b", 0)) for call in calls])
    assert num_calls >= 10


def test_the_best_of_several(served: Served) -> None:
    """Guards against best_of that returns the least likely answers, or the first ones."""
    call: dict[str, Any] = {"model": "demo", "prompt": "Once", "max_tokens": 12, "seed": 5, "logprobs": 0}
    every = served.openai.completions.create(**call, n=6).choices
    best = served.openai.completions.create(**call, n=2, best_of=6).choices
    likely = sorted(every, key=lambda choice: sum(choice.logprobs.token_logprobs), reverse=True)
    assert [choice.text for choice in best] == [choice.text for choice in likely[:2]]
    assert [choice.text for choice in best] != [choice.text for choice in every[:2]]
