"""Every exception that Penstock raises on purpose.

    PenstockError
     +-- InvalidRequestError (also a ValueError)   a value that the caller gave is wrong; `param` names it
     |    +-- NotSupportedError                    asked for something planned but not built
     +-- ModelLoadError                            a model directory cannot be served, and why
     +-- EngineError
          +-- EngineDeadError                      the engine process died; the request may be sent again
          +-- EngineOverloadedError                the queue is full; try again after `retry_after_s`
          +-- RequestFailedError                   this request's own computation failed; others go on

User errors are these, never `assert`. Nothing here knows about HTTP: `server` maps the classes to statuses.
"""


class PenstockError(Exception):
    """Root of the tree."""


class InvalidRequestError(PenstockError, ValueError):
    """A value that the caller gave is wrong.

    Attributes:
        param: name of the offending field, as the caller spelt it, or None.
        code: a short machine-readable word for the kind of mistake, or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class NotSupportedError(InvalidRequestError):
    """The caller asked for something that is planned but not built; `code` is "not_implemented"."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="not_implemented")


class ModelLoadError(PenstockError):
    """A model directory cannot be served; the message says which file and why."""


class EngineError(PenstockError):
    """The engine could not do its work."""


class EngineDeadError(EngineError):
    """The engine process died or has not come up; nothing is wrong with the request."""


class EngineOverloadedError(EngineError):
    """Too many requests are waiting already.

    Attributes:
        retry_after_s: seconds after which a new try makes sense.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestFailedError(EngineError):
    """The computation of this one request failed; the engine and the other requests go on."""
