"""The web application: its table of routes, its middleware, and the routes about the server itself and its cache.

/v1/cache/pin keeps prefixes, such as a system prompt, in the cache. /v1/kv exists only with `--kv-role prefill`: this
server computes prompts for decode servers, and sends them blocks of its cache. All of these are for administrators
only, because a block is computed from a user's prompt. Knows nothing about sockets or processes.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict, replace
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from penstock import __version__
from penstock.client.engine_client import EngineClient, EngineState
from penstock.client.input_processor import PromptRequest, check_salt
from penstock.client.model_pool import ModelPool
from penstock.client.turns import Turns
from penstock.errors import PenstockError, check_ids, check_str, fail, invalid, string_tuple
from penstock.interface.kv_transfer import MAX_BATCH, Progress
from penstock.interface.messages import LoRARequest, ModelInfo
from penstock.interface.outputs import PrefixUse
from penstock.interface.sampling_params import RequestOutputKind, SamplingParams
from penstock.server.api_errors import ApiError, handle, not_found, unavailable, until_disconnect
from penstock.server.client_fields import UNSUPPORTED_ROUTES
from penstock.server.completions import create_chat_completion, create_completion, source_of
from penstock.server.context import (
    FLOW,
    ServerContext,
    check_administrator,
    context_of,
    is_administrator,
    json_response,
    log_of,
    model_of,
    read_body,
    shown_adapter,
    shown_memory,
    shown_model,
    shown_process,
    shown_replica,
    shown_stats,
)
from penstock.server.embeddings import (
    ClassificationRequest,
    EmbeddingRequest,
    RankingRequest,
    ScoreRequest,
    VectorsRequest,
    create_classification,
    create_embeddings,
    create_pooling,
    create_ranking,
    create_scores,
)
from penstock.server.inputs import chat_prompts, completion_prompts, salted
from penstock.server.kept_calls import KeptCalls
from penstock.server.keys import KeyRing
from penstock.server.llama_cpp import (
    InfillRequest,
    NativeChatRequest,
    NativeCompletionRequest,
    create_infill,
    create_native_chat,
    create_native_completion,
    list_slots,
    show_properties,
)
from penstock.server.messages import CountRequest, MessageRequest, count_tokens, create_message
from penstock.server.metrics import Metrics
from penstock.server.middleware import (
    BodyLimitMiddleware,
    BoundaryMiddleware,
    KeyMiddleware,
    OverloadMiddleware,
    SiteMiddleware,
)
from penstock.server.models import (
    OllamaPullRequest,
    OllamaShowRequest,
    list_models,
    list_ollama_models,
    list_ollama_processes,
    ollama_version,
    pull_ollama_model,
    retrieve_model,
    show_ollama_model,
)
from penstock.server.ollama import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    create_ollama_chat,
    create_ollama_embed,
    create_ollama_embedding,
    create_ollama_text,
)
from penstock.server.openai_requests import (
    BlocksRequest,
    ChatRequest,
    CompletionRequest,
    PinRequest,
    PrefillRequest,
    Strict,
)
from penstock.server.openai_responses import ChatChoice, CompletionChoice
from penstock.server.openapi import POLICY, describe
from penstock.server.openapi import page as described_page
from penstock.server.options import ServerOptions
from penstock.server.page import page_file, settings
from penstock.server.responses import (
    ResponseRequest,
    ResponseSource,
    cancel_response,
    create_response,
    delete_response,
    list_input_items,
    retrieve_response,
)
from penstock.server.resumption import continue_stream
from penstock.server.timelines import ENDPOINT_VARIABLE, MAX_CALLS, RequestLog, TimelineTable, Tracing
from penstock.server.tokens import (
    DetokenizeRequest,
    TemplateRequest,
    TokenizeRequest,
    apply_template,
    create_text,
    create_tokens,
    show_tokenizer,
)

if TYPE_CHECKING:
    from penstock.client.kv_transfer import KVBlocks

SOURCES = {"completions": source_of, "chat": source_of, "responses": ResponseSource}
SHOWN_PREFIXES = 10


def create_app(models: ModelPool | EngineClient, options: ServerOptions | None = None) -> Starlette:
    """Build the application over a pool of models, or over the engine client of the only one. It starts and stops no
    engine of its own accord.

    `app.state.context.models.draining = True` makes it refuse new requests. With a journal, the caller has to start and
    close `app.state.context.kept`.

    Raises InvalidRequestError if the journal cannot be used.
    """
    options = options or ServerOptions()
    models = models if isinstance(models, ModelPool) else ModelPool.of(models)
    metrics = Metrics(models)
    keys = KeyRing(options.api_key, options.api_key_file, metrics.note_use)
    app = Starlette(
        routes=_routes(),
        middleware=_middleware(options, metrics, keys),
        exception_handlers={HTTPException: handle, ApiError: handle, PenstockError: handle},
    )
    app.router.redirect_slashes = False
    endpoint = options.otlp_traces_endpoint or os.environ.get(ENDPOINT_VARIABLE)
    tracing = Tracing(endpoint) if endpoint else None
    timelines = TimelineTable([metrics.note_timeline, *([tracing.export] if tracing else [])])
    kept = KeptCalls(options.journal, max_bytes=options.max_kept_bytes)
    shared: dict[str, Any] = {"models": models, "options": options, "metrics": metrics, "keys": keys, "kept": kept}
    shared |= {"timelines": timelines, "sources": SOURCES, "created": int(time.time())}
    shared |= {"tokenizing": Turns(options.max_parallel_tokenizations), "reporting": Turns(1), "beginning": Turns(1)}
    shared["arriving"] = Counter()
    contexts: list[ServerContext] = []
    contexts += [ServerContext(model=model, all=contexts, **shared) for model in models]
    app.state.context = contexts[0]
    app.state.tracing = tracing
    return app


def _routes() -> list[Route]:
    return [
        Route("/", page_file),
        Route("/page/settings", settings),
        Route("/page/{file:path}", page_file),
        Route("/v1/completions", create_completion, methods=["POST"]),
        Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
        Route("/v1/completions/{id}", partial(continue_stream, kind="completions")),
        Route("/v1/chat/completions/{id}", partial(continue_stream, kind="chat")),
        Route("/v1/responses", create_response, methods=["POST"]),
        Route("/v1/responses/{id}", retrieve_response),
        Route("/v1/responses/{id}", delete_response, methods=["DELETE"]),
        Route("/v1/responses/{id}/input_items", list_input_items),
        Route("/v1/responses/{id}/cancel", cancel_response, methods=["POST"]),
        Route("/v1/messages", create_message, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        Route("/api/chat", create_ollama_chat, methods=["POST"]),
        Route("/api/generate", create_ollama_text, methods=["POST"]),
        Route("/api/embed", create_ollama_embed, methods=["POST"]),
        Route("/api/embeddings", create_ollama_embedding, methods=["POST"]),
        Route("/api/tags", list_ollama_models),
        Route("/api/ps", list_ollama_processes),
        Route("/api/version", ollama_version),
        Route("/api/show", show_ollama_model, methods=["POST"]),
        Route("/api/pull", pull_ollama_model, methods=["POST"]),
        Route("/completion", create_native_completion, methods=["POST"]),
        Route("/infill", create_infill, methods=["POST"]),
        Route("/chat", create_native_chat, methods=["POST"]),
        Route("/apply-template", apply_template, methods=["POST"]),
        Route("/props", show_properties),
        Route("/slots", list_slots),
        Route("/v1/load_lora_adapter", load_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload_adapter, methods=["POST"]),
        Route("/v1/cache/pin", create_pin, methods=["POST"]),
        Route("/v1/cache/pin", list_pins),
        Route("/v1/cache/pin/{name}", delete_pin, methods=["DELETE"]),
        Route("/v1/kv/prefill", create_prefill, methods=["POST"]),
        Route("/v1/kv/blocks", create_blocks, methods=["POST"]),
        Route("/v1/embeddings", create_embeddings, methods=["POST"]),
        Route("/classify", create_classification, methods=["POST"]),
        Route("/pooling", create_pooling, methods=["POST"]),
        *(Route(path, create_scores, methods=["POST"]) for path in ("/score", "/v1/score")),
        *(Route(path, create_ranking, methods=["POST"]) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        Route("/v1/models", list_models),
        Route("/v1/models/{model:path}", retrieve_model),
        Route("/tokenize", create_tokens, methods=["POST"]),
        Route("/detokenize", create_text, methods=["POST"]),
        Route("/tokenizer_info", show_tokenizer),
        Route("/health", health),
        Route("/ping", ping, methods=["GET", "POST"]),
        Route("/engine_check", check_engine),
        Route("/live", live),
        Route("/ready", ready),
        Route("/version", version),
        Route("/status", _in_turn(status)),
        Route("/status/record", record, methods=["POST"]),
        Route("/status/requests", _in_turn(list_timelines)),
        Route("/status/requests/{id}", retrieve_timeline),
        Route("/metrics", _in_turn(metrics)),
        Route("/openapi.json", _in_turn(openapi)),
        Route("/docs", docs),
        *(Route(path, not_built, methods=["GET", "POST", "DELETE"]) for path in UNSUPPORTED_ROUTES),
    ]


def _in_turn(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Make one report per turn of the event loop, keys in turn: nobody is served during its milliseconds."""

    @wraps(handler)
    async def wrapped(request: Request) -> Response:
        async with context_of(request).reporting.turn(FLOW.get()):
            await asyncio.sleep(0)
            return await handler(request)

    return wrapped


