"""/tokenize, /detokenize and /apply-template: texts and conversations to token ids and back, for vLLM's clients and
llama.cpp's, which have the same paths with other fields.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import check_ids, invalid, unsupported
from penstock.interface.messages import ModelInfo
from penstock.server.context import ServerContext, context_of, json_response, model_of, read_body
from penstock.server.inputs import decode, encode, render
from penstock.server.openai_requests import ChatRequest, Message, PromptOrMessages, Strict, Tool, check_tools
from penstock.tokenizer.tokenizer import MAX_CHARS_PER_TOKEN, RenderedChat, check_prompt_length


class TemplateRequest(Strict, kw_only=True, frozen=True):
    """POST /apply-template."""

    place: ClassVar[str] = "tokenize"

    model: str | None = None
    messages: list[Message]
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeRequest(PromptOrMessages, kw_only=True, frozen=True):
    """POST /tokenize. `content` and the fields after it are llama.cpp's."""

    place: ClassVar[str] = "tokenize"

    prompt: str | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None

    def check(self) -> None:
        if self.parse_special is False:
            raise unsupported("parse_special", "false is not supported; the texts of special tokens are these tokens")
        if self.content is None:
            return super().check()
        for name in ("prompt", "messages", "tools", "chat_template_kwargs", "continue_final_message"):
            if getattr(self, name):
                raise invalid(name, "not allowed with content, which is a prompt, too")

    @property
    def adds_special_tokens(self) -> bool:
        """Whether the tokenizer adds its special tokens; by default only to vLLM's `prompt`."""
        given = self.add_special if self.add_special_tokens is None else self.add_special_tokens
        return self.prompt is not None if given is None else given


class DetokenizeRequest(Strict, kw_only=True, frozen=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


async def create_tokens(request: Request) -> Response:
    """Handle POST /tokenize: turn a text, or a conversation, into token ids."""
    body = await read_body(request, TokenizeRequest)
    context = await model_of(request, body.model)
    info = context.info()
    body.check()
    text: str | RenderedChat = body.prompt or body.content or ""
    if body.messages is not None:
        text = await _rendered(context, body, info)
    shown = text if isinstance(text, str) else text.text
    check_prompt_length(shown, info.max_model_len, param="prompt" if body.messages is None else "messages")
    ids = await encode(context, text, add_special_tokens=body.adds_special_tokens)
    strings = [context.tokenizer().token_to_text(token_id) for token_id in ids] if body.return_token_strs else None
    tokens: Sequence[Any] = ids
    if body.with_pieces:
        tokens = [{"id": token_id, "piece": _piece(context, token_id)} for token_id in ids]
    answer = {"count": len(ids), "max_model_len": info.max_model_len, "tokens": tokens, "token_strs": strings}
    return json_response(answer)


async def create_text(request: Request) -> Response:
    """Handle POST /detokenize: turn token ids into a text."""
    body = await read_body(request, DetokenizeRequest)
    context = await model_of(request, body.model)
    info = context.info()
    limit = MAX_CHARS_PER_TOKEN * info.max_model_len
    if len(body.tokens) > limit:
        raise invalid("tokens", f"{len(body.tokens)} are too many; at most {limit}")
    check_ids("tokens", body.tokens, info.vocab_size)
    text = await decode(context, body.tokens)
    return json_response({"prompt": text, "content": text})  # vLLM's name and llama.cpp's


async def show_tokenizer(request: Request) -> Response:
    """Handle GET /tokenizer_info: describe the tokenizer in the names of tokenizer_config.json, as vLLM does."""
    context = context_of(request).named(request.query_params.get("model"))
    info, tokenizer = context.info(), context.tokenizer()
    ends = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
    return json_response({
        **{name: None if token_id is None else tokenizer.token_to_text(token_id) for name, token_id in ends.items()},
        "chat_template": None if tokenizer.chat_template is None else tokenizer.chat_template.text,
        "model_max_length": info.max_model_len,
    })  # fmt: skip


async def apply_template(request: Request) -> Response:
    """Handle POST /apply-template: render a conversation with the model's chat template."""
    body = await read_body(request, TemplateRequest)
    context = await model_of(request, body.model)
    info = context.info()
    return json_response({"prompt": (await _rendered(context, body, info)).text})


async def _rendered(context: ServerContext, body: TemplateRequest | TokenizeRequest, info: ModelInfo) -> RenderedChat:
    check_tools(body.tools)
    chat = ChatRequest(
        messages=body.messages or [],
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    return await render(context, chat, info, body.tools)


def _piece(context: ServerContext, token_id: int) -> str | list[int]:
    """Show a token as its text, or as a list of bytes that are no text."""
    spelt = context.tokenizer().token_to_bytes(token_id)
    try:
        return spelt.decode()
    except UnicodeDecodeError:
        return list(spelt)
