"""What a request leaves is freed at once, by reference counting: a collector that runs late would let memory grow."""

import asyncio
import gc
import json
from collections import Counter
from typing import Any

import pytest

from penstock_lab.prove.hostile import JSON_HEADER
from penstock_lab.prove.scripted import ScriptedServer

COMPLETION = {"prompt": "Hi", "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
RESPONSE = {"input": "a", "max_output_tokens": 4, "store": False}
CALLS: dict[str, tuple[str, dict[str, Any], int | None, int]] = {  # path, body, when the client leaves, status
    "a completion": ("/v1/completions", COMPLETION | {"n": 2, "logprobs": 2, "echo": True}, None, 200),
    "a stream": ("/v1/completions", COMPLETION | {"stream": True}, None, 200),
    "a stream that is left": ("/v1/completions", COMPLETION | {"stream": True, "max_tokens": 40}, 2, 200),
    "a chat": ("/v1/chat/completions", CHAT | {"n": 3, "stream": True}, None, 200),
    "a beam search": ("/v1/completions", COMPLETION | {"use_beam_search": True, "n": 2}, None, 200),
    "a response": ("/v1/responses", RESPONSE, None, 200),
    "a response's stream": ("/v1/responses", RESPONSE | {"stream": True}, None, 200),
    "a stream of lines": ("/api/chat", {"model": "demo", "messages": CHAT["messages"]}, None, 200),
    "a stream of lines that is left": ("/api/chat", {"model": "demo", "messages": CHAT["messages"]}, 2, 200),
    "a stream of llama.cpp's": (
        "/completion",
        {"prompt": "Hi", "n_predict": 4, "n_probs": 1, "stream": True},
        None,
        200,
    ),
    "a message's stream": ("/v1/messages", CHAT | {"stream": True}, None, 200),
    "embeddings": ("/v1/embeddings", {"input": ["a", "b"]}, None, 200),
    "a ranking": ("/rerank", {"query": "a", "documents": ["b"]}, None, 200),
    "token ids": ("/tokenize", {"prompt": "a"}, None, 200),
    "a wrong value": ("/v1/completions", COMPLETION | {"temperature": -1}, None, 400),
    "an unknown field": ("/v1/completions", COMPLETION | {"x": 1}, None, 400),
    "a form that is refused": ("/v1/completions", COMPLETION | {"guided_regex": "a"}, None, 400),
    "no such response": ("/v1/responses/x/cancel", {}, None, 404),
}


async def left_behind(call: tuple[str, dict[str, Any], int | None, int]) -> Counter[str]:
    """Count what the collector finds after some calls of a kind, by type."""
    path, body, leave_after, status = call
    server = ScriptedServer("demo")

    async def ask() -> None:
        answer = await server.call("POST", path, json.dumps(body).encode(), JSON_HEADER, leave_after=leave_after)
        assert answer.status == status, answer.body
        while server.client.leftovers() is not None:
            await asyncio.sleep(0)

    await ask()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(3):
            await ask()
        gc.collect()
        return Counter(type(item).__name__ for item in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("call", CALLS)
def test_no_cycles_on_the_path_of_a_request(call: str) -> None:
    """Guards against objects that refer to each other: the memory of a call then waits for the garbage collector."""
    # a server of another test may end meanwhile in this process; but what a call leaves, it leaves each time
    assert {} in (asyncio.run(left_behind(CALLS[call])) for _ in range(3))