def _middleware(options: ServerOptions, metrics: Metrics, keys: KeyRing) -> list[Middleware]:
    """List the middleware from the outside in. CORS comes before the key check: a browser's preflight has no key."""
    layers = [Middleware(BoundaryMiddleware, options=options, metrics=metrics)]
    if options.allowed_origins:
        headers = ["Anthropic-Version", "Authorization", "Content-Type", "Last-Event-ID", "X-Api-Key", "X-Request-Id"]
        origins, methods = options.allowed_origins, ["GET", "POST", "DELETE"]
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=headers)
        layers.append(cors)
    hosts = options.hosts()
    if hosts is not None:
        layers.append(Middleware(SiteMiddleware, hosts=hosts, origins=options.allowed_origins))
    layers.append(Middleware(KeyMiddleware, keys=keys, metrics=metrics))
    return [*layers, Middleware(OverloadMiddleware), Middleware(BodyLimitMiddleware, options=options)]


# --- health and status ------------------------------------------------------------------------------------------------


async def live(request: Request) -> Response:
    """Answer 200 as long as this process can answer."""
    return Response()


async def health(request: Request) -> Response:
    """Answer 200 while the engine makes progress; if there are several models, one of them, or the one in ?model=. A
    503 has the engine's state, or "stuck", as `status`."""
    context, name = context_of(request), request.query_params.get("model")
    asked = context.all if name is None else [context.named(name)]
    problems = [problem for one in asked if (problem := _problem(one)) is not None]
    if len(problems) < len(asked):
        return json_response({"status": "ok"})  # as llama.cpp's clients read it
    raise unavailable(f"the engine is {problems[0]}", status=problems[0])


