"""LogitsParams: the sampling options of Transformers' logits processors and llama.cpp's samplers.

Names, meanings and defaults are theirs, and every default is "off". docs/sampling.md gives the order of application.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import check_float, check_int, fail, int_tuple, list_of, string_tuple

MAX_TOKEN_ID = 2**31 - 1
MAX_COUNT = 2**31 - 1
MAX_LISTED_IDS = 1024  # ids in a list of suppressed tokens, or sequences in a list of sequences
MAX_SEQUENCE = 1024  # ids in one sequence
MAX_NGRAM = 64
MAX_BREAKERS = 16
MAX_BREAKER_LENGTH = 40  # characters
MAX_BREAKER_IDS = 2**17  # id sequences that stand for the breakers of a request
DRY_BREAKERS = ("\n", ":", '"', "*")
Bias = tuple[tuple[tuple[int, ...], float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsParams:
    """Parameters of logits processors and samplers. "End tokens" are those of the model and stop_token_ids.

    Attributes:
        no_repeat_ngram_size: no sequence of this many tokens occurs twice in prompt and output.
        suppress_tokens: never chosen.    begin_suppress_tokens: not chosen as the first token.
        bad_words_ids: sequences of ids that are never completed. A sequence that is one end token is ignored.
        sequence_bias: numbers added to the logit of the token that completes a sequence: [[[ids], number], ...], or a
            mapping of tuples of ids to numbers.
        forced_bos_token_id: the second token of a text whose prompt is one token.
        forced_eos_token_id: the last of max_tokens tokens; of several ids, one is chosen.
        min_length: no end token before prompt and output have this many tokens.
        min_new_tokens: no end token before this many outputs.
        exponential_decay_length_penalty: (start, factor): after `start` outputs, end tokens become more likely:
            |logit| * (factor ** (tokens since then) - 1) is added to their logits.
        typical_p: keeps the tokens whose surprise is nearest to the entropy, up to this total probability.
        epsilon_cutoff: drops tokens less likely than this.
        eta_cutoff: drops tokens less likely than min(this, sqrt(this) * exp(-entropy)).
        top_h: keeps the most likely tokens, up to this share of the entropy of the 100 most likely tokens.
        xtc_probability: how often all tokens at least as likely as xtc_threshold are dropped, except the least likely
            one of them.
        xtc_threshold: above 0.5 XTC is off, because two tokens cannot both be that likely.
        dry_multiplier: subtracts dry_multiplier * dry_base ** (n - dry_allowed_length) from the logit of a token that
            would make a repetition of n tokens one longer. 0 is off.
        dry_penalty_last_n: number of last tokens in which repetitions are looked for; -1: all.
        dry_sequence_breakers: texts that a repetition never crosses. The client derives dry_sequence_breaker_ids.
        mirostat: 1 or 2 keep the surprise of the tokens, in bits, near mirostat_tau, after the other options. Its
            state `mu` changes with every token, so drafts cannot be verified with it.
        mirostat_eta: how fast mu changes.

    Temperature 0 is greedy: only the options that change logits apply, as with do_sample=False in Transformers.
    """

    no_repeat_ngram_size: int = 0
    suppress_tokens: Sequence[int] | None = ()
    begin_suppress_tokens: Sequence[int] | None = ()
    bad_words_ids: Sequence[Sequence[int]] | None = ()
    sequence_bias: Mapping[Any, Any] | Sequence[Any] | None = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | Sequence[int] | None = ()
    min_length: int = 0
    min_new_tokens: int = 0
    exponential_decay_length_penalty: Sequence[float] | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    top_h: float | None = None
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: str | Sequence[str] | None = DRY_BREAKERS
    dry_sequence_breaker_ids: tuple[tuple[int, ...], ...] = ()
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1

    def check_logits_params(self) -> None:
        """Turn lists into tuples. Raise InvalidRequestError, which names the field, if a value is not allowed."""
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            self._set(name, _ids(name, getattr(self, name), MAX_LISTED_IDS))
        forced = self.forced_eos_token_id
        given = (forced,) if isinstance(forced, int) and not isinstance(forced, bool) else forced
        self._set("forced_eos_token_id", _ids("forced_eos_token_id", given, MAX_LISTED_IDS))
        check_int("forced_bos_token_id", self.forced_bos_token_id, 0, MAX_TOKEN_ID, optional=True)
        for name, most in (("bad_words_ids", MAX_LISTED_IDS), ("dry_sequence_breaker_ids", MAX_BREAKER_IDS)):
            words = list_of(name, getattr(self, name), max_items=most)
            self._set(name, tuple(_sequence(name, word) for word in words))
        self._set("sequence_bias", _sequence_bias(self.sequence_bias))
        limits = {"max_items": MAX_BREAKERS, "max_length": MAX_BREAKER_LENGTH}
        breakers = string_tuple("dry_sequence_breakers", self.dry_sequence_breakers, **limits)
        self._set("dry_sequence_breakers", breakers)
        decay = self.exponential_decay_length_penalty
        self._set("exponential_decay_length_penalty", None if decay is None else _decay(decay))
        for name, low, high in INTEGERS:
            check_int(name, getattr(self, name), low, high)
        for name, least, most_, above in NUMBERS:
            value = getattr(self, name)
            if value is not None or name != "top_h":
                check_float(name, value, least, most_, low_open=above)
                self._set(name, float(value))

    @property
    def has_sampler_state(self) -> bool:
        """Whether a draw depends on the draws before it, so that tokens alone do not suffice to continue."""
        return self.mirostat > 0

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def listed_ids(self) -> dict[str, list[int]]:
        """Return the given token ids, by field, to be checked against the vocabulary."""
        bias: Any = self.sequence_bias
        bos = self.forced_bos_token_id
        forced: Any = self.forced_eos_token_id
        return {
            "suppress_tokens": list(self.suppress_tokens or ()),
            "begin_suppress_tokens": list(self.begin_suppress_tokens or ()),
            "bad_words_ids": [token_id for word in self.bad_words_ids or () for token_id in word],
            "sequence_bias": [token_id for ids, _ in bias for token_id in ids],
            "forced_bos_token_id": [] if bos is None else [bos],
            "forced_eos_token_id": list(forced),
        }


INTEGERS = (  # field, lowest and highest value
    ("no_repeat_ngram_size", 0, MAX_NGRAM),
    ("min_length", 0, MAX_COUNT),
    ("min_new_tokens", 0, MAX_COUNT),
    ("dry_allowed_length", 1, MAX_COUNT),
    ("dry_penalty_last_n", -1, MAX_COUNT),
    ("mirostat", 0, 2),
)
NUMBERS = (  # field, lowest and highest value, whether it must be above the lowest
    ("typical_p", 0.0, 1.0, True),
    ("epsilon_cutoff", 0.0, 1.0, False),
    ("eta_cutoff", 0.0, 1.0, False),
    ("top_h", 0.0, 1.0, True),
    ("xtc_probability", 0.0, 1.0, False),
    ("xtc_threshold", 0.0, 1.0, False),
    ("dry_multiplier", 0.0, 100.0, False),
    ("dry_base", 1.0, 100.0, False),
    ("mirostat_tau", 0.0, 100.0, False),
    ("mirostat_eta", 0.0, 1.0, False),
)


def _ids(name: str, value: Any, max_items: int) -> tuple[int, ...]:
    return int_tuple(name, value, low=0, high=MAX_TOKEN_ID, max_items=max_items)


def _sequence(name: str, value: Any) -> tuple[int, ...]:
    ids = _ids(name, value, MAX_SEQUENCE)
    if not ids:
        raise fail(name, value, "a list of sequences of at least one token id")
    return ids


def _sequence_bias(value: Any) -> Bias:
    """Return the ids and the number of every sequence. For a sequence given twice, the last number counts."""
    name = "sequence_bias"
    items = list(value.items()) if isinstance(value, Mapping) else list_of(name, value, max_items=MAX_LISTED_IDS)
    found: dict[tuple[int, ...], float] = {}
    for item in items:
        if not isinstance(item, list | tuple) or len(item) != 2 or not isinstance(item[0], list | tuple) or not item[0]:
            raise fail(name, item, "a list of pairs of a list of token ids and a number")
        check_float(name, item[1], -1e4, 1e4)
        found[_ids(name, item[0], MAX_SEQUENCE)] = float(item[1])
    if len(found) > MAX_LISTED_IDS:
        raise fail(name, len(found), f"at most {MAX_LISTED_IDS} sequences")
    return tuple(found.items())


def _decay(value: Any) -> tuple[int, float]:
    name = "exponential_decay_length_penalty"
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise fail(name, value, "a pair: number of tokens, and a factor")
    start = int(value[0]) if isinstance(value[0], float) and value[0].is_integer() else value[0]
    check_int(name, start, 0, MAX_COUNT)
    check_float(name, value[1], 0.01, 100.0)
    return start, float(value[1])
