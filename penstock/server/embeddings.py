"""POST /v1/embeddings, /score and /rerank: compute vectors of texts, and compare them.

All three compute one embedding per text, each as an ordinary engine request. A call has at most max_num_seqs of them in
the engine at a time, so that a long list does not keep other calls out.
"""

import asyncio
import base64
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock import validation as check
from penstock.client.prompts import PromptRequest, check_num_tokens
from penstock.errors import InvalidRequestError, RequestFailedError
from penstock.interface.messages import ModelInfo
from penstock.interface.outputs import RequestOutput
from penstock.interface.pooling import PoolingParams, cosine
from penstock.interface.sampling_params import SamplingParams
from penstock.server import pooling_bodies as bodies
from penstock.server.context import ServerContext, account_of, context_of, log_of, read_body
from penstock.server.generation import Generation, until_disconnect
from penstock.server.inputs import encode, salted
from penstock.server.keys import priority_of
from penstock.server.openai_requests import check_timeout
from penstock.tokenizer.tokenizer import check_prompt_length

MAX_INPUTS = 2048  # texts per call, as at OpenAI
KINDS = "a text, a list of texts, a list of token ids or a list of lists of token ids"
# The name of a body's first field -> the prefix of the answer's id.
ANSWER_IDS = {"input": "embd", "text_1": "score", "query": "rerank"}
Item = str | list[int]
Answer = Callable[[str, str, list[RequestOutput]], msgspec.Struct]  # arguments: answer id, model name, vectors


async def create_embeddings(request: Request) -> Response:
    """Handle POST /v1/embeddings."""
    body = await read_body(request, bodies.EmbeddingRequest)
    encoding = body.encoding_format or "float"

    def answer(id_: str, model: str, outputs: list[RequestOutput]) -> msgspec.Struct:
        data = [
            bodies.Embedding(index=index, embedding=_encoded(output, encoding)) for index, output in enumerate(outputs)
        ]
        created = int(time.time())
        return bodies.EmbeddingList(id=id_, created=created, model=model, data=data, usage=_usage(outputs))

    return await _pooled(request, body, {"input": _inputs(body.input)}, body.params(), answer)


async def create_scores(request: Request) -> Response:
    """Handle POST /score: return the similarity of pairs of texts."""
    body = await read_body(request, bodies.ScoreRequest)
    first, second = ([item] if isinstance(item, str) else item for item in (body.text_1, body.text_2))
    if len(first) not in (1, len(second)):
        message = f"text_1: has {len(first)} texts and text_2 {len(second)}; give one, or as many as text_2 has"
        raise InvalidRequestError(message, param="text_1")

    def answer(id_: str, model: str, outputs: list[RequestOutput]) -> msgspec.Struct:
        known, others = outputs[: len(first)], outputs[len(first) :]
        data = [
            bodies.Score(index=index, score=_similarity(known[index % len(known)], other))
            for index, other in enumerate(others)
        ]
        return bodies.ScoreList(id=id_, created=int(time.time()), model=model, data=data, usage=_usage(outputs))

    return await _pooled(request, body, {"text_1": first, "text_2": second}, _comparable(body), answer)


async def create_ranking(request: Request) -> Response:
    """Handle POST /rerank: return documents in the order of their similarity to a query."""
    body = await read_body(request, bodies.RankingRequest)
    check.check_int("top_n", body.top_n, 0, MAX_INPUTS, optional=True)
    texts = [item if isinstance(item, str) else item.text for item in body.documents]

    def answer(id_: str, model: str, outputs: list[RequestOutput]) -> msgspec.Struct:
        query, *documents = outputs
        results = [
            bodies.RankedDocument(
                index=index,
                document={"text": texts[index]} if body.return_documents is not False else None,
                relevance_score=_similarity(query, document),
            )
            for index, document in enumerate(documents)
        ]
        results.sort(key=lambda item: (-item.relevance_score, item.index))
        usage = _usage(outputs)
        return bodies.Ranking(id=id_, model=model, usage=usage, results=results[: body.top_n or None])

    return await _pooled(request, body, {"query": [body.query], "documents": texts}, _comparable(body), answer)


def _comparable(body: bodies.PoolingRequest) -> PoolingParams:
    return replace(body.params(), normalize=True)


