"""Routes about models: which there are, as OpenAI's, Anthropic's and Ollama's clients read it, and which are loaded."""

from hashlib import sha256
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from penstock import __version__
from penstock.client.model_pool import Phase
from penstock.errors import InvalidRequestError
from penstock.server.context import ServerContext, context_of, is_administrator, json_response, read_body
from penstock.server.generation import NDJSON
from penstock.server.messages import model_card
from penstock.server.ollama import NAMES, capabilities, encoded, model_name, shown_time
from penstock.server.openai_requests import Strict

ANTHROPIC_VERSION = "anthropic-version"  # the header that every client of Anthropic's API sends
VERSION = "0.12.11"  # of Ollama, whose API has what is here; clients compare it with the one that they need
NEVER = "9999-12-31T23:59:59Z"


async def list_models(request: Request) -> Response:
    """List the model under each of its names; for clients of Anthropic's API, as that describes models."""
    context = context_of(request)
    cards = [_card(one, request, name) for one in context.all for name in one.model_names()]
    more: dict[str, Any] = {"object": "list"}
    if ANTHROPIC_VERSION in request.headers:
        more = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}
    return json_response({"data": cards, **more})


async def retrieve_model(request: Request) -> Response:
    """Describe the model."""
    name = request.path_params["model"]
    return json_response(_card(context_of(request).named(name), request, name))


def _card(context: ServerContext, request: Request, name: str) -> dict[str, Any]:
    """Describe a model as OpenAI does, with vLLM's fields and the model's certificate, or as Anthropic does."""
    info, adapter = context.info_if_loaded(), context.adapter_named(name)
    is_base = name in context.own_names()
    max_model_len = None if info is None else info.max_model_len
    if ANTHROPIC_VERSION in request.headers:
        return model_card(name, context.created, max_model_len)
    more = {} if context.model.name is None else {"state": context.model.state.value}
    return {
        "id": name,
        "created": context.created,
        "root": name if adapter is None or not is_administrator(request) else adapter.source.lora_path,
        "max_model_len": max_model_len,
        "object": "model",
        "owned_by": "penstock",
        "parent": None if is_base else context.own_names()[0],
        "permission": [],
        "certificate": info.certificate if info is not None and is_base else None,
        **more,
    }


# --- Ollama's ---------------------------------------------------------------------------------------------------------


class OllamaShowRequest(Strict, kw_only=True, frozen=True):
    """POST /api/show. `name` is the older name of `model`."""

    place: ClassVar[str] = "ollama_show"

    model: str | None = None
    name: str | None = None


class OllamaPullRequest(OllamaShowRequest, kw_only=True, frozen=True):
    """POST /api/pull. `insecure` is about downloads, of which there are none."""

    place: ClassVar[str] = "ollama_pull"

    stream: bool | None = None
    insecure: bool | None = None


def _details(context: ServerContext) -> dict[str, Any]:
    """Describe the model. What the server does not know of it is empty."""
    texts = dict.fromkeys(("parent_model", "format", "family", "parameter_size"), "")
    info = context.info_if_loaded()
    return {**texts, "families": [], "quantization_level": "" if info is None else info.dtype}


def _cards(context: ServerContext) -> list[dict[str, Any]]:
    """Describe a model under each of its names; before it has been loaded, its size is not known."""
    info = context.info_if_loaded()
    size, cards = 0 if info is None else info.memory.get("weights", 0), []
    for name in context.model_names():
        adapter = context.adapter_named(name)
        bits = "" if info is None else context.fingerprint(None if adapter is None else adapter.id)
        details = _details(context) | ({} if adapter is None else {"parent_model": context.own_names()[0]})
        digest = sha256(bits.encode()).hexdigest()
        cards.append({"name": name, "model": name, "size": size, "digest": digest, "details": details})
    return cards


async def list_ollama_models(request: Request) -> Response:
    """Handle GET /api/tags: list the models under each of their names."""
    context = context_of(request)
    more = {"modified_at": shown_time(context.created)}
    return json_response({"models": [{**card, **more} for one in context.all for card in _cards(one)]})


async def list_ollama_processes(request: Request) -> Response:
    """Handle GET /api/ps: list the loaded models, with their memory and when they will be put to sleep."""
    cards: list[dict[str, Any]] = []
    for one in context_of(request).all:
        if one.model.phase is Phase.AWAKE:
            ends, info = one.model.expires_at, one.known_info()
            more = {"expires_at": NEVER if ends is None else shown_time(ends), "context_length": info.max_model_len}
            cards += [{**card, "size": one.model.held or card["size"], **more} for card in _cards(one)]
    return json_response({"models": cards})


async def ollama_version(request: Request) -> Response:
    """Handle GET /api/version: name the version of Ollama's API, and Penstock's own."""
    return json_response({"version": VERSION, "penstock": __version__})


async def show_ollama_model(request: Request) -> Response:
    """Handle POST /api/show: describe the model, with its chat template and its default parameters."""
    name = _check_name(request, await read_body(request, OllamaShowRequest))
    context = context_of(request).named(name)
    info, defaults, template = context.info_if_loaded(), {}, None
    numbers: dict[str, Any] = {"general.architecture": "penstock"}
    if info is not None:
        template = context.tokenizer().chat_template
        defaults = {NAMES[name]: value for name, value in info.default_sampling.items() if name in NAMES}
        numbers |= {"penstock.context_length": info.max_model_len, "penstock.vocab_size": info.vocab_size}
    return json_response({
        "modified_at": shown_time(context.created),
        "template": "" if template is None else template.text,
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in defaults.items()),
        "details": _details(context),
        "model_info": numbers,
        "capabilities": capabilities(context),
    })  # fmt: skip


async def pull_ollama_model(request: Request) -> Response:
    """Handle POST /api/pull: report success for a model that is served; there are no others."""
    body = await read_body(request, OllamaPullRequest)
    _check_name(request, body)
    line = {"status": "success"}
    return json_response(line) if body.stream is False else Response(encoded(line), media_type=NDJSON.decode())


def _check_name(request: Request, body: OllamaShowRequest) -> str:
    """Find the name under which a model is served. Raise ApiError (404) for a model that is not served."""
    name = body.model or body.name
    if name is None:
        raise InvalidRequestError("model: missing; give the name of a model", param="model", code="missing_field")
    return model_name(request, name)
