"""The web application: its table of routes, its middleware, and the routes about the server itself.

Knows nothing about sockets or processes.
"""

import asyncio
import base64
import hashlib
import os
import re
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock import __version__
from penstock.client.engine_client import EngineClient, EngineState
from penstock.errors import InvalidRequestError, PenstockError, check_ids, fail
from penstock.server.api_errors import ApiError, handle, not_found, unavailable
from penstock.server.cache_routes import create_blocks, create_pin, create_prefill, delete_pin, list_pins, use_object
from penstock.server.completions import create_chat_completion, create_completion, source_of
from penstock.server.context import (
    Metrics,
    ServerContext,
    context_of,
    is_administrator,
    json_response,
    log_of,
    read_body,
    shown_memory,
    shown_process,
    shown_replica,
    shown_stats,
)
from penstock.server.embeddings import create_embeddings, create_ranking, create_scores
from penstock.server.inputs import decode, tokenize
from penstock.server.kept_calls import KeptCalls
from penstock.server.keys import KeyRing
from penstock.server.middleware import (
    BodyLimitMiddleware,
    BoundaryMiddleware,
    KeyMiddleware,
    OverloadMiddleware,
    SiteMiddleware,
)
from penstock.server.openai_requests import UNSUPPORTED_ROUTES, DetokenizeRequest, TokenizeRequest
from penstock.server.options import ServerOptions
from penstock.server.responses import (
    ResponseSource,
    cancel_response,
    create_response,
    delete_response,
    retrieve_response,
)
from penstock.server.resumption import continue_chat_completion, continue_completion
from penstock.server.timelines import ENDPOINT_VARIABLE, MAX_CALLS, TimelineTable, Tracing
from penstock.tokenizer.tokenizer import MAX_CHARS_PER_TOKEN

SOURCES = {"completions": source_of, "chat": source_of, "responses": ResponseSource}
SHOWN_PREFIXES = 10


def create_app(client: EngineClient, options: ServerOptions | None = None) -> Starlette:
    """Return the application over an engine client. It neither starts nor stops the engine.

    `app.state.context.draining = True` makes it refuse new requests. With a journal, the caller has to start and close
    `app.state.context.kept`.

    Raises InvalidRequestError if the journal cannot be used.
    """
    options = options or ServerOptions()
    metrics, keys = Metrics(client), KeyRing(options.api_key, options.api_key_file)
    app = Starlette(
        routes=_routes(),
        middleware=_middleware(options, metrics, keys),
        exception_handlers={HTTPException: handle, ApiError: handle, PenstockError: handle},
    )
    app.router.redirect_slashes = False
    timelines = TimelineTable([metrics.note_timeline])
    endpoint = options.otlp_traces_endpoint or os.environ.get(ENDPOINT_VARIABLE)
    tracing = Tracing(endpoint) if endpoint else None
    if tracing is not None:
        timelines.listeners.append(tracing.export)
    kept = KeptCalls(options.journal, max_bytes=options.max_kept_bytes)
    app.state.context = ServerContext(client, options, metrics, keys, kept=kept, timelines=timelines, sources=SOURCES)
    app.state.tracing = tracing
    return app


