"""Every exception that Penstock raises on purpose.

    PenstockError
     +-- InvalidRequestError (also a ValueError)   a value that the caller gave is wrong; `param` names it
     |    +-- NotSupportedError                    a feature that is planned but not built
     +-- ModelLoadError                            a model directory cannot be served
     +-- EngineError
          +-- ExecutorLostError                    the processes that compute steps are gone; no step can follow
          +-- EngineDeadError                      the engine process died; the request may be sent again
          +-- EngineOverloadedError                the queue is full; retry after `retry_after_s`
          +-- RequestFailedError                   the computation of this request failed; others continue

User errors raise these, never `assert`. Nothing here knows about HTTP: `server` maps the classes to statuses.
"""


class PenstockError(Exception):
    """The base class of every error below."""


class InvalidRequestError(PenstockError, ValueError):
    """A value that the caller gave is wrong.

    Attributes:
        param: name of the offending field, as the caller spelt it, or None.
        code: a machine-readable name of the kind of mistake, or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class NotSupportedError(InvalidRequestError):
    """A feature that is planned but not built; `code` is "not_implemented"."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="not_implemented")


class ModelLoadError(PenstockError):
    """A model directory cannot be served; the message names the file and the reason."""


class EngineError(PenstockError):
    """The engine could not do its work."""


class ExecutorLostError(EngineError):
    """No step can be computed any more: one of the processes that share a model ended, hangs or failed.

    Attributes:
        rank: rank of that process, if it is known.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class EngineDeadError(EngineError):
    """The engine process died or did not start; nothing is wrong with the request."""


class EngineOverloadedError(EngineError):
    """The queue of waiting requests is full.

    Attributes:
        retry_after_s: seconds to wait before sending the request again.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestFailedError(EngineError):
    """The computation of this request failed; the engine and the other requests continue."""
