"""The items of a response's output (reasoning, messages and tool calls) as they grow, and their stream events."""

from collections.abc import Iterator
from typing import Any

from penstock.tokenizer.answer_formats import Kind

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
