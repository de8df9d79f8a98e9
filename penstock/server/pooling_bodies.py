"""Request and answer bodies of /v1/embeddings, /score and /rerank, in the formats of OpenAI, vLLM, Jina and Cohere."""

from dataclasses import replace
from typing import Any, ClassVar, Literal

import msgspec

from penstock.interface.pooling import PoolingParams
from penstock.server.openai_requests import Strict


class PoolingRequest(Strict, kw_only=True, frozen=True):
    """The fields that all three share. `user` and those after it are labels for the log."""

    place: ClassVar[str] = "pooling"

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    session_id: str | None = None
    request_id: str | None = None

    def params(self) -> PoolingParams:
        """Return the body's PoolingParams. Raise InvalidRequestError for a value that is not allowed."""
        side = "right" if self.truncation_side is None else self.truncation_side
        return PoolingParams(truncate_prompt_tokens=self.truncate_prompt_tokens, truncation_side=side)


class EmbeddingRequest(PoolingRequest, kw_only=True, frozen=True):
    """POST /v1/embeddings. `input` is a text, token ids, or a list of either. `normalize` is vLLM's field.

    If `normalize` is None, the model decides.
    """

    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None

    def params(self) -> PoolingParams:
        return replace(super().params(), dimensions=self.dimensions, normalize=self.normalize)


class ScoreRequest(PoolingRequest, kw_only=True, frozen=True):
    """POST /score: compares one text_1 with every text_2, or each text_1 with the text_2 at the same index."""

    text_1: str | list[str]
    text_2: str | list[str]


class Document(Strict, kw_only=True, frozen=True):
    text: str


class RankingRequest(PoolingRequest, kw_only=True, frozen=True):
    """POST /rerank. `return_documents` says whether the answer repeats the texts (default: yes)."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None


# --- answers ----------------------------------------------------------------------------------------------------------


class PoolingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, kw_only=True):
    """One vector, as a JSON list of numbers, or with base64 as its float32 bytes in little-endian order."""

    object: str = "embedding"
    index: int
    embedding: msgspec.Raw | str


class EmbeddingList(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: str = "score"
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RankedDocument(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    document: dict[str, str] | None = None
    relevance_score: float


class Ranking(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: PoolingUsage
    results: list[RankedDocument]