async def _pooled(
    request: Request,
    body: bodies.PoolingRequest,
    fields: dict[str, Sequence[Item]],
    params: PoolingParams,
    answer: Answer,
) -> Response:
    """Compute one vector per item, field by field, and send the answer that `answer` makes of them."""
    context, log = context_of(request), log_of(request)
    check_timeout(body.timeout)
    info = context.info()
    model = context.check_model(body.model)
    context.client.check_admission(log.flow)
    info.pooler.settle(params, 1)  # refuses impossible parameters before any text is tokenised
    _check_count(fields)
    items = [(name, item) for name, listed in fields.items() for item in listed]
    total = sum(len(item) for _, item in items if isinstance(item, str))
    special = body.add_special_tokens is not False
    prompts = []
    for name, item in items:
        prompts.append(PromptRequest(await _ids(context, info, name, item, params, special, total)))
        await asyncio.sleep(0)  # let other requests run in between
    prompts = salted(request, body.cache_salt, prompts)
    sampling, account = SamplingParams.for_pooling(params), account_of(request)
    if account is not None:
        sampling = account.limited(sampling, len(prompts))
    log.timeout_s, log.priority = body.timeout, priority_of(account, body.priority)
    answer_id = f"{ANSWER_IDS[next(iter(fields))]}-{uuid4().hex}"
    generation = Generation(context, answer_id, prompts, sampling, log, at_once=info.max_num_seqs)
    generation.is_patient = len(prompts) > 1  # the call was admitted: later arrivals must not end it half-way
    outputs = await until_disconnect(request.receive, generation.collect())
    encoded = await asyncio.to_thread(lambda: msgspec.json.encode(answer(answer_id, model, outputs)))
    return Response(encoded, media_type="application/json")


def _check_count(fields: dict[str, Sequence[Item]]) -> None:
    for name, listed in fields.items():
        if not listed:
            raise InvalidRequestError(f"{name}: give at least one text", param=name)
        if len(listed) > MAX_INPUTS:
            message = f"{name}: {len(listed)} texts are too many; at most {MAX_INPUTS} are allowed in a call"
            raise InvalidRequestError(message, param=name)


def _inputs(given: str | list[Any]) -> Sequence[Item]:
    """Return the texts or lists of token ids in an `input`."""
    if isinstance(given, str):
        return [given]
    if given and type(given[0]) is int:
        return [given]
    kinds = set(map(type, given))
    if kinds not in ({str}, {list}):
        raise check.fail("input", given, KINDS)
    return given


async def _ids(
    context: ServerContext, info: ModelInfo, name: str, item: Item, params: PoolingParams, special: bool, total: int
) -> list[int]:
    """Return the token ids to compute for an item, truncated if the parameters say so."""
    if isinstance(item, str):
        if not item:
            raise check.fail(name, item, "a text of at least one character")
        check_prompt_length(item, info.max_model_len, param=name)
        ids = await encode(context, item, add_special_tokens=special, total=total)
    else:
        ids = item
        check.check_ids(name, ids, info.vocab_size)
    if not ids:
        raise InvalidRequestError(f"{name}: a text has no tokens", param=name)
    ids = params.truncated(ids, info.max_model_len)
    check_num_tokens(name, len(ids), info.max_model_len, is_pooled=True)
    return ids


def _usage(outputs: Sequence[RequestOutput]) -> bodies.PoolingUsage:
    count = sum(len(output.prompt_token_ids) for output in outputs)
    return bodies.PoolingUsage(prompt_tokens=count, total_tokens=count)


def _encoded(output: RequestOutput, encoding: str) -> msgspec.Raw | str:
    """Return a vector as encoded JSON or as base64. As Python floats, a long list would take five times the memory."""
    numbers = _numbers(output)
    if encoding == "base64":
        return base64.b64encode(numbers).decode()
    return msgspec.Raw(msgspec.json.encode(array("f", numbers).tolist()))


def _numbers(output: RequestOutput) -> bytes:
    if output.pooled is None:
        raise RequestFailedError("the engine ended a request without its vector")
    return output.pooled


def _similarity(first: RequestOutput, second: RequestOutput) -> float:
    return cosine(array("f", _numbers(first)), array("f", _numbers(second)))
