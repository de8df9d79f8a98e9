"""Log-probabilities in the shapes of the three APIs: chat, legacy completions, and vLLM's prompt_logprobs.

JSON has no infinities, so a log-probability below OpenAI's floor of -9999 is that floor.
"""

import codecs
from collections.abc import Sequence

from penstock.interface.outputs import Logprob, LogprobsAt
from penstock.server.openai_responses import (
    ChatLogprobs,
    LegacyLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from penstock.tokenizer.tokenizer import Tokenizer

FLOOR = -9999.0


def finite(logprob: float) -> float:
    """The number itself, or the floor for what is below it (or is no number)."""
    return logprob if logprob > FLOOR else FLOOR


class TokenNames:
    """How tokens are written: their text, or `token_id:7` where the request asked for ids."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self.tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int, logprob: Logprob | None = None) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        return self.tokenizer.token_to_text(token_id)


def chat_logprobs(names: TokenNames, token_ids: Sequence[int], places: Sequence[LogprobsAt], top: int) -> ChatLogprobs:
    """The chosen tokens, each with exactly the `top` most likely ones."""
    return ChatLogprobs(
        content=[_chat_token(names, token_id, at, top) for token_id, at in zip(token_ids, places, strict=False)]
    )


def _chat_token(names: TokenNames, token_id: int, at: LogprobsAt, top: int) -> TokenLogprob:
    best = sorted(at.items(), key=lambda item: -finite(item[1].logprob))[:top]
    return TokenLogprob(
        token=names.name(token_id, at[token_id]),
        logprob=finite(at[token_id].logprob),
        bytes=list(names.tokenizer.token_to_bytes(token_id)),
        top_logprobs=[
            TopLogprob(
                token=names.name(other, entry),
                logprob=finite(entry.logprob),
                bytes=list(names.tokenizer.token_to_bytes(other)),
            )
            for other, entry in best
        ],
    )


def cut(token_ids: Sequence[int], places: Sequence[LogprobsAt | None], top: int) -> list[LogprobsAt | None]:
    """The prompt's log-probabilities with the `top` most likely tokens of each place and the prompt's own."""
    return [
        None if at is None else {key: entry for key, entry in at.items() if key == token_id or (entry.rank or 0) <= top}
        for token_id, at in zip(token_ids, places, strict=False)
    ]


class LegacyWriter:
    """Writes the four parallel lists for one choice, piece by piece.

    text_offset counts the characters that the bytes of the tokens before it complete, so a character of several tokens
    counts once, for the last of them. Special tokens that the text leaves out count nothing.
    """

    def __init__(self, names: TokenNames, *, skip_special_tokens: bool) -> None:
        self._names = names
        self._hidden = names.tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(self, token_ids: Sequence[int], places: Sequence[LogprobsAt | None]) -> LegacyLogprobs:
        """The lists for the next tokens. None stands for a prompt's first token, which nothing comes before."""
        lists = LegacyLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, at in zip(token_ids, places, strict=False):
            lists.tokens.append(self._names.name(token_id, None if at is None else at[token_id]))
            lists.token_logprobs.append(None if at is None else finite(at[token_id].logprob))
            lists.top_logprobs.append(None if at is None else self._top(at))
            lists.text_offset.append(self._advance(token_id))
        return lists

    def _top(self, at: LogprobsAt) -> dict[str, float]:
        """By name; of two tokens that are written alike the likelier one counts."""
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
    """The lists of two pieces as one."""
    return LegacyLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def prompt_logprobs(names: TokenNames, places: Sequence[LogprobsAt | None]) -> PromptLogprobs:
    """vLLM's shape: for each prompt token an object from token id to its log-probability."""
    return [
        None if at is None else {str(token_id): _prompt_entry(names, token_id, at) for token_id in at} for at in places
    ]


def _prompt_entry(names: TokenNames, token_id: int, at: LogprobsAt) -> PromptLogprob:
    entry = at[token_id]
    return PromptLogprob(logprob=finite(entry.logprob), rank=entry.rank, decoded_token=names.name(token_id, entry))