def _problem(context: ServerContext) -> str | None:
    """Name the state of a model's engine that keeps it from answering. One that sleeps is woken when it is wanted."""
    now = context.model.status()
    state = EngineState.DRAINING if context.models.draining else now.state
    if state is EngineState.READY:
        return None if now.making_progress else "stuck"
    wakes = not context.model.pinned and state in (EngineState.SLEEPING, EngineState.STARTING)
    return None if wakes else state.value


async def ping(request: Request) -> Response:
    """Answer as /health does, in ColossalAI's words."""
    await health(request)
    return json_response({"status": "Healthy"})


async def check_engine(request: Request) -> Response:
    """Handle GET /engine_check: answer as /health does, in ColossalAI's words."""
    await health(request)
    return json_response({"status": "Running"})


async def ready(request: Request) -> Response:
    """Answer 200 while a new request would be accepted."""
    if context_of(request).models.draining:
        raise unavailable("the server is shutting down")
    return await health(request)


async def version(request: Request) -> Response:
    """Answer with the version of Penstock."""
    return json_response({"version": __version__})


async def status(request: Request) -> Response:
    """Answer with the current state and counters of the engine: the first model's, or that of ?model=. Only
    administrators see which prefixes are used."""
    context = context_of(request).named(request.query_params.get("model"))
    client, now = context.model.loaded, context.model.status()
    prefixes = client.most_used_prefixes(SHOWN_PREFIXES) if client is not None and is_administrator(request) else []
    draining = context.models.draining and now.state is not EngineState.FAILED
    answer = {
        "engine": shown_process(replace(now, state=EngineState.DRAINING) if draining else now),
        **shown_stats(now.stats),
        "unread_tokens": now.unread_tokens,
        "memory": shown_memory(now),
        "journal": {"requests": now.journal_requests, "tokens": now.journal_tokens, "file": context.kept.status()},
        "prefixes": [use_object(use) for use in prefixes],
        "aborted_total": now.num_aborted_total,
    }
    if adapters := context.adapters():
        answer["adapters"] = [shown_adapter(adapter) for adapter in adapters]
    if now.remote_prefill is not None:
        answer["remote_prefill"] = asdict(now.remote_prefill)
    if len(now.replicas) > 1:
        answer["replicas"] = [shown_replica(engine) for engine in now.replicas]
    if context.model.name is not None:
        models = {model.name: shown_model(model) for model in context.models}
        answer |= {"model": context.model.name, "models": models, "models_memory_bytes": context.models.held}
        answer["models_memory_budget_bytes"] = context.models.budget
    return json_response(answer)


