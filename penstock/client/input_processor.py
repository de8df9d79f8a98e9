"""InputProcessor: the one place where a prompt is tokenised, and where prompt and parameters are checked.

A PromptRequest, which LLM, AsyncLLM and the HTTP server make of what they are asked for, goes in. An OpenRequest comes
out that leaves nothing open: ids, lengths and seed are settled, so it gives the same tokens on any engine. The
InputProcessor knows no engine and keeps no request. `process` may run in several threads at once, because tokenising a
long text takes a while.
"""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from penstock.client.open_requests import OpenRequest
from penstock.client.prompts import PROMPT_KEYS, check_text
from penstock.errors import (
    InvalidRequestError,
    check_float,
    check_ids,
    check_int,
    check_str,
    check_unicode,
    fail,
    invalid,
)
from penstock.interface.messages import EngineRequest, ModelInfo
from penstock.interface.pooling import PoolingParams
from penstock.interface.sampling_params import MAX_BREAKER_IDS, SamplingParams
from penstock.tokenizer.answer_formats import reasoning_format_of
from penstock.tokenizer.answers import is_within, thinking_ids
from penstock.tokenizer.tokenizer import Tokenizer, check_prompt_length, encode_all, encode_pair

# A string, token ids, or a mapping with `prompt` or `prompt_token_ids`, and perhaps `cache_salt`.
Prompt = str | list[int] | Mapping[str, Any]
MAX_SALT_LENGTH = 1024
MAX_REQUEST_ID_LENGTH = 128
MAX_PRIORITY = 1000
MAX_TIMEOUT_S = 86400.0

Sequences = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt of a call, and how it is to be answered.

    Attributes:
        token_ids: the prompt; empty if `text` is still to be tokenised.
        text: with ids, it is only repeated in the output.
        seed: replaces that of `params`.
        output_token_ids: tokens of an earlier computation of the request, one list per choice. They come first, and the
            engine continues after them, with the same seed.
        cache_salt: see EngineRequest.cache_salt.
        adapter: the id of the adapter that computes it (client/adapters.py); None: the base model.
        params: None takes the model's defaults.
        request_id: None makes one.
        flow: the engine is fair among flows, and all requests of one flow share one share of it. None: this request
            with all its choices.
        priority: lower comes first, with scheduling_policy = "priority"; with other policies it must be 0.
        timeout: seconds until the answer is due, with scheduling_policy = "deadline"; None with other policies. It
            orders requests, and ends none.
        param: the caller's name for the prompt, for errors.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    seed: int | None = None
    output_token_ids: list[list[int]] | None = None
    cache_salt: str | None = None
    adapter: str | None = None
    params: SamplingParams | None = None
    request_id: str | None = None
    flow: str | None = None
    priority: int = 0
    timeout: float | None = None
    param: str = "prompt"

    @classmethod
    def of(
        cls, prompt: Any, params: SamplingParams | Any = None, request_id: str | None = None, **more: Any
    ) -> "PromptRequest":
        """Make the request for a prompt in any of the forms of `Prompt`, or an array of one axis.

        more: further fields.

        Raises:
            InvalidRequestError: it is none of these. Keys of a mapping that have no meaning must be None.
        """
        more |= {"params": params, "request_id": request_id}
        if isinstance(prompt, str):
            return cls(text=prompt, **more)
        if not isinstance(prompt, Mapping):
            return cls(_as_list("prompt", prompt), **more)
        unknown = [key for key, value in prompt.items() if key not in PROMPT_KEYS and value is not None]
        if unknown or not prompt:
            allowed = f"a mapping with {' or '.join(PROMPT_KEYS[:2])}, and perhaps {PROMPT_KEYS[2]}"
            raise fail("prompt", unknown[0] if unknown else {}, allowed)
        text, ids, salt = (prompt.get(key) for key in PROMPT_KEYS)
        if text is not None and not isinstance(text, str):
            raise fail("prompt", text, "a text")
        if ids is None:
            return cls(text=text or "", cache_salt=salt, **more)
        name = "prompt_token_ids"
        return cls(_as_list(name, ids), text, cache_salt=salt, param=name, **more)


def _as_list(name: str, ids: Any) -> list[int]:
    if hasattr(ids, "tolist"):  # an array of numpy or a tensor of torch
        ids = ids.tolist()
    if not isinstance(ids, list | tuple) or not ids:
        raise fail(name, ids, "a text, or a list of at least one token id")
    return list(ids)


