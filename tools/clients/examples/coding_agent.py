# /// script
# dependencies = []
# ///
"""A coding agent on Anthropic's API: requests in the shape of Claude Code's, with its headers, hints and thinking."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

from features import KEY, MODEL, QUESTION, SCHEMA, Server, add, check

BETAS = "claude-code-20250219,interleaved-thinking-2025-05-14,fine-grained-tool-streaming-2025-05-14"
CACHED = {"cache_control": {"type": "ephemeral"}}
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {**SCHEMA, "$schema": "https://json-schema.org/draft/2020-12/schema"},
}
ASKED: dict[str, Any] = {
    "model": MODEL,
    "system": [
        {"type": "text", "text": "You are a coding agent.", **CACHED},
        {"type": "text", "text": "Be brief.", **CACHED},
    ],
    "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION, **CACHED}]}],
    "metadata": {"user_id": "user_0123_account__session_4567"},
    "max_tokens": 32000,
    "temperature": 1,
    "stream": True,
}


def events(server: Server, path: str = "/v1/messages", **body: Any) -> Iterator[dict[str, Any]]:
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {KEY}",
        "Anthropic-Version": "2023-06-01",
        "Anthropic-Beta": BETAS,
        "Anthropic-Dangerous-Direct-Browser-Access": "true",
        "X-App": "cli",
        "X-Stainless-Retry-Count": "0",
        "User-Agent": "claude-cli/2.1.328 (external, cli)",
    }
    request = urllib.request.Request(f"{server.url}{path}?beta=true", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith((b"data: ", b"{")):
                yield json.loads(line.removeprefix(b"data: "))


def message(server: Server, **more: Any) -> list[dict[str, Any]]:
    """The blocks that a stream's events add up to."""
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in events(server, **{**ASKED, **more}):
        if event["type"] == "error":
            raise ValueError(event["error"])
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            texts.append("")
        if event["type"] == "content_block_delta":
            texts[-1] += next(str(text) for kind, text in event["delta"].items() if kind != "type")
    for block, text in zip(blocks, texts, strict=True):
        block.update({"input": json.loads(text or "{}")} if block["type"] == "tool_use" else {block["type"]: text})
    return blocks


def chat(server: Server) -> None:
    (counted,) = events(server, "/v1/messages/count_tokens", **{name: ASKED[name] for name in ("model", "messages")})
    check(counted["input_tokens"] > 5, "True")
    (whole,) = events(server, **{**ASKED, "stream": False, "temperature": 0})
    check(whole["content"][-1]["text"])


def stream(server: Server) -> None:
    check(message(server, temperature=0)[-1]["text"])


def tools(server: Server) -> None:
    block = message(server, tools=[ADD], tool_choice={"type": "any"})[-1]
    check(add(**block["input"]) >= 0, "True")


def agent(server: Server) -> None:
    messages = list(ASKED["messages"])
    thinking = {"type": "enabled", "budget_tokens": 31999}
    for _ in range(4):
        blocks = message(server, messages=messages, tools=[{**ADD, **CACHED}], thinking=thinking, temperature=0)
        messages.append({"role": "assistant", "content": blocks})
        calls = [block for block in blocks if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": c["id"], "content": str(add(**c["input"]))} for c in calls]
        if not calls:
            break
        messages.append({"role": "user", "content": [*results[:-1], {**results[-1], **CACHED}]})
    check(len(messages) > 2, "True")
    check(messages[-1]["content"][-1]["text"])