async def record(request: Request) -> Response:
    """Answer with a bundle of an engine's flight recorder, without texts: a client may not read what others sent."""
    engine = request.query_params.get("engine", "0")
    if not engine.isdecimal():
        raise fail("engine", engine[:100], "the index of an engine, from 0")
    try:
        context = context_of(request).named(request.query_params.get("model"))
        saved = await context.client.record(int(engine[:9]))
    except OSError as error:
        raise ApiError(500, f"the record cannot be written: {error.strerror}", code="record_not_written") from None
    headers = {"Content-Disposition": 'attachment; filename="penstock.record"', "Cache-Control": "no-store"}
    if saved.file is not None:
        headers["Penstock-Record-File"] = os.path.basename(saved.file)
    return Response(saved.data, media_type="application/octet-stream", headers=headers)


async def list_timelines(request: Request) -> Response:
    """Answer with the last calls, newest first, each with the kind of interval that took the most time."""
    calls = context_of(request).timelines.visible_to(_reader(request))
    return json_response({"object": "list", "data": [call.summary() for call in calls]})


async def retrieve_timeline(request: Request) -> Response:
    """Answer with the timelines of one of the last calls, found by its answer's id or its X-Request-Id."""
    wanted = request.path_params["id"]
    for call in context_of(request).timelines.visible_to(_reader(request)):
        if wanted in (call.id, call.log.request_id):
            return json_response(call.shown())
    message = f"No call {ascii(wanted)[:100]} is known; the last {MAX_CALLS} are kept, none of them across a restart."
    raise not_found(message, "request_not_found")


def _reader(request: Request) -> str | None:
    """Find the name of the key whose calls the request may see; None for all keys."""
    return None if is_administrator(request) else log_of(request).key


