"""EngineClient: an engine as seen by its users, in whatever process it runs. All that the HTTP server knows of one.

Text lives on this side: prompts are tokenised, ids become text and stop strings are found here, so that no text is
lost with an engine that dies.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from penstock.client.records import SavedRecord
from penstock.interface.kv_transfer import RemotePrefillStatus
from penstock.interface.messages import EngineStats, ModelInfo
from penstock.interface.outputs import PrefixUse, RequestOutput
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.structured_outputs import StructuredOutputsParams
from penstock.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.client.kv_blocks import KVBlocks

# A string, token ids, or a mapping with `prompt` or `prompt_token_ids`, and perhaps `cache_salt`.
Prompt = str | list[int] | Mapping[str, Any]


class EngineState(StrEnum):
    """STARTING until the first engine is ready; RECOVERING after a death; DRAINING takes no new requests."""

    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StandbyStatus:
    """A snapshot of a second engine process that waits to take over.

    Attributes:
        state: STARTING, also while it has to wait to be started; READY, or FAILED where there will be none any more.
        private_bytes: memory that only it has, and no file: mapped weights do not count. Measured when it was ready.
    """

    state: EngineState
    pid: int | None
    private_bytes: int | None


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot for /status, /health and /metrics: of one engine, or the sum of several.

    Attributes:
        replicas: each engine of a client; empty in the status of one of them.
    """

    state: EngineState
    pid: int | None
    restarts: int
    heartbeat_age_s: float | None  # since the last frame of the engine
    making_progress: bool  # ready, heard from lately, and no step has been running for too long
    stats: EngineStats = field(default_factory=EngineStats)
    journal_requests: int = 0  # engine requests that run or wait
    journal_tokens: int = 0  # received for them
    queued_tokens: float = 0.0  # that are still to be computed for them, as far as can be foreseen
    num_aborted_total: int = 0  # requests that ended because their caller left
    planned_memory: dict[str, int] = field(default_factory=dict)  # bytes by what they are for (planner/ledger.py)
    peak_memory_bytes: int | None = None  # the most physical memory that the engine process ever had
    standby: StandbyStatus | None = None  # None where none is wanted
    replicas: tuple["EngineStatus", ...] = ()
    remote_prefill: RemotePrefillStatus | None = None  # with the role decode


class EngineClient(Protocol):
    """An engine as AsyncLLM offers it."""

    @property
    def model_info(self) -> ModelInfo:
        """Return the model. Raise EngineDeadError until an engine is ready, or the reason why none can be built."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, which this process has loaded. Raise ModelLoadError if the model has none."""

    @property
    def kv_blocks(self) -> "KVBlocks | None":
        """Return the blocks that engines elsewhere may have; None where the role is not prefill, or no engine is
        ready."""

    async def attach(self) -> None:
        """Watch the engine from this event loop, without waiting for it. A second call does nothing."""

    def status(self) -> EngineStatus:
        """Return at once, without raising."""

    def check_admission(self, flow: str | None = None, *, num_arriving: int = 0) -> None:
        """Raise what `generate` would raise for any request of the flow: EngineDeadError or EngineOverloadedError.

        num_arriving: requests that `generate` will be called for before.
        """

    def assign_seed(self) -> int:
        """Return the seed that a request without one would get now. Raises what model_info raises."""

    async def check_form(self, form: StructuredOutputsParams) -> None:
        """Raise InvalidRequestError for a form of answers that the model cannot follow, as `generate` does."""

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        flow: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        output_token_ids: Sequence[list[int]] = (),
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the request's outputs as SamplingParams.output_kind says; leaving the loop aborts the request.

        The request is validated and sent at the first `anext`. Each `anext` may come from another task. A delta has at
        most one token of each choice.

        Args:
            flow: names what the engine is fair to: all requests of one flow share its turns. None: this request.
            priority: lower comes first, with scheduling_policy = "priority"; with another policy it must be 0.
            timeout: seconds until the answer is due, with scheduling_policy = "deadline"; with another policy None.
                It orders requests, and ends none.
            output_token_ids: tokens that an earlier computation of the request gave, one list per choice. They come
                first, and the engine continues after them, with the seed of `params`.

        Raises (inside the iteration):
            InvalidRequestError: the prompt or a parameter is wrong.
            EngineDeadError: there is no engine any more, or it takes no requests.
            EngineOverloadedError: the queue is full.
            RequestFailedError: the computation of this request failed.
        """

    async def pin_prefix(self, prompt: Prompt, name: str | None = None) -> PrefixUse:
        """Compute the whole blocks of a prompt and keep them in the cache of every engine from now on.

        Without a cache_salt the prefix is public: requests of every salt find it. A pin of the same name and prefix is
        returned as it is.

        Raises:
            InvalidRequestError: the prompt or the name is wrong, or pins would take too much of the cache.
            EngineDeadError, EngineOverloadedError, RequestFailedError: as `generate`.
        """

    def unpin_prefix(self, name: str) -> bool:
        """Let a pinned prefix be evicted as any other. False if there is none of this name."""

    def pinned_prefixes(self) -> list[PrefixUse]:
        """Return the pinned prefixes, oldest first."""

    def most_used_prefixes(self, count: int) -> list[PrefixUse]:
        """Return the prefixes that were found in the cache most often, pinned or not; of late, if there are many."""

    async def record(self, engine: int = 0) -> SavedRecord:
        """Make a bundle of the flight recorder: what an engine did in its last minutes.

        Raises:
            InvalidRequestError: the recorder is off or empty, or there is no such engine.
            EngineOverloadedError: another one is being made.
            OSError: there is a directory for bundles, which cannot be written to.
        """

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait until the open ones have ended, at most timeout_s seconds."""

    async def shutdown(self) -> None:
        """End the engine; open requests end with EngineDeadError."""
