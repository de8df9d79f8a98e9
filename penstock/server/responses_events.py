"""OpenAI's Response object and its stream events, made of the outputs of one generation.

Every event carries a sequence_number. What it says depends on the tokens alone, so a number means the same place of the
stream however often the response is computed.
"""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec

from penstock.interface.outputs import FinishReason
from penstock.server.context import ServerContext
from penstock.server.generation import Generation
from penstock.server.kept_calls import Frame, KeptCall
from penstock.server.records import Failure
from penstock.server.responses_input import ResponseRequest

_encode = msgspec.json.Encoder().encode
ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "prompt_cache_key", "user",
          "safety_identifier")  # fmt: skip
FIXED = {  # what is not built has one value
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
}


class ResponseSource:
    """Computes one response. Implements kept_calls.Source."""

    def __init__(self, context: ServerContext, call: KeptCall, generation: Generation) -> None:
        self._begun = call.begun
        self._generation = generation
        self._body = msgspec.json.decode(call.begun.body, type=ResponseRequest)
        self._item_id = call.begun.id.replace("resp_", "msg_", 1)
        self._number = 0
        self._texts: list[str] = []
        self._is_running = False
        self._reason: FinishReason | None = None

    # --- the stream ------------------------------------------------------------------------------------------------

    async def frames(self) -> AsyncGenerator[Frame | None, None]:
        """Yield the events. A response that is refused at once has none, unless it runs in the background."""
        if self._body.background:
            for frame in self._head():
                yield frame
        async with aclosing(self._generation.outputs()) as outputs:
            async for item in outputs:
                for frame in self._head():
                    yield frame
                if item is None:
                    yield None
                    continue
                for frame in self._item_head():
                    yield frame
                (choice,) = item[1].outputs
                self._reason = choice.finish_reason
                if choice.text:
                    self._texts.append(choice.text)
                    yield self._text_event("delta", delta=choice.text, logprobs=[])

    def _head(self) -> Iterator[Frame]:
        if self._number == 0:
            status = "queued" if self._body.background else "in_progress"
            yield self._event("response.created", response=self._response(status))
            yield self._event("response.in_progress", response=self._response("in_progress"))

    def _item_head(self) -> Iterator[Frame]:
        if not self._is_running:
            self._is_running = True
            yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
            yield self._part_event("added", self._part(""))

    def last_frames(self, failure: Failure | None) -> list[Frame]:
        if failure is not None:
            if self._number == 0:
                return []
            return [self._event("response.failed", response=self._response("failed", failure))]
        text = "".join(self._texts)
        status = self._final_status()
        return [
            self._text_event("done", text=text, logprobs=[]),
            self._part_event("done", self._part(text)),
            self._event("response.output_item.done", output_index=0, item=self._item(status, [self._part(text)])),
            self._event(f"response.{status}", response=self._response(status)),
        ]

    def _event(self, kind: str, **fields: Any) -> Frame:
        body = _encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return 0, b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"

    def _text_event(self, kind: str, **fields: Any) -> Frame:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event(f"response.output_text.{kind}", **place, **fields)

    def _part_event(self, kind: str, part: dict[str, Any]) -> Frame:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event(f"response.content_part.{kind}", **place, part=part)

    # --- the whole answer ------------------------------------------------------------------------------------------

    def result(self, failure: Failure | None = None, status: str | None = None) -> bytes | None:
        if failure is not None:
            status = "failed"
        elif status is None and self._reason is not None:
            status = self._final_status()
        elif status is None:
            status = "in_progress" if self._is_running else "queued"
        return _encode(self._response(status, failure))

    def _final_status(self) -> str:
        return "incomplete" if self._reason is FinishReason.LENGTH else "completed"

    def _response(self, status: str, failure: Failure | None = None) -> dict[str, Any]:
        begun, body = self._begun, self._body
        is_cut = status == "incomplete"
        return {
            "id": begun.id,
            "object": "response",
            "created_at": begun.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": bool(body.background),
            "error": None if failure is None else {"code": _code(failure), "message": failure.message},
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": begun.model,
            "output": self._output(status),
            "store": body.store is not False,
            "temperature": begun.params.temperature,
            "top_p": begun.params.top_p,
            "usage": self._usage() if status in ("completed", "incomplete") else None,
            **{name: getattr(body, name) for name in ECHOED},
            "metadata": body.metadata or {},
            **FIXED,
            "seed": begun.prompts[0].seed,
            "system_fingerprint": begun.fingerprint,
        }

    def _output(self, status: str) -> list[dict[str, Any]]:
        if not self._is_running:
            return []
        item_status = status if status in ("completed", "in_progress") else "incomplete"
        return [self._item(item_status, [self._part("".join(self._texts))])]

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._item_id, "status": status, "role": "assistant", "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage()
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.total_tokens,
        }


def _code(failure: Failure) -> str:
    """Return OpenAI's code of a response's error."""
    if failure.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if failure.status >= 500 else "invalid_prompt"
