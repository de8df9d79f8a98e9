"""POST /v1/embeddings, /pooling, /classify, /score and /rerank: compute vectors of texts, and compare them.

Each computes one vector per text, or per pair of texts for a cross-encoder, as an ordinary engine request. A call has
at most max_num_seqs of them in the engine at a time, so that a long list does not keep other calls out. Bodies and
answers are in the formats of OpenAI, vLLM, Jina and Cohere.
"""

import asyncio
import base64
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.client.input_processor import PromptRequest, check_num_tokens, pair_request
from penstock.errors import RequestFailedError, check_ids, check_int, fail, invalid
from penstock.interface.messages import ModelInfo
from penstock.interface.outputs import RequestOutput
from penstock.interface.pooling import PoolingParams, cosine
from penstock.interface.sampling_params import SamplingParams
from penstock.server.api_errors import until_disconnect
from penstock.server.context import ServerContext, log_of, model_of, read_body, within_limits
from penstock.server.generation import Generation
from penstock.server.inputs import Texts, encode, salted, split_texts, tokenizing
from penstock.server.openai_requests import ComputingRequest, Strict
from penstock.tokenizer.tokenizer import check_prompt_length

# --- bodies -----------------------------------------------------------------------------------------------------------


class PoolingRequest(ComputingRequest, kw_only=True, frozen=True):
    """The fields that all of them share."""

    place: ClassVar[str] = "pooling"
    id_prefix: ClassVar[str] = "embd"  # of the answer's id

    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None

    def params(self) -> PoolingParams:
        """Make the body's PoolingParams. Raise InvalidRequestError for a value that is not allowed."""
        side = "right" if self.truncation_side is None else self.truncation_side
        return PoolingParams(truncate_prompt_tokens=self.truncate_prompt_tokens, truncation_side=side)


class EmbeddingRequest(PoolingRequest, kw_only=True, frozen=True):
    """POST /v1/embeddings. `input` is a text, token ids, or a list of either. `normalize` is vLLM's field.

    If `normalize` is None, the model decides. `prompt_name` names one of the prompts that sentence-transformers knows.
    """

    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str | None = None

    def params(self) -> PoolingParams:
        names = "dimensions", "normalize", "prompt_name"
        return replace(super().params(), task="embed", **{name: getattr(self, name) for name in names})


class VectorsRequest(EmbeddingRequest, kw_only=True, frozen=True):
    """POST /pooling: vLLM's route to what a model has of a text. Without a `task`: the vectors of all tokens."""

    id_prefix: ClassVar[str] = "pool"

    task: str | None = None
    use_activation: bool | None = None

    def params(self) -> PoolingParams:
        return replace(super().params(), task=self.task, use_activation=self.use_activation)


class ClassificationRequest(PoolingRequest, kw_only=True, frozen=True):
    """POST /classify: a classifier's scores of each text."""

    id_prefix: ClassVar[str] = "classify"

    input: str | list[Any]
    use_activation: bool | None = None

    def params(self) -> PoolingParams:
        return replace(super().params(), task="classify", use_activation=self.use_activation)


class ScoreRequest(PoolingRequest, kw_only=True, frozen=True):
    """POST /score: compares one text_1 with every text_2, or each text_1 with the text_2 at the same index."""

    id_prefix: ClassVar[str] = "score"

    text_1: str | list[str]
    text_2: str | list[str]


class Document(Strict, kw_only=True, frozen=True):
    text: str


class RankingRequest(PoolingRequest, kw_only=True, frozen=True):
    """POST /rerank. `return_documents` says whether the answer repeats the texts (default: yes)."""

    id_prefix: ClassVar[str] = "rerank"

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None


# --- routes -----------------------------------------------------------------------------------------------------------


MAX_INPUTS = 2048  # texts per call, as at OpenAI
MakeAnswer = Callable[[list[RequestOutput]], dict[str, Any]]  # the answer's own fields, made of the vectors
Pairs = list[tuple[str, str]]


async def create_embeddings(request: Request) -> Response:
    """Handle POST /v1/embeddings: compute the vectors of texts."""
    body = await read_body(request, EmbeddingRequest)
    encoding = body.encoding_format or "float"

    def answer(outputs: list[RequestOutput]) -> dict[str, Any]:
        return _list(
            {"object": "embedding", "index": index, "embedding": _encoded(output, encoding)}
            for index, output in enumerate(outputs)
        )

    return await pooled(request, body, {"input": split_texts("input", body.input)}, body.params(), answer)


