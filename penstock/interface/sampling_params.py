"""SamplingParams: how the tokens of one request are chosen, in the spelling of vLLM, Transformers and llama.cpp.

This class is the one table of a request's parameters. A field states its type, its default, the values it allows, the
help text of its flag and the routes whose bodies have it; the checks here, the command line (`cli/options.py`) and the
bodies (`server/openai_requests.py`) follow from it. To add a parameter, add a field.

Values are frozen, and checked when they are made: lists become tuples, and no field is accepted and ignored.
`check_vocabulary` checks what depends on the model. docs/sampling.md gives the order of application.
"""

import copy
import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache, partial
from typing import Any, NamedTuple, get_type_hints

from penstock.errors import (
    Interval,
    InvalidRequestError,
    NotSupportedError,
    check_choice,
    check_float,
    check_ids,
    check_int,
    check_options,
    check_str,
    check_unicode,
    fail,
    int_tuple,
    invalid,
    list_of,
    option,
    string_tuple,
)
from penstock.interface.pooling import TRUNCATION_SIDES, PoolingParams
from penstock.interface.structured_outputs import StructuredOutputsParams

MAX_CHOICES = 128
MAX_BEAM_WIDTH = 64
MAX_LENGTH_PENALTY = 5.0  # a context of 2^20 tokens to this power is still far from the end of float32
MAX_LOGPROBS = 2**20  # per token; there are no more than the vocabulary has
FEW_LOGPROBS = 20  # per token; more of them are counted
MAX_COUNTED_LOGPROBS = 2**18  # in one request, with more than a few per token: some 170 MB of the server's memory
MAX_LISTED_LOGPROBS = 128  # ids in logprob_token_ids
MAX_ALLOWED_IDS = 2**17
MAX_PATTERN = 256  # tokens of a repeated pattern
MAX_STOP_STRINGS = 16
MAX_STRING_LENGTH = 256  # characters of a stop string or bad word
MAX_WORD_IDS = 4 * MAX_STRING_LENGTH + 4  # ids of a bad word and a space before it: at most one token per byte
MAX_ID_LISTS = 128  # ids in stop_token_ids
MAX_BIASED_TOKENS = 1024
MAX_PROCESSORS = 16
MAX_ARGUMENT_DEPTH = 8  # lists and mappings in an argument of a logits processor
MAX_TOKENS = 2**31 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_COUNT = 2**31 - 1
MIN_TEMPERATURE = 1e-5  # below it, division by the temperature overflows float32; 0 means greedy
MAX_LISTED_IDS = 1024  # ids in a list of suppressed tokens, or sequences in a list of sequences
MAX_SEQUENCE = 1024  # ids in one sequence
MAX_NGRAM = 64
MAX_BREAKERS = 16
MAX_BREAKER_LENGTH = 40  # characters
MAX_BREAKER_IDS = 2**17  # id sequences that stand for the breakers of a request
DRY_BREAKERS = ("\n", ":", '"', "*")
WITH_BEAM_SEARCH = (  # fields that may be set with use_beam_search; all others choose or change tokens
    "n", "temperature", "seed", "ignore_eos", "max_tokens", "logprobs", "detokenize", "skip_special_tokens",
    "structured_outputs", "truncate_prompt_tokens", "truncation_side",
    "spaces_between_special_tokens", "include_stop_str_in_output", "use_beam_search", "length_penalty",
    "early_stopping", "output_kind", "dry_sequence_breakers",  # the last does nothing without dry_multiplier
)  # fmt: skip
WITH_POOLING = {"pooling", "seed", "output_kind", "dry_sequence_breakers"}  # fields that may be set with pooling
POOLING_FIELDS = {"temperature": 0.0, "max_tokens": 1, "detokenize": False}


class RequestOutputKind(StrEnum):
    """The content of each RequestOutput of a stream."""

    CUMULATIVE = "cumulative"  # everything so far
    DELTA = "delta"  # only what is new
    FINAL_ONLY = "final_only"  # one output, at the end


