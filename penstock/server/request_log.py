"""What one HTTP request leaves in the log and the metrics. The middleware makes it, the routes fill it."""

import time
from dataclasses import dataclass, field

from starlette.requests import Request


@dataclass(slots=True)
class RequestLog:
    """Facts of one request.

    Attributes:
        request_id: the caller's X-Request-Id (or one made up), for the log and the answer's header only.
        labels: what the body called itself (`user`, ...), ready to print.
    """

    request_id: str
    started: float = field(default_factory=time.monotonic)
    labels: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0

    def age_s(self) -> float:
        return time.monotonic() - self.started

    def tokens(self) -> str:
        """The token counts as a piece of a log line; empty where none were counted."""
        if not self.num_prompt_tokens:
            return ""
        return (
            f"prompt={self.num_prompt_tokens} cached={self.num_cached_tokens} completion={self.num_completion_tokens}"
        )


def log_of(request: Request) -> RequestLog:
    log: RequestLog = request.state.log
    return log
