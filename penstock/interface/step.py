"""The interface between planning a step and computing it: plain ints and lists, no torch, no text.

The engine's Scheduler makes a SchedulerOutput; an Executor computes it and returns a StepOutput.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.interface.sampling_params import SamplingParams

SamplerState = tuple[float, ...]  # carried from draw to draw; only the sampler knows its meaning

NO_BLOCK = -1  # entry of a block table where nothing is allocated
NO_ADAPTER = -1  # in place of an adapter's slot: the base model


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table, because they have the same sliding window.

    Attributes:
        layers: indices of the decoder layers in this group.
        sliding_window: a token attends to itself and the sliding_window - 1 tokens before it; None: to all before.
        chunked: the window does not slide: a token attends to itself and the tokens before it in its own chunk, chunks
            being as long as the window.
        num_blocks: blocks in each layer of the group.
        block_size: tokens per block, a multiple of 16.
        ring: whether a request has one block in each layer, whose slots are overwritten: the token at position p is in
            slot p % block_size; block_size is at least sliding_window. No block is released, no prefix is reused.
        num_sink_tokens: how many first tokens all tokens see besides their window.
        bidirectional: a token attends to all tokens of its text, which is computed in one step.
    """

    layers: tuple[int, ...]
    sliding_window: int | None
    num_blocks: int
    block_size: int
    ring: bool = False
    num_sink_tokens: int = 0
    chunked: bool = False
    bidirectional: bool = False

    def first_seen(self, position: int) -> int:
        """Find the first position, besides those of sink tokens, to which a token at `position` attends."""
        if self.sliding_window is None:
            return 0
        if self.chunked:
            return position - position % self.sliding_window
        return max(0, position - self.sliding_window + 1)

    def hidden_blocks(self, position: int) -> range:
        """Find the entries of a block table that no token sees at this position or later: those before the window, but
        for the first ones, which hold sink tokens."""
        if self.sliding_window is None or self.ring:
            return range(0)
        start = -(-self.num_sink_tokens // self.block_size)
        return range(start, max(start, self.first_seen(position) // self.block_size))

    def release(self, table: list[int], num_released: int) -> None:
        """Note in a block table that its first num_released entries are released, but for those of sink tokens."""
        for entry in range(self.hidden_blocks(0).start, num_released):
            table[entry] = NO_BLOCK


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A whole request that is new to the executor, or was preempted and removed.

    Attributes:
        token_ids: the prompt, then the outputs so far (after a preemption or a resumption).
        params: with the seed settled.
        choice: index among the `n` choices of one prompt; part of the noise counter.
        block_tables: one list of block ids per cache group; NO_BLOCK where nothing is allocated.
        sampler_state: as the result of the last output had it; None before the first output, or if draws do not
            depend on each other.
        adapter: the slot of its LoRA adapter (Adapters in engine/adapters.py); NO_ADAPTER: the base model.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    choice: int
    block_tables: list[list[int]]
    sampler_state: SamplerState | None = None
    adapter: int = NO_ADAPTER


@dataclass(slots=True)  # not frozen: one is made per request and step, in a third of the time
class ScheduledRequest:
    """One request's share of a step.

        token_ids:   [ computed: keys and values are cached | computed in this step | later ]
                     0                    num_computed_tokens        + num_new_tokens

    With drafts, which follow all of token_ids, the step computes [ last token | drafts ] and samples after each.

    Attributes:
        new_block_ids: per cache group, ids appended to the block table since the request's last step
            (none in the step that also has the request's NewRequest).
        num_released_blocks: per cache group, how many leading entries of the table are now -1 (blocks that the
            sliding window has passed), not counting those of sink tokens, which stay.
        num_samples: number of tokens to sample, after the last num_samples computed tokens: 1 + the number of drafts at
            the end of token_ids, 0 in the middle of the prompt and with params.pooling.
        draft_token_ids: guesses of the next tokens (Proposer); num_new_tokens counts them too. Each position
            is sampled as if the drafts before it were outputs. The result has the leading drafts that were sampled at
            their own positions, and the token sampled after them.
    """

    request_id: str
    num_computed_tokens: int
    num_new_tokens: int
    new_block_ids: list[list[int]]
    num_released_blocks: list[int]
    num_samples: int
    draft_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block whose content, in every layer of a cache group, is to be copied to another block."""

    group: int  # index of the cache group
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """A block whose content, in every layer of a cache group, is to be saved to the store or loaded from it."""

    group: int  # index of the cache group
    block_id: int
    block_hash: bytes  # of the block's tokens and all before them


class BlockStore(Protocol):
    """An executor's store of full blocks beyond its cache, as far as planning needs to know it.

    Attributes:
        survives: whether it outlives this process, so that a block is worth saving as soon as it is full.
    """

    survives: bool

    def holds(self, group: int, block_hash: bytes) -> bool:
        """Check for a block, as far as the store can tell without reading it."""

    def fetch(self, group: int, block_hash: bytes) -> bool:
        """Read and check a block, and keep it for the step that loads it. Return False if there is none."""

    def counters(self) -> dict[str, Any]:
        """Collect the store's fields of EngineStats."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: how many tokens of which requests to compute.

    Attributes:
        new_requests: requests to add before the step; each is scheduled in this very step.
        scheduled: requests in the order in which their tokens are packed.
        removed_request_ids: requests finished, aborted or preempted since the last step; their rows are free. They are
            removed before new_requests are added, so an id may be in both (preempted and admitted again).
        checksum_logits: whether results carry a checksum of the logits that were sampled from.
        block_copies: copies to make before anything is computed, in this order: a block may be a target, and later a
            source or a target again.
        block_saves, block_loads: transfers to make before the copies, all saves before all loads.
    """

    step_id: int  # counts up from 0
    new_requests: list[NewRequest]
    scheduled: list[ScheduledRequest]
    removed_request_ids: list[str] = field(default_factory=list)
    checksum_logits: bool = False
    block_copies: list[BlockCopy] = field(default_factory=list)
    block_saves: list[BlockTransfer] = field(default_factory=list)
    block_loads: list[BlockTransfer] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new_tokens for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw log-probabilities at one position: of the token itself, then of the most likely ones, best first, and of
    num_listed tokens that were asked for by their ids."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the token itself; 1 is the most likely
    num_listed: int = 0


@dataclass(slots=True)  # not frozen: one is made per request and step, in a third of the time
class RequestStepOutput:
    """The results of a step for one request.

    Attributes:
        new_token_ids: sampled ids, several if drafts were accepted; empty in the middle of a prompt.
        logprobs: one entry per new id, if requested; None if there are none in this step. A beam
            (params.use_beam_search) always has them, with SamplingParams.num_candidates most likely tokens.
        prompt_logprobs: those of the prompt tokens from num_computed_tokens + 1 on (the token after each computed
            position, if it belongs to the prompt), if requested; None if there are none in this step.
        error: why this request alone could not be computed; it has no new ids then.
        checksum: checksum of the logits that were sampled from, after every draft, if the step asked for it and
            something was sampled.
        sampler_state: what the draw after the last new id needs; None if draws do not depend on those before.
        pooled: the result for params.pooling, in the step that computes the end of the prompt: little-endian float32
            numbers, [hidden] or [T, hidden]. There are no new ids then.
    """

    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    checksum: int | None = None
    sampler_state: SamplerState | None = None
    pooled: bytes | None = None


def num_rejected_drafts(item: ScheduledRequest, result: RequestStepOutput) -> int:
    """Count the rejected drafts of a request, whose keys and values are written again."""
    return max(0, len(item.draft_token_ids) + 1 - len(result.new_token_ids)) if item.draft_token_ids else 0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of one step by request id, one for every scheduled request.

    Attributes:
        bytes_received: bytes that the first process of each model part received from other processes to compute it.
        num_compiled, num_recorded: kernels that were compiled and programs that were recorded since the step before.
    """

    step_id: int
    results: dict[str, RequestStepOutput]
    bytes_received: int = 0
    num_compiled: int = 0
    num_recorded: int = 0


class Executor(Protocol):
    """Computes steps, in the order submitted.

    Attributes:
        depth: maximum number of steps that are submitted and not collected. No request is in two of them. It is above 1
            if parts of several steps are computed at once.
    """

    depth: int

    def submit(self, scheduler_output: SchedulerOutput) -> Any:
        """Start a step and return a handle for `collect`, perhaps before the step is done.

        removed_request_ids are removed even if the step fails. Steps submitted earlier may still contain them.
        """

    def collect(self, handle: Any) -> StepOutput:
        """Wait for the step and return its results.

        Raise what the step raised. Later steps are still computed; the requests of a failed step must be removed.
        ExecutorLostError: no step can be computed any more.
        """

    def shutdown(self) -> None:
        """Free everything. No call may follow. A second call does nothing."""


@dataclass(frozen=True, slots=True)
class DraftQuery:
    """A request that wants drafts.

    Attributes:
        token_ids: prompt and outputs so far: the engine's own list, not to be changed. It only grows until the request
            is forgotten.
        count: maximum number of drafts wanted, at least 1.
    """

    request_id: str
    token_ids: list[int]
    count: int


class Proposer(Protocol):
    """Guesses the next tokens of requests, so that one step can compute several positions.

    A draft is accepted exactly when it is the token that the step samples at its position. So drafts change the number
    of steps of an answer, but no bit of it, and a Proposer may guess as it likes.

    Attributes:
        is_free: whether a guess takes next to no time, so that the engine asks first and then decides what to use.
    """

    is_free: bool

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """Guess at most `count` tokens for each query, perhaps none. An exception affects drafts only, no request."""

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended; it may be unknown."""

    def shutdown(self) -> None:
        """Free everything. No call may follow."""