# --- the values of single fields --------------------------------------------------------------------------------------
# Each function takes a field's name and its value, and returns the value as it is kept.

Check = Callable[[str, Any], Any]
FROM_0_TO_1 = Interval(0.0, 1.0)
PENALTY = Interval(-2.0, 2.0)


def _texts(max_items: int, max_length: int) -> Check:
    return partial(string_tuple, max_items=max_items, max_length=max_length)


def _ids(max_items: int) -> Callable[[str, Any], tuple[int, ...]]:
    return partial(int_tuple, low=0, high=MAX_TOKEN_ID, max_items=max_items)


def _stop(name: str, value: Any) -> tuple[str, ...]:
    texts = string_tuple(name, value, max_items=MAX_STOP_STRINGS, max_length=MAX_STRING_LENGTH)
    for text in texts:
        check_unicode(text, param=name)
    return texts


def _temperature(name: str, value: Any) -> float:
    check_float(name, value, 0.0, 100.0)
    if 0.0 < value < MIN_TEMPERATURE:
        raise fail(name, value, f"0 (greedy) or a number from {MIN_TEMPERATURE:g} to 100")
    return float(value)


def _end_ids(name: str, value: Any) -> tuple[int, ...]:
    """Take one id, or a list of ids."""
    given = (value,) if isinstance(value, int) and not isinstance(value, bool) else value
    return _ids(MAX_LISTED_IDS)(name, given)


def _sequence(name: str, value: Any, max_ids: int = MAX_SEQUENCE) -> tuple[int, ...]:
    ids = _ids(max_ids)(name, value)
    if not ids:
        raise fail(name, value, "a list of sequences of at least one token id")
    return ids


