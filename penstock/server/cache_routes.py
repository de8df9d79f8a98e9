"""The routes about the cache, all for administrators only, because a block is computed from a user's prompt.

/v1/cache/pin keeps prefixes, such as a system prompt, in the cache. /v1/kv exists only with `--kv-role prefill`: this
server computes prompts for decode servers, and sends them blocks of its cache.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.client.input_processor import PromptRequest, check_salt
from penstock.errors import InvalidRequestError, PenstockError, check_ids, string_tuple
from penstock.interface.kv_transfer import MAX_BATCH, Progress
from penstock.interface.messages import ModelInfo
from penstock.interface.outputs import PrefixUse
from penstock.interface.sampling_params import RequestOutputKind, SamplingParams
from penstock.server.api_errors import ApiError, not_found
from penstock.server.context import (
    ServerContext,
    check_administrator,
    context_of,
    json_response,
    log_of,
    read_body,
)
from penstock.server.generation import until_disconnect
from penstock.server.inputs import chat_prompts, check_one_prompt, completion_prompts, salted
from penstock.server.openai_requests import BlocksRequest, ChatRequest, CompletionRequest, PinRequest, PrefillRequest
from penstock.server.timelines import RequestLog

if TYPE_CHECKING:
    from penstock.client.kv_transfer import KVBlocks

# --- pinned prefixes --------------------------------------------------------------------------------------------------


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


# --- blocks for other servers -----------------------------------------------------------------------------------------


MAX_NAME = 64  # characters
POLL_S = 0.005  # seconds between two checks of the directory that the engine process writes to
SILENCE_S = 1.0  # after this long without a new block, a line reports that the prompt is still being computed
WRITTEN_S = 1.0  # a block that is not in its file this long after its computation is given up
# Every engine request generates at least one token; when it is sampled, the prompt's blocks are complete.
PARAMS = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)


async def create_prefill(request: Request) -> Response:
    """Handle POST /v1/kv/prefill: compute a prompt, and stream lines that count its available blocks."""
    check_administrator(request)
    context, log = context_of(request), log_of(request)
    body = await read_body(request, PrefillRequest)
    blocks = _blocks(context)
    if body.store != blocks.name:
        message = f"store: this server's blocks are {blocks.name}: it has other weights, kernels or options"
        raise ApiError(409, message, param="store", code="other_bits")
    info = context.info()
    check_ids("prompt_token_ids", body.prompt_token_ids, info.vocab_size)
    check_salt(body.cache_salt)
    context.client.check_admission(log.flow, num_arriving=context.num_arriving)
    log.num_prompt_tokens = len(body.prompt_token_ids)
    return StreamingResponse(_lines(context, log, blocks, body), media_type="application/x-ndjson")


async def create_blocks(request: Request) -> Response:
    """Handle POST /v1/kv/blocks: answer with the block files, each with its own checksum, or null if one is missing."""
    check_administrator(request)
    body = await read_body(request, BlocksRequest)
    string_tuple("names", body.names, max_items=MAX_BATCH, max_length=MAX_NAME)
    blocks = _blocks(context_of(request))
    files = await asyncio.to_thread(lambda: [blocks.files.read_whole(name) for name in body.names])
    return Response(msgspec.msgpack.encode(files), media_type="application/msgpack")


def _blocks(context: ServerContext) -> "KVBlocks":
    blocks = context.client.kv_blocks
    if blocks is None:
        raise not_found("This server gives no blocks to others; start it with --kv-role prefill.", "not_found")
    return blocks


async def _lines(
    context: ServerContext, log: RequestLog, blocks: "KVBlocks", body: PrefillRequest
) -> AsyncGenerator[bytes, None]:
    """Yield a line when there are new blocks, and after each SILENCE_S without one. Closing it aborts the prompt."""
    hashes = blocks.hashes(body.prompt_token_ids, body.cache_salt)
    computing = asyncio.create_task(_compute(context, log, body))
    loop, error, done = asyncio.get_running_loop(), None, False
    said, said_at, count = -1, loop.time(), 0
    written_by = None
    try:
        while not done:
            await asyncio.wait({computing}, timeout=POLL_S)
            count = blocks.count(hashes, count)
            if computing.done() and written_by is None:
                error, written_by = computing.result(), loop.time() + WRITTEN_S
            elif written_by is not None:
                await asyncio.sleep(POLL_S)
            is_written = not hashes or blocks.has(hashes[-1])  # every cache group holds the last block
            done = written_by is not None and (error is not None or is_written or loop.time() > written_by)
            if done or count > said or loop.time() - said_at > SILENCE_S:
                said, said_at = count, loop.time()
                yield msgspec.json.encode(Progress(count, done, error)) + b"\n"
    finally:
        computing.cancel()


async def _compute(context: ServerContext, log: RequestLog, body: PrefillRequest) -> str | None:
    """Compute the prompt; the engine saves its blocks. Return the error message if that failed, else None."""
    prompt = PromptRequest(body.prompt_token_ids, cache_salt=body.cache_salt, params=PARAMS, flow=log.flow)
    try:
        async with aclosing(context.client.generate(prompt)) as outputs:
            async for output in outputs:
                log.num_cached_tokens = output.num_cached_tokens or 0
    except PenstockError as error:
        return str(error)
    return None
