"""The innermost layer of a server that has too much to do: what is refused is refused before its body is read.

Beyond what the machine can bear, most requests are refused, and each refusal takes processor time from those that are
served. Most of that time is spent on a request's body, parameters and prompt; a full queue needs none of them.
"""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.errors import EngineOverloadedError, PenstockError
from penstock.server.api_errors import from_exception
from penstock.server.context import RequestLog, ServerContext

GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})


class OverloadMiddleware:
    """Answers 429 to a request for tokens while any of its flow would be refused, whatever its body says.

    The route asks again when the body is here. A request that continues a stream is no new one.
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
    except PenstockError:  # the route has more to say of an engine that is dead or drains
        pass
    return None