def _routes() -> list[Route]:
    return [
        Route("/", page),
        Route("/v1/completions", create_completion, methods=["POST"]),
        Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
        Route("/v1/completions/{id}", continue_completion),
        Route("/v1/chat/completions/{id}", continue_chat_completion),
        Route("/v1/responses", create_response, methods=["POST"]),
        Route("/v1/responses/{id}", retrieve_response),
        Route("/v1/responses/{id}", delete_response, methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", cancel_response, methods=["POST"]),
        Route("/v1/cache/pin", create_pin, methods=["POST"]),
        Route("/v1/cache/pin", list_pins),
        Route("/v1/cache/pin/{name}", delete_pin, methods=["DELETE"]),
        Route("/v1/kv/prefill", create_prefill, methods=["POST"]),
        Route("/v1/kv/blocks", create_blocks, methods=["POST"]),
        Route("/v1/embeddings", create_embeddings, methods=["POST"]),
        *(Route(path, create_scores, methods=["POST"]) for path in ("/score", "/v1/score")),
        *(Route(path, create_ranking, methods=["POST"]) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        Route("/v1/models", list_models),
        Route("/v1/models/{model:path}", retrieve_model),
        Route("/tokenize", create_tokens, methods=["POST"]),
        Route("/detokenize", create_text, methods=["POST"]),
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/live", live),
        Route("/ready", ready),
        Route("/version", version),
        Route("/status", status),
        Route("/status/record", record, methods=["POST"]),
        Route("/status/requests", list_timelines),
        Route("/status/requests/{id}", retrieve_timeline),
        Route("/metrics", metrics),
        *(Route(path, not_built, methods=["GET", "POST", "DELETE"]) for path in UNSUPPORTED_ROUTES),
    ]


def _middleware(options: ServerOptions, metrics: Metrics, keys: KeyRing) -> list[Middleware]:
    """Return the middleware from the outside in. CORS comes before the key check: a browser's preflight has no key."""
    layers = [Middleware(BoundaryMiddleware, options=options, metrics=metrics)]
    if options.allowed_origins:
        methods, headers = (
            ["GET", "POST", "DELETE"],
            ["Authorization", "Content-Type", "Last-Event-ID", "X-Request-Id"],
        )
        origins = options.allowed_origins
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=headers)
        layers.append(cors)
    hosts = options.hosts()
    if hosts is not None:
        layers.append(Middleware(SiteMiddleware, hosts=hosts, origins=options.allowed_origins))
    if keys:
        layers.append(Middleware(KeyMiddleware, keys=keys, metrics=metrics))
    return [*layers, Middleware(OverloadMiddleware), Middleware(BodyLimitMiddleware, options=options)]


# --- health and status ------------------------------------------------------------------------------------------------


async def live(request: Request) -> Response:
    """Answer 200 as long as this process can answer."""
    return Response()


async def health(request: Request) -> Response:
    """Answer 200 only while the engine makes progress. A 503 has the engine's state, or "stuck", as `status`."""
    context = context_of(request)
    now = context.client.status()
    state = EngineState.DRAINING if context.draining else now.state
    if state is EngineState.READY and now.making_progress:
        return Response()
    problem = "stuck" if state is EngineState.READY else state.value
    raise unavailable(f"the engine is {problem}", status=problem)


async def ready(request: Request) -> Response:
    """Answer 200 while a new request would be accepted."""
    if context_of(request).draining:
        raise unavailable("the server is shutting down")
    return await health(request)


async def version(request: Request) -> Response:
    return json_response({"version": __version__})


async def status(request: Request) -> Response:
    """Answer with the engine's current state and counters. Only administrators see which prefixes are used."""
    context = context_of(request)
    prefixes = context.client.most_used_prefixes(SHOWN_PREFIXES) if is_administrator(request) else []
    now = context.client.status()
    draining = context.draining and now.state is not EngineState.FAILED
    answer = {
        "engine": shown_process(replace(now, state=EngineState.DRAINING) if draining else now),
        **shown_stats(now.stats),
        "memory": shown_memory(now),
        "journal": {"requests": now.journal_requests, "tokens": now.journal_tokens, "file": context.kept.status()},
        "prefixes": [use_object(use) for use in prefixes],
        "aborted_total": now.num_aborted_total,
    }
    if now.remote_prefill is not None:
        answer["remote_prefill"] = asdict(now.remote_prefill)
    if len(now.replicas) > 1:
        answer["replicas"] = [shown_replica(engine) for engine in now.replicas]
    return json_response(answer)


async def record(request: Request) -> Response:
    """Answer with a bundle of an engine's flight recorder, without texts: a client may not read what others sent."""
    engine = request.query_params.get("engine", "0")
    if not engine.isdecimal():
        raise fail("engine", engine[:100], "the index of an engine, from 0")
    try:
        saved = await context_of(request).client.record(int(engine[:9]))
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
    """Return the name of the key whose calls the request may see; None for all keys."""
    return None if is_administrator(request) else log_of(request).key


async def metrics(request: Request) -> Response:
    """Answer with the metrics in the Prometheus text format."""
    body = generate_latest(context_of(request).metrics.registry)
    return Response(body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


# --- models and tokens ------------------------------------------------------------------------------------------------


async def list_models(request: Request) -> Response:
    context = context_of(request)
    return json_response({"data": [_card(context, name) for name in context.model_names()], "object": "list"})


async def retrieve_model(request: Request) -> Response:
    context = context_of(request)
    return json_response(_card(context, context.check_model(request.path_params["model"])))


def _card(context: ServerContext, name: str) -> dict[str, Any]:
    """Return OpenAI's description of a model, with vLLM's fields and the model's certificate."""
    info = context.known_info()
    return {
        "id": name,
        "created": context.created,
        "root": name,
        "max_model_len": info.max_model_len,
        "object": "model",
        "owned_by": "penstock",
        "parent": None,
        "permission": [],
        "certificate": info.certificate,
    }


async def create_tokens(request: Request) -> Response:
    """Handle POST /tokenize."""
    context = context_of(request)
    body = await read_body(request, TokenizeRequest)
    info = context.info()
    context.check_model(body.model)
    tokens = await tokenize(context, body, info)
    texts = None
    if body.return_token_strs:
        texts = [context.tokenizer().token_to_text(token_id) for token_id in tokens]
    answer = {"count": len(tokens), "max_model_len": info.max_model_len, "tokens": tokens, "token_strs": texts}
    return json_response(answer)


async def create_text(request: Request) -> Response:
    """Handle POST /detokenize."""
    context = context_of(request)
    body = await read_body(request, DetokenizeRequest)
    info = context.info()
    context.check_model(body.model)
    limit = MAX_CHARS_PER_TOKEN * info.max_model_len
    if len(body.tokens) > limit:
        raise InvalidRequestError(f"tokens: {len(body.tokens)} are too many; at most {limit}", param="tokens")
    check_ids("tokens", body.tokens, info.vocab_size)
    return json_response({"prompt": await decode(context, body.tokens)})


# --- the rest ---------------------------------------------------------------------------------------------------------


async def not_built(request: Request) -> Response:
    """Refuse a route that clients know but this server does not have yet."""
    raise not_found(f"{request.scope['path'][:100]} is not built yet.", "not_implemented")


# --- the web page -----------------------------------------------------------------------------------------------------


STATIC = Path(__file__).parent / "static"
PARTS = re.compile(r"<(style|script)>(.*?)</\1>")  # in index.html; holds the names of the files to insert
POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def page(request: Request) -> Response:
    """Answer with the web page."""
    html, policy = await asyncio.to_thread(_page)
    headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
    return Response(html, media_type="text/html", headers=headers)


@cache
def _page() -> tuple[str, str]:
    """Return the document and its content security policy."""
    hashes: dict[str, str] = {}

    def put_in(found: re.Match[str]) -> str:
        kind, names = found.groups()
        text = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in names.split())
        text = f'"use strict";\n{text}' if kind == "script" else text
        hashes[kind] = f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        return f"<{kind}>{text}</{kind}>"

    html = PARTS.sub(put_in, (STATIC / "index.html").read_text(encoding="utf-8"))
    return html, POLICY.format(**hashes)
