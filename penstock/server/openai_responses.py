"""Response bodies, exactly OpenAI's shapes, plus the fields vLLM adds. Knows no engine.

A field of type `... | UnsetType` is left out of the JSON until it is set.
"""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(msgspec.Struct, kw_only=True):
    """One alternative for one prompt token, in vLLM's shape."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
Seed = int | list[int | None] | None


class Envelope(msgspec.Struct, kw_only=True):
    """Fields of every answer and every chunk."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


# --- POST /v1/completions ---------------------------------------------------------------------------------------------


class LegacyLogprobs(msgspec.Struct, kw_only=True):
    """Four parallel lists with one entry per token; text_offset counts characters of the choice's text."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: LegacyLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Envelope, kw_only=True):
    """A whole answer, or with `stream` one chunk of it: the legacy API gives both the same name."""

    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    seed: Seed | UnsetType = UNSET


# --- POST /v1/chat/completions ----------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class ChatAnswer(msgspec.Struct, kw_only=True):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Envelope, kw_only=True):
    choices: list[ChatChoice]
    usage: Usage
    seed: Seed | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Envelope, kw_only=True):
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    seed: Seed | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


# --- the other routes -------------------------------------------------------------------------------------------------


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "penstock"
    parent: str | None = None
    permission: list[str] = []
    certificate: dict[str, Any] | None = None


class ModelList(msgspec.Struct, kw_only=True):
    data: list[ModelCard]
    object: str = "list"


class Tokenized(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, kw_only=True):
    prompt: str