async def create_pooling(request: Request) -> Response:
    """Handle POST /pooling: compute what `task` says of texts, by default a vector or scores for each token."""
    body = await read_body(request, VectorsRequest)
    encoding, params = body.encoding_format or "float", body.params()
    pooler = (await _context(request, body)).info().pooler
    if params.task is None:
        params = replace(params, task="token_classify" if pooler.labels else "token_embed")
    is_matrix = pooler.settle(params, 1).pooling_type == "ALL"

    def data(output: RequestOutput) -> Any:
        if encoding == "base64" or not is_matrix:
            return _encoded(output, encoding)
        numbers = array("f", _numbers(output)).tolist()
        width = len(numbers) // len(output.prompt_token_ids)
        return [numbers[start : start + width] for start in range(0, len(numbers), width)]

    def answer(outputs: list[RequestOutput]) -> dict[str, Any]:
        return _list({"object": "pooling", "index": at, "data": data(output)} for at, output in enumerate(outputs))

    return await pooled(request, body, {"input": split_texts("input", body.input)}, params, answer)


async def create_classification(request: Request) -> Response:
    """Handle POST /classify: compute a classifier's scores of texts, and name the best label of each."""
    body = await read_body(request, ClassificationRequest)
    labels = (await _context(request, body)).info().pooler.labels

    def classes(index: int, output: RequestOutput) -> dict[str, Any]:
        probs = array("f", _numbers(output)).tolist()
        best = labels[probs.index(max(probs))]
        return {"index": index, "label": best, "probs": probs, "num_classes": len(labels)}

    def answer(outputs: list[RequestOutput]) -> dict[str, Any]:
        return _list(classes(index, output) for index, output in enumerate(outputs))

    return await pooled(request, body, {"input": split_texts("input", body.input)}, body.params(), answer)


async def create_scores(request: Request) -> Response:
    """Handle POST /score: compute the similarity of pairs of texts."""
    body = await read_body(request, ScoreRequest)
    first, second = ([item] if isinstance(item, str) else item for item in (body.text_1, body.text_2))
    if len(first) not in (1, len(second)):
        raise invalid("text_1", f"has {len(first)} texts and text_2 {len(second)}; give one, or as many as text_2 has")

    def answer(scores: list[float]) -> dict[str, Any]:
        return _list({"index": index, "object": "score", "score": score} for index, score in enumerate(scores))

    return await compared(request, body, {"text_1": first, "text_2": second}, answer)


async def create_ranking(request: Request) -> Response:
    """Handle POST /rerank: sort documents by their similarity to a query."""
    body = await read_body(request, RankingRequest)
    check_int("top_n", body.top_n, 0, MAX_INPUTS, optional=True)
    texts = [item if isinstance(item, str) else item.text for item in body.documents]

    def answer(scores: list[float]) -> dict[str, Any]:
        results: list[dict[str, Any]] = []
        for index, score in enumerate(scores):
            document = {} if body.return_documents is False else {"document": {"text": texts[index]}}
            results.append({"index": index, **document, "relevance_score": score})
        results.sort(key=lambda item: (-item["relevance_score"], item["index"]))
        return {"results": results[: body.top_n or None]}

    return await compared(request, body, {"query": [body.query], "documents": texts}, answer)


def _list(data: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "created": int(time.time()), "data": list(data)}


async def compared(
    request: Request,
    body: PoolingRequest,
    fields: dict[str, list[str]],
    answer: Callable[[list[float]], dict[str, Any]],
) -> Response:
    """Score each text of the second field with that of the first, or with its only one: with a cross-encoder, which
    reads both, or by their embeddings. Send the answer that `answer` makes of the scores."""
    first, second = fields.values()

    def scores(outputs: list[RequestOutput]) -> dict[str, Any]:
        return answer([array("f", _numbers(output))[0] for output in outputs])

    def similarities(outputs: list[RequestOutput]) -> dict[str, Any]:
        known, others = outputs[: len(first)], outputs[len(first) :]
        return answer([_similarity(known[index % len(known)], other) for index, other in enumerate(others)])

    texts: dict[str, Texts] = {**fields}
    if (await _context(request, body)).info().pooler.labels:
        if body.add_special_tokens is False:
            raise fail("add_special_tokens", False, "true, or absent: a cross-encoder tells two texts apart by them")
        pairs = [(first[index % len(first)], text) for index, text in enumerate(second)] if first else []
        return await pooled(request, body, texts, replace(body.params(), task="classify"), scores, pairs)
    return await pooled(request, body, texts, replace(body.params(), task="embed", normalize=True), similarities)


