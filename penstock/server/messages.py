"""/v1/messages: Anthropic's API, as a translation of bodies to chats, and of outputs to its messages and events.

A message of that API is a list of blocks: text, thinking, tool_use, and tool_result in messages of the user. A chat has
a message of its own for each result of a tool, one text per message, and reasoning beside it. What a body asks for is
computed as the chat request that asks for the same, so the same conversation has the same tokens over both APIs.

`cache_control` is a hint that changes no token: prefixes are cached without it, and the usage tells what was read. The
signature of thinking is the message's id, and is not checked when the thinking comes back.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar, Literal
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import InvalidRequestError, NotSupportedError, check_int
from penstock.interface.outputs import CompletionOutput, FinishReason
from penstock.interface.sampling_params import MAX_TOKENS
from penstock.server.api_errors import until_disconnect
from penstock.server.client_fields import without_unread_hints
from penstock.server.completions import ChatAnswers
from penstock.server.context import ServerContext, context_of, json_response, log_of, model_of, read_body, within_limits
from penstock.server.generation import EventStream, Generation
from penstock.server.inputs import chat_params, chat_prompts, check_form, rules_of, salted, with_rules
from penstock.server.openai_requests import ChatRequest, ComputingRequest, Effort, Strict, to_request
from penstock.tokenizer.answer_formats import reasoning_format_of
from penstock.tokenizer.answer_reader import Kind, Part

# --- the body ---------------------------------------------------------------------------------------------------------


class CacheControl(Strict, kw_only=True, frozen=True):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Strict, kw_only=True, frozen=True, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(Strict, kw_only=True, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None


class Caller(Strict, kw_only=True, frozen=True):
    type: Literal["direct"]


class ToolUseBlock(Strict, kw_only=True, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: Caller | None = None
    cache_control: CacheControl | None = None


class ToolResultBlock(Strict, kw_only=True, frozen=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None

    @property
    def text(self) -> str:
        """The text that the model is shown; chat templates have no place for is_error."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content or ())
        return f"Error: {text}" if self.is_error else text


class Turn(Strict, kw_only=True, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]


class CustomTool(Strict, kw_only=True, frozen=True):
    """A tool of the client. `eager_input_streaming` changes nothing: inputs are always streamed as they come."""

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(Strict, kw_only=True, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict, kw_only=True, frozen=True):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized"] | None = None


class OutputFormat(Strict, kw_only=True, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Strict, kw_only=True, frozen=True):
    effort: Effort | None = None
    format: OutputFormat | None = None


class Metadata(Strict, kw_only=True, frozen=True):
    user_id: str | None = None


