"""EngineClient: an engine as its users see it, in whatever process it runs. The HTTP server knows nothing else of it.

Text lives on this side: prompts are tokenised, ids become text and stop strings are found here, so that no text is
lost when an engine dies.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from penstock.client.adapters import Adapter
from penstock.client.input_processor import PromptRequest
from penstock.client.records import SavedRecord
from penstock.interface.kv_transfer import RemotePrefillStatus
from penstock.interface.messages import EngineStats, LoRARequest, ModelInfo
from penstock.interface.outputs import PrefixUse, RequestOutput
from penstock.interface.structured_outputs import StructuredOutputsParams
from penstock.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.client.kv_transfer import KVBlocks


class EngineState(StrEnum):
    """STARTING until the first engine is ready; RECOVERING after a death; SLEEPING without an engine until one is
    wanted; DRAINING takes no new requests."""

    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"
    SLEEPING = "sleeping"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StandbyStatus:
    """A snapshot of a second engine process that waits to take over.

    Attributes:
        state: STARTING, also while it waits to be started; READY; or FAILED if there will be no standby any more.
        private_bytes: memory of this process alone, without mapped files such as weights. Measured when it was ready.
    """

    state: EngineState
    pid: int | None
    private_bytes: int | None


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot for /status, /health and /metrics, of one engine or summed over several.

    Attributes:
        replicas: the status of each engine of a client; empty in a status of one engine.
    """

    state: EngineState
    pid: int | None
    restarts: int
    heartbeat_age_s: float | None  # since the last frame of the engine
    making_progress: bool  # ready, heard from recently, and in no step for too long
    stats: EngineStats = field(default_factory=EngineStats)
    journal_requests: int = 0  # engine requests that run or wait
    journal_tokens: int = 0  # tokens received for them
    unread_tokens: int = 0  # tokens and log-probabilities of streams that wait for their readers
    queued_tokens: float = 0.0  # tokens still to be computed for them, as far as can be foreseen
    num_aborted_total: int = 0  # requests that ended because their caller left
    planned_memory: dict[str, int] = field(default_factory=dict)  # bytes by purpose (assembly/memory.py)
    peak_memory_bytes: int | None = None  # the most physical memory that the engine process ever had
    standby: StandbyStatus | None = None  # None if no standby is wanted
    replicas: tuple["EngineStatus", ...] = ()
    remote_prefill: RemotePrefillStatus | None = None  # with the role decode


class EngineClient(Protocol):
    """An engine as ProcessClient offers it."""

    @property
    def model_info(self) -> ModelInfo:
        """The model. Until an engine is ready, EngineDeadError is raised, or the error why none can be built."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that this process has loaded. ModelLoadError is raised if the model has none."""

    @property
    def kv_blocks(self) -> "KVBlocks | None":
        """The blocks that engines elsewhere may fetch; None if the role is not prefill, or no engine is ready."""

    async def attach(self) -> None:
        """Watch the engine from this event loop, without waiting for it. A second call does nothing."""

    def status(self) -> EngineStatus:
        """Take a snapshot at once, without raising."""

    def check_admission(self, flow: str | None = None, *, num_arriving: int = 0) -> None:
        """Raise what `generate` would raise for any request of the flow: EngineDeadError or EngineOverloadedError.

        num_arriving: requests of the flow (or without one) for which `generate` will be called first.
        """

    def assign_seed(self) -> int:
        """Assign the seed that a request without one would get now. Raise what model_info raises."""

    async def check_form(self, form: StructuredOutputsParams, flow: str | None = None) -> None:
        """Raise InvalidRequestError for a form of answers that the model cannot follow, as `generate` does."""

    def generate(self, request: PromptRequest) -> AsyncGenerator[RequestOutput, None]:
        """Stream the request's outputs as SamplingParams.output_kind says; leaving the loop aborts the request.

        The request is validated and sent at the first `anext`. Each `anext` may come from another task. A delta has at
        most one token of each choice.

        Raises (inside the iteration):
            InvalidRequestError: the prompt or a parameter is wrong.
            EngineDeadError: there is no engine any more, or it takes no requests.
            EngineOverloadedError: the queue is full.
            RequestFailedError: the computation of this request failed.
        """

    def adapters(self) -> Sequence[Adapter]:
        """List the LoRA adapters that new requests may use, oldest first."""

    async def load_adapter(self, source: LoRARequest, *, load_inplace: bool = False) -> Adapter:
        """Load an adapter into every engine and every standby, or into none. A second call with the same files does
        nothing.

        load_inplace: whether the name may stand for another adapter until now. Open requests end with that one.

        Raises:
            InvalidRequestError: the files are not an adapter of this model; or the name is in use; or there are as many
                adapters as the engines take; or they take none, because enable_lora is false.
            EngineDeadError: there is no engine, or one died meanwhile.
        """

    async def unload_adapter(self, name: str) -> bool:
        """Refuse new requests with an adapter; open ones go on. Return False if no adapter has this name."""

    async def pin_prefix(self, prompt: PromptRequest, name: str | None = None) -> PrefixUse:
        """Compute the whole blocks of a prompt and keep them in the cache of every engine from now on.

        Without a cache_salt the prefix is public: requests with any salt find it. An existing pin of the same name and
        prefix is returned.

        Raises:
            InvalidRequestError: the prompt or the name is wrong, or pins would take too much of the cache.
            EngineDeadError, EngineOverloadedError, RequestFailedError: as for `generate`.
        """

    def unpin_prefix(self, name: str) -> bool:
        """Let a pinned prefix be evicted like any other. Return False if no pin has this name."""

    def pinned_prefixes(self) -> list[PrefixUse]:
        """List the pinned prefixes, oldest first."""

    def most_used_prefixes(self, count: int) -> list[PrefixUse]:
        """List the prefixes found most often in the cache, pinned or not; if there are many, among recent ones."""

    async def record(self, engine: int = 0) -> SavedRecord:
        """Make a bundle of the flight recorder: what an engine did in its last minutes.

        Raises:
            InvalidRequestError: the recorder is off or empty, or there is no such engine.
            EngineOverloadedError: another bundle is being made.
            OSError: the directory for bundles cannot be written to.
        """

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait until the open ones have ended, at most timeout_s seconds."""

    async def shutdown(self) -> None:
        """End the engine; open requests end with EngineDeadError."""
