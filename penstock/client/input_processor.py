"""InputProcessor: turns a user's prompt and SamplingParams into checked, tokenised EngineRequests, one per choice.

A PreparedRequest leaves nothing open: ids, lengths and seed are settled, so it gives the same tokens on any engine. The
InputProcessor knows no engine and keeps no request. `process` may run in several threads at once, because tokenising a
long text takes a while.
"""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from penstock.client.sequence_breakers import SequenceBreakers, Sequences
from penstock.errors import InvalidRequestError, check_float, check_ids, check_int, check_str, check_unicode, fail
from penstock.interface.messages import EngineRequest, ModelInfo
from penstock.interface.pooling import PoolingParams
from penstock.interface.prompts import PROMPT_KEYS, check_text
from penstock.interface.sampling_params import SamplingParams
from penstock.tokenizer.tokenizer import Tokenizer, check_prompt_length

MAX_REQUEST_ID_LENGTH = 128
MAX_SALT_LENGTH = 1024
MAX_PRIORITY = 1000
MAX_TIMEOUT_S = 86400.0


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One user's request, ready to run.

    Attributes:
        request_id: the user's, or a new one. OpenRequests checks whether it is in use.
        prompt: the text, if one was given.
        params: as the user gave them (stop strings included), with max_tokens and seed settled.
        engine_requests: one per choice, in order; a single one for a beam search. Their ids are never used twice, even
            if a request_id is.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    engine_requests: tuple[EngineRequest, ...]


