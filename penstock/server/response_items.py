"""The items of /v1/responses: those of an input as the messages of a chat, and those of an answer with their events.

A model's output is a list of items: reasoning, messages and tool calls. The client sends them back as input of the next
response, together with the results of the calls. A chat template takes messages, and one message holds all items of a
turn.
"""

from collections.abc import Iterator
from typing import Any

from penstock.errors import InvalidRequestError, NotSupportedError, check_str, fail
from penstock.interface.outputs import CompletionOutput
from penstock.server.client_fields import MAX_MESSAGES
from penstock.server.openai_responses import TokenNames, chat_logprobs
from penstock.tokenizer.answer_reader import Kind, Part

# --- a conversation as items ------------------------------------------------------------------------------------------


TEXT_PARTS = ("input_text", "output_text", "text")
PART_FIELDS = {"type", "text", "annotations", "logprobs", "parsed"}  # the last three occur in answers sent back
ITEM_FIELDS = {
    "message": {"role", "content", "phase"},
    "function_call": {"call_id", "name", "arguments", "parsed_arguments"},
    "function_call_output": {"call_id", "output"},
    "custom_tool_call": {"call_id", "name", "input"},
    "custom_tool_call_output": {"call_id", "output"},
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
        elif kind in ("function_call", "custom_tool_call"):
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
    kind, field = ("custom", "input") if item["type"] == "custom_tool_call" else ("function", "arguments")
    if not isinstance(item.get(field), str):
        raise fail(f"input.{field}", item.get(field), "a text" if kind == "custom" else "JSON as text")
    return {"id": item["call_id"], "type": kind, kind: {"name": item["name"], field: item[field]}}


def _result(item: Item, calls: set[str]) -> Message:
    """Convert the result of a tool call to a message. `calls`: the ids of the calls before it."""
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or call_id not in calls:
        raise fail("input.call_id", call_id, "the call_id of a call before it")
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


def listed_items(items: list[Item], response_id: str, *, logprobs: bool) -> Iterator[Item]:
    """Yield the items of an input as a list shows them, each with an id of its own that stays the same.

    Args:
        logprobs: whether to show those that came back with an answer's text.
    """
    ids: set[str] = set()
    for index, item in enumerate(items):
        kind, item_id, status = item.get("type") or "message", item.get("id"), item.get("status")
        if not isinstance(item_id, str) or not item_id or item_id in ids:
            item_id = f"{response_id.replace('resp', PREFIXES[kind], 1)}_in{index}"
        ids.add(item_id)
        status = status if isinstance(status, str) else "completed"
        shown = {name: value for name, value in item.items() if value is not None and name in ITEM_FIELDS[kind]}
        if kind == "message":
            content = item["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            shown["content"] = [_listed_part(part, item["role"], logprobs=logprobs) for part in parts]
        elif kind == "reasoning":
            shown.setdefault("summary", [])
        yield {"type": kind, "id": item_id, "status": status, **shown}


def _listed_part(part: Item, role: str, *, logprobs: bool) -> Item:
    if role != "assistant":
        return {"type": "input_text", "text": part["text"]}
    own = {"annotations": part.get("annotations") or [], "logprobs": (part.get("logprobs") or []) if logprobs else []}
    return {"type": "output_text", "text": part["text"], **own}


# --- items of the output ----------------------------------------------------------------------------------------------


Event = tuple[str, dict[str, Any]]  # its type, and its fields
PREFIXES = {  # of the items' ids, as at OpenAI
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco",
}  # fmt: skip
TEXTS = {  # an item's type -> the events about its text, and the field of a call that has it
    "message": ("output_text", ""), "reasoning": ("reasoning_text", ""),
    "function_call": ("function_call_arguments", "arguments"), "custom_tool_call": ("custom_tool_call_input", "input"),
}  # fmt: skip


class OutputItem:
    """One item of the output.

    Args:
        kind: its type.
        index: its place in the output.
        response_id: the item's id is made of this and `index`.
        call: `call_id` and `name` of a tool call.
    """

    def __init__(self, kind: str, index: int, response_id: str, **call: str) -> None:
        self.kind = kind
        self._events, self._field = TEXTS[kind]
        self._index = index
        self._id = f"{response_id.replace('resp', PREFIXES[kind], 1)}_{index}"
        self._call = call
        self._texts: list[str] = []
        self._logprobs: list[Any] = []

    def begin(self) -> Iterator[Event]:
        """Yield the events before the item's text."""
        item = self._shown("in_progress", "", content=[])
        yield "response.output_item.added", {"output_index": self._index, "item": item}
        if not self._field:
            yield "response.content_part.added", {**self._place(), "part": self._part("", [])}

    def grow(self, text: str, logprobs: list[Any]) -> Event:
        """Add text, with the log-probabilities of its tokens, and return the event for it."""
        self._texts.append(text)
        self._logprobs += logprobs
        return f"response.{self._events}.delta", {**self._place(), "delta": text, **self._scored(logprobs)}

    def end(self, status: str) -> Iterator[Event]:
        """Yield the events after the item's text."""
        text, done = "".join(self._texts), f"response.{self._events}.done"
        if self._field:
            named = {"name": self._call["name"]} if self.kind == "function_call" else {}
            yield done, {**self._place(), **named, self._field: text}
        else:
            yield done, {**self._place(), "text": text, **self._scored(self._logprobs)}
            yield "response.content_part.done", {**self._place(), "part": self._part(text, self._logprobs)}
        yield "response.output_item.done", {"output_index": self._index, "item": self.shown(status)}

    def shown(self, status: str) -> dict[str, Any]:
        text = "".join(self._texts)
        return self._shown(status, text, content=[] if self._field else [self._part(text, self._logprobs)])

    def _shown(self, status: str, text: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        item = {"type": self.kind, "id": self._id, "status": status}
        if self._field:
            return {**item, **self._call, self._field: text}
        more: dict[str, Any] = {"summary": []} if self.kind == "reasoning" else {"role": "assistant"}
        return {**item, **more, "content": content}

    def _place(self) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._id, "output_index": self._index}
        return place if self._field else {**place, "content_index": 0}

    def _part(self, text: str, logprobs: list[Any]) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self._events, "text": text, **self._scored(logprobs)}
        return {**part, "annotations": []} if self.kind == "message" else part

    def _scored(self, logprobs: list[Any]) -> dict[str, list[Any]]:
        return {"logprobs": logprobs} if self.kind == "message" else {}


class TextLogprobs:
    """Log-probabilities of tokens, held until the text that they are tokens of is shown."""

    def __init__(self, names: TokenNames, top: int) -> None:
        self._names, self._top = names, top
        self._held: list[dict[str, Any]] = []

    def hold(self, choice: CompletionOutput) -> None:
        shown = chat_logprobs(self._names, choice.token_ids, choice.logprobs or [], self._top)
        self._held += shown["content"]

    def take(self, part: Part) -> list[dict[str, Any]]:
        """Take those of the tokens that a part's text is made of. Those before them were markup, and are dropped."""
        if part.kind not in (Kind.CONTENT, Kind.REASONING):  # written in another way than its tokens
            self._held = []
        text, spelt = part.text.encode(), b"".join(bytes(entry["bytes"]) for entry in self._held)
        start = 0 if spelt.startswith(text) else max(0, spelt.rfind(text))
        taken, at = [], 0
        while self._held and at < start + len(text):
            entry = self._held.pop(0)
            at += len(entry["bytes"])
            if at > start:
                taken.append(entry)
        return taken
