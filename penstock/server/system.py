"""The routes about the server itself: health, status, metrics, models, tokenising, the web page."""

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock import __version__
from penstock import validation as check
from penstock.client.engine_client import EngineState
from penstock.errors import InvalidRequestError
from penstock.server.api_errors import ApiError, not_found, unavailable
from penstock.server.context import ServerContext, context_of, read_body
from penstock.server.json_response import json_response
from penstock.server.metrics import CONTENT_TYPE
from penstock.server.openai_requests import DetokenizeRequest, TokenizeRequest
from penstock.server.openai_responses import Detokenized, ModelCard, ModelList, Tokenized
from penstock.server.prompts import tokenize
from penstock.tokenizer.tokenizer import MAX_CHARS_PER_TOKEN

PAGE = Path(__file__).parent / "static" / "index.html"
# The page needs nothing but itself and this server; no other page may frame it.
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def health(request: Request) -> Response:
    """200 only while the engine makes progress; the reason of a 503 is in the error object."""
    _check_healthy(context_of(request))
    return Response()


async def ready(request: Request) -> Response:
    """200 while a new request would be taken."""
    context = context_of(request)
    if context.draining:
        raise unavailable("the server is shutting down")
    _check_healthy(context)
    return Response()


async def live(request: Request) -> Response:
    """200 while this process answers at all."""
    return Response()


def _check_healthy(context: ServerContext) -> None:
    status = context.client.status()
    if context.draining or status.state is not EngineState.READY or not status.making_progress:
        state = EngineState.DRAINING if context.draining else status.state
        raise unavailable(f"the engine is {state.value}" if state is not EngineState.READY else "the engine is stuck")


async def version(request: Request) -> Response:
    return json_response({"version": __version__})


async def status(request: Request) -> Response:
    """The snapshot of CONTRACT.md, and the counters that the web page draws."""
    context = context_of(request)
    return json_response(_status(context))


def _status(context: ServerContext) -> dict[str, Any]:
    now = context.client.status()
    stats = now.stats
    draining = context.draining and now.state is not EngineState.FAILED
    engine = {
        "pid": now.pid,
        "state": EngineState.DRAINING.value if draining else now.state.value,
        "restarts": now.restarts,
        "heartbeat_age_s": now.heartbeat_age_s,
    }
    return {
        "engine": engine,
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "kv_blocks": {
            "total": stats.kv_blocks_total,
            "free": stats.kv_blocks_free,
            "cached": stats.kv_blocks_cached,
        },
        "journal": {"requests": now.journal_requests, "tokens": now.journal_tokens},
        "prompt_tokens_total": stats.num_prompt_tokens_total,
        "cached_tokens_total": stats.num_cached_tokens_total,
        "generated_tokens_total": stats.num_generated_tokens_total,
        "preemptions_total": stats.num_preemptions_total,
        "aborted_total": now.num_aborted_total,
    }


async def metrics(request: Request) -> Response:
    return Response(context_of(request).metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def list_models(request: Request) -> Response:
    context = context_of(request)
    return json_response(ModelList(data=[_card(context, name) for name in context.model_names()]))


async def retrieve_model(request: Request) -> Response:
    context = context_of(request)
    return json_response(_card(context, context.check_model(request.path_params["model"])))


def _card(context: ServerContext, name: str) -> ModelCard:
    info = context.known_info()
    return ModelCard(
        id=name,
        created=context.created,
        root=name,
        max_model_len=info.max_model_len,
        certificate=info.certificate,
    )


async def create_tokens(request: Request) -> Response:
    """POST /tokenize."""
    context = context_of(request)
    body = await read_body(request, TokenizeRequest)
    info = context.info()
    context.check_model(body.model)
    tokens = await tokenize(context, body, info)
    texts = None
    if body.return_token_strs:
        texts = [context.tokenizer().token_to_text(token_id) for token_id in tokens]
    answer = Tokenized(count=len(tokens), max_model_len=info.max_model_len, tokens=tokens, token_strs=texts)
    return json_response(answer)


async def create_text(request: Request) -> Response:
    """POST /detokenize."""
    context = context_of(request)
    body = await read_body(request, DetokenizeRequest)
    info = context.info()
    context.check_model(body.model)
    limit = MAX_CHARS_PER_TOKEN * info.max_model_len
    if len(body.tokens) > limit:
        raise InvalidRequestError(f"tokens: {len(body.tokens)} are too many; at most {limit}", param="tokens")
    for token_id in body.tokens:
        check.check_int("tokens", token_id, 0, info.vocab_size - 1)
    return json_response(Detokenized(prompt=await context.decode(body.tokens)))


async def page(request: Request) -> Response:
    """The web page: one file, nothing from elsewhere."""
    body = await asyncio.to_thread(_page)
    headers = {"Content-Security-Policy": PAGE_POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
    return Response(body, media_type="text/html", headers=headers)


@cache
def _page() -> bytes:
    return PAGE.read_bytes()


async def not_built(request: Request) -> Response:
    """A route that clients know and this server does not have yet."""
    error: ApiError = not_found(f"{request.scope['path'][:100]} is not built yet.", "not_implemented")
    raise error
