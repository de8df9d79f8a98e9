"""OpenAI's Response object and its stream events, made from the outputs of one generation.

Every event has a sequence_number. The events depend on the tokens alone, so a number means the same place in the stream
however often the response is computed.
"""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec

from penstock.interface.outputs import FinishReason
from penstock.server.context import ServerContext
from penstock.server.generation import Generation
from penstock.server.kept_calls import Failure, Frame, KeptCall
from penstock.server.responses import ResponseRequest, chat_of
from penstock.server.tools import ChatAnswers, rules_of
from penstock.tokenizer.answer_formats import Kind, Part

# --- items of the output ----------------------------------------------------------------------------------------------


Event = tuple[str, dict[str, Any]]  # its type, and its fields
PREFIXES = {Kind.CONTENT: "msg", Kind.REASONING: "rs", Kind.CALL: "fc"}  # of the items' ids, as at OpenAI
TEXT_TYPES = {Kind.CONTENT: "output_text", Kind.REASONING: "reasoning_text"}


class OutputItem:
    """One item of the output.

    Args:
        kind: CONTENT for a message, REASONING for reasoning, CALL for a tool call.
        index: its place in the output.
        response_id: the item's id is made of this and `index`.
        call: `call_id` and `name` of a tool call.
    """

    def __init__(self, kind: Kind, index: int, response_id: str, **call: str) -> None:
        self.kind = kind
        self._index = index
        self._id = f"{response_id.replace('resp', PREFIXES[kind], 1)}_{index}"
        self._call = call
        self._texts: list[str] = []

    def begin(self) -> Iterator[Event]:
        """Yield the events before the item's text."""
        item = self._shown("in_progress", "", content=[])
        yield "response.output_item.added", {"output_index": self._index, "item": item}
        if self.kind is not Kind.CALL:
            yield "response.content_part.added", {**self._place(), "part": self._part("")}

    def grow(self, text: str) -> Event:
        """Add text and return the event for it."""
        self._texts.append(text)
        return f"response.{self._text_type}.delta", {**self._place(), "delta": text, **self._logprobs()}

    def end(self, status: str) -> Iterator[Event]:
        """Yield the events after the item's text."""
        text = "".join(self._texts)
        done = f"response.{self._text_type}.done"
        if self.kind is Kind.CALL:
            yield done, {**self._place(), "name": self._call["name"], "arguments": text}
        else:
            yield done, {**self._place(), "text": text, **self._logprobs()}
            yield "response.content_part.done", {**self._place(), "part": self._part(text)}
        yield "response.output_item.done", {"output_index": self._index, "item": self.shown(status)}

    def shown(self, status: str) -> dict[str, Any]:
        """Return the item as the response object shows it."""
        text = "".join(self._texts)
        return self._shown(status, text, content=[] if self.kind is Kind.CALL else [self._part(text)])

    def _shown(self, status: str, text: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        if self.kind is Kind.CALL:
            return {"type": "function_call", "id": self._id, "status": status, **self._call, "arguments": text}
        if self.kind is Kind.REASONING:
            return {"type": "reasoning", "id": self._id, "status": status, "summary": [], "content": content}
        return {"type": "message", "id": self._id, "status": status, "role": "assistant", "content": content}

    @property
    def _text_type(self) -> str:
        return TEXT_TYPES.get(self.kind, "function_call_arguments")

    def _place(self) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._id, "output_index": self._index}
        return place if self.kind is Kind.CALL else {**place, "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self._text_type, "text": text, **self._logprobs()}
        return {**part, "annotations": []} if self.kind is Kind.CONTENT else part

    def _logprobs(self) -> dict[str, list[Any]]:
        return {"logprobs": []} if self.kind is Kind.CONTENT else {}


# --- the response -----------------------------------------------------------------------------------------------------


_encode = msgspec.json.Encoder().encode
ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "prompt_cache_key", "user",
          "safety_identifier")  # fmt: skip
FIXED = {  # fields of features that are not built
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "top_logprobs": 0,
    "truncation": "disabled",
}


class ResponseSource:
    """Computes one response. Implements kept_calls.Source."""

    def __init__(self, context: ServerContext, call: KeptCall, generation: Generation) -> None:
        self._begun = call.begun
        self._generation = generation
        self._body = msgspec.json.decode(call.begun.body, type=ResponseRequest)
        rules = rules_of(context, chat_of(self._body), call.begun.prompts[0])
        self._answers = ChatAnswers(call.begun.id, rules, context.tokenizer() if rules.marks else None)
        self._number = 0
        self._items: list[OutputItem] = []
        self._is_running = False
        self._reason: FinishReason | None = None

    # --- the stream ------------------------------------------------------------------------------------------------

    async def frames(self) -> AsyncGenerator[Frame | None, None]:
        """Yield the events. A response that is refused at once has no events, unless it runs in the background."""
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
                self._is_running = True
                (choice,) = item[1].outputs
                self._reason = choice.finish_reason
                for part in self._answers.parts(choice):
                    for frame in self._part(part):
                        yield frame
                self._generation.num_reasoning_tokens = self._answers.num_reasoning_tokens

    def _head(self) -> Iterator[Frame]:
        if self._number == 0:
            status = "queued" if self._body.background else "in_progress"
            yield self._event("response.created", {"response": self._response(status)})
            yield self._event("response.in_progress", {"response": self._response("in_progress")})

    def _part(self, part: Part) -> Iterator[Frame]:
        """Yield the events of the next part of the answer."""
        kind = Kind.CALL if part.kind is Kind.ARGUMENTS else part.kind
        if part.kind is Kind.CALL or not self._items or self._items[-1].kind is not kind:
            yield from self._end_item("completed")
            yield from self._begin_item(part)
        if part.kind is not Kind.CALL:
            yield self._event(*self._items[-1].grow(part.text))

    def _begin_item(self, part: Part) -> Iterator[Frame]:
        call = {"call_id": self._answers.call_id(0, part.call), "name": part.text} if part.kind is Kind.CALL else {}
        self._items.append(OutputItem(part.kind, len(self._items), self._begun.id, **call))
        yield from (self._event(*event) for event in self._items[-1].begin())

    def _end_item(self, status: str) -> Iterator[Frame]:
        if self._items:
            yield from (self._event(*event) for event in self._items[-1].end(status))

    def last_frames(self, failure: Failure | None) -> list[Frame]:
        if failure is not None:
            if self._number == 0:
                return []
            return [self._event("response.failed", {"response": self._response("failed", failure)})]
        status = self._final_status()
        empty = [] if self._items else list(self._begin_item(Part(Kind.CONTENT, "")))
        ended = list(self._end_item(status))
        return [*empty, *ended, self._event(f"response.{status}", {"response": self._response(status)})]

    def _event(self, kind: str, fields: dict[str, Any]) -> Frame:
        body = _encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return 0, b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"

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
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            **FIXED,
            "seed": begun.prompts[0].seed,
            "system_fingerprint": begun.fingerprint,
        }

    def _output(self, status: str) -> list[dict[str, Any]]:
        """Return the items. Only the last one can be incomplete or in progress."""
        last = status if status in ("completed", "in_progress") else "incomplete"
        final = len(self._items) - 1
        return [item.shown(last if index == final else "completed") for index, item in enumerate(self._items)]

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage()
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._generation.num_reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }


def _code(failure: Failure) -> str:
    """Return OpenAI's error code for the failure of a response."""
    if failure.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if failure.status >= 500 else "invalid_prompt"
