"""From a request body to SamplingParams: the request first, then the model's defaults, then OpenAI's. Checks nothing
that SamplingParams checks."""

from typing import Any

from penstock import validation as check
from penstock.interface.messages import ModelInfo
from penstock.interface.sampling_params import MAX_LOGPROBS, MAX_TOKENS, RequestOutputKind, SamplingParams
from penstock.server.openai_requests import ChatRequest, CompletionRequest, GenerationRequest

# Body fields that are fields of SamplingParams under the same name.
COPIED = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "logit_bias",
    "bad_words",
    "logits_processors",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def completion_params(body: CompletionRequest, info: ModelInfo) -> SamplingParams:
    """16 tokens unless told otherwise. `echo` with `logprobs` needs the prompt's log-probabilities too;
    where prompt_logprobs asks for another number of them, the larger is computed and each shows its own."""
    own: dict[str, Any] = {"logprobs": body.logprobs}
    if body.max_tokens is not None:
        own["max_tokens"] = body.max_tokens
    if body.echo and body.logprobs is not None:
        check.check_int("logprobs", body.logprobs, 0, MAX_LOGPROBS)
        own["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return _params(body, info, own)


def chat_params(body: ChatRequest, info: ModelInfo) -> SamplingParams:
    """The rest of the context unless told otherwise. max_completion_tokens is the newer name of max_tokens."""
    own: dict[str, Any] = {"max_tokens": info.default_sampling.get("max_tokens")}
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(body, name)
        check.check_int(name, value, 1, MAX_TOKENS, optional=True)
        own["max_tokens"] = own["max_tokens"] if value is None else value
    check.check_int("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS, optional=True)
    if body.logprobs:
        own["logprobs"] = body.top_logprobs or 0
    return _params(body, info, own)


def _params(body: GenerationRequest, info: ModelInfo, own: dict[str, Any]) -> SamplingParams:
    given = {name: value for name in COPIED if (value := getattr(body, name)) is not None}
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    params = SamplingParams(**{**info.default_sampling, **given, **own, "output_kind": kind})
    params.check_vocabulary(info.vocab_size)
    return params
