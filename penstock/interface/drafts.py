"""Drafts: cheap guesses of the next tokens of a request, so that one step can compute several positions.

A draft is accepted exactly when it is the token that the step samples at its position. So drafts change the number of
steps of an answer, but no bit of it, and a Proposer may guess as it likes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from penstock.errors import InvalidRequestError, check_choice, check_int, check_str, fail, shown

NGRAM, DRAFT_MODEL = "ngram", "draft_model"
OPTION = "speculative_config"
DEFAULT_LOOKUP_MAX = 4
MAX_DRAFTS, MAX_NGRAM = 32, 64  # drafts of a request in a step; tokens that are looked up


@dataclass(frozen=True, slots=True)
class DraftQuery:
    """A request that wants drafts.

    Attributes:
        token_ids: prompt and outputs so far: the engine's own list, not to be changed. It only grows until the request
            is forgotten.
        count: maximum number of drafts wanted, at least 1.
    """

    request_id: str
    token_ids: list[int]
    count: int


class Proposer(Protocol):
    """Guesses tokens.

    Attributes:
        is_free: whether a guess takes next to no time, so that the engine asks first and then decides what to use.
    """

    is_free: bool

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """Return at most `count` tokens for each query, perhaps none. An exception affects drafts only, no request."""

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended; it may be unknown."""

    def shutdown(self) -> None:
        """Free everything. No call may follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made, in vLLM's names.

    Attributes:
        method: "ngram" looks up the last tokens in the request's own text; "draft_model" asks a smaller model. If it
            is not given, a `model` implies "draft_model".
        model: for "draft_model": a directory, a hub name or "demo-draft". Its vocabulary is that of the main model.
        num_speculative_tokens: maximum number of drafts of a request in a step. Only as many as pay are computed.
        prompt_lookup_max, prompt_lookup_min: for "ngram": most and fewest tokens that are looked up.

    Raises:
        InvalidRequestError: a value is out of range, or belongs to the other method.
    """

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int = 5
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None

    def __post_init__(self) -> None:
        if self.method is None and self.model is not None:
            object.__setattr__(self, "method", DRAFT_MODEL)
        check_choice(_name("method"), self.method, (NGRAM, DRAFT_MODEL))
        check_int(_name("num_speculative_tokens"), self.num_speculative_tokens, 1, MAX_DRAFTS)
        if self.method == DRAFT_MODEL:
            check_str(_name("model"), self.model)
            for name in ("prompt_lookup_max", "prompt_lookup_min"):
                if getattr(self, name) is not None:
                    raise fail(_name(name), getattr(self, name), "left out: only method = ngram uses it")
            return
        if self.model is not None:
            raise fail(_name("model"), self.model, "left out: method = ngram has no model")
        self._settle_lengths()

    def _settle_lengths(self) -> None:
        longest, shortest = self.prompt_lookup_max, self.prompt_lookup_min
        longest = max(DEFAULT_LOOKUP_MAX, shortest or 1) if longest is None else longest
        check_int(_name("prompt_lookup_max"), longest, 1, MAX_NGRAM)
        shortest = 1 if shortest is None else shortest
        check_int(_name("prompt_lookup_min"), shortest, 1, longest)
        object.__setattr__(self, "prompt_lookup_max", longest)
        object.__setattr__(self, "prompt_lookup_min", shortest)

    @classmethod
    def of(cls, value: Any) -> "SpeculativeConfig":
        """Return the config of a dictionary, as users write it.

        Raises:
            InvalidRequestError: it has unknown keys or wrong values.
        """
        if not isinstance(value, dict):
            raise fail(OPTION, value, 'an object like {"method": "ngram"}')
        names = [item.name for item in fields(cls)]
        unknown = next((str(key) for key in value if key not in names), None)
        if unknown is not None:
            message = f"{_name(shown(unknown))}: unknown key; known are {', '.join(names)}"
            raise InvalidRequestError(message, param=OPTION)
        try:
            return cls(**value)
        except InvalidRequestError as error:  # to a user, it is one option
            raise InvalidRequestError(str(error), param=OPTION) from None


def _name(key: str) -> str:
    return f"{OPTION}.{key}"
