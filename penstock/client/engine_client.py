"""What anyone who uses an engine sees of it, wherever it runs. The HTTP server knows an engine only through this.

Text lives on this side: prompts are tokenised, ids become text and stop strings are found here, so that an engine
that dies takes no text with it.
"""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from penstock.interface.messages import EngineStats, ModelInfo
from penstock.interface.outputs import RequestOutput
from penstock.interface.sampling_params import SamplingParams
from penstock.tokenizer.tokenizer import Tokenizer

# A string, token ids, or a mapping with `prompt` or `prompt_token_ids`.
Prompt = str | list[int] | Mapping[str, Any]


class EngineState(StrEnum):
    """STARTING until the first engine is ready; RECOVERING after a death; DRAINING takes no new requests."""

    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot for /status, /health and /metrics.

    Attributes:
        heartbeat_age_s: seconds since the engine was last heard of; None while there is none.
        making_progress: ready, heard of lately, and no step has been running for too long.
        journal_requests, journal_tokens: open requests and the tokens noted for them.
        num_aborted_total: requests that ended because their caller went away.
    """

    state: EngineState
    pid: int | None
    restarts: int
    heartbeat_age_s: float | None
    making_progress: bool
    stats: EngineStats = field(default_factory=EngineStats)
    journal_requests: int = 0
    journal_tokens: int = 0
    num_aborted_total: int = 0


class EngineClient(Protocol):
    """An engine as AsyncLLM offers it."""

    @property
    def model_info(self) -> ModelInfo:
        """Raises EngineDeadError until the engine has been ready once, or why it cannot be built."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Loaded in this process; there before the engine is ready. Raises ModelLoadError if there is none."""

    async def attach(self) -> None:
        """Watch the engine from this event loop, without waiting for it. A second call does nothing."""

    def status(self) -> EngineStatus:
        """Never blocks, never raises."""

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the request's outputs as SamplingParams.output_kind says; leaving the loop aborts the request.

        The request is validated and handed over at the first `anext`. Each `anext` may come from another task.

        Raises (inside the iteration):
            InvalidRequestError: the prompt or a parameter is wrong.
            EngineDeadError: there is no engine, or it died under the request.
            EngineOverloadedError: the queue is full.
            RequestFailedError: the computation of this request failed.
        """

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait until the open ones have ended, at most that long."""

    async def shutdown(self) -> None:
        """End the engine; open requests end with EngineDeadError."""
