"""Builds the web application: the table of routes and the layers around it. Knows nothing of sockets or processes."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from penstock.client.engine_client import EngineClient
from penstock.errors import PenstockError
from penstock.server import system
from penstock.server.api_errors import ApiError, handle
from penstock.server.chat import create_chat_completion
from penstock.server.completions import create_completion
from penstock.server.context import ServerContext
from penstock.server.metrics import Metrics
from penstock.server.middleware import BodyBudget, BodyLimitMiddleware, BoundaryMiddleware, KeyMiddleware
from penstock.server.options import ServerOptions

ALL_METHODS = ["GET", "POST", "DELETE"]

# Routes of OpenAI and vLLM that are planned, and answer so.
PLANNED_PATHS = (
    "/v1/embeddings",
    "/v1/responses",
    "/v1/responses/{id}",
    "/v1/responses/{id}/cancel",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/completions/render",
    "/v1/chat/completions/render",
    "/v1/rerank",
    "/rerank",
    "/v1/score",
    "/score",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/load",
    "/openapi.json",
    "/docs",
)


def create_app(client: EngineClient, options: ServerOptions | None = None) -> Starlette:
    """The application over an engine client; it neither starts nor ends the engine.

    `app.state.context.draining = True` makes it refuse new requests.
    """
    options = options or ServerOptions()
    metrics = Metrics(client)
    app = Starlette(
        routes=_routes(),
        middleware=_middleware(options, metrics),
        exception_handlers={HTTPException: handle, ApiError: handle, PenstockError: handle},
    )
    app.router.redirect_slashes = False
    app.state.context = ServerContext(client, options, metrics)
    return app


def _routes() -> list[Route]:
    return [
        Route("/", system.page),
        Route("/v1/completions", create_completion, methods=["POST"]),
        Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
        Route("/v1/models", system.list_models),
        Route("/v1/models/{model:path}", system.retrieve_model),
        Route("/tokenize", system.create_tokens, methods=["POST"]),
        Route("/detokenize", system.create_text, methods=["POST"]),
        Route("/health", system.health),
        Route("/ping", system.health, methods=["GET", "POST"]),
        Route("/live", system.live),
        Route("/ready", system.ready),
        Route("/version", system.version),
        Route("/status", system.status),
        Route("/metrics", system.metrics),
        *(Route(path, system.not_built, methods=ALL_METHODS) for path in PLANNED_PATHS),
    ]


def _middleware(options: ServerOptions, metrics: Metrics) -> list[Middleware]:
    """From the outside in. CORS comes before the key, since a browser's preflight carries none."""
    layers = [Middleware(BoundaryMiddleware, options=options, metrics=metrics)]
    if options.allowed_origins:
        layers.append(_cors(options))
    if options.api_key is not None:
        layers.append(Middleware(KeyMiddleware, api_key=options.api_key))
    layers.append(
        Middleware(
            BodyLimitMiddleware,
            max_bytes=options.max_body_bytes,
            timeout_s=options.receive_timeout_s,
            budget=BodyBudget(options.max_inflight_body_bytes),
        )
    )
    return layers


def _cors(options: ServerOptions) -> Middleware:
    from starlette.middleware.cors import CORSMiddleware

    headers = ["Authorization", "Content-Type", "X-Request-Id"]
    return Middleware(
        CORSMiddleware, allow_origins=options.allowed_origins, allow_methods=["GET", "POST"], allow_headers=headers
    )