async def metrics(request: Request) -> Response:
    """Answer with the metrics in the Prometheus text format; those of pins and other keys are an administrator's."""
    context = context_of(request)
    try:
        model = context.model_names()[0]
    except (ApiError, PenstockError):  # it is not known before the engine is ready
        model = ""
    body = context.metrics.exposition(model, context.options.metrics_names, _reader(request))
    return Response(body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


# --- adapters ---------------------------------------------------------------------------------------------------------


class UnloadAdapterRequest(Strict, kw_only=True, frozen=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


class LoadAdapterRequest(UnloadAdapterRequest, kw_only=True, frozen=True):
    """POST /v1/load_lora_adapter. model: the adapter's base model, where the server has several."""

    lora_path: str
    load_inplace: bool | None = None
    model: str | None = None


async def load_adapter(request: Request) -> Response:
    """Load a LoRA adapter from a directory below --allowed-lora-path, under a name of its own."""
    root = _adapter_root(request)
    body = await read_body(request, LoadAdapterRequest)
    check_str("lora_path", body.lora_path, max_length=4096)
    context = await model_of(request, body.model)
    path = await asyncio.to_thread(_path_below, root, body.lora_path)
    replaces = body.load_inplace and context.adapter_named(body.lora_name) is not None
    if not replaces and any(body.lora_name in one.model_names() for one in context.all):
        message = f"{ascii(body.lora_name)[:100]} is the name of a model or of a loaded adapter"
        raise invalid("lora_name", message, "adapter_already_loaded")
    source = LoRARequest(body.lora_name, path)
    adapter = await context.client.load_adapter(source, load_inplace=bool(body.load_inplace))
    return Response(f"Success: LoRA adapter '{adapter.name}' added successfully.", media_type="text/plain")


async def unload_adapter(request: Request) -> Response:
    """Refuse new requests with a LoRA adapter. Open ones go on with it, and then its place is free."""
    _adapter_root(request)
    name = (await read_body(request, UnloadAdapterRequest)).lora_name
    found = [one.client for one in context_of(request).all if one.adapter_named(name) is not None]
    if not found or not await found[0].unload_adapter(name):
        raise not_found(f"There is no LoRA adapter with the name {ascii(name)[1:-1][:100]}.", "not_found", "lora_name")
    return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain")


def _path_below(root: str, path: str) -> str:
    """Resolve a path, which may be relative to `root`. Raise InvalidRequestError if it leads elsewhere."""
    found = None if "\0" in path else os.path.realpath(os.path.join(root, path))
    if found is None or os.path.commonpath([root, found]) != root:
        raise invalid("lora_path", "the directory must lie below the server's --allowed-lora-path", "path_not_allowed")
    return found


def _adapter_root(request: Request) -> str:
    """Find the directory from which adapters may be loaded. Raise ApiError (403, 404) if this key, or nobody, may."""
    check_administrator(request)
    root = context_of(request).options.allowed_lora_path
    if root is None:
        raise not_found(
            "No adapter can be loaded or unloaded; start the server with --allowed-lora-path DIR.", "not_found"
        )
    return root


# --- pinned prefixes --------------------------------------------------------------------------------------------------


async def create_pin(request: Request) -> Response:
    """Handle POST /v1/cache/pin: compute a prefix and keep it until it is deleted or the server stops."""
    check_administrator(request)
    body = await read_body(request, PinRequest)
    context, log = await model_of(request, body.model), log_of(request)
    info = context.info()
    (prompt,) = salted(request, body.cache_salt, [await _prompt(context, body, info)])
    if body.cache_salt is None:  # the pin is public, even where requests are salted by key
        prompt = replace(prompt, cache_salt=None)
    prompt = replace(prompt, adapter=log.adapter)
    log.count(prompt=len(prompt.token_ids))
    use = await until_disconnect(request.receive, context.client.pin_prefix(prompt, body.name))
    return json_response(pin_object(use))


async def _prompt(context: ServerContext, body: PinRequest, info: ModelInfo) -> PromptRequest:
    """Read the prefix: a text, token ids, or the beginning of a conversation rendered by the chat template."""
    body.check()
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
        raise invalid("prompt", f"{len(prompts)} prompts; a pin has one")
    return prompts[0]


async def list_pins(request: Request) -> Response:
    """List the pinned prefixes."""
    check_administrator(request)
    context = context_of(request).named(request.query_params.get("model"))
    pins = context.client.pinned_prefixes()
    return json_response({"object": "list", "data": [pin_object(use) for use in pins]})


async def delete_pin(request: Request) -> Response:
    """Let go of a pinned prefix."""
    check_administrator(request)
    name = request.path_params["name"]
    context = context_of(request).named(request.query_params.get("model"))
    if not context.client.unpin_prefix(name):
        raise not_found(f"There is no pin with the name {ascii(name)[1:-1][:100]}.", "not_found", "name")
    return json_response({"name": name, "object": "cache.pin", "deleted": True})


def pin_object(use: PrefixUse) -> dict[str, Any]:
    return {"object": "cache.pin", **use_object(use)}


def use_object(use: PrefixUse) -> dict[str, Any]:
    """Describe a prefix for /status and the pin routes, without its text, which is a user's."""
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
    if body.adapter not in (None, *(adapter.id for adapter in context.client.adapters())):
        message = f"adapter: this server has no {ascii(body.adapter)[:100]}, or its files are others"
        raise ApiError(409, message, param="adapter", code="other_bits")
    info = context.info()
    check_ids("prompt_token_ids", body.prompt_token_ids, info.vocab_size)
    check_salt(body.cache_salt)
    context.check_admission(log)
    log.count(prompt=len(body.prompt_token_ids))
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
    adapter = next((one for one in context.client.adapters() if one.id == body.adapter), None)
    hashes = blocks.hashes(body.prompt_token_ids, body.cache_salt, b"" if adapter is None else adapter.root_hash)
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
    prompt = PromptRequest(
        body.prompt_token_ids, cache_salt=body.cache_salt, adapter=body.adapter, params=PARAMS, flow=log.flow
    )
    try:
        async with aclosing(context.client.generate(prompt)) as outputs:
            async for output in outputs:
                log.num_cached_tokens = output.num_cached_tokens or 0
    except PenstockError as error:
        return str(error)
    return None


# --- the rest ---------------------------------------------------------------------------------------------------------


async def not_built(request: Request) -> Response:
    """Refuse a route that clients know but this server does not have yet."""
    raise not_found(f"{request.scope['path'][:100]} is not built yet.", "not_implemented")


# --- the description of the API ---------------------------------------------------------------------------------------


BODIES: dict[Any, tuple[type, type | None]] = {  # handler -> the body that it reads, and the choices in its answer
    create_completion: (CompletionRequest, CompletionChoice),
    create_chat_completion: (ChatRequest, ChatChoice),
    create_response: (ResponseRequest, None),
    create_message: (MessageRequest, None),
    count_tokens: (CountRequest, None),
    create_ollama_chat: (OllamaChatRequest, None),
    create_ollama_text: (OllamaGenerateRequest, None),
    create_ollama_embed: (OllamaEmbedRequest, None),
    create_ollama_embedding: (OllamaEmbeddingsRequest, None),
    show_ollama_model: (OllamaShowRequest, None),
    pull_ollama_model: (OllamaPullRequest, None),
    create_native_completion: (NativeCompletionRequest, None),
    create_infill: (InfillRequest, None),
    create_native_chat: (NativeChatRequest, None),
    apply_template: (TemplateRequest, None),
    create_embeddings: (EmbeddingRequest, None),
    create_classification: (ClassificationRequest, None),
    create_pooling: (VectorsRequest, None),
    create_scores: (ScoreRequest, None),
    create_ranking: (RankingRequest, None),
    create_tokens: (TokenizeRequest, None),
    create_text: (DetokenizeRequest, None),
    load_adapter: (LoadAdapterRequest, None),
    unload_adapter: (UnloadAdapterRequest, None),
    create_pin: (PinRequest, None),
    create_prefill: (PrefillRequest, None),
    create_blocks: (BlocksRequest, None),
}


@cache
def _description(root_path: str) -> dict[str, Any]:
    shown = [route for route in _routes() if route.endpoint not in (page_file, settings, not_built)]
    return describe(shown, BODIES, root_path)


async def openapi(request: Request) -> Response:
    """Answer with this description as an OpenAPI document."""
    return json_response(_description(context_of(request).options.root_path))


async def docs(request: Request) -> Response:
    """Answer with this description as a page."""
    html = described_page(_description(context_of(request).options.root_path))
    return Response(html, media_type="text/html", headers={"Content-Security-Policy": POLICY})
