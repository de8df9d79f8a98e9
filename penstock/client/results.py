"""Requests and results of pooling for Python programs: arrays, embeddings, and scores of pairs."""

from array import array
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.errors import RequestFailedError, check_choice, fail, invalid
from penstock.interface.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput
from penstock.interface.pooling import (
    POOLING_TASKS,
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolerConfig,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    cosine,
)
from penstock.interface.sampling_params import BeamSearchParams, SamplingParams
from penstock.tokenizer.tokenizer import Tokenizer


def pooling_request(params: Any, pooling_task: str | None = None) -> SamplingParams:
    """Make the parameters of a request for vectors.

    Raises:
        InvalidRequestError: params are not PoolingParams, or have another task.
    """
    params = PoolingParams() if params is None else params
    if not isinstance(params, PoolingParams):
        raise fail("pooling_params", params, "a PoolingParams, or a list of them")
    if pooling_task is not None:
        check_choice("pooling_task", pooling_task, [*POOLING_TASKS])
        if params.task not in (None, pooling_task):
            raise fail("pooling_task", pooling_task, f"{params.task}, as in pooling_params")
        params = replace(params, task=pooling_task)
    return SamplingParams.for_pooling(params)


def embedding_request(params: Any) -> SamplingParams:
    """Make the parameters of a request for one vector.

    Raises:
        InvalidRequestError: params are not PoolingParams, or ask for a vector of each token.
    """
    request = pooling_request(params, "embed")
    if request.pooling is not None and request.pooling.pooling_type == "ALL":
        raise fail("pooling_type", "ALL", "LAST, MEAN or CLS: an embedding is one vector; encode gives all")
    return request


def requests_for(params: Any, count: int, make: Any) -> list[SamplingParams]:
    """Make one request for each prompt; params: one PoolingParams for all, one for each, or None."""
    listed = list(params) if isinstance(params, list | tuple) else [params] * count
    if len(listed) != count:
        raise invalid("pooling_params", f"{len(listed)} for {count} prompts; give one, or one per prompt")
    return [make(item) for item in listed]


def is_matrix(request: SamplingParams, pooler: PoolerConfig) -> bool:
    """Tell whether a request gives a vector for each token."""
    return request.pooling is not None and pooler.settle(request.pooling, 1).pooling_type == "ALL"


def pooling_output(output: RequestOutput, *, is_matrix: bool) -> PoolingRequestOutput[PoolingOutput]:
    """Convert a request's vectors to an array. Raise RequestFailedError if its computation failed."""
    data = np.frombuffer(_pooled(output), dtype="<f4")
    shaped = data.reshape(len(output.prompt_token_ids), -1) if is_matrix else data
    result = PoolingOutput(shaped)
    return PoolingRequestOutput(output.request_id, result, output.prompt_token_ids, output.num_cached_tokens)


def embedding_output(output: RequestOutput) -> EmbeddingRequestOutput:
    """Convert a request's vector to a list. Raise RequestFailedError if its computation failed."""
    result = EmbeddingOutput(array("f", _pooled(output)).tolist())
    return EmbeddingRequestOutput(output.request_id, result, output.prompt_token_ids, output.num_cached_tokens)


def classification_output(output: RequestOutput) -> ClassificationRequestOutput:
    """Convert a classifier's scores to a list. Raise RequestFailedError if its computation failed."""
    result = ClassificationOutput(array("f", _pooled(output)).tolist())
    return ClassificationRequestOutput(output.request_id, result, output.prompt_token_ids, output.num_cached_tokens)


def pair_output(output: RequestOutput) -> ScoringRequestOutput:
    """Convert a cross-encoder's score. Raise RequestFailedError if its computation failed."""
    (score,) = array("f", _pooled(output))
    return ScoringRequestOutput(output.request_id, ScoringOutput(score), output.prompt_token_ids)


def score_output(first: EmbeddingRequestOutput, second: EmbeddingRequestOutput) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        request_id=second.request_id,
        outputs=ScoringOutput(cosine(first.outputs.embedding, second.outputs.embedding)),
        prompt_token_ids=[*first.prompt_token_ids, *second.prompt_token_ids],
        num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
    )


def _pooled(output: RequestOutput) -> bytes:
    if output.pooled is None:
        raise RequestFailedError(output.error or "the engine ended a request without its vectors")
    return output.pooled


def search_params(params: BeamSearchParams) -> SamplingParams:
    """Convert the parameters of a search. Raise InvalidRequestError for any other type."""
    if not isinstance(params, BeamSearchParams):
        raise fail("params", params, "a BeamSearchParams")
    return params.sampling_params()


def search_output(output: RequestOutput, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """Convert a finished request to its sequences. Raise RequestFailedError if its computation failed."""
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
