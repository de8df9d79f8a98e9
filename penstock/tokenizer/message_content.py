"""Content of a chat message, as OpenAI's API has it, to the one text that a chat template gets."""

from collections.abc import Mapping
from typing import Any

from penstock.errors import InvalidRequestError, NotSupportedError
from penstock.validation import shown

PLANNED_PARTS = frozenset({"image_url", "input_audio", "file", "video_url"})


def text_of_content(content: Any, role: str) -> str:
    """Return a message's content as one text; text parts are joined by newlines.

    Nothing but text is read: what a part refers to is never fetched.

    Raises:
        InvalidRequestError: it is neither a string nor a list of at least one part {"type": "text", "text": "..."}.
        NotSupportedError: a part is an image, audio or a file.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple) and content:
        return "\n".join(_text_of_part(part) for part in content)
    raise InvalidRequestError(
        f"messages: {shown(content)} is not allowed as the content of the {role} message; it must be a string or a "
        "list of text parts",
        param="messages",
    )


def _text_of_part(part: Any) -> str:
    fields = {name: value for name, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    if isinstance(fields.get("type"), str) and fields["type"] in PLANNED_PARTS:
        raise NotSupportedError(f"messages: parts of type {fields['type']} are not built yet", param="messages")
    if set(fields) != {"type", "text"} or fields["type"] != "text" or not isinstance(fields["text"], str):
        raise InvalidRequestError(
            f"messages: {shown(part)} is not allowed as a part of the content; it must be a mapping with type "
            '"text" and a text',
            param="messages",
        )
    return fields["text"]
