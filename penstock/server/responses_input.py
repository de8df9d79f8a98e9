"""The body of POST /v1/responses, and what it means: a conversation for the chat template, and SamplingParams."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import msgspec

from penstock import validation as check
from penstock.errors import InvalidRequestError, NotSupportedError
from penstock.interface.messages import ModelInfo
from penstock.interface.sampling_params import MAX_TOKENS, RequestOutputKind, SamplingParams
from penstock.server.context import ServerContext
from penstock.server.inputs import COPIED, chat_prompts
from penstock.server.logits_fields import LogitsFields
from penstock.server.openai_requests import ChatRequest, Strict, check_timeout, to_request
from penstock.server.records import EncodedPrompt
from penstock.server.structured import form_of
from penstock.server.unsupported import MAX_MESSAGES

TEXT_PARTS = ("input_text", "output_text", "text")
PART_FIELDS = {"type", "text", "annotations", "logprobs"}  # the last two come back with an answer that is sent again
ITEM_FIELDS = {"type", "role", "content", "id", "status", "phase"}


class StreamOptions(Strict, kw_only=True, frozen=True):
    include_obfuscation: bool | None = None


class ResponseRequest(Strict, LogitsFields, kw_only=True, frozen=True):
    """POST /v1/responses: OpenAI's fields, vLLM's sampling fields, and last the labels."""

    place: ClassVar[str] = "responses"

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: str | list[str] | None = None
    logits_processors: list[str] | dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def check(self) -> None:
        """Raise InvalidRequestError for parameters that contradict each other, or that are not built."""
        if self.background and self.store is False:
            raise InvalidRequestError(
                "background: a response in the background is stored; leave out store", param="store"
            )
        check_timeout(self.timeout)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options: only allowed with stream: true", param="stream_options")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            message = "stream_options.include_obfuscation: true is not supported; this is not built yet"
            raise NotSupportedError(message, param="stream_options.include_obfuscation")


def messages_of(value: str | list[Any]) -> list[dict[str, str]]:
    """Return the input as messages with a role and a text each."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise InvalidRequestError(f"input: {len(value)} items; 1 to {MAX_MESSAGES} are allowed", param="input")
    return [_message(item) for item in value]


def _message(item: Any) -> dict[str, str]:
    if not isinstance(item, dict):
        raise check.fail("input", item, "a text, or a list of messages")
    kind = item.get("type") or "message"
    if kind != "message":
        raise NotSupportedError(
            f"input: items of type {ascii(kind)[:60]} are not supported; only messages are", param="input"
        )
    for name in item.keys() - ITEM_FIELDS:
        raise InvalidRequestError(f"input.{name}: unknown field", param=f"input.{name}", code="unknown_field")
    return {"role": item.get("role"), "content": _text(item.get("content"))}  # type: ignore[dict-item]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content or len(content) > MAX_MESSAGES:
        raise check.fail("input", content, "a message whose content is a text, or a list of text parts")
    return "\n".join(map(_text_of_part, content))


def _text_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in TEXT_PARTS:
        raise NotSupportedError(f"input: parts of type {ascii(kind)[:60]} are not supported", param="input")
    if kind is None or part.keys() - PART_FIELDS or not isinstance(part.get("text"), str):
        raise check.fail("input", part, 'a part of the content like {"type": "input_text", "text": "..."}')
    text: str = part["text"]
    return text


async def response_prompts(context: ServerContext, body: ResponseRequest, info: ModelInfo) -> list[EncodedPrompt]:
    """Return the conversation, rendered by the model's template, as the only prompt."""
    messages = messages_of(body.input)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    with _naming_the_input():
        chat = to_request({"messages": messages}, ChatRequest)
        return await chat_prompts(context, chat, info)


@contextmanager
def _naming_the_input() -> Iterator[None]:
    """Turn errors about `messages` into errors about `input`."""
    try:
        yield
    except InvalidRequestError as error:
        if (error.param or "").partition(".")[0].partition("[")[0] != "messages":
            raise
        message = error.message.replace("messages", "input", 1)
        raise InvalidRequestError(message, param="input", code=error.code) from None


def response_params(body: ResponseRequest, info: ModelInfo) -> SamplingParams:
    """Return the SamplingParams of a response; by default it may fill the rest of the context."""
    check.check_int("max_output_tokens", body.max_output_tokens, 1, MAX_TOKENS, optional=True)
    max_tokens = info.default_sampling.get("max_tokens") if body.max_output_tokens is None else body.max_output_tokens
    given = {name: value for name in COPIED if (value := getattr(body, name, None)) is not None}
    kind = RequestOutputKind.DELTA
    own = {"max_tokens": max_tokens, "structured_outputs": form_of(body), "output_kind": kind}
    params = SamplingParams(**{**info.default_sampling, **given, **own})
    params.check_vocabulary(info.vocab_size)
    return params


def continuing(body: ResponseRequest, previous: ResponseRequest, answer: str) -> ResponseRequest:
    """Return the body with the conversation of an earlier response before its own input, without its instructions."""
    before = [*messages_of(previous.input), {"role": "assistant", "content": answer}]
    return msgspec.structs.replace(body, input=[*before, *messages_of(body.input)])