async def pooled(
    request: Request,
    body: PoolingRequest,
    fields: dict[str, Texts],
    params: PoolingParams,
    answer: MakeAnswer,
    pairs: Pairs | None = None,
) -> Response:
    """Compute one vector per item, field by field, or per pair, and send the answer that `answer` makes of them."""
    context, log = await _context(request, body), log_of(request)
    info, model = context.info(), context.shown_name(body.model)
    context.client.check_admission(log.flow)
    info.pooler.settle(params, 1)  # refuses impossible parameters before any text is tokenised
    _check_count(fields)
    prompts = await _prompts(context, info, body, fields, params, pairs)
    prompts = salted(request, body.cache_salt, prompts)
    sampling = SamplingParams.for_pooling(replace(params, prompt_name=None))  # it is before the texts now
    sampling = within_limits(request, sampling, prompts, priority=body.priority, timeout_s=body.timeout)
    answer_id = f"{body.id_prefix}-{uuid4().hex}"
    generation = Generation(context, answer_id, prompts, sampling, log, at_once=info.max_num_seqs)
    generation.is_patient = len(prompts) > 1  # the call was admitted: later arrivals must not end it half-way
    outputs = await until_disconnect(request.receive, generation.collect())
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    common = {"id": answer_id, "model": model, "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens}}
    encoded = await asyncio.to_thread(lambda: msgspec.json.encode({**common, **answer(outputs)}))
    return Response(encoded, media_type="application/json")


async def _context(request: Request, body: PoolingRequest) -> ServerContext:
    """Check a body, and wait for its model."""
    body.check()
    return await model_of(request, body.model, body.timeout)


async def _prompts(
    context: ServerContext,
    info: ModelInfo,
    body: PoolingRequest,
    fields: dict[str, Texts],
    params: PoolingParams,
    pairs: Pairs | None,
) -> list[PromptRequest]:
    """Tokenise the texts of all fields, or pairs of them."""
    prompts = []
    if pairs is not None:
        total = sum(len(text) for pair in pairs for text in pair)
        for pair in pairs:
            work = partial(pair_request, context.tokenizer(), info, pair, params, names=tuple(fields))
            ids, own = await tokenizing(context, work, total)
            check_num_tokens(next(iter(fields)), len(ids), info.max_model_len, is_pooled=True)
            prompts.append(PromptRequest(ids, params=SamplingParams.for_pooling(own)))
        return prompts
    items = [(name, item) for name, listed in fields.items() for item in listed]
    total = sum(len(item) for _, item in items if isinstance(item, str))
    special = body.add_special_tokens is not False
    for name, item in items:
        prompts.append(PromptRequest(await _ids(context, info, name, item, params, special, total)))
        await asyncio.sleep(0)  # let other requests run in between
    return prompts


def _check_count(fields: dict[str, Texts]) -> None:
    for name, listed in fields.items():
        if not listed:
            raise invalid(name, "give at least one text")
        if len(listed) > MAX_INPUTS:
            raise invalid(name, f"{len(listed)} texts are too many; at most {MAX_INPUTS} are allowed in a call")


async def _ids(
    context: ServerContext,
    info: ModelInfo,
    name: str,
    item: str | list[int],
    params: PoolingParams,
    special: bool,
    total: int,
) -> list[int]:
    """Check or tokenise an item. Its ids are truncated if the parameters say so."""
    if isinstance(item, str):
        if not item:
            raise fail(name, item, "a text of at least one character")
        check_prompt_length(item, info.max_model_len, param=name)
        tokenizer, text = context.tokenizer(), info.pooler.prompted(item, params.prompt_name)
        ids = await encode(context, text, add_special_tokens=special, total=total)
        ids = info.pooler.ended(ids, tokenizer.eos_token_id) if special and ids else ids
        ids = params.truncated(ids, info.max_model_len, tokenizer.special_ids if special else ())
    else:
        ids = params.truncated(item, info.max_model_len)
        check_ids(name, item, info.vocab_size)
        if params.prompt_name is not None:
            raise fail("prompt_name", params.prompt_name, "absent: a prompt goes before a text, not before token ids")
    if not ids:
        raise invalid(name, "a text has no tokens")
    check_num_tokens(name, len(ids), info.max_model_len, is_pooled=True)
    return ids


def _encoded(output: RequestOutput, encoding: str) -> msgspec.Raw | str:
    """Encode a vector as JSON or as base64. As Python floats, a long list would take five times the memory."""
    if encoding == "base64":
        return base64.b64encode(_numbers(output)).decode()
    return floats(output)


def floats(output: RequestOutput) -> msgspec.Raw:
    """Encode a vector as a list of numbers."""
    return msgspec.Raw(msgspec.json.encode(array("f", _numbers(output)).tolist()))


def _numbers(output: RequestOutput) -> bytes:
    if output.pooled is None:
        raise RequestFailedError("the engine ended a request without its vector")
    return output.pooled


def _similarity(first: RequestOutput, second: RequestOutput) -> float:
    return cosine(array("f", _numbers(first)), array("f", _numbers(second)))