def _sequences(max_items: int, max_ids: int = MAX_SEQUENCE) -> Check:
    def check(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
        return tuple(_sequence(name, item, max_ids) for item in list_of(name, value, max_items=max_items))

    return check


def _bias(name: str, value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_BIASED_TOKENS:
        raise fail(name, value, f"a map of at most {MAX_BIASED_TOKENS} token ids to numbers")
    for token_id, bias in value.items():
        check_int(name, token_id, 0, MAX_TOKEN_ID)
        check_float(name, bias, -100.0, 100.0)
    return {int(token_id): float(bias) for token_id, bias in value.items()}


def _sequence_bias(name: str, value: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Read the ids and the number of every sequence. For a sequence given twice, the last number counts."""
    items = list(value.items()) if isinstance(value, Mapping) else list_of(name, value, max_items=MAX_LISTED_IDS)
    found: dict[tuple[int, ...], float] = {}
    for item in items:
        if not isinstance(item, list | tuple) or len(item) != 2 or not isinstance(item[0], list | tuple) or not item[0]:
            raise fail(name, item, "a list of pairs of a list of token ids and a number")
        check_float(name, item[1], -1e4, 1e4)
        found[_ids(MAX_SEQUENCE)(name, item[0])] = float(item[1])
    if len(found) > MAX_LISTED_IDS:
        raise fail(name, len(found), f"at most {MAX_LISTED_IDS} sequences")
    return tuple(found.items())


def _decay(name: str, value: Any) -> tuple[int, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise fail(name, value, "a pair: number of tokens, and a factor")
    start = int(value[0]) if isinstance(value[0], float) and value[0].is_integer() else value[0]
    check_int(name, start, 0, MAX_COUNT)
    check_float(name, value[1], 0.01, 100.0)
    return start, float(value[1])


def _processors(name: str, value: Any) -> dict[str, Any] | None:
    """Read name -> argument or None; None without processors."""
    named = value if isinstance(value, Mapping) else None
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        named = dict.fromkeys(value)
    if (value is not None and named is None) or (named is not None and len(named) > MAX_PROCESSORS):
        raise fail(name, value, f"at most {MAX_PROCESSORS} names, or a mapping of names to arguments")
    for processor, argument in (named or {}).items():
        check_str(name, processor, max_length=MAX_STRING_LENGTH)
        check_unicode(processor, param=name)
        if not _is_plain(argument, MAX_ARGUMENT_DEPTH):
            allowed = "numbers, texts, true, false, null, and lists and mappings of these"
            raise fail(name, argument, f"made of {allowed}: it goes to another process")
    return copy.deepcopy(dict(named)) if named else None


def _is_plain(value: Any, depth: int) -> bool:
    """Check that a processor's argument can go to another process. Raise as check_unicode does."""
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


def _early_stopping(name: str, value: Any) -> bool | str:
    if not isinstance(value, bool) and not (isinstance(value, str) and value == "never"):
        raise fail(name, value, 'true, false or "never"')
    return value


def _guided_decoding(name: str, value: Any) -> None:
    raise invalid(name, "use structured_outputs, its newer name, with a StructuredOutputsParams")


def _output_kind(name: str, value: Any) -> RequestOutputKind:
    check_choice(name, value, list(RequestOutputKind))
    return RequestOutputKind(value)


def _a(kind: type) -> Check:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise fail(name, value, f"a {kind.__name__}")
        return value

    return check


class RepetitionDetectionParams(NamedTuple):
    """What counts as an endless repetition: a pattern of min_pattern_size to max_pattern_size tokens, min_count times
    in a row at the end of the answer. max_pattern_size 0: nothing does. min_pattern_size 0 means 1. Names are vLLM's.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def found_in(self, token_ids: Sequence[int]) -> bool:
        """Tell whether an answer ends with such a repetition."""
        longest = min(self.max_pattern_size, len(token_ids) // self.min_count)
        for size in range(max(self.min_pattern_size, 1), longest + 1):
            if token_ids[-1] == token_ids[-1 - size]:
                repeated = token_ids[-size * self.min_count :]
                if repeated[size:] == repeated[:-size]:
                    return True
        return False


def _repetition(name: str, value: Any) -> RepetitionDetectionParams | None:
    keys = RepetitionDetectionParams._fields
    given = dict(zip(keys, value, strict=True)) if isinstance(value, list | tuple) and len(value) == 3 else value
    is_made_of_integers = isinstance(given, Mapping) and not {type(item) for item in given.values()} - {int}
    if is_made_of_integers and set(given) <= set(keys):
        found = RepetitionDetectionParams(**given)
        count = range(2, MAX_COUNT + 1) if found.max_pattern_size else range(MAX_COUNT + 1)
        if 0 <= found.min_pattern_size <= found.max_pattern_size <= MAX_PATTERN and found.min_count in count:
            return found if found.max_pattern_size else None
    allowed = f"max_pattern_size up to {MAX_PATTERN}, min_pattern_size up to it, and min_count of 2 or more"
    raise fail(name, value, f"an object of {allowed}")


def _allowed_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_ALLOWED_IDS:
        raise fail(name, value, f"a list of 1 to {MAX_ALLOWED_IDS} token ids")
    check_ids(name, value, MAX_TOKEN_ID + 1)
    return tuple(dict.fromkeys(value))


def _prompt_length(name: str, value: Any) -> int:
    check_int(name, value, -1, MAX_TOKENS)
    if value == 0:
        raise fail(name, 0, "-1, or at least 1")
    return int(value)


def _thinking_ids(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(_ids(MAX_SEQUENCE)(name, item) for item in list_of(name, value, max_items=2))


# --- names that are no fields -----------------------------------------------------------------------------------------

MAX_MISSPELT = 40  # characters; a longer unknown name is not compared with the known ones
HINTS = {  # name in Transformers, llama.cpp, TGI or an older vLLM -> its equivalent here
    "best_of": "ask for n answers, and take the one with the highest cumulative_logprob",
    "do_sample": "temperature: 0 is greedy",
    "extra_body": "its fields belong beside the others; clients written in Python put them there",
    "max_length": "it is max_tokens here, which counts the answer alone",
    "max_new_tokens": "it is max_tokens here",
    "n_predict": "it is max_tokens here",
    "num_beams": "it is n here, with use_beam_search: true",
    "num_return_sequences": "it is n here",
    "penalty_alpha": "contrastive search is not built",
    "repeat_penalty": "it is repetition_penalty here",
    "stop_sequences": "it is stop here",
    "stop_strings": "it is stop here",
}


def unknown_field(name: str, known: Collection[str]) -> InvalidRequestError:
    """Make the error about an unknown parameter, with its name here, or a known one with a similar name."""
    similar = difflib.get_close_matches(name, known, 1, cutoff=0.8) if len(name) <= MAX_MISSPELT else []
    advice = HINTS.get(name) or (f"did you mean {similar[0]}?" if similar else "")
    return invalid(name, f"unknown field; {advice}" if advice else "unknown field", "unknown_field")


# --- the table --------------------------------------------------------------------------------------------------------

# The routes whose bodies have a field, as `place` of a body names them; all four unless the field says otherwise.
ALL = ("completions", "chat", "responses", "completion")
TWO = ("completions", "chat")
NONE: tuple[str, ...] = ()  # no route has the field, or each has a spelling of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The choice of the tokens of one request. "End tokens" are those of the model and stop_token_ids.

    The help texts below are the short meanings. What they leave open:

    Attributes:
        max_tokens: None goes to the end of the context.
        temperature: divides the logits. 0 is greedy: only the options that change logits apply, as with do_sample=False
            in Transformers.
        top_k: 0 or -1 keeps all.
        presence_penalty, frequency_penalty: count generated tokens; repetition_penalty counts those of the prompt, too,
            and divides positive and multiplies negative logits.
        n: number of independent choices generated from the prompt.
        seed: 64-bit; None derives one from the engine's seed and the arrival number. RequestOutput.seed reports it.
        stop: not part of the text unless include_stop_str_in_output.
        min_tokens: end tokens and stop_token_ids cannot be chosen before this many.
        logprobs: report the log-probabilities of each generated token and of this many most likely tokens, in the raw
            distribution: before penalties, bias and temperature. -1: of the whole vocabulary. More than FEW_LOGPROBS
            per token are limited to MAX_COUNTED_LOGPROBS in the request.
        prompt_logprobs: the same for the tokens of the prompt, which then reuses no cached prefix.
        logprob_token_ids: tokens whose log-probabilities are reported besides; their rank is not.
        truncate_prompt_tokens: a longer prompt is cut to this many tokens; -1: to what the context has room for beside
            max_tokens. truncation_side: "left" keeps its last tokens, "right" its first ones.
        thinking_token_budget: after this many tokens of reasoning, the token that ends it is chosen. -1: no limit. The
            client sets thinking_token_ids: the tokens that begin reasoning, () if the prompt has begun it, and the one
            that ends it.
        repetition_detection: the answer ends, with the reason "repetition", when it repeats itself in this way.
        detokenize: False leaves the text empty (and allows no stop strings).
        logit_bias: token id -> number added to its logit, -100 to 100.
        bad_words: words that are never completed. The client sets bad_words_token_ids from them.
        logits_processors: names of functions that a user has registered, or a mapping of names to their arguments, in
            the order in which they run.
        structured_outputs: the form that the answer must have. Only tokens that it allows are chosen, and the answer
            ends when it is complete, even with ignore_eos or before min_tokens.
        use_beam_search: search for the n most likely answers with n beams, as Transformers' generate(num_beams=n) does;
            they come at the end, best first. The raw distribution decides, so fields that change it are not allowed.
        length_penalty: answers are compared by the sum of their log-probabilities divided by
            (number of tokens) ** length_penalty.
        early_stopping: True ends the search with the n-th complete answer, False when no better answer is likely,
            "never" when no better answer is possible.
        output_kind: what each streamed RequestOutput carries.
        pooling: compute the hidden states of the prompt, and generate nothing (`for_pooling`).
        bad_words_ids: a sequence that is one end token is ignored.
        sequence_bias: numbers added to the logit of the token that completes a sequence: [[[ids], number], ...], or a
            mapping of tuples of ids to numbers.
        forced_eos_token_id: of several ids, one is chosen.
        exponential_decay_length_penalty: (start, factor): after `start` outputs, |logit| * (factor ** (tokens since
            then) - 1) is added to the logits of end tokens.
        eta_cutoff: drops tokens less likely than min(this, sqrt(this) * exp(-entropy)).
        top_h: a share of the entropy of the 100 most likely tokens.
        xtc_threshold: above 0.5 XTC is off, because two tokens cannot both be that likely.
        dry_multiplier: subtracts dry_multiplier * dry_base ** (n - dry_allowed_length) from the logit of a token that
            would make a repetition of n tokens one longer.
        dry_sequence_breakers: texts that a repetition never crosses. The client derives dry_sequence_breaker_ids.
        mirostat: keeps the surprise of the tokens, in bits, near mirostat_tau, after the other options. Its state `mu`
            changes with every token, so drafts cannot be verified with it.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of range; `param` names the field.
    """

    max_tokens: int | None = option(
        16, range(1, MAX_TOKENS + 1), "maximum number of tokens to generate", routes=TWO, optional=True
    )
    min_tokens: int = option(
        0, range(MAX_TOKENS + 1), "generate at least this many tokens before an end token or a stop string counts"
    )
    temperature: float = option(1.0, _temperature, "0 is greedy")
    top_p: float = option(
        1.0, Interval(0.0, 1.0, low_open=True), "keep the most likely tokens up to this total probability"
    )
    top_k: int = option(0, range(-1, 2**31), "keep this many of the most likely tokens")
    min_p: float = option(0.0, FROM_0_TO_1, "keep tokens that are at least this likely relative to the most likely one")
    presence_penalty: float = option(0.0, PENALTY, "subtracted from the logits of tokens that were generated before")
    frequency_penalty: float = option(
        0.0, PENALTY, "subtracted from a token's logit for each time that it was generated before"
    )
    repetition_penalty: float = option(
        1.0, Interval(0.01, 100.0), "divides the logits of tokens in the prompt or output"
    )
    n: int = option(1, range(1, MAX_CHOICES + 1), "number of answers for each prompt", routes=TWO)
    seed: int | None = option(None, range(-(2**63), 2**64), "seed of the request; the same seed repeats the answer")
    stop: str | Sequence[str] | None = option((), _stop, "stop before this text (repeatable)")
    stop_token_ids: Sequence[int] | None = option((), _ids(MAX_ID_LISTS), "tokens that end the text")
    logprobs: int | None = option(  # chat asks for them with two fields of its own
        None,
        range(-1, MAX_LOGPROBS + 1),
        "report the log-probabilities of N tokens per position (needs --json)",
        routes=NONE,
    )
    prompt_logprobs: int | None = option(
        None, range(-1, MAX_LOGPROBS + 1), "the same for the tokens of the prompt", routes=TWO
    )
    logprob_token_ids: Sequence[int] | None = option(
        (), _ids(MAX_LISTED_LOGPROBS), "tokens whose log-probabilities are reported too", routes=TWO
    )
    allowed_token_ids: Sequence[int] | None = option(None, _allowed_ids, "the only tokens that may be chosen")
    logit_bias: dict[int, float] | None = option(None, _bias, "added to the logit of a token, like 42=-5 (repeatable)")
    bad_words: str | Sequence[str] | None = option(
        (), _texts(MAX_STOP_STRINGS, MAX_STRING_LENGTH), "a word that is never generated (repeatable)"
    )
    bad_words_token_ids: tuple[tuple[int, ...], ...] = option((), _sequences(MAX_ID_LISTS, MAX_WORD_IDS), routes=NONE)
    typical_p: float = option(
        1.0,
        Interval(0.0, 1.0, low_open=True),
        "keep the tokens whose surprise is nearest to the entropy, up to this total probability",
    )
    top_h: float | None = option(
        None,
        Interval(0.0, 1.0, low_open=True),
        "keep the most likely tokens up to this share of the entropy",
    )
    epsilon_cutoff: float = option(0.0, FROM_0_TO_1, "drop tokens less likely than this")
    eta_cutoff: float = option(0.0, FROM_0_TO_1, "the same, but with a lower limit if the entropy is high")
    no_repeat_ngram_size: int = option(0, range(MAX_NGRAM + 1), "no sequence of N tokens occurs twice")
    min_length: int = option(0, range(MAX_COUNT + 1), "no end token before prompt and answer together have N tokens")
    suppress_tokens: Sequence[int] | None = option((), _ids(MAX_LISTED_IDS), "tokens that are never chosen")
    xtc_probability: float = option(
        0.0, FROM_0_TO_1, "probability of dropping all likely tokens except the least likely of them (XTC)"
    )
    xtc_threshold: float = option(0.1, FROM_0_TO_1, "tokens that are at least this likely count as likely for XTC")
    dry_multiplier: float = option(
        0.0, Interval(0.0, 100.0), "penalty for a token that continues a repetition (DRY); 0: off"
    )
    dry_base: float = option(
        1.75, Interval(1.0, 100.0), "factor of the penalty for each further token of the repetition"
    )
    dry_allowed_length: int = option(2, range(1, MAX_COUNT + 1), "longest repetition that has no penalty, in tokens")
    dry_penalty_last_n: int = option(
        -1, range(-1, MAX_COUNT + 1), "how many of the last tokens are searched for repetitions; -1: all"
    )
    dry_sequence_breakers: str | Sequence[str] | None = option(
        DRY_BREAKERS, _texts(MAX_BREAKERS, MAX_BREAKER_LENGTH), "text that ends a repetition (repeatable)"
    )
    dry_sequence_breaker_ids: tuple[tuple[int, ...], ...] = option((), _sequences(MAX_BREAKER_IDS))
    mirostat: int = option(0, range(3), "1 or 2: keep the surprise of the tokens near --mirostat-tau")
    mirostat_tau: float = option(5.0, Interval(0.0, 100.0), "target surprise of the tokens, in bits")
    mirostat_eta: float = option(0.1, FROM_0_TO_1, "learning rate of mirostat")
    begin_suppress_tokens: Sequence[int] | None = option(
        (), _ids(MAX_LISTED_IDS), "tokens that are never chosen as the first token"
    )
    forced_bos_token_id: int | None = option(
        None, range(MAX_TOKEN_ID + 1), "the second token of a text whose prompt is one token"
    )
    forced_eos_token_id: int | Sequence[int] | None = option(
        (), _end_ids, "the last token of a text that reaches --max-tokens"
    )
    min_new_tokens: int = option(0, range(MAX_COUNT + 1), "no end token before the answer has N tokens")
    exponential_decay_length_penalty: Sequence[float] | None = option(
        None, _decay, "after N tokens, FACTOR makes end tokens more likely with each further token"
    )
    bad_words_ids: Sequence[Sequence[int]] | None = option(
        (), _sequences(MAX_LISTED_IDS), 'sequences of token ids that are never generated, like "[[5, 6], [7]]"'
    )
    sequence_bias: Mapping[Any, Any] | Sequence[Any] | None = option(
        (),
        _sequence_bias,
        'added to the logit of a token that completes a sequence, like "[[[5, 6], -2.5]]"',
    )
    logits_processors: Mapping[str, Any] | Sequence[str] | None = option(
        None, _processors, "names of functions that --import registers, with arguments"
    )
    use_beam_search: bool = option(False, bool, "search for the -n most likely answers with as many beams", routes=TWO)
    length_penalty: float = option(
        1.0,
        Interval(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
        "of a beam search: values above 0 prefer long answers",
        routes=TWO,
    )
    early_stopping: bool | str = option(False, _early_stopping, "when a beam search ends", routes=TWO)
    skip_special_tokens: bool = option(True, bool, "leave special tokens out of the text")
    spaces_between_special_tokens: bool = option(True, bool, "put spaces between special tokens", routes=TWO)
    ignore_eos: bool = option(False, bool, "continue after the end token")
    truncate_prompt_tokens: int | None = option(
        None, _prompt_length, "cut a longer prompt to N tokens; -1: to what the context has room for", routes=TWO
    )
    truncation_side: str = option("left", TRUNCATION_SIDES, "which end of a prompt that is too long is cut", routes=TWO)
    thinking_token_budget: int | None = option(
        None, range(-1, MAX_COUNT + 1), "end the reasoning of the model after N tokens"
    )
    thinking_token_ids: tuple[tuple[int, ...], ...] = option((), _thinking_ids, routes=NONE)
    repetition_detection: Mapping[str, int] | Sequence[int] | None = option(
        None, _repetition, 'end a text that repeats itself, like {"max_pattern_size": 20, "min_count": 4}'
    )
    include_stop_str_in_output: bool = option(False, bool, "keep the stop string in the text")
    structured_outputs: StructuredOutputsParams | None = option(
        None, _a(StructuredOutputsParams), "the answer is JSON that the schema in FILE allows", routes=NONE
    )
    guided_decoding: Any = option(None, _guided_decoding, routes=NONE)
    detokenize: bool = option(True, bool, routes=NONE)
    output_kind: RequestOutputKind = option(RequestOutputKind.CUMULATIVE, _output_kind, routes=NONE)
    pooling: PoolingParams | None = option(None, _a(PoolingParams), routes=NONE)

    @classmethod
    def for_pooling(cls, pooling: PoolingParams) -> "SamplingParams":
        """Make the parameters of a request that generates nothing."""
        last = RequestOutputKind.FINAL_ONLY
        return cls(**POOLING_FIELDS, output_kind=last, pooling=pooling)  # type: ignore[arg-type]

    def __new__(cls, *_: Any, **given: Any) -> "SamplingParams":
        for name in given:
            if name not in cls.__dataclass_fields__:
                raise unknown_field(name, cls.__dataclass_fields__)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise fail("min_tokens", self.min_tokens, f"at most max_tokens = {self.max_tokens}")
        if self.structured_outputs is not None:
            for name in ("forced_bos_token_id", "forced_eos_token_id"):
                if getattr(self, name) not in (None, ()):
                    raise invalid(
                        name, "not allowed with structured_outputs, which decides which tokens may come where"
                    )
        if self.logprob_token_ids and self.logprobs is None:
            self._set("logprobs", 0)
        self._check_beam_search()
        self._check_pooling()
        if self.stop and not self.detokenize:
            raise invalid("stop", "stop strings need detokenize=True")

    def _check_beam_search(self) -> None:
        if not self.use_beam_search:
            for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != neutral:
                    raise invalid(name, "only allowed with use_beam_search: true")
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
        for field in fields(self):
            if field.name not in WITH_POOLING and (value := getattr(self, field.name)) != (
                expected := POOLING_FIELDS.get(field.name, field.default)
            ):
                allowed = f"{expected!r} with pooling, which generates nothing (SamplingParams.for_pooling)"
                raise fail(field.name, value, allowed)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def num_candidates(self, num_end_tokens: int) -> int:
        """Count the continuations of each beam that a search needs, so that n go on even if end tokens end others."""
        goes_on = self.ignore_eos and self.structured_outputs is None
        return max(2, 1 + (0 if goes_on else num_end_tokens)) * self.n

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequestError if a token id is outside the model's vocabulary."""
        bias: Any = self.sequence_bias
        forced_bos = self.forced_bos_token_id
        given: dict[str, Any] = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias or (),
            "suppress_tokens": self.suppress_tokens,
            "begin_suppress_tokens": self.begin_suppress_tokens,
            "bad_words_ids": [token_id for word in self.bad_words_ids or () for token_id in word],
            "sequence_bias": [token_id for ids, _ in bias for token_id in ids],
            "forced_bos_token_id": () if forced_bos is None else (forced_bos,),
            "forced_eos_token_id": self.forced_eos_token_id,
            "allowed_token_ids": self.allowed_token_ids or (),
            "logprob_token_ids": self.logprob_token_ids,
        }
        for name, token_ids in given.items():
            check_ids(name, list(token_ids), vocab_size)

    def settle_logprobs(self, num_prompt_tokens: int, max_tokens: int, vocab_size: int) -> dict[str, int | None]:
        """Find how many log-probabilities a token of the answer and of the prompt gets, at most the whole vocabulary.

        Raises:
            InvalidRequestError: with more than a few per token, the request has too many of them.
        """
        found: dict[str, int | None] = {"logprobs": self.logprobs, "prompt_logprobs": self.prompt_logprobs}
        for name, num_tokens in (("logprobs", self.n * max_tokens), ("prompt_logprobs", num_prompt_tokens)):
            top = found[name]
            if top is None:
                continue
            found[name] = top = min(top if top >= 0 else vocab_size, vocab_size)
            if top > FEW_LOGPROBS and num_tokens * top > MAX_COUNTED_LOGPROBS:
                what = f"{num_tokens} tokens with {top} log-probabilities each are too many"
                fewer = f"at most {MAX_COUNTED_LOGPROBS // top} tokens may have so many"
                raise invalid(name, f"{what}; {fewer} (max_tokens and n limit them)")
        return found

    def truncated(self, token_ids: list[int], max_model_len: int) -> list[int]:
        """Cut a prompt as the request asks."""
        most = self.truncate_prompt_tokens
        if most is None:
            return token_ids
        most = max(1, max_model_len - (self.max_tokens or 1)) if most < 0 else most
        return token_ids[-most:] if self.truncation_side == "left" else token_ids[:most]

    def settled(self, **fields: Any) -> "SamplingParams":
        """Copy the parameters with fields that the client has settled (seed, ...), without another check."""
        made = object.__new__(type(self))  # copy.copy takes three times as long, for each choice of a call
        for name in self.__slots__:
            made._set(name, fields[name] if name in fields else getattr(self, name))
        return made

    def changed(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_sampler_state(self) -> bool:
        """True if a draw depends on the draws before it, so that tokens alone do not suffice to continue."""
        return self.mirostat > 0


TYPES: dict[str, Any] = get_type_hints(SamplingParams)  # field -> its type, also in a body and on the command line


@cache
def fields_of(route: str) -> tuple[str, ...]:
    """List the names of the fields that the bodies of a route have."""
    return tuple(item.name for item in fields(SamplingParams) if route in item.metadata.get("routes", ALL))


# --- beam search, in vLLM's spelling ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """The parameters of a beam search. Fields mean what they mean in Transformers' generate(num_beams=...).

    Attributes:
        beam_width: number of beams, and of sequences returned.
        max_tokens: maximum number of tokens to generate.
        ignore_eos: whether the model's own end tokens do not end a sequence.
        temperature: 0 or 1; the raw distribution decides in both cases.
        length_penalty: sequences are compared by the sum of their log-probabilities divided by
            (number of generated tokens) ** length_penalty.
        include_stop_str_in_output: whether the text over HTTP shows the end token; sequences always have it.
        early_stopping: True ends the search with the beam_width-th complete sequence, False when no better one is
            likely, "never" when no better one is possible.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of range; `param` names the field.
    """

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        self.sampling_params()  # checks the other fields

    def sampling_params(self) -> SamplingParams:
        """Convert the search to a request's parameters, with the log-probabilities of vLLM's beam search."""
        same = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "beam_width"}
        logprobs = min(2 * self.beam_width, FEW_LOGPROBS)
        kind = RequestOutputKind.FINAL_ONLY
        return SamplingParams(n=self.beam_width, use_beam_search=True, logprobs=logprobs, output_kind=kind, **same)
