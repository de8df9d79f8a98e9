"""SamplingParams: how the tokens of one request are chosen, with vLLM's names, meanings and defaults.

It is frozen, and checked when it is made: lists become tuples, and no field is accepted and ignored.
`check_vocabulary` checks what depends on the model.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from penstock.errors import (
    InvalidRequestError,
    NotSupportedError,
    check_bool,
    check_choice,
    check_float,
    check_int,
    check_str,
    check_unicode,
    fail,
    int_tuple,
    list_of,
    string_tuple,
)
from penstock.interface.logits_params import MAX_TOKEN_ID, LogitsParams
from penstock.interface.pooling import PoolingParams
from penstock.interface.structured_outputs import StructuredOutputsParams

MAX_CHOICES = 128
MAX_BEAM_WIDTH = 64
MAX_LENGTH_PENALTY = 5.0  # a context of 2^20 tokens to this power is still far from the end of float32
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STRING_LENGTH = 256  # characters of a stop string or bad word
MAX_WORD_IDS = 4 * MAX_STRING_LENGTH + 4  # ids of a bad word and a space before it: at most one token per byte
MAX_ID_LISTS = 128  # ids in stop_token_ids
MAX_BIASED_TOKENS = 1024
MAX_PROCESSORS = 16
MAX_ARGUMENT_DEPTH = 8  # lists and mappings in an argument of a logits processor
MAX_TOKENS = 2**31 - 1
MIN_TEMPERATURE = 1e-5  # below it, division by the temperature overflows float32; 0 means greedy
FLOATS = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p", "length_penalty",
)  # fmt: skip
WITH_BEAM_SEARCH = (  # fields that may be set with use_beam_search; all others choose or change tokens
    "n", "temperature", "seed", "ignore_eos", "max_tokens", "logprobs", "detokenize", "skip_special_tokens",
    "structured_outputs",
    "spaces_between_special_tokens", "include_stop_str_in_output", "use_beam_search", "length_penalty",
    "early_stopping", "output_kind", "dry_sequence_breakers",  # the last does nothing without dry_multiplier
)  # fmt: skip
WITH_POOLING = {"pooling", "seed", "output_kind", "dry_sequence_breakers"}  # fields that may be set with pooling
POOLING_FIELDS = {"temperature": 0.0, "max_tokens": 1, "detokenize": False}


class RequestOutputKind(StrEnum):
    """What each RequestOutput of a stream carries."""

    CUMULATIVE = "cumulative"  # everything so far
    DELTA = "delta"  # only what is new
    FINAL_ONLY = "final_only"  # one output, at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(LogitsParams):
    """How to choose the tokens of one request.

    Attributes:
        n: number of independent choices generated from the prompt.
        presence_penalty: subtracted once from the logit of every token that was generated before.
        frequency_penalty: subtracted from a token's logit as many times as it was generated before.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the output.
        temperature: divides the logits; 0 is greedy.
        top_p: keeps the smallest set of most likely tokens whose probabilities reach this sum.
        top_k: number of most likely tokens kept; 0 or -1 keeps all.
        min_p: keeps tokens at least this likely relative to the most likely one.
        seed: 64-bit; None derives one from the engine's seed and the arrival number. RequestOutput.seed reports it.
        stop: strings that end the text; they are not part of it unless include_stop_str_in_output.
        stop_token_ids: tokens that end the text besides the model's own end tokens.
        ignore_eos: whether the model's own end tokens do not end the text.
        max_tokens: maximum number of tokens to generate; None goes to the end of the context.
        min_tokens: end tokens and stop_token_ids cannot be chosen before this many.
        logprobs: report the log-probabilities of each generated token and of this many most likely tokens, in the raw
            distribution: before penalties, bias and temperature.
        prompt_logprobs: the same for the tokens of the prompt, which then reuses no cached prefix.
        detokenize: False leaves the text empty (and allows no stop strings).
        logit_bias: token id -> number added to its logit, -100 to 100.
        bad_words: words that are never completed. The client sets bad_words_token_ids from them.
        logits_processors: names of functions that a user has registered (plugins/logits_processors.py), or a mapping of
            names to their arguments, in the order in which they run.
        structured_outputs: the form that the answer must have. Only tokens that it allows are chosen, and the answer
            ends when it is complete, even with ignore_eos or before min_tokens.
        use_beam_search: search for the n most likely answers with n beams, as Transformers' generate(num_beams=n) does;
            they come at the end, best first. The raw distribution decides, so fields that change it are not allowed.
        length_penalty: for a beam search: answers are compared by the sum of their log-probabilities divided by
            (number of tokens) ** length_penalty.
        early_stopping: for a beam search: True ends it with the n-th complete answer, False when no better answer is
            likely, "never" when no better answer is possible.
        output_kind: what each streamed RequestOutput carries.
        pooling: compute the hidden states of the prompt, and generate nothing (`for_pooling`).

    LogitsParams has the options of Transformers' logits processors and of llama.cpp's samplers.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of range; `param` names the field.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    bad_words: Sequence[str] | None = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logits_processors: Mapping[str, Any] | Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: Any = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    pooling: PoolingParams | None = None

    @classmethod
    def for_pooling(cls, pooling: PoolingParams) -> "SamplingParams":
        """Return the parameters of a request that generates nothing."""
        return cls(**POOLING_FIELDS, output_kind=RequestOutputKind.FINAL_ONLY, pooling=pooling)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        self._normalise()
        self._check_numbers()
        self._check_bias()
        self.check_logits_params()
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            check_bool(name, getattr(self, name))
        check_bool("spaces_between_special_tokens", self.spaces_between_special_tokens)
        self._check_form()
        self._check_beam_search()
        self._check_pooling()
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop: stop strings need detokenize=True", param="stop")

    def _normalise(self) -> None:
        """Turn lists into tuples and output_kind into an enum, so that equal parameters are equal values."""
        limits = {"max_items": MAX_STOP_STRINGS, "max_length": MAX_STRING_LENGTH}
        self._set("stop", string_tuple("stop", self.stop, **limits))
        for text in self.stop or ():
            check_unicode(text, param="stop")
        self._set("bad_words", string_tuple("bad_words", self.bad_words, **limits))
        ids = int_tuple("stop_token_ids", self.stop_token_ids, low=0, high=MAX_TOKEN_ID, max_items=MAX_ID_LISTS)
        self._set("stop_token_ids", ids)
        words = list_of("bad_words_token_ids", self.bad_words_token_ids, max_items=MAX_ID_LISTS)
        range_ = {"low": 0, "high": MAX_TOKEN_ID, "max_items": MAX_WORD_IDS}
        word_ids = tuple(int_tuple("bad_words_token_ids", word, **range_) for word in words)
        if () in word_ids:
            raise fail("bad_words_token_ids", [], "a list of sequences of at least one token id")
        self._set("bad_words_token_ids", word_ids)
        self._set("logits_processors", _processors(self.logits_processors))
        check_choice("output_kind", self.output_kind, list(RequestOutputKind))
        self._set("output_kind", RequestOutputKind(self.output_kind))

    def _check_numbers(self) -> None:
        check_int("n", self.n, 1, MAX_CHOICES)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        check_float("temperature", self.temperature, 0.0, 100.0)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise fail("temperature", self.temperature, f"0 (greedy) or a number from {MIN_TEMPERATURE:g} to 100")
        check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        check_int("top_k", self.top_k, -1, 2**31 - 1)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        check_int("seed", self.seed, -(2**63), 2**64 - 1, optional=True)
        check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS, optional=True)
        check_int("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise fail("min_tokens", self.min_tokens, f"at most max_tokens = {self.max_tokens}")
        for name in FLOATS:
            self._set(name, float(getattr(self, name)))  # a numpy number becomes a plain one

    def _check_form(self) -> None:
        if self.guided_decoding is not None:
            message = "guided_decoding: use structured_outputs, its newer name, with a StructuredOutputsParams"
            raise InvalidRequestError(message, param="guided_decoding")
        if self.structured_outputs is None:
            return
        if not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise fail("structured_outputs", self.structured_outputs, "a StructuredOutputsParams")
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            if getattr(self, name) not in (None, ()):
                message = f"{name}: not allowed with structured_outputs, which decides which tokens may come where"
                raise InvalidRequestError(message, param=name)

    def _check_beam_search(self) -> None:
        check_bool("use_beam_search", self.use_beam_search)
        is_never = isinstance(self.early_stopping, str) and self.early_stopping == "never"
        if not (is_never or isinstance(self.early_stopping, bool)):
            raise fail("early_stopping", self.early_stopping, 'true, false or "never"')
        if not self.use_beam_search:
            for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != neutral:
                    raise InvalidRequestError(f"{name}: only allowed with use_beam_search: true", param=name)
            return
        check_int("n", self.n, 1, MAX_BEAM_WIDTH)
        if self.temperature not in (0.0, 1.0):
            raise fail("temperature", self.temperature, "0 or 1 with use_beam_search: nothing is sampled")
        self._set("temperature", 0.0)
        for field in fields(self):
            value = getattr(self, field.name)
            unchanged = value == field.default or (field.name == "top_k" and value == -1)
            if field.name not in WITH_BEAM_SEARCH and not unchanged:
                message = f"{field.name}: not supported with use_beam_search, which searches in the raw distribution"
                raise NotSupportedError(message, param=field.name)

    def _check_pooling(self) -> None:
        if self.pooling is None:
            return
        if not isinstance(self.pooling, PoolingParams):
            raise fail("pooling", self.pooling, "a PoolingParams")
        for field in fields(self):
            if field.name not in WITH_POOLING and (value := getattr(self, field.name)) != (
                expected := POOLING_FIELDS.get(field.name, field.default)
            ):
                allowed = f"{expected!r} with pooling, which generates nothing (SamplingParams.for_pooling)"
                raise fail(field.name, value, allowed)

    def num_candidates(self, num_end_tokens: int) -> int:
        """Return how many continuations of each beam a search needs, so that n go on even if end tokens end others."""
        goes_on = self.ignore_eos and self.structured_outputs is None
        return max(2, 1 + (0 if goes_on else num_end_tokens)) * self.n

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict) or len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise fail("logit_bias", self.logit_bias, f"a map of at most {MAX_BIASED_TOKENS} token ids to numbers")
        for token_id, bias in self.logit_bias.items():
            check_int("logit_bias", token_id, 0, MAX_TOKEN_ID)
            check_float("logit_bias", bias, -100.0, 100.0)
        self._set("logit_bias", {int(token_id): float(bias) for token_id, bias in self.logit_bias.items()})

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequestError if a token id is outside the model's vocabulary."""
        given = {"stop_token_ids": self.stop_token_ids or (), "logit_bias": self.logit_bias or {}, **self.listed_ids()}
        for name, token_ids in given.items():
            for token_id in token_ids:
                check_int(name, token_id, 0, vocab_size - 1)

    def settled(self, **fields: Any) -> "SamplingParams":
        """Return a copy with fields that the client has settled (seed, max_tokens, ...), without checking it again."""
        made = copy.copy(self)
        for name, value in fields.items():
            made._set(name, value)
        return made

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _processors(value: Any) -> dict[str, Any] | None:
    """Return name -> argument or None; None without processors. Raise InvalidRequestError if malformed."""
    named = value if isinstance(value, Mapping) else None
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        named = dict.fromkeys(value)
    if (value is not None and named is None) or (named is not None and len(named) > MAX_PROCESSORS):
        allowed = f"at most {MAX_PROCESSORS} names, or a mapping of names to arguments"
        raise fail("logits_processors", value, allowed)
    for name, argument in (named or {}).items():
        check_str("logits_processors", name, max_length=MAX_STRING_LENGTH)
        check_unicode(name, param="logits_processors")
        if not _is_plain(argument, MAX_ARGUMENT_DEPTH):
            allowed = "numbers, texts, true, false, null, and lists and mappings of these"
            raise fail("logits_processors", argument, f"made of {allowed}: it goes to another process")
    return copy.deepcopy(dict(named)) if named else None


def _is_plain(value: Any, depth: int) -> bool:
    """Return whether a processor's argument can go to another process. Raise as check_unicode does."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    if isinstance(value, str):
        check_unicode(value, param="logits_processors")
    if value is None or isinstance(value, str | float):
        return True
    if depth and isinstance(value, list | tuple):
        return all(_is_plain(item, depth - 1) for item in value)
    mapping = depth and isinstance(value, dict)
    return bool(mapping) and all(
        isinstance(key, str) and _is_plain(key, 0) and _is_plain(item, depth - 1) for key, item in value.items()
    )
