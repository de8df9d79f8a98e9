"""The items of /v1/responses: those of an input as the messages of a chat, and those of an answer with their events.

A model's output is a list of items: reasoning, messages and tool calls. The client sends them back as input of the next
response, together with the results of the calls. A chat template takes messages, and one message holds all items of a
turn.
"""

from collections.abc import Iterator
from typing import Any

from penstock.errors import InvalidRequestError, NotSupportedError, check_str, fail
from penstock.server.client_fields import MAX_MESSAGES
from penstock.tokenizer.answer_reader import Kind

# --- a conversation as items ------------------------------------------------------------------------------------------


TEXT_PARTS = ("input_text", "output_text", "text")
PART_FIELDS = {"type", "text", "annotations", "logprobs", "parsed"}  # the last three occur in answers sent back
ITEM_FIELDS = {
    "message": {"role", "content", "phase"},
    "function_call": {"call_id", "name", "arguments", "parsed_arguments"},
    "function_call_output": {"call_id", "output"},
    "reasoning": {"content", "summary"},
}
Item = dict[str, Any]
Message = dict[str, Any]


def items_of(value: str | list[Any]) -> list[Any]:
    """Read the input of a response as items; a text is the message of a user."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise InvalidRequestError(f"input: {len(value)} items; 1 to {MAX_MESSAGES} are allowed", param="input")
    return value


class Conversation:
    """Builds messages item by item. Reasoning begins an assistant turn; the text and calls after it join that turn."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._call_ids: set[str] = set()

    def add(self, item: Any) -> None:
        kind = _kind_of(item)
        if kind == "message":
            role, text = item.get("role"), _text(item.get("content"))
            thinking = self._thinking_turn() if role == "assistant" else None
            if thinking is None:
                self.messages.append({"role": role, "content": text})
            else:
                thinking["content"] = text
        elif kind == "reasoning":
            turn = self._thinking_turn() or self._new_turn()
            turn["reasoning_content"] = turn.get("reasoning_content", "") + _thoughts(item)
        elif kind == "function_call":
            turn = self.messages[-1] if self.messages and self.messages[-1]["role"] == "assistant" else self._new_turn()
            call = _call(item)
            self._call_ids.add(call["id"])
            turn.setdefault("tool_calls", []).append(call)
        else:
            self.messages.append(_result(item, self._call_ids))

    def _new_turn(self) -> Message:
        self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    def _thinking_turn(self) -> Message | None:
        """Find the last message if it holds only reasoning."""
        last = self.messages[-1] if self.messages else {}
        return last if "reasoning_content" in last and not last["content"] and "tool_calls" not in last else None


def _kind_of(item: Any) -> str:
    """Check an item and find its type. Raise InvalidRequestError for an unsupported type or an unknown field."""
    if not isinstance(item, dict):
        raise fail("input", item, "a text, or a list of messages, calls and their results")
    kind = item.get("type") or "message"
    if not isinstance(kind, str) or kind not in ITEM_FIELDS:
        message = f"input: items of type {ascii(kind)[:60]} are not supported; {', '.join(ITEM_FIELDS)} are"
        raise NotSupportedError(message, param="input")
    for name, value in item.items():
        if value is not None and name not in ITEM_FIELDS[kind] | {"type", "id", "status"}:
            shown = ascii(name)[1:-1][:60]
            raise InvalidRequestError(f"input.{shown}: unknown field", param=f"input.{shown}", code="unknown_field")
    return kind


def _call(item: Item) -> dict[str, Any]:
    for name in ("call_id", "name"):
        check_str(f"input.{name}", item.get(name))
    if not isinstance(item.get("arguments"), str):
        raise fail("input.arguments", item.get("arguments"), "JSON as text")
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _result(item: Item, calls: set[str]) -> Message:
    """Convert the result of a tool call to a message. `calls`: the ids of the calls before it."""
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or call_id not in calls:
        raise fail("input.call_id", call_id, "the call_id of a function_call before it")
    return {"role": "tool", "tool_call_id": call_id, "content": _text(item.get("output"))}


def _thoughts(item: Item) -> str:
    """Read the text of a reasoning item, or its summary, which may be all that another server sent."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        raise fail("input", parts, 'parts of a reasoning item, like {"type": "reasoning_text", "text": "..."}')
    return "".join(part["text"] for part in parts)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content or len(content) > MAX_MESSAGES:
        raise fail("input", content, "an item whose content is a text, or a list of text parts")
    return "\n".join(map(_text_of_part, content))


def _text_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in TEXT_PARTS:
        raise NotSupportedError(f"input: parts of type {ascii(kind)[:60]} are not supported", param="input")
    if kind is None or part.keys() - PART_FIELDS or not isinstance(part.get("text"), str):
        raise fail("input", part, 'a part of the content like {"type": "input_text", "text": "..."}')
    text: str = part["text"]
    return text


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
