"""The routes of /v1/cache/pin, which keep prefixes, such as a system prompt, in the cache. For administrators only."""

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.client.prompts import PromptRequest
from penstock.errors import InvalidRequestError
from penstock.interface.messages import ModelInfo
from penstock.interface.outputs import PrefixUse
from penstock.server.api_errors import not_found
from penstock.server.context import ServerContext, check_administrator, context_of, json_response, log_of, read_body
from penstock.server.generation import until_disconnect
from penstock.server.inputs import chat_prompts, check_one_prompt, completion_prompts, salted
from penstock.server.openai_requests import ChatRequest, CompletionRequest, PinRequest


async def create_pin(request: Request) -> Response:
    """Handle POST /v1/cache/pin: compute a prefix and keep it until it is deleted or the server stops."""
    check_administrator(request)
    context, log = context_of(request), log_of(request)
    body = await read_body(request, PinRequest)
    info = context.info()
    context.check_model(body.model)
    (prompt,) = salted(request, body.cache_salt, [await _prompt(context, body, info)])
    if body.cache_salt is None:  # the pin is public, even where requests are salted by key
        prompt = replace(prompt, cache_salt=None)
    log.num_prompt_tokens = len(prompt.token_ids)
    use = await until_disconnect(request.receive, context.client.pin_prefix(prompt, body.name))
    return json_response(pin_object(use))


async def _prompt(context: ServerContext, body: PinRequest, info: ModelInfo) -> PromptRequest:
    """Return the prefix: a text, token ids, or the beginning of a conversation rendered by the chat template."""
    check_one_prompt(body)
    if body.messages is not None:
        chat = ChatRequest(
            messages=body.messages,
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=bool(body.add_generation_prompt),
            add_special_tokens=body.add_special_tokens,
        )
        chat.check()
        return (await chat_prompts(context, chat, info))[0]
    given = CompletionRequest(
        prompt="" if body.prompt is None else body.prompt, add_special_tokens=body.add_special_tokens
    )
    prompts = await completion_prompts(context, given, info)
    if len(prompts) != 1:
        raise InvalidRequestError(f"prompt: {len(prompts)} prompts; a pin has one", param="prompt")
    return prompts[0]


async def list_pins(request: Request) -> Response:
    check_administrator(request)
    pins = context_of(request).client.pinned_prefixes()
    return json_response({"object": "list", "data": [pin_object(use) for use in pins]})


async def delete_pin(request: Request) -> Response:
    check_administrator(request)
    name = request.path_params["name"]
    if not context_of(request).client.unpin_prefix(name):
        raise not_found(f"There is no pin with the name {ascii(name)[1:-1][:100]}.", "not_found", "name")
    return json_response({"name": name, "object": "cache.pin", "deleted": True})


def pin_object(use: PrefixUse) -> dict[str, Any]:
    return {"object": "cache.pin", **use_object(use)}


def use_object(use: PrefixUse) -> dict[str, Any]:
    """Return what /status and the pin routes show of a prefix, which is never its text."""
    counts = {"tokens": use.num_tokens, "hits": use.hits, "tokens_saved": use.tokens_saved}
    return {"name": use.name, **counts, "last_used": use.last_used}
