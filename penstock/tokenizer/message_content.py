"""Convert the content of a chat message, as in OpenAI's API, to the text that a chat template gets."""

from collections.abc import Mapping
from typing import Any

from penstock.errors import NotSupportedError
from penstock.validation import fail

PLANNED_PARTS = frozenset({"image_url", "input_audio", "file", "video_url"})


def text_of_content(content: Any, role: str) -> str:
    """Return a message's content as one text; text parts are joined by newlines.

    Raises:
        InvalidRequestError: it is neither a string nor a list of at least one part {"type": "text", "text": "..."}.
        NotSupportedError: a part is an image, audio, video or a file.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple) and content:
        return "\n".join(_text_of_part(part) for part in content)
    raise fail("messages", content, f"a string or a list of text parts, as the content of the {role} message")


def _text_of_part(part: Any) -> str:
    fields = {name: value for name, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    if isinstance(fields.get("type"), str) and fields["type"] in PLANNED_PARTS:
        raise NotSupportedError(f"messages: parts of type {fields['type']} are not built yet", param="messages")
    if set(fields) != {"type", "text"} or fields["type"] != "text" or not isinstance(fields["text"], str):
        raise fail("messages", part, 'a part of the content like {"type": "text", "text": "..."}')
    return fields["text"]
