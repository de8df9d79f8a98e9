"""The routes of /v1/responses. A response is always a kept call: it is stored unless `store` is false, it runs on
without a connection if `background` is true, and its stream can be read again from any sequence_number.
"""

from typing import Any
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import InvalidRequestError
from penstock.server.api_errors import ApiError
from penstock.server.context import ServerContext, account_of, context_of, json_response, log_of, read_body
from penstock.server.generation import until_disconnect
from penstock.server.inputs import chat_prompts, salted
from penstock.server.kept_calls import KeptCall
from penstock.server.keys import priority_of
from penstock.server.responses_input import ResponseRequest, chat_of, continuing, naming_the_response, response_params
from penstock.server.resumption import keep, owner_of, resume, stream_of
from penstock.server.structured import check_form
from penstock.server.tools import rules_of, with_rules

KIND = "responses"
TRUE, FALSE = ("true", "True", "1"), ("false", "False", "0")


async def create_response(request: Request) -> Response:
    """Handle POST /v1/responses."""
    context = context_of(request)
    body = await read_body(request, ResponseRequest)
    body.check()
    info = context.info()
    context.check_model(body.model)
    body = msgspec.structs.replace(_with_previous(request, body), model=context.check_model(body.model))
    params = response_params(body, info)
    await check_form(context, body, params)
    chat = chat_of(body)
    with naming_the_response():
        prompts = salted(request, body.cache_salt, await chat_prompts(context, chat, info))
        rules = rules_of(context, chat, prompts[0])
        params = await with_rules(context, chat, rules, params)
    if body.include and rules.reasoning:
        message = (
            "include: the model's thoughts are not encrypted: they are items of the answer, to be sent back as such"
        )
        raise InvalidRequestError(message, param="include", code="not_supported")
    account = account_of(request)
    if account is not None:
        params = account.limited(params, len(prompts))
    log = log_of(request)
    log.timeout_s, log.priority = body.timeout, priority_of(account, body.priority)
    call = await keep(
        request, f"resp_{uuid4().hex}", KIND, body, params, prompts,
        grace_s=None if body.background else 0.0,
        keep_s=0.0 if body.store is False else context.options.response_retention_s,
    )  # fmt: skip
    if body.stream:
        return stream_of(context, call, [], done=b"")
    if not body.background:
        await until_disconnect(request.receive, _finished(context, call))
        if call.failure is not None:
            raise call.failure.as_error()
    return _json(call)


def _with_previous(request: Request, body: ResponseRequest) -> ResponseRequest:
    """Return the body with the conversation of the previous response, if it names one, before its own input."""
    if body.previous_response_id is None:
        return body
    try:
        call = context_of(request).kept.get(body.previous_response_id, KIND, owner_of(request))
    except ApiError as error:
        message = f"previous_response_id: {error.message}"
        raise InvalidRequestError(message, param="previous_response_id", code="previous_response_not_found") from None
    answer = msgspec.json.decode(call.result) if call.ended and call.result else {}
    if answer.get("status") not in ("completed", "incomplete"):
        message = "previous_response_id: that response has no answer to continue"
        raise InvalidRequestError(message, param="previous_response_id")
    previous = msgspec.json.decode(call.begun.body, type=ResponseRequest)
    return continuing(body, previous, answer["output"])


async def _finished(context: ServerContext, call: KeptCall) -> None:
    async for _ in context.kept.read(call, [], context.options.keep_alive_s):
        pass


def _json(call: KeptCall) -> Response:
    body = call.result if call.ended else None if call.source is None else call.source.result()
    if body is None and call.failure is not None:
        raise call.failure.as_error()
    if body is None:
        raise ApiError(
            503, "the response is not available yet", code="engine_unavailable", headers={"Retry-After": "1"}
        )
    return Response(body, media_type="application/json")


def _fetch(request: Request) -> KeptCall:
    context = context_of(request)
    context.info()
    resume(context)  # only has work right after a server with a journal has started
    return context.kept.get(request.path_params["id"], KIND, owner_of(request))


async def retrieve_response(request: Request) -> Response:
    """Handle GET /v1/responses/{id}: return the response as it is now, or its events with ?stream=true."""
    given = _query(request)
    call = _fetch(request)
    if not given["stream"]:
        return _json(call)
    return stream_of(context_of(request), call, [given["starting_after"] + 1], done=b"")


def _query(request: Request) -> dict[str, Any]:
    """Return `stream` and `starting_after`. Raise ApiError for other parameters, except include_obfuscation=false."""
    query = dict(request.query_params)
    stream = query.pop("stream", "false")
    if stream not in TRUE + FALSE:
        raise ApiError(400, f"stream: {ascii(stream)[:60]} must be true or false", param="stream", code="invalid_value")
    after = query.pop("starting_after", None)
    if after is not None and (stream in FALSE or not after.isascii() or not after.isdigit() or len(after) > 9):
        message = "starting_after: must be the sequence_number of an event, with stream=true"
        raise ApiError(400, message, param="starting_after", code="invalid_value")
    if query.get("include_obfuscation") in FALSE:
        del query["include_obfuscation"]
    for name in query:
        shown = ascii(name)[1:-1][:60]
        raise ApiError(400, f"{shown}: not supported; this is not built yet", param=shown, code="not_implemented")
    return {"stream": stream in TRUE, "starting_after": -1 if after is None else int(after)}


async def cancel_response(request: Request) -> Response:
    """Handle POST /v1/responses/{id}/cancel. A response that has ended is returned unchanged."""
    call = _fetch(request)
    if call.begun.grace_s is not None:
        raise ApiError(400, "Only a response in the background can be cancelled.", code="not_in_background")
    await context_of(request).kept.cancel(call)
    return _json(call)


async def delete_response(request: Request) -> Response:
    """Handle DELETE /v1/responses/{id}; a running response is stopped."""
    call = _fetch(request)
    await context_of(request).kept.delete(call)
    return json_response({"id": call.begun.id, "object": "response", "deleted": True})