class CountRequest(ComputingRequest, kw_only=True, frozen=True):
    """POST /v1/messages/count_tokens: what a prompt is made of."""

    place: ClassVar[str] = "messages"

    messages: list[Turn]
    system: str | list[TextBlock] | None = None
    tools: list[CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessageRequest(CountRequest, kw_only=True, frozen=True):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    metadata: Metadata | None = None  # type: ignore[assignment]  # of ComputingRequest, whose is free

    def check(self) -> None:
        super().check()
        check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        thinking = self.thinking
        if thinking is not None and thinking.budget_tokens is not None:
            check_int("thinking.budget_tokens", thinking.budget_tokens, 1, MAX_TOKENS)
            if thinking.type != "enabled":
                raise InvalidRequestError(
                    f"thinking.budget_tokens: not allowed with the type {thinking.type}", param="thinking"
                )

    @property
    def asks_for_cache(self) -> bool:
        """Whether the body has a cache_control anywhere."""
        blocks: list[Any] = [self, *(self.tools or ())]
        for content in (self.system, *(turn.content for turn in self.messages)):
            blocks += content if isinstance(content, list) else []
        return any(getattr(block, "cache_control", None) is not None for block in blocks)


# --- from the body to a chat ------------------------------------------------------------------------------------------


NAMES = {  # field of a chat -> field of this API
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "tools": "tools",
}
INSIDE = {"].function.parameters": "].input_schema", "].function.": "]."}
CONVERTED_AT_ONCE = 2**14  # bytes of a body; small blocks of as many bytes take less than 10 ms
FLAT = ("max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "chat_template_kwargs")


@contextmanager
def renaming(names: Mapping[str, str], inside: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turn errors about a chat's fields into errors about another API's. `inside` are the names of parts of a field."""
    try:
        yield
    except InvalidRequestError as error:
        field = (error.param or "").partition(".")[0].partition("[")[0]
        if field not in names:
            raise
        message = error.message
        for theirs, own in ((field, names[field]), *(inside or {}).items()):
            message = message.replace(theirs, own, 1)
        raise InvalidRequestError(message, param=names[field], code=error.code) from None


def chat_of(context: ServerContext, body: CountRequest) -> ChatRequest:
    """Convert a body to the chat request that asks for the same.

    Raises:
        InvalidRequestError: something is malformed, or not supported; `param` is the field of a message.
    """
    messages = _messages(body)
    fields: dict[str, Any] = {"messages": messages, **_tool_fields(body)}
    thinking = None if body.thinking is None else body.thinking.type
    effort = None if body.output_config is None else body.output_config.effort
    fields |= thinking_fields(context, thinking, effort, body.chat_template_kwargs, "thinking: disabled")
    if isinstance(body, MessageRequest):
        fields |= {name: getattr(body, name) for name in FLAT if getattr(body, name) is not None}
        fields["stop"] = body.stop_sequences
        if thinking == "enabled" and body.thinking is not None and _can_limit(context):
            fields["thinking_token_budget"] = body.thinking.budget_tokens
        fields["user"] = None if body.metadata is None else body.metadata.user_id
    last = body.messages[-1] if body.messages else None
    if last is not None and last.role == "assistant" and "tool_calls" not in messages[-1]:
        fields["continue_final_message"] = True  # the answer continues the text that the client has begun
    config = body.output_config
    if config is not None and config.format is not None:
        wanted = {"name": "answer", "schema": config.format.schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": wanted}
    chat = to_request(fields, ChatRequest)
    chat.check()
    return chat


def _can_limit(context: ServerContext) -> bool:
    """Tell whether a budget can end the reasoning of the model. That API's budgets are targets, so that others are
    accepted too."""
    template = context.tokenizer().chat_template
    reasoning = reasoning_format_of("" if template is None else template.text, context.options.reasoning_parser)
    return reasoning is not None and len(context.tokenizer().encode(reasoning.end, add_special_tokens=False)) == 1


def _messages(body: CountRequest) -> list[dict[str, Any]]:
    """Convert the conversation. Neighbouring messages of the user, or of the assistant, become one."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _parts(body.system)})
    for index, turn in enumerate(body.messages):
        place = f"messages[{index}]"
        blocks = [TextBlock(text=turn.content)] if isinstance(turn.content, str) else turn.content
        if turn.role == "assistant":
            _add_answer(messages, blocks, place)
            continue
        for block in blocks:
            if isinstance(block, ToolResultBlock) and turn.role == "user":
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text})
            elif isinstance(block, TextBlock):
                if not messages or messages[-1]["role"] != turn.role:
                    messages.append({"role": turn.role, "content": []})
                messages[-1]["content"] += _parts([block])
            else:
                kind = block.__struct_config__.tag
                message = f"{place}.content: a message of the role {turn.role} has no blocks of type {kind}"
                raise InvalidRequestError(message, param="messages")
    return messages


def _parts(content: str | list[TextBlock]) -> list[dict[str, Any]]:
    texts = [content] if isinstance(content, str) else [block.text for block in content]
    return [{"type": "text", "text": text} for text in texts]


def _add_answer(messages: list[dict[str, Any]], blocks: list[Any], place: str) -> None:
    """Add a message of the assistant, with its thinking and its calls. Its texts are joined as they were generated."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    answer = messages[-1]
    for block in blocks:
        if isinstance(block, TextBlock):
            answer["content"] = (answer["content"] or "") + block.text  # null after calls of the turn before
        elif isinstance(block, ThinkingBlock):
            answer["reasoning_content"] = answer.get("reasoning_content", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": text_of_input(block.input)}
            answer.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
        else:
            message = f"{place}.content: a message of the assistant has no blocks of type tool_result"
            raise InvalidRequestError(message, param="messages")
    if "tool_calls" in answer and not answer["content"]:
        answer["content"] = None


def _tool_fields(body: CountRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.tools is not None:
        names = ("description", "strict")
        fields["tools"] = [
            {"type": "function", "function": {"name": tool.name, "parameters": tool.input_schema}
             | {name: getattr(tool, name) for name in names if getattr(tool, name) is not None}}
            for tool in body.tools
        ]  # fmt: skip
    choice = body.tool_choice
    if choice is None:
        return fields
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequestError("tool_choice.name: required with the type tool, and only there", param="tool_choice")
    by_name = {"type": "function", "function": {"name": choice.name}}
    fields["tool_choice"] = {"any": "required", "tool": by_name}.get(choice.type, choice.type)
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def thinking_fields(
    context: ServerContext, thinking: str | None, effort: str | None, kwargs: Mapping[str, Any] | None, refused: str
) -> dict[str, Any]:
    """Find the fields of a chat that turn reasoning on or off, for templates that have a switch or levels.

    A model that does not reason needs no switch to be without thinking, and uses none of a budget. The effort "high" is
    this API's default, and goes to templates that have levels. `refused` is the field and the value of an error.
    """
    template = context.tokenizer().chat_template
    text = "" if template is None else template.text
    has_levels, has_switch = "reasoning_effort" in text, "enable_thinking" in text
    if thinking == "disabled":
        if has_levels or has_switch:
            return {"reasoning_effort": "none"}
        if reasoning_format_of(text, context.options.reasoning_parser) is not None:
            message = f"{refused} is not supported; the model's chat template cannot turn its reasoning off"
            raise NotSupportedError(message, param=refused.partition(":")[0])
        return {}
    if effort is not None and (has_levels or effort != "high"):
        return {"reasoning_effort": effort}
    if thinking is not None and has_switch:
        return {"chat_template_kwargs": {"enable_thinking": True, **(kwargs or {})}}
    return {}


# --- the answer -------------------------------------------------------------------------------------------------------


INVALID = "INVALID_JSON"  # the key of an input that is not the JSON of an object, as that API recommends
BLOCKS = {Kind.CONTENT: "text", Kind.REASONING: "thinking", Kind.CALL: "tool_use"}
Event = dict[str, Any]


class MessageAnswer:
    """Shapes the outputs of one call as a message, or as its events."""

    def __init__(self, body: MessageRequest, chat: ChatRequest, generation: Generation, envelope: Event) -> None:
        self._asks_for_cache, self._generation = body.asks_for_cache, generation
        rules = rules_of(generation.context, chat, generation.prompts[0])
        self._answers = ChatAnswers(generation.id, rules, generation.context.tokenizer() if rules.marks else None)
        self._envelope = {"id": generation.id, "type": "message", "role": "assistant", **envelope}
        self._blocks: list[Event] = []
        self._texts: list[str] = []  # of the last block

    async def whole(self) -> Event:
        """Wait for the whole message."""
        (output,) = await self._generation.collect()
        choice = output.outputs[0]
        for part in self._answers.parts(choice):
            for _ in self._part(part):
                pass
        for _ in self._end_block():
            pass
        ending = self._ending(choice)
        return {**self._envelope, "content": self._blocks, **ending, "usage": self._usage()} | self._seed()

    async def events(self) -> AsyncGenerator[bytes | None, None]:
        """Yield the events as they come. The first one waits for the first output, so that a refusal has its status."""
        begun, last = False, None
        async with aclosing(self._generation.outputs()) as outputs:
            async for item in outputs:
                if not begun:
                    begun = True
                    empty: Event = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
                    yield _event({"type": "message_start", "message": {**self._envelope, **empty}})
                if item is None:
                    yield _event({"type": "ping"})
                    continue
                (last,) = item[1].outputs
                for part in self._answers.parts(last):
                    for event in self._part(part):
                        yield _event(event)
        for event in self._end_block():
            yield _event(event)
        if last is not None:
            yield _event({"type": "message_delta", "delta": self._ending(last), "usage": self._usage()} | self._seed())
        yield _event({"type": "message_stop"})

    def _part(self, part: Part) -> Iterator[Event]:
        """Yield the events of the next part of the answer, and add it to the blocks."""
        kind = BLOCKS.get(part.kind, "tool_use")
        if part.kind is Kind.CALL or not self._blocks or self._blocks[-1]["type"] != kind:
            yield from self._end_block()
            yield from self._begin_block(part)
        if part.kind is Kind.CALL:
            return
        self._texts.append(part.text)
        name = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}[kind]
        delta = {"type": "input_json_delta" if kind == "tool_use" else f"{kind}_delta", name: part.text}
        yield {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _begin_block(self, part: Part) -> Iterator[Event]:
        kind = BLOCKS[part.kind]
        block: Event = {"type": kind}
        if kind == "tool_use":
            block |= {"id": self._answers.call_id(0, part.call), "name": part.text, "input": {}}
        else:
            block |= {"text": ""} if kind == "text" else {"thinking": "", "signature": ""}
        self._blocks.append(block)
        self._texts = []
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": {**block}}

    def _end_block(self) -> Iterator[Event]:
        if not self._blocks:
            return
        block, index, text = self._blocks[-1], len(self._blocks) - 1, "".join(self._texts)
        if block["type"] == "tool_use":
            block["input"] = input_of(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            block["signature"] = self._generation.id
            delta = {"type": "signature_delta", "signature": self._generation.id}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}

    def _ending(self, choice: CompletionOutput) -> Event:
        """Name the reason why the message has ended, and the stop sequence if one did it."""
        reason, sequence = "end_turn", None
        limit = self._generation.params.max_tokens
        if choice.finish_reason is FinishReason.LENGTH:
            reached = limit is not None and self._generation.log.num_completion_tokens >= limit
            reason = "max_tokens" if reached else "model_context_window_exceeded"
        elif self._answers.finish_reason(choice) == "tool_calls":
            reason = "tool_use"
        elif isinstance(choice.stop_reason, str):
            reason, sequence = "stop_sequence", choice.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> Event:
        """Count the tokens. Those of the prompt are in three numbers: read from the cache, written to it at the
        request's wish, and all others."""
        log = self._generation.log
        computed = log.num_prompt_tokens - log.num_cached_tokens
        written = computed if self._asks_for_cache else 0
        return {
            "input_tokens": computed - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": log.num_cached_tokens,
            "output_tokens": log.num_completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._answers.num_reasoning_tokens},
        }

    def _seed(self) -> Event:
        return {"seed": self._generation.seed()}


