"""The items of OpenAI's Responses API, and their conversion to the messages of a chat.

A model's output is a list of items: reasoning, messages and tool calls. The client sends them back as input of the
next response, together with the results of the calls. A chat template takes messages, and one message holds all items
of a turn.
"""

from typing import Any

from penstock.errors import InvalidRequestError, NotSupportedError, check_str, fail
from penstock.server.unsupported import MAX_MESSAGES

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
    """Return the input of a response as items."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise InvalidRequestError(f"input: {len(value)} items; 1 to {MAX_MESSAGES} are allowed", param="input")
    return value


def messages_of(items: list[Any]) -> list[Message]:
    """Return items as messages of a chat.

    Raises:
        InvalidRequestError: an item is malformed, or is the result of a call that does not precede it.
    """
    conversation = _Conversation()
    for item in items:
        conversation.add(item)
    return conversation.messages


class _Conversation:
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
        """Return the last message if it holds only reasoning."""
        last = self.messages[-1] if self.messages else {}
        return last if "reasoning_content" in last and not last["content"] and "tool_calls" not in last else None


def _kind_of(item: Any) -> str:
    """Return the type of an item. Raise InvalidRequestError for an unsupported type or an unknown field."""
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
    """Return a tool call in the form that chat messages use."""
    for name in ("call_id", "name"):
        check_str(f"input.{name}", item.get(name))
    if not isinstance(item.get("arguments"), str):
        raise fail("input.arguments", item.get("arguments"), "JSON as text")
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _result(item: Item, calls: set[str]) -> Message:
    """Return the result of a tool call as a message."""
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or call_id not in calls:
        raise fail("input.call_id", call_id, "the call_id of a function_call before it")
    return {"role": "tool", "tool_call_id": call_id, "content": _text(item.get("output"))}


def _thoughts(item: Item) -> str:
    """Return the text of a reasoning item, or its summary, which may be all that another server sent."""
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