class InputProcessor:
    """Makes OpenRequests for one model. Without a tokenizer it takes prompts as ids only.

    A request without a seed gets one from the engine's `seed` and its arrival number.

    Args:
        arrivals: counts the requests; processors that one client uses after another share it.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, info: ModelInfo, *, seed: int = 0, arrivals: Iterator[int] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._seed = seed
        self._arrivals = itertools.count() if arrivals is None else arrivals
        self._breakers = None if tokenizer is None else SequenceBreakers(tokenizer)
        self._last_bad_words: tuple[tuple[str, ...], tuple[tuple[int, ...], ...]] = ((), ())

    def process(self, request: PromptRequest) -> OpenRequest:
        """Check and prepare a request.

        Raises:
            InvalidRequestError: a value is wrong; code "context_length_exceeded" if the prompt leaves no room for an
                answer.
        """
        request_id = request.request_id
        if request_id is not None:
            check_str("request_id", request_id, max_length=MAX_REQUEST_ID_LENGTH)
            check_unicode(request_id, param="request_id")
        params = SamplingParams(**self._info.default_sampling) if request.params is None else request.params
        if not isinstance(params, SamplingParams):  # a dict is a common mistake
            raise fail("sampling_params", params, "a SamplingParams")
        params.check_vocabulary(self._info.vocab_size)
        deadline = self._check_order(request.priority, request.timeout)
        if params.stop and self._tokenizer is None:
            raise invalid("stop", "stop strings need a tokenizer, and the model has none")
        ids = self.read_prompt(request, params)
        params = self._settle_pooling(params, len(ids))
        arrival = next(self._arrivals)
        request_id = request_id or f"request-{arrival}"
        params = self._settle(params if request.seed is None else params.settled(seed=request.seed), ids, arrival)
        known = _check_known(request.output_token_ids or (), params)
        unique = f"{request_id}#{arrival}"
        source = EngineRequest(
            unique,
            ids,
            params,
            flow=unique if request.flow is None else request.flow,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            priority=request.priority,
            deadline=deadline,
            arrived_at=time.monotonic(),
        )
        return OpenRequest(request_id, request.text, params, _of_choices(source, known), self._tokenizer)

    def read_prompt(self, request: PromptRequest, params: SamplingParams | None = None) -> list[int]:
        """Check a prompt and find its ids, cut if `params` say so. Raise as `process` does."""
        pooling = None if params is None else params.pooling
        text, ids = request.text, request.token_ids
        check_salt(request.cache_salt)
        if not ids:
            if self._tokenizer is None:
                raise invalid("prompt", "the model has no tokenizer; give token ids")
            check_text(text or "")
            check_prompt_length(text or "", self._info.max_model_len)
        if text is not None:
            check_unicode(text, param="prompt")
        special_ids: frozenset[int] = frozenset()
        if not ids and self._tokenizer is not None:
            given = text or ""
            ids = self._tokenizer.encode(
                given if pooling is None else self._info.pooler.prompted(given, pooling.prompt_name)
            )
            if not ids:
                raise fail("prompt", ids, "a text, or a list of at least one token id")
            if pooling is not None:
                ids = self._info.pooler.ended(ids, self._tokenizer.eos_token_id)
                special_ids = self._tokenizer.special_ids
        elif pooling is not None and pooling.prompt_name is not None:
            raise fail("prompt_name", pooling.prompt_name, "absent: a prompt goes before a text, not before token ids")
        if pooling is not None:
            ids = pooling.truncated(ids, self._info.max_model_len, special_ids)
        elif params is not None:
            ids = params.truncated(ids, self._info.max_model_len)
        check_num_tokens(request.param, len(ids), self._info.max_model_len, is_pooled=pooling is not None)
        check_ids(request.param, ids, self._info.vocab_size)
        return list(ids)

    def _check_order(self, priority: Any, timeout: Any) -> float | None:
        """Compute the deadline. Raise InvalidRequestError for an option that the engine's policy does not use."""
        check_int("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
        if timeout is not None:
            check_float("timeout", timeout, 0.0, MAX_TIMEOUT_S, low_open=True)
        policy = self._info.scheduling_policy
        for name, value, needed in (("priority", priority or None, "priority"), ("timeout", timeout, "deadline")):
            if value is not None and policy != needed:
                raise invalid(name, f"{value} has no effect with scheduling_policy = {policy}; it needs {needed}")
        return None if timeout is None else time.monotonic() + timeout

    def assign_seed(self) -> int:
        """Assign the seed that a request without one would get now, and count it as an arrival."""
        return assigned_seed(self._seed, next(self._arrivals))

    def _settle_pooling(self, params: SamplingParams, num_tokens: int) -> SamplingParams:
        """Settle the parameters of pooling. Refuse to generate without a language-model head."""
        if params.pooling is not None:
            return params.settled(pooling=self._info.pooler.settle(params.pooling, num_tokens))
        if not self._info.has_lm_head:
            gives = "classes" if self._info.pooler.labels else "embeddings"
            message = f"this model has no language-model head: it gives {gives}, and generates nothing"
            raise InvalidRequestError(message, param="model", code="no_lm_head")
        return params

    # --- the parameters --------------------------------------------------------------------------------------------

    def _settle(self, params: SamplingParams, prompt: list[int], arrival: int) -> SamplingParams:
        room = max(1, self._info.max_model_len - len(prompt))  # 0 only with pooling, which needs no room
        max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        if params.min_tokens > max_tokens:
            raise fail("min_tokens", params.min_tokens, f"at most the {max_tokens} tokens there is room for")
        seed = assigned_seed(self._seed, arrival) if params.seed is None else params.seed
        words = params.bad_words_token_ids + self._ids_of_bad_words(tuple(params.bad_words or ()))
        breakers = params.dry_sequence_breaker_ids + self._ids_of_breakers(params)
        counts = params.settle_logprobs(len(prompt), max_tokens, self._info.vocab_size)
        return params.settled(
            max_tokens=max_tokens, seed=seed, bad_words_token_ids=words, dry_sequence_breaker_ids=breakers,
            thinking_token_ids=self._thinking_ids(params, prompt), **counts,
        )  # fmt: skip

    def _thinking_ids(self, params: SamplingParams, prompt: list[int]) -> Sequences:
        """Find the tokens around reasoning, if it has a limit. An answer with a form has only the reasoning that the
        server has put into it."""
        is_free = params.structured_outputs is None and not params.thinking_token_ids
        if params.thinking_token_budget in (None, -1) or not is_free or self._tokenizer is None:
            return params.thinking_token_ids
        template = self._tokenizer.chat_template
        reasoning = reasoning_format_of("" if template is None else template.text)
        is_thinking = reasoning is not None and is_within(reasoning, prompt, self._tokenizer)
        return thinking_ids(reasoning, self._tokenizer, is_thinking=is_thinking)

    def _ids_of_breakers(self, params: SamplingParams) -> Sequences:
        """Find the ids of DRY's sequence breakers. Without a tokenizer there are none."""
        if not params.dry_multiplier or self._breakers is None:
            return ()
        return self._breakers.ids_of(tuple(params.dry_sequence_breakers or ()))

    def _ids_of_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Encode each word as at the start of a text and after a space. The ids are kept for the next prompt."""
        known, ids = self._last_bad_words
        if known != words:
            ids = self._encode_bad_words(words)
            self._last_bad_words = (words, ids)  # a single assignment, because other threads read it
        return ids

    def _encode_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            check_unicode(word, param="bad_words")
            if self._tokenizer is None or not word.strip():
                raise fail("bad_words", word, "a word (and the engine must have a tokenizer)")
            for text in (word.lstrip(), " " + word.lstrip()):
                found[tuple(self._tokenizer.encode(text, add_special_tokens=False))] = None
        return tuple(ids for ids in found if ids)


def _of_choices(source: EngineRequest, known: Sequence[list[int]]) -> list[EngineRequest]:
    """Make one request per choice, without texts. Only the first computes the prompt's log-probabilities.

    The hypotheses of a beam search are the choices of one request.
    """
    first = source.params.settled(stop=(), bad_words=(), dry_sequence_breakers=())
    later = first.settled(prompt_logprobs=None)
    count = 1 if source.params.use_beam_search else source.params.n
    return [
        replace(
            source,
            request_id=f"{source.request_id}-{choice}",
            params=later if choice else first,
            choice=choice,
            output_token_ids=list(known[choice]) if known else [],
        )
        for choice in range(count)
    ]


def pair_request(
    tokenizer: Tokenizer | None,
    info: ModelInfo,
    pair: tuple[Any, Any],
    params: PoolingParams,
    names: tuple[str, ...] = ("text_1", "text_2"),
) -> tuple[list[int], PoolingParams]:
    """Encode a pair of texts for a cross-encoder, cut as the parameters say: its ids, and the parameters with them.

    names: of the two texts, for errors.

    Raises:
        InvalidRequestError: the model has not exactly one label, or a text is none, or too long.
    """
    if len(info.pooler.labels) != 1:
        raise invalid(
            "model", f"a classifier with {len(info.pooler.labels)} labels scores no pairs; it needs one label"
        )
    for name, text in zip(names, pair, strict=True):
        if not isinstance(text, str) or not text:
            raise fail(name, text, "a text: a cross-encoder reads pairs of them")
        check_prompt_length(text, info.max_model_len, param=name)
    ids, start = encode_pair(tokenizer, *pair)
    special = frozenset() if tokenizer is None else tokenizer.special_ids
    ids = params.truncated(ids, info.max_model_len, special)
    start = start if start is not None and start < len(ids) and info.pooler.num_token_types > 1 else None
    return ids, replace(params, task="classify", second_text_start=start, truncate_prompt_tokens=None)


def check_salt(salt: Any) -> None:
    """Raise InvalidRequestError unless `salt` is a valid cache_salt or None."""
    check_str("cache_salt", salt, max_length=MAX_SALT_LENGTH, optional=True)
    if salt is not None:
        check_unicode(salt, param="cache_salt")


def check_num_tokens(param: str, num_tokens: int, max_model_len: int, *, is_pooled: bool = False) -> None:
    """Raise InvalidRequestError (code "context_length_exceeded") if a prompt does not fit the context.

    is_pooled: whether the context holds nothing else; otherwise it must leave room for an answer.
    """
    if is_pooled and num_tokens > max_model_len:
        what = f"{num_tokens} tokens exceed the context of {max_model_len}; truncate_prompt_tokens cuts them"
    elif not is_pooled and num_tokens >= max_model_len:
        what = f"{num_tokens} tokens are too many; the context of {max_model_len} tokens must hold the prompt and "
        what += "at least one token of the answer"
    else:
        return
    raise invalid(param, what, "context_length_exceeded")


def _check_known(output_token_ids: Sequence[list[int]], params: SamplingParams) -> Sequence[list[int]]:
    """Check the tokens that the choices got before, one list per choice, or none.

    Raises:
        InvalidRequestError: the lists do not fit the choices, or log-probabilities or mirostat are requested, whose
            state is not kept.
    """
    if not output_token_ids or (params.use_beam_search and not any(output_token_ids)):
        return ()
    if params.use_beam_search:
        raise invalid("output_token_ids", "not allowed with use_beam_search: a search cannot be resumed")
    num_tokens = [len(ids) for ids in output_token_ids]
    if len(num_tokens) != params.n or max(num_tokens) >= (params.max_tokens or 0):
        allowed = f"one list per choice, each shorter than max_tokens = {params.max_tokens}"
        raise invalid("output_token_ids", f"must be {allowed}")
    if params.logprobs is not None or params.prompt_logprobs is not None or params.has_sampler_state:
        raise invalid(
            "output_token_ids", "not allowed with log-probabilities or mirostat; compute the request from its beginning"
        )
    return output_token_ids


def assigned_seed(engine_seed: int, arrival: int) -> int:
    """Derive a seed that looks random and depends only on the engine's seed and the order of arrival.

    It has 53 bits, so that a JSON reader that stores numbers as doubles can send it back unchanged.
    """
    digest = blake2b(f"{engine_seed}:{arrival}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 11


MAX_TAIL = 20  # tokens of the rest of a breaker
KEPT = 64  # breakers whose ids are kept, because the search goes through the whole vocabulary


class SequenceBreakers:
    """Finds the token ids that stand for DRY's sequence breakers, which are texts. Thread-safe.

    A breaker may lie inside a token ("\\n" in ".\\n\\n"), or begin in one token and continue in the next. So, as in
    llama.cpp, it is represented by every token that contains it, and by every token that ends with its beginning,
    followed by the tokens of its rest.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: list[bytes] = []  # read when it is first needed
        self._of_one = lru_cache(KEPT)(self._search)

    def ids_of(self, breakers: Iterable[str]) -> Sequences:
        """Find the sequences of ids that stand for these texts.

        Raises:
            InvalidRequestError: too many tokens contain them.
        """
        found: dict[tuple[int, ...], None] = {}
        for breaker in breakers:
            check_unicode(breaker, param="dry_sequence_breakers")
            found |= dict.fromkeys(self._of_one(breaker))
        if len(found) > MAX_BREAKER_IDS:
            raise invalid(
                "dry_sequence_breakers", f"{len(found)} tokens contain one; at most {MAX_BREAKER_IDS} are allowed"
            )
        return tuple(found)

    def _search(self, breaker: str) -> Sequences:
        if not self._vocabulary:
            count = self._tokenizer.vocab_size
            self._vocabulary = [self._tokenizer.token_to_bytes(token_id) for token_id in range(count)]
        whole = breaker.encode()
        starts = [breaker[:length].encode() for length in range(1, len(breaker))]
        rests = encode_all(self._tokenizer, [breaker[length:] for length in range(1, len(breaker))])
        tails = [tuple(ids[:MAX_TAIL]) for ids in rests]
        found: list[tuple[int, ...]] = []
        for token_id, text in enumerate(self._vocabulary):
            if whole in text:
                found.append((token_id,))
            else:
                pairs = zip(starts, tails, strict=True)
                found += [(token_id, *tail) for start, tail in pairs if tail and text.endswith(start)]
        return tuple(found)
