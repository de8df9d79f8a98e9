"""From a request body to prompts as token ids. Knows the tokenizer through ServerContext, and no engine.

Lengths are checked before any text is tokenised, and ids before anything is computed for them.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import to_builtins

from penstock import validation as check
from penstock.errors import InvalidRequestError, NotSupportedError
from penstock.interface.messages import ModelInfo
from penstock.server.context import ServerContext
from penstock.server.openai_requests import (
    ChatRequest,
    CompletionRequest,
    Message,
    TokenizeRequest,
    refuse_planned,
)
from penstock.tokenizer.message_content import text_of_content
from penstock.tokenizer.tokenizer import check_prompt_length

MAX_MESSAGES = 4096
MESSAGE_PLANNED = ("tool_calls", "tool_call_id", "function_call", "audio", "annotations", "refusal")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the engine takes it; the text only where the answer may repeat it."""

    token_ids: list[int]
    text: str | None = None


async def completion_prompts(context: ServerContext, body: CompletionRequest, info: ModelInfo) -> list[EncodedPrompt]:
    """The prompts of a call, in order: a text, ids, or a list of either."""
    items = _split(body.prompt)
    limit = context.options.max_choices
    if len(items) * (body.n or 1) > limit:
        name = "n" if len(items) == 1 else "prompt"
        message = f"{name}: {len(items)} prompts times n = {body.n or 1} are too many; at most {limit} choices a call"
        raise InvalidRequestError(message, param=name)
    add_special_tokens = body.add_special_tokens is not False
    for item in items:
        if not isinstance(item, str):
            _check_ids(item, info)
            await asyncio.sleep(0)
    total = sum(len(item) for item in items if isinstance(item, str))
    prompts = []
    for item in items:
        prompts.append(await _encoded(context, item, info, body, add_special_tokens, total))
        await asyncio.sleep(0)  # others come in between
    return prompts


def _split(prompt: str | list[Any]) -> Sequence[str | list[int]]:
    if isinstance(prompt, str) or (prompt and type(prompt[0]) is int):
        return [prompt]
    kind = type(prompt[0]) if prompt else None
    if kind not in (str, list) or set(map(type, prompt)) != {kind}:
        raise check.fail(
            "prompt", prompt, "a text, a list of texts, a list of token ids or a list of lists of token ids"
        )
    return prompt


def _check_ids(ids: list[Any], info: ModelInfo) -> None:
    if not ids:
        raise check.fail("prompt", ids, "at least one token id")
    if len(ids) >= info.max_model_len:
        raise _too_long("prompt", len(ids), info)
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < info.vocab_size:
        return  # quickly, since there may be many
    for token_id in ids:
        check.check_int("prompt", token_id, 0, info.vocab_size - 1)


async def _encoded(
    context: ServerContext,
    item: str | list[int],
    info: ModelInfo,
    body: CompletionRequest,
    add_special_tokens: bool,
    total: int,
) -> EncodedPrompt:
    if isinstance(item, str):
        ids = await _encode(context, item, info, "prompt", add_special_tokens=add_special_tokens, total=total)
        return EncodedPrompt(ids, item)
    return EncodedPrompt(
        item,
        await context.decode(item, skip_special_tokens=body.skip_special_tokens is not False) if body.echo else None,
    )


async def _encode(
    context: ServerContext, text: str, info: ModelInfo, param: str, *, add_special_tokens: bool, total: int = 0
) -> list[int]:
    if not text:
        raise check.fail(param, text, "a text of at least one character")
    check_prompt_length(text, info.max_model_len, param=param)
    ids = await context.encode(text, add_special_tokens=add_special_tokens, total=total)
    if not ids:
        raise InvalidRequestError(f"{param}: the text has no tokens", param=param)
    if len(ids) >= info.max_model_len:
        raise _too_long(param, len(ids), info)
    return ids


def _too_long(param: str, length: int, info: ModelInfo) -> InvalidRequestError:
    message = (
        f"{param}: {length} tokens are too many; the context of {info.max_model_len} tokens must hold the prompt and "
        "at least one token of the answer"
    )
    return InvalidRequestError(message, param=param, code="context_length_exceeded")


async def chat_prompt(context: ServerContext, body: ChatRequest, info: ModelInfo) -> EncodedPrompt:
    """The conversation in the model's own template."""
    continue_final = bool(body.continue_final_message)
    add_generation = not continue_final if body.add_generation_prompt is None else body.add_generation_prompt
    text = await render(
        context, body.messages, info, add_generation_prompt=add_generation, continue_final=continue_final
    )
    ids = await _encode(context, text, info, "messages", add_special_tokens=bool(body.add_special_tokens))
    return EncodedPrompt(ids)


async def render(
    context: ServerContext,
    messages: list[Message],
    info: ModelInfo,
    *,
    add_generation_prompt: bool,
    continue_final: bool,
) -> str:
    """The prompt text of a conversation, or an error that names `messages`."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        message = f"messages: {len(messages)} messages are not allowed; give 1 to {MAX_MESSAGES}"
        raise InvalidRequestError(message, param="messages")
    turns = [_turn(message) for message in messages]
    check_prompt_length("".join(turn["content"] for turn in turns), info.max_model_len, param="messages")
    template = context.tokenizer().chat_template
    if template is None:
        message = "messages: the model has no chat template; use /v1/completions"
        raise InvalidRequestError(message, param="messages", code="no_chat_template")
    return template.render(turns, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final)


def _turn(message: Message) -> dict[str, str]:
    """What the template sees. `developer` is the newer name of `system`, which is the one that templates know."""
    refuse_planned(message, *MESSAGE_PLANNED)
    if message.role in ("tool", "function"):
        raise NotSupportedError(
            f"messages: the role {message.role} is not supported; tools are not built yet", param="messages"
        )
    content = text_of_content(to_builtins(message.content), message.role)
    turn = {"role": "system" if message.role == "developer" else message.role, "content": content}
    return turn if message.name is None else {**turn, "name": message.name}


async def tokenize(context: ServerContext, body: TokenizeRequest, info: ModelInfo) -> list[int]:
    """Ids for POST /tokenize. Longer texts than a prompt may be are refused, like a prompt."""
    refuse_planned(body, "chat_template", "chat_template_kwargs")
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("prompt: give either prompt or messages", param="prompt")
    if body.messages is None:
        check_prompt_length(body.prompt or "", info.max_model_len)
        return await context.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    add_generation = body.add_generation_prompt is not False
    text = await render(context, body.messages, info, add_generation_prompt=add_generation, continue_final=False)
    check_prompt_length(text, info.max_model_len, param="messages")
    return await context.encode(text, add_special_tokens=bool(body.add_special_tokens))
