"""Convert the answer to a request with use_beam_search into the result of `beam_search`."""

from penstock.errors import RequestFailedError, fail
from penstock.interface.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput
from penstock.interface.sampling_params import BeamSearchParams, SamplingParams
from penstock.tokenizer.tokenizer import Tokenizer


def search_params(params: BeamSearchParams) -> SamplingParams:
    """Return the parameters of a search. Raise InvalidRequestError for any other type."""
    if not isinstance(params, BeamSearchParams):
        raise fail("params", params, "a BeamSearchParams")
    return params.sampling_params()


def search_output(output: RequestOutput, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """Return the sequences of a finished request. Raise RequestFailedError if its computation failed."""
    if output.error is not None:
        raise RequestFailedError(output.error)
    return BeamSearchOutput([_sequence(output.prompt_token_ids, choice, tokenizer) for choice in output.outputs])


def _sequence(prompt: list[int], choice: CompletionOutput, tokenizer: Tokenizer | None) -> BeamSearchSequence:
    tokens = [*prompt, *choice.token_ids]
    return BeamSearchSequence(
        tokens,
        choice.logprobs or [],
        choice.cumulative_logprob or 0.0,
        None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=False),
        choice.finish_reason,
    )
