"""A layer that refuses requests before their body is read while the server is overloaded.

Under overload most requests are refused, and each refusal takes processor time from the requests that are served. Most
of that time goes into the body, the parameters and the prompt, none of which is needed to see that the queue is full.
"""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.errors import EngineOverloadedError, PenstockError
from penstock.server.api_errors import from_exception
from penstock.server.context import RequestLog, ServerContext

GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})


class OverloadMiddleware:
    """Answers 429 to a request for tokens while every request of its flow would be refused, whatever its body.

    The route checks again when the body has arrived. A request that continues a stream is not new, and passes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST" or scope["path"] not in GENERATING_PATHS:
            return await self._app(scope, receive, send)
        context: ServerContext = scope["app"].state.context
        log: RequestLog = scope["state"]["log"]
        refusal = None if "last-event-id" in Headers(scope=scope) else _refusal(context, log)
        if refusal is not None:
            return await from_exception(refusal).response()(scope, receive, send)
        try:
            await self._app(scope, receive, send)
        finally:
            context.arrived(log)


def _refusal(context: ServerContext, log: RequestLog) -> EngineOverloadedError | None:
    try:
        context.client.check_admission(log.flow, num_arriving=context.num_arriving)
    except EngineOverloadedError as exc:
        return exc
    except PenstockError:  # the route gives a better answer about an engine that is dead or draining
        pass
    return None
