"""Response bodies in OpenAI's format with the fields that vLLM adds, and the log-probabilities in them.

Knows no engine. A field of type `... | UnsetType` is left out of the JSON unless it is set.
"""

import codecs
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from penstock.interface.outputs import Logprob, LogprobsAt
from penstock.tokenizer.tokenizer import Tokenizer

FLOOR = -9999.0  # OpenAI's lowest log-probability; JSON has no infinities


class Usage(msgspec.Struct, kw_only=True):
    """The tokens of a call. completion_tokens_details is present only if there were drafts or reasoning.

    It has the draft tokens, of which only the accepted ones are part of completion_tokens, and the reasoning tokens.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int] | UnsetType = UNSET


PromptLogprobs = list[dict[str, dict[str, Any]] | None]  # alternatives of each prompt token, as vLLM shows them
Seed = int | list[int | None] | None


class LegacyLogprobs(msgspec.Struct, kw_only=True):
    """Four parallel lists with one entry per token; text_offset counts characters of the choice's text."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A choice of the legacy API, or its new part in a chunk."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


ToolCall = dict[str, Any]  # of a message; in a delta, `index` says which call the piece continues


class ChatMessage(msgspec.Struct, kw_only=True):
    """A whole message. `reasoning` is vLLM's newer name for `reasoning_content`; clients know one or the other."""

    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: dict[str, str] | UnsetType = UNSET  # of the older API


class Delta(msgspec.Struct, kw_only=True):
    """The new part of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: dict[str, str] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """A choice of a chat answer with its `message`, or of a chunk with a `delta`."""

    index: int
    message: ChatMessage | UnsetType = UNSET
    delta: Delta | UnsetType = UNSET
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A whole answer of either API, or one chunk of an answer; `object` says which."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[CompletionChoice | ChatChoice]
    usage: Usage | UnsetType | None = UNSET
    seed: Seed | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timeline: dict[str, Any] | UnsetType = UNSET
    service_tier: str | UnsetType = UNSET


# --- log-probabilities ------------------------------------------------------------------------------------------------


def finite(logprob: float) -> float:
    """Replace NaN, and every number below FLOOR, by FLOOR, because JSON has no infinity."""
    return logprob if logprob > FLOOR else FLOOR


class TokenNames:
    """Names of tokens: their text, or `token_id:7` if the request asked for ids."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self.tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int, logprob: Logprob | None = None) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        return self.tokenizer.token_to_text(token_id)


def chat_logprobs(
    names: TokenNames,
    token_ids: Sequence[int],
    places: Sequence[LogprobsAt],
    top: int,
    listed: Sequence[int] = (),
    *,
    ids: bool = False,
) -> dict[str, Any]:
    """List the chosen tokens, each with exactly the `top` most likely ones and those `listed`; with their `ids` if
    asked for."""

    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        value, spelt = finite(logprob.logprob), list(names.tokenizer.token_to_bytes(token_id))
        shown = {"token": names.name(token_id, logprob), "logprob": value, "bytes": spelt}
        return {"id": token_id, **shown} if ids else shown

    content = []
    for token_id, at in zip(token_ids, places, strict=False):
        ordered = sorted(at.items(), key=lambda item: -finite(item[1].logprob))
        best = ordered[:top] + [item for item in ordered[top:] if item[0] in listed]
        content.append({**entry(token_id, at[token_id]), "top_logprobs": [entry(*item) for item in best]})
    return {"content": content, "refusal": None}


def cut(token_ids: Sequence[int], places: Sequence[LogprobsAt | None], top: int) -> list[LogprobsAt | None]:
    """Reduce the prompt's log-probabilities to the `top` most likely tokens and the prompt's own token."""
    return [
        None if at is None else {key: entry for key, entry in at.items() if key == token_id or (entry.rank or 0) <= top}
        for token_id, at in zip(token_ids, places, strict=False)
    ]


class LegacyWriter:
    """The four parallel lists of one choice, written piece by piece.

    A token's text_offset is the number of characters completed by the tokens before it. A character made of several
    tokens counts once, at the last of them. Special tokens that are left out of the text do not count.
    """

    def __init__(self, names: TokenNames, *, skip_special_tokens: bool) -> None:
        self._names = names
        self._hidden = names.tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(self, token_ids: Sequence[int], places: Sequence[LogprobsAt | None]) -> LegacyLogprobs:
        """Write the lists for the next tokens. The place of a prompt's first token is None: nothing predicted it."""
        lists = LegacyLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, at in zip(token_ids, places, strict=False):
            lists.tokens.append(self._names.name(token_id, None if at is None else at[token_id]))
            lists.token_logprobs.append(None if at is None else finite(at[token_id].logprob))
            lists.top_logprobs.append(None if at is None else self._top(at))
            lists.text_offset.append(self._advance(token_id))
        return lists

    def _top(self, at: LogprobsAt) -> dict[str, float]:
        """Collect log-probabilities by token name. If two tokens have the same name, the more likely one counts."""
        found: dict[str, float] = {}
        for token_id, entry in at.items():
            name = self._names.name(token_id, entry)
            found[name] = max(finite(entry.logprob), found.get(name, FLOOR))
        return found

    def _advance(self, token_id: int) -> int:
        start = self._offset
        if token_id not in self._hidden:
            self._offset += len(self._decoder.decode(self._names.tokenizer.token_to_bytes(token_id)))
        return start


def joined(first: LegacyLogprobs, second: LegacyLogprobs) -> LegacyLogprobs:
    names = LegacyLogprobs.__struct_fields__
    return LegacyLogprobs(**{name: getattr(first, name) + getattr(second, name) for name in names})


def prompt_logprobs(names: TokenNames, places: Sequence[LogprobsAt | None]) -> PromptLogprobs:
    """Make one object per prompt token in vLLM's format, with token ids as keys and log-probabilities as values."""

    def shaped(token_id: int, entry: Logprob) -> dict[str, Any]:
        name = names.name(token_id, entry)
        return {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": name}

    return [None if at is None else {str(key): shaped(key, entry) for key, entry in at.items()} for at in places]