class InputProcessor:
    """Makes PreparedRequests for one model. Without a tokenizer it takes prompts as ids only.

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

    def process(
        self,
        prompt: Any,
        params: SamplingParams | Any = None,
        request_id: str | None = None,
        flow: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> PreparedRequest:
        """Check and prepare a request.

        Args:
            prompt: a text, ids (a list, or an array of one axis), or a mapping with `prompt` or `prompt_token_ids`;
                with both, the ids are the prompt and the text is only repeated in the output. A mapping may have a
                `cache_salt`; other keys must be None.
            params: None takes the model's defaults.
            request_id: None makes one.
            flow: the flow of the request (EngineRequest.flow); None: one of its own, with all its choices.
            priority: lower comes first, with scheduling_policy = priority.
            timeout: seconds until the answer is due, with scheduling_policy = deadline.

        Raises:
            InvalidRequestError: a value is wrong; code "context_length_exceeded" if the prompt leaves no room for an
                answer.
        """
        if request_id is not None:
            check_str("request_id", request_id, max_length=MAX_REQUEST_ID_LENGTH)
            check_unicode(request_id, param="request_id")
        params = SamplingParams(**self._info.default_sampling) if params is None else params
        if not isinstance(params, SamplingParams):  # a dict is a common mistake
            raise fail("sampling_params", params, "a SamplingParams")
        params.check_vocabulary(self._info.vocab_size)
        deadline = self._check_turn(priority, timeout)
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError("stop: stop strings need a tokenizer, and the model has none", param="stop")
        text, ids = self._read_prompt(prompt, params.pooling)
        params = self._settle_pooling(params, len(ids))
        salt = _salt_of(prompt)
        arrival = next(self._arrivals)
        request_id = request_id or f"request-{arrival}"
        params = self._settle(params, len(ids), arrival)
        unique = f"{request_id}#{arrival}"
        flow = unique if flow is None else flow
        turn = EngineRequest(unique, ids, params, flow=flow, priority=priority, deadline=deadline)
        choices = _choices(replace(turn, cache_salt=salt, arrived_at=time.monotonic()))
        return PreparedRequest(request_id, text, ids, params, choices)

    def read_prefix(self, prompt: Any) -> tuple[list[int], str | None]:
        """Return the ids and the salt of a prompt. Raise InvalidRequestError as `process` does."""
        return self._read_prompt(prompt)[1], _salt_of(prompt)

    def _check_turn(self, priority: Any, timeout: Any) -> float | None:
        """Return the deadline. Raise InvalidRequestError for an option that the engine's policy does not use."""
        check_int("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
        if timeout is not None:
            check_float("timeout", timeout, 0.0, MAX_TIMEOUT_S, low_open=True)
        policy = self._info.scheduling_policy
        for name, value, needed in (("priority", priority or None, "priority"), ("timeout", timeout, "deadline")):
            if value is not None and policy != needed:
                raise InvalidRequestError(
                    f"{name}: {value} has no effect with scheduling_policy = {policy}; it needs {needed}", param=name
                )
        return None if timeout is None else time.monotonic() + timeout

    def assign_seed(self) -> int:
        """Return the seed that a request without one would get now."""
        return assigned_seed(self._seed, next(self._arrivals))

    # --- the prompt ------------------------------------------------------------------------------------------------

    def _read_prompt(self, prompt: Any, pooling: PoolingParams | None = None) -> tuple[str | None, list[int]]:
        """Return the prompt's text, if it has one, and its ids."""
        if isinstance(prompt, str):
            return prompt, self._ids_of_text(prompt, pooling)
        if not isinstance(prompt, Mapping):
            return None, self._checked_ids("prompt", prompt, pooling)
        unknown = [key for key, value in prompt.items() if key not in PROMPT_KEYS and value is not None]
        if unknown or not prompt:
            allowed = f"a mapping with {' or '.join(PROMPT_KEYS[:2])}, and perhaps {PROMPT_KEYS[2]}"
            raise fail("prompt", unknown[0] if unknown else {}, allowed)
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise fail("prompt", text, "a text")
        if ids is None:
            return text, self._ids_of_text(text or "", pooling)
        if text is not None:
            check_unicode(text, param="prompt")
        return text, self._checked_ids("prompt_token_ids", ids, pooling)

    def _ids_of_text(self, text: str, pooling: PoolingParams | None) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequestError("prompt: the model has no tokenizer; give token ids", param="prompt")
        check_text(text)
        check_prompt_length(text, self._info.max_model_len)
        check_unicode(text, param="prompt")
        return self._checked_ids("prompt", self._tokenizer.encode(text), pooling)

    def _checked_ids(self, name: str, ids: Any, pooling: PoolingParams | None) -> list[int]:
        if hasattr(ids, "tolist"):  # an array of numpy or a tensor of torch
            ids = ids.tolist()
        if not isinstance(ids, list | tuple) or not ids:
            raise fail(name, ids, "a text, or a list of at least one token id")
        if pooling is not None:
            ids = pooling.truncated(ids, self._info.max_model_len)
            check_pooled_length(name, len(ids), self._info.max_model_len)
        elif len(ids) >= self._info.max_model_len:
            raise InvalidRequestError(
                f"{name}: {len(ids)} tokens are too many; the context of {self._info.max_model_len} tokens must hold "
                "the prompt and at least one token of the answer",
                param=name,
                code="context_length_exceeded",
            )
        check_ids(name, ids, self._info.vocab_size)
        return list(ids)

    def _settle_pooling(self, params: SamplingParams, num_tokens: int) -> SamplingParams:
        """Return the parameters with pooling settled. Refuse to generate without a language-model head."""
        if params.pooling is not None:
            return params.settled(pooling=self._info.pooler.settle(params.pooling, num_tokens))
        if not self._info.has_lm_head:
            message = "this model has no language-model head: it gives embeddings, and generates nothing"
            raise InvalidRequestError(message, param="model", code="no_lm_head")
        return params

    # --- the parameters --------------------------------------------------------------------------------------------

    def _settle(self, params: SamplingParams, num_prompt_tokens: int, arrival: int) -> SamplingParams:
        room = max(1, self._info.max_model_len - num_prompt_tokens)  # 0 only with pooling, which needs no room
        max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        if params.min_tokens > max_tokens:
            raise fail("min_tokens", params.min_tokens, f"at most the {max_tokens} tokens there is room for")
        seed = assigned_seed(self._seed, arrival) if params.seed is None else params.seed
        words = params.bad_words_token_ids + self._ids_of_bad_words(tuple(params.bad_words or ()))
        breakers = params.dry_sequence_breaker_ids + self._ids_of_breakers(params)
        return params.settled(
            max_tokens=max_tokens, seed=seed, bad_words_token_ids=words, dry_sequence_breaker_ids=breakers
        )

    def _ids_of_breakers(self, params: SamplingParams) -> Sequences:
        """Return the ids of DRY's sequence breakers. Without a tokenizer there are none."""
        if not params.dry_multiplier or self._breakers is None:
            return ()
        return self._breakers.ids_of(tuple(params.dry_sequence_breakers or ()))

    def _ids_of_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the ids of each word, at the start of a text and after a space. They are kept for the next prompt."""
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


def check_pooled_length(name: str, num_tokens: int, max_model_len: int) -> None:
    """Raise InvalidRequestError if a pooled prompt does not fit the context, which holds nothing else."""
    if num_tokens > max_model_len:
        message = f"{name}: {num_tokens} tokens exceed the context of {max_model_len}; truncate_prompt_tokens cuts them"
        raise InvalidRequestError(message, param=name, code="context_length_exceeded")


def _salt_of(prompt: Any) -> str | None:
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    check_salt(salt)
    return salt


def check_salt(salt: Any) -> None:
    """Raise InvalidRequestError unless `salt` is a valid cache_salt or None."""
    check_str("cache_salt", salt, max_length=MAX_SALT_LENGTH, optional=True)
    if salt is not None:
        check_unicode(salt, param="cache_salt")


def _choices(source: EngineRequest) -> tuple[EngineRequest, ...]:
    """Return one request per choice, without texts. Only the first computes the prompt's log-probabilities.

    The hypotheses of a beam search are the choices of one request.
    """
    first = source.params.settled(stop=(), bad_words=(), dry_sequence_breakers=())
    later = first.settled(prompt_logprobs=None)
    return tuple(
        replace(source, request_id=f"{source.request_id}-{choice}", params=later if choice else first, choice=choice)
        for choice in range(1 if source.params.use_beam_search else source.params.n)
    )


def resumed(prepared: PreparedRequest, output_token_ids: Sequence[list[int]]) -> PreparedRequest:
    """Return the request with the tokens that its choices got before, one list per choice; unchanged without lists.

    Raises:
        InvalidRequestError: the lists do not fit the choices, or log-probabilities or mirostat are requested, whose
            state is not kept.
    """
    if not output_token_ids:
        return prepared
    params = prepared.params
    if params.use_beam_search and not any(output_token_ids):
        return prepared
    if params.use_beam_search:
        message = "output_token_ids: not allowed with use_beam_search: a search cannot be resumed"
        raise InvalidRequestError(message, param="output_token_ids")
    num_tokens = [len(ids) for ids in output_token_ids]
    if len(num_tokens) != params.n or max(num_tokens) >= (params.max_tokens or 0):
        allowed = f"one list per choice, each shorter than max_tokens = {params.max_tokens}"
        raise InvalidRequestError(f"output_token_ids: must be {allowed}", param="output_token_ids")
    if params.logprobs is not None or params.prompt_logprobs is not None or params.has_sampler_state:
        message = (
            "output_token_ids: not allowed with log-probabilities or mirostat; compute the request from its beginning"
        )
        raise InvalidRequestError(message, param="output_token_ids")
    pairs = zip(prepared.engine_requests, output_token_ids, strict=True)
    continued = tuple(replace(request, output_token_ids=list(ids)) for request, ids in pairs)
    return replace(prepared, engine_requests=continued)


def assigned_seed(engine_seed: int, arrival: int) -> int:
    """Return a seed that looks random and depends only on the engine's seed and the order of arrival.

    It has 53 bits, so that a JSON reader that stores numbers as doubles can send it back unchanged.
    """
    digest = blake2b(f"{engine_seed}:{arrival}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 11
