"""The results that a caller gets: RequestOutput with its CompletionOutputs, in vLLM's spelling."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.interface.timeline import Arrivals, RequestMetrics, Timeline


class FinishReason(StrEnum):
    """The reason why a choice ended. Equal to the plain string, and printed like it."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the end of the context
    ABORT = "abort"  # the caller left
    ERROR = "error"  # the computation of this request failed
    REPETITION = "repetition"  # it repeated itself as repetition_detection says


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token in the raw distribution (before penalties, bias and temperature)."""

    logprob: float
    rank: int | None = None  # 1 for the most likely token; None for one of logprob_token_ids
    decoded_token: str | None = None


@dataclass(slots=True)
class PrefixUse:
    """The use that requests have made of a prefix in the cache.

    Attributes:
        name: name of its pin; None if it is not pinned.
        tokens_saved: tokens found and not computed again; a hit on a pin also counts cached tokens after it.
        last_used: time.time() of the last hit; None before the first.
    """

    num_tokens: int
    hits: int = 0
    tokens_saved: int = 0
    last_used: float | None = None
    name: str | None = None


LogprobsAt = dict[int, Logprob]  # the tokens reported at one position; the chosen one comes first


@dataclass(slots=True)  # not frozen: one is made per request and step, in a third of the time
class CompletionOutput:
    """One of the `n` choices of a request."""

    index: int
    text: str
    token_ids: list[int]  # every generated id, an end token included (which the text leaves out)
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsAt] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop string or stop token; None for the model's own end token

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)  # not frozen: one is made per request and step, in a third of the time
class RequestOutput:
    """A request's state after a step: everything so far or only what is new, by SamplingParams.output_kind.

    Attributes:
        prompt_logprobs: one entry per prompt token; the first is None, because no token precedes it.
        num_cached_tokens: prompt tokens whose keys and values were found in the cache.
        seed: the seed that was used, given or assigned. Sending it again repeats the answer.
        error: what went wrong, if a choice finished with "error".
        num_accepted_tokens, num_rejected_tokens: drafts computed for it so far (speculative decoding): those in
            the answer, and the others.
        pooled: the result of a request with SamplingParams.pooling (RequestStepOutput.pooled).
        timelines: where the time of each choice has gone so far; they grow while the request is open.
        arrivals: when the tokens of each choice reached the client; they grow too.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[LogprobsAt | None] | None = None
    num_cached_tokens: int = 0
    seed: int | None = None
    error: str | None = None
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0
    pooled: bytes | None = None
    timelines: Sequence[Timeline] = field(default=(), repr=False, compare=False)
    arrivals: Sequence[Arrivals] = field(default=(), repr=False, compare=False)

    @property
    def metrics(self) -> RequestMetrics | None:
        """The request's times; None if they are unknown."""
        return RequestMetrics.of(self.timelines)


# --- beam search ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class BeamSearchSequence:
    """One answer that a beam search has found.

    Attributes:
        tokens: the prompt and the generated tokens, an end token included.
        logprobs: one entry per generated token: the token, and the most likely ones.
        cum_logprob: the sum of the generated tokens' raw log-probabilities.
        text: the text of all tokens, including the prompt and special tokens; None without a tokenizer.
    """

    tokens: list[int]
    logprobs: list[LogprobsAt]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The sequences found for one prompt, best first; one for each beam of the search."""

    sequences: list[BeamSearchSequence]
