"""The body of POST /v1/responses, and its conversion to a conversation for the chat template and SamplingParams."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import msgspec

from penstock.errors import InvalidRequestError, NotSupportedError, check_int, shown
from penstock.interface.messages import ModelInfo
from penstock.interface.sampling_params import MAX_TOKENS, RequestOutputKind, SamplingParams
from penstock.server.inputs import COPIED
from penstock.server.logits_fields import LogitsFields
from penstock.server.openai_requests import ChatRequest, Strict, check_timeout, to_request
from penstock.server.responses_items import items_of, messages_of
from penstock.server.structured import form_of
from penstock.server.tool_fields import FunctionTool, ResponseToolChoice

ENCRYPTED = "reasoning.encrypted_content"  # the value of `include` that changes nothing, if the model does not think
NAMES = {"messages": "input", "response_format": "text", "tools": "tools"}  # field of a chat -> field of a response


class StreamOptions(Strict, kw_only=True, frozen=True):
    include_obfuscation: bool | None = None


class ResponseRequest(Strict, LogitsFields, kw_only=True, frozen=True):
    """POST /v1/responses: OpenAI's fields, vLLM's sampling fields, and finally the labels for the log."""

    place: ClassVar[str] = "responses"

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[str] | None = None
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
    session_id: str | None = None
    request_id: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def check(self) -> None:
        """Raise InvalidRequestError for parameters that contradict each other or are not built."""
        if self.background and self.store is False:
            raise InvalidRequestError(
                "background: a response in the background is stored; leave out store", param="store"
            )
        check_timeout(self.timeout)
        for wanted in self.include or ():
            if wanted != ENCRYPTED:
                message = f"include: {shown(wanted)} is not supported; this is not built yet"
                raise NotSupportedError(message, param="include")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options: only allowed with stream: true", param="stream_options")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            message = "stream_options.include_obfuscation: true is not supported; this is not built yet"
            raise NotSupportedError(message, param="stream_options.include_obfuscation")


def chat_of(body: ResponseRequest) -> ChatRequest:
    """Return a response's body as a chat request: its conversation, its tools and the form of its answer.

    Raises:
        InvalidRequestError: something is malformed; the error uses the names of a response's fields.
    """
    messages = messages_of(items_of(body.input))
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    choice = body.tool_choice
    with naming_the_response():
        chat = msgspec.structs.replace(
            to_request({"messages": messages, "structured_outputs": body.structured_outputs}, ChatRequest),
            tools=None if body.tools is None else [tool.as_tool() for tool in body.tools],
            tool_choice=choice if choice is None or isinstance(choice, str) else choice.as_choice(),
            parallel_tool_calls=body.parallel_tool_calls,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        chat.check_tools()
    return chat


@contextmanager
def naming_the_response() -> Iterator[None]:
    """Turn errors about a chat's fields into errors about a response's."""
    try:
        yield
    except InvalidRequestError as error:
        field = (error.param or "").partition(".")[0].partition("[")[0]
        if field not in NAMES:
            raise
        message = error.message.replace(field, NAMES[field], 1).replace("].function.", "].", 1)
        raise type(error)(message, param=NAMES[field], code=error.code) from None


def response_params(body: ResponseRequest, info: ModelInfo) -> SamplingParams:
    """Return the SamplingParams of a response; by default it may fill the rest of the context."""
    check_int("max_output_tokens", body.max_output_tokens, 1, MAX_TOKENS, optional=True)
    max_tokens = info.default_sampling.get("max_tokens") if body.max_output_tokens is None else body.max_output_tokens
    given = {name: value for name in COPIED if (value := getattr(body, name, None)) is not None}
    kind = RequestOutputKind.DELTA
    own = {"max_tokens": max_tokens, "structured_outputs": form_of(body), "output_kind": kind}
    params = SamplingParams(**{**info.default_sampling, **given, **own})
    params.check_vocabulary(info.vocab_size)
    return params


def continuing(body: ResponseRequest, previous: ResponseRequest, output: list[Any]) -> ResponseRequest:
    """Return the body with the conversation of an earlier response before its own input.

    The earlier response's instructions are left out.
    """
    return msgspec.structs.replace(body, input=[*items_of(previous.input), *output, *items_of(body.input)])
