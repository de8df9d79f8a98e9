"""Streams that a client can continue after losing the connection, and kept calls that a new server continues.

With `resumable: true`, each event of a stream has an id. After losing the connection, the client sends the last id that
it received as Last-Event-ID, with the same POST or with GET /v1/completions/{id}?stream=true, and gets the rest.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.client.input_processor import PromptRequest
from penstock.errors import PenstockError, invalid
from penstock.interface.messages import ModelInfo
from penstock.interface.sampling_params import RequestOutputKind, SamplingParams
from penstock.server.api_errors import ApiError
from penstock.server.context import ServerContext, context_of, log_of, most_tokens
from penstock.server.generation import DONE, MIN_TIMEOUT_S, EventStream, Generation
from penstock.server.kept_calls import MAX_LANES, Begun, KeptCall, Source, position_of
from penstock.server.middleware import sent_key
from penstock.server.openai_requests import Strict
from penstock.server.timelines import RequestLog

LOGGER = logging.getLogger("penstock.journal")
_encode = msgspec.json.Encoder().encode


def owner_of(request: Request) -> str:
    """Hash the key that the client sends, which tells clients apart."""
    return blake2b(sent_key(request.headers), digest_size=16, person=b"penstock owner").hexdigest()


async def keep(
    request: Request, call_id: str, kind: str, body: Strict, params: SamplingParams, prompts: Sequence[PromptRequest],
    *, grace_s: float | None, keep_s: float,
) -> KeptCall:  # fmt: skip
    """Accept a call to keep, settle its seeds and start computing it. See Begun for the arguments."""
    context = context_of(request)
    log = log_of(request)
    if len(prompts) * params.n >= MAX_LANES:
        raise invalid("resumable", f"at most {MAX_LANES - 1} choices, prompts times n, can be continued")
    begun = Begun(
        id=call_id,
        kind=kind,
        owner=owner_of(request),
        created=int(time.time()),
        body=_encode(body),
        model=context.shown_name(getattr(body, "model", None)),
        fingerprint=context.fingerprint(log.adapter),
        params=params.settled(output_kind=RequestOutputKind.DELTA),
        prompts=[_settled(context, prompt, params) for prompt in prompts],
        grace_s=grace_s,
        keep_s=keep_s,
        key=log.key,
        priority=log.priority,
        timeout_s=log.timeout_s,
        adapter=log.adapter,
    )
    call = await context.kept.begin(begun, log.lease)
    try:
        source = context.sources[kind](context, call, _generation(context, call, log))
    except BaseException:  # what the call holds of its key's account is given back
        context.kept.remove(call)
        raise
    context.kept.run(call, source)
    return call


def _settled(context: ServerContext, prompt: PromptRequest, params: SamplingParams) -> PromptRequest:
    return replace(prompt, seed=context.client.assign_seed() if params.seed is None else params.seed)


def _generation(context: ServerContext, call: KeptCall, log: RequestLog) -> Generation:
    """Make the computation of a call, which continues from the tokens already known."""
    begun = call.begun
    prompts = [replace(prompt, output_token_ids=_known(call, index)) for index, prompt in enumerate(begun.prompts)]
    generation = Generation(context, begun.id, prompts, begun.params, log)
    generation.is_patient = begun.grace_s is None
    generation.on_output = partial(context.kept.note_output, call, {})
    return generation


def _known(call: KeptCall, prompt: int) -> list[list[int]] | None:
    """List the known tokens of each choice but the last, which is computed again to see whether it ends the choice.

    Log-probabilities and the sampler's state are not stored, so a call that uses them is computed from its beginning.
    """
    params = call.begun.params
    if params.logprobs is not None or params.prompt_logprobs is not None or params.has_sampler_state:
        return None
    known = [call.tokens.get((prompt, choice), [])[:-1] for choice in range(params.n)]
    return known if any(known) else None


def resume(context: ServerContext) -> None:
    """Continue the calls that the journal has as unfinished. Called when the server is ready.

    A call whose request this version cannot read ends with an error, and the others go on.
    """
    for call in context.kept.pop_restored():
        if context.model.name is None:
            _resume(context, call)
        else:
            call.task = asyncio.create_task(_resume_later(context, call), name=call.begun.id)


async def _resume_later(context: ServerContext, call: KeptCall) -> None:
    """Continue a call when its model has been loaded, however long that takes."""
    try:
        own = context.named(call.begun.model)
        await own.models.use(own.model, patient=True)
    except (ApiError, PenstockError) as error:
        if context.models.draining:  # the next server continues it
            return
        LOGGER.error("the journal's call %s cannot be continued: %s", call.begun.id, error)
        message = f"the server was restarted, and has no model {call.begun.model} any more that it can load"
        context.kept.fail(call, ApiError(500, message, code="not_continued"), None)
        return
    _resume(own, call)
    if call.lease is None:  # it could not be continued
        own.models.release(own.model)
    else:
        call.lease.until_end(partial(own.models.release, own.model))


def _resume(context: ServerContext, call: KeptCall) -> None:
    info = context.known_info()
    log = _restored_log(call.begun, info)
    call.lease = log.lease = context.keys.named(call.begun.key).readmit()
    try:
        _resume_one(context, call, info, log)
    except Exception:
        LOGGER.exception("the journal's call %s cannot be continued; it ends with an error", call.begun.id)
        message = "the server was restarted and cannot read this request of before; send the request again"
        _give_up(context, call, log, ApiError(500, message, code="not_continued"))


def _resume_one(context: ServerContext, call: KeptCall, info: ModelInfo, log: RequestLog) -> None:
    lengths = [len(prompt.token_ids) for prompt in call.begun.prompts]
    if log.lease is not None:
        log.lease.reserve(most_tokens(call.begun.params, lengths, info.max_model_len), is_accepted=True)
    generation = _generation(context, call, log)
    generation.is_patient = True
    source = context.sources[call.begun.kind](context, call, generation)
    before, adapter, now = call.begun.fingerprint, call.begun.adapter, context.fingerprint(call.begun.adapter)
    if before != now:
        message = f"the new engine computes differently: {before} became {now}; send the request again"
        _give_up(context, call, log, ApiError(500, message, code="model_changed"), source)
    elif adapter is not None and adapter not in {one.id for one in context.client.adapters()}:
        message = f"this server has no adapter {adapter}, or its files have changed; send the request again"
        _give_up(context, call, log, ApiError(500, message, code="model_changed"), source)
    else:
        generation.timeline.answered(200)  # its connection ended with the previous server
        context.kept.run(call, source)


def _give_up(
    context: ServerContext, call: KeptCall, log: RequestLog, error: ApiError, source: Source | None = None
) -> None:
    """End a call from the journal with an error."""
    context.kept.fail(call, error, source)
    if log.timeline is not None:
        log.timeline.answered(error.status)
        log.timeline.computed()


def _restored_log(begun: Begun, info: ModelInfo) -> RequestLog:
    """Make a log for a call from the journal, with its time left and, if the policy uses it, its priority."""
    log = RequestLog(begun.id, key=begun.key, adapter=begun.adapter)
    if info.scheduling_policy == "priority":
        log.priority = begun.priority
    if begun.timeout_s is not None:
        log.timeout_s = max(MIN_TIMEOUT_S, begun.created + begun.timeout_s - time.time())
    return log


def stream_of(context: ServerContext, call: KeptCall, after: Sequence[int], *, done: bytes = DONE) -> EventStream:
    options = context.options
    events = context.kept.read(call, after, options.keep_alive_s)
    return EventStream(events, stall_timeout_s=options.stall_timeout_s, done=done)


def continued(request: Request, kind: str, body: Strict, last_event_id: str) -> Response:
    """Send the rest of a stream. Raise ApiError if there is no such stream, or if its request had another body."""
    context = context_of(request)
    call_id, after = position_of(last_event_id)
    call = context.kept.get(call_id, kind, owner_of(request))
    if call.begun.body != _encode(body):
        message = "Last-Event-ID: the body differs from that of the stream to be continued"
        raise ApiError(400, message, code="invalid_value")
    return stream_of(context, call, after)


async def continue_stream(request: Request, kind: str) -> Response:
    """Send a resumable stream again (?stream=true), from the beginning or after Last-Event-ID."""
    if request.query_params.get("stream") not in ("true", "True", "1"):
        message = "stream: only ?stream=true is built: whole completions are not stored"
        raise ApiError(400, message, param="stream", code="not_implemented")
    context = context_of(request)
    context.check_started()
    resume(context)  # only has work right after a server with a journal has started
    call = context.kept.get(request.path_params["id"], kind, owner_of(request))
    call_id, after = position_of(request.headers.get("last-event-id", f"{call.begun.id}:"))
    if call_id != call.begun.id:
        raise ApiError(400, "Last-Event-ID: it belongs to another stream", code="invalid_value")
    return stream_of(context, call, after)