def _event(event: Event) -> bytes:
    return b"event: " + str(event["type"]).encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


def text_of_input(value: Mapping[str, Any]) -> str:
    """Write the arguments of a call as the text that `input_of` reads."""
    text = value.get(INVALID)
    return text if len(value) == 1 and isinstance(text, str) else json.dumps(value, ensure_ascii=False)


def input_of(text: str) -> Any:
    """Read the arguments of a call. A call that was cut off, or is not an object, keeps its text under INVALID."""
    try:
        found = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        found = None
    return found if isinstance(found, dict) else {INVALID: text}


# --- routes -----------------------------------------------------------------------------------------------------------


async def create_message(request: Request) -> Response:
    """Handle POST /v1/messages: answer a conversation in Anthropic's format, whole or as a stream of events."""
    body = await read_body(request, MessageRequest)
    body.check()
    context, log = await model_of(request, body.model, body.timeout), log_of(request)
    info = context.info()
    envelope = {"model": context.shown_name(body.model), "system_fingerprint": context.fingerprint(log.adapter)}
    context.arrive(log)  # refuse it before spending time on the prompt
    with renaming(NAMES, INSIDE):
        chat = await _chat(request, body)
        params = chat_params(chat, info)
        await check_form(request, chat, params)
        prompts = salted(request, body.cache_salt, await chat_prompts(context, chat, info))
        params = await with_rules(context, chat, rules_of(context, chat, prompts[0]), params)
        params = within_limits(request, params, prompts, priority=body.priority, timeout_s=body.timeout)
    generation = Generation(context, f"msg_{uuid4().hex}", prompts, params, log)
    answer = MessageAnswer(body, chat, generation, envelope)
    if body.stream:
        return EventStream(answer.events(), stall_timeout_s=context.options.stall_timeout_s, done=b"")
    return json_response(await until_disconnect(request.receive, answer.whole()))


async def count_tokens(request: Request) -> Response:
    """Handle POST /v1/messages/count_tokens: count the tokens of the prompt that such a message would have."""
    body = await read_body(request, CountRequest)
    body.check()
    context = await model_of(request, body.model, body.timeout)
    info = context.info()
    with renaming(NAMES, INSIDE):
        (prompt,) = await chat_prompts(context, await _chat(request, body), info)
    return json_response({"input_tokens": len(prompt.token_ids)})


async def _chat(request: Request, body: CountRequest) -> ChatRequest:
    """Convert a body; a large one in a thread, so that others are served meanwhile."""
    context, is_large = context_of(request), len(await request.body()) > CONVERTED_AT_ONCE
    convert = partial(chat_of, context, body)
    chat = await asyncio.to_thread(convert) if is_large else convert()
    if context.options.unknown_fields == "warn":
        chat = without_unread_hints(chat, context.tokenizer().chat_template, log_of(request).ignored)
    return chat


def model_card(name: str, created: int, max_model_len: int | None) -> Event:
    """Describe a model as this API does."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }
