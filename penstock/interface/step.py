"""What crosses between planning a step and doing it: plain ints and lists, no torch, no text.

The engine's Scheduler fills a SchedulerOutput; an Executor carries it out and answers with a StepOutput. Three kinds
of Executor exist: torch (production), the cost model's virtual clock, and the scripted one of the tests.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.interface.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table, because they look equally far back.

    Attributes:
        layers: indices of the decoder layers in this group.
        sliding_window: a token sees itself and the sliding_window - 1 tokens before it; None sees everything.
        num_blocks: blocks that every layer of the group has.
        block_size: tokens a block holds, a multiple of 16.
        ring: a request has one block of each layer, whose rows are used again: the token at position p is in row
            p % block_size, which is not less than sliding_window. Nothing is released, and no prefix is reused.
    """

    layers: tuple[int, ...]
    sliding_window: int | None
    num_blocks: int
    block_size: int
    ring: bool = False


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that the executor does not know, or was told to forget (preempted): all there is to know.

    Attributes:
        token_ids: the prompt, then the outputs so far (more than none after a preemption or a resumption).
        params: with the seed resolved.
        choice: index among the `n` choices of one prompt; a word of the noise counter.
        block_tables: one list of block ids a cache group; -1 where nothing is allocated.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    choice: int
    block_tables: list[list[int]]


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step.

        token_ids:   [ computed: keys and values are cached | computed in this step | later ]
                     0                    num_computed_tokens        + num_new_tokens

    Attributes:
        new_block_ids: per cache group, ids appended to the block table since the request's last step
            (empty in the step that also carries the request's NewRequest).
        num_released_blocks: per cache group, how many leading table entries are -1 by now, counted from the start of
            the table (blocks behind a sliding window).
        num_samples: tokens to sample, after the last num_samples computed ones: 1 when the request has caught up,
            0 in the middle of its prompt.
    """

    request_id: str
    num_computed_tokens: int
    num_new_tokens: int
    new_block_ids: list[list[int]]
    num_released_blocks: list[int]
    num_samples: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: who computes how many tokens.

    Attributes:
        step_id: counts up from 0.
        new_requests: to be learnt before the step; each is scheduled in this very step.
        scheduled: in the order in which their tokens are packed.
        forgotten_request_ids: finished, aborted or preempted since the last step; their rows are free. They are
            forgotten before new_requests are learnt, so an id may be in both (preempted and back at once).
    """

    step_id: int
    new_requests: list[NewRequest]
    scheduled: list[ScheduledRequest]
    forgotten_request_ids: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new_tokens for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw log-probabilities at one position: first the token itself, then the most likely ones, best first.

    `rank` is the token's own rank; 1 is the most likely.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass(frozen=True, slots=True)
class RequestStepOutput:
    """What a step did for one request.

    Attributes:
        new_token_ids: sampled ids; a list because drafts may yield several. Empty in the middle of a prompt.
        logprobs: one entry a new id, where the parameters ask for them.
        prompt_logprobs: for the prompt tokens num_computed_tokens + 1 .. (the token after each computed position,
            as far as it belongs to the prompt), where the parameters ask for them. Like logprobs it is None, not
            empty, in a step that has nothing to report.
        error: why this request alone could not be computed; it has no new ids then.
    """

    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of one step, keyed by request id: one for every scheduled request."""

    step_id: int
    results: dict[str, RequestStepOutput]


class Executor(Protocol):
    """Carries steps out, in the order submitted."""

    def submit(self, scheduler_output: SchedulerOutput) -> Any:
        """Start a step and return a handle for `collect`. May return before the step is done.

        Whatever else goes wrong, forgotten_request_ids are forgotten."""

    def collect(self, handle: Any) -> StepOutput:
        """Wait for the step and return its results. Raises what the step raised as a whole; after that the
        executor still serves later steps, and the requests of the failed one have to be forgotten."""

    def shutdown(self) -> None:
        """Free everything. No call may follow. A second call does nothing."""
