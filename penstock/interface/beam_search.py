"""BeamSearchParams and what `beam_search` returns, in vLLM's spelling."""

from dataclasses import dataclass

from penstock.errors import check_int
from penstock.interface.outputs import FinishReason, LogprobsAt
from penstock.interface.sampling_params import (
    MAX_BEAM_WIDTH,
    MAX_LOGPROBS,
    MAX_TOKENS,
    RequestOutputKind,
    SamplingParams,
)


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How to search. Lengths, end tokens and penalties have the meaning of Transformers' generate(num_beams=...).

    Attributes:
        beam_width: number of beams, and of sequences returned.
        max_tokens: maximum number of tokens to generate.
        ignore_eos: whether the model's own end tokens do not end a sequence.
        temperature: 0 or 1; the raw distribution decides in both cases.
        length_penalty: sequences are compared by the sum of their log-probabilities divided by
            (number of generated tokens) ** length_penalty.
        include_stop_str_in_output: whether the text over HTTP shows the end token; sequences always have it.
        early_stopping: True ends the search with the beam_width-th complete sequence, False when no better one is
            likely, "never" when no better one is possible.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of range; `param` names the field.
    """

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        self.sampling_params()  # checks the other fields

    def sampling_params(self) -> SamplingParams:
        """Return the same search as a request's parameters, with the log-probabilities of vLLM's beam search."""
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=min(2 * self.beam_width, MAX_LOGPROBS),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


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
