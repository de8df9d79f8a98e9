"""Grammars: which tokens the form of an answer allows next. llguidance does the work; it is loaded with the first form.

    StructuredOutputsParams --compile--> grammar --start--> Matcher, which follows one answer token by token

A grammar is compiled once, and kept while it is among the recently used ones; a matcher is a cheap copy of it. What a
matcher allows depends on the form and the tokens alone, so a new one can be made wherever an answer is continued.
"""

import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidRequestError, invalid, one_line
from penstock.interface.structured_outputs import FIELD, FORMS, WHITESPACE, StructuredOutputsParams
from penstock.tokenizer.answers import literal

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Allowed = npt.NDArray[np.bool_]
MAX_GRAMMARS = 256  # how many compiled grammars are kept
MAX_KEPT_CHARS = 2**22  # maximum number of characters of their forms together
TRIAL_TOKENS = 12  # tokens of a trial answer: some forms show that they are too large only after a few tokens
SPECIAL = frozenset(".^$*+?()[]{}|\\")  # characters with a meaning in regular expressions
DATA = ("const", "enum", "default", "examples")  # keywords of a schema whose values are no schemas
LOOKAHEAD = re.compile(r"\^\(\?!\^?\[(?!\^)((?:\\.|[^\]\\])+)\]\*\$\)")
NO_TEXT = "nothing fits it: there is no text that it allows"


class Grammars:
    """Compiles forms for one model. Thread-safe.

    Args:
        load: returns the model's tokenizer (an HFTokenizer), or None if it has none; called for the first form.
        vocab_size: the model's vocabulary size, which may exceed the tokenizer's number of tokens.
        eos_token_ids: the tokens that end a complete answer.
    """

    def __init__(self, load: Callable[[], Any], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._load = load
        self._vocab_size = vocab_size
        self._end_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[Any, ...], LLMatcher] = OrderedDict()
        self._num_chars = 0
        self._lock = threading.Lock()

    def knows(self, form: StructuredOutputsParams) -> bool:
        """Check whether a form is compiled already, so that `start` takes almost no time."""
        return form.key in self._compiled

    def tokenizer(self) -> "LLTokenizer":
        """Load the model's tokenizer, once. Raise InvalidRequestError if it cannot be used for forms."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load_tokenizer()
            return self._tokenizer

    def use(self, tokenizer: Any) -> None:
        """Use this tokenizer instead. Call it before the first form comes."""
        self._load = lambda: tokenizer

    def check(self, form: StructuredOutputsParams) -> None:
        """Raise InvalidRequestError if a form cannot be followed; the message says why."""
        self.start(form)

    def start(self, form: StructuredOutputsParams) -> "Matcher":
        """Make a matcher that follows an answer of this form from its beginning.

        Raises:
            InvalidRequestError: the form is malformed, too large or not supported, or no text fits it.
        """
        tokenizer = self.tokenizer()
        with self._lock:
            found = self._compiled.get(form.key)
            if found is not None:
                self._compiled.move_to_end(form.key)
        if found is None:
            found = _compile(form, tokenizer)
            self._keep(form, found)
        return Matcher(found.deep_copy(), self._vocab_size, frozenset(self._end_ids))

    def _keep(self, form: StructuredOutputsParams, matcher: "LLMatcher") -> None:
        """Keep a compiled form. If there are too many, drop the least recently used ones."""
        with self._lock:
            self._num_chars += _num_chars(form.key) if form.key not in self._compiled else 0
            self._compiled[form.key] = matcher
            while len(self._compiled) > MAX_GRAMMARS or (self._num_chars > MAX_KEPT_CHARS and len(self._compiled) > 1):
                key, _ = self._compiled.popitem(last=False)
                self._num_chars -= _num_chars(key)

    def _load_tokenizer(self) -> "LLTokenizer":
        import llguidance

        to_json = getattr(self._load(), "to_json", None)
        if to_json is None:
            raise invalid(FIELD, "a form needs a tokenizer, and the model has none")
        if not self._end_ids:
            raise invalid(FIELD, "the model has no end token to end the answer with")
        try:
            return llguidance.LLTokenizer(to_json(), n_vocab=self._vocab_size, eos_token=self._end_ids)
        except (ValueError, RuntimeError) as error:
            raise invalid(FIELD, f"the model's tokenizer cannot follow a form: {one_line(error)}") from None


class Matcher:
    """Follows one answer.

    Attributes:
        end_ids: the model's end tokens, which end a complete answer.
    """

    def __init__(self, matcher: "LLMatcher", vocab_size: int, end_ids: frozenset[int]) -> None:
        self.end_ids = end_ids
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._token_ids: list[int] = []  # the part of the answer that the matcher has followed

    def follow(self, token_ids: list[int]) -> None:
        """Follow the current answer. The tokens that it shares with the last one are not read again.

        Raises:
            ValueError: the form does not allow the answer. The matcher cannot be used any more.
        """
        known = self._token_ids
        shared = len(known) if token_ids[: len(known)] == known else _num_shared(known, token_ids)
        if shared < len(known) and not self._matcher.rollback(len(known) - shared):
            raise ValueError(f"cannot go back: {self._reason()}")
        new = token_ids[shared:]
        if self._matcher.try_consume_tokens(new) < len(new):
            raise ValueError(f"the tokens so far do not fit it: {self._reason()}")
        self._token_ids = list(token_ids)

    def allowed(self) -> Allowed:
        """Compute which tokens may come next, [vocab_size] bool; the end tokens are allowed if the answer is complete.

        Raises:
            ValueError: the form has become too large, or nothing fits it any more.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise ValueError(self._reason())
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def forced(self) -> int | None:
        """Find the only token that may come next; None if there are several, or if it is not known yet."""
        if not (self._matcher.is_stopped() or self._matcher.compute_ff_bytes()):
            return None
        found = np.flatnonzero(self.allowed())
        return int(found[0]) if len(found) == 1 else None

    def _reason(self) -> str:
        text = self._matcher.get_error()
        return NO_TEXT if not text or "NoExtension" in text else _shortened(text)


def _compile(form: StructuredOutputsParams, tokenizer: "LLTokenizer") -> "LLMatcher":
    """Compile a form, and try some tokens of an answer, which shows whether the form is too large or allows nothing."""
    import llguidance

    limits = llguidance.LLParserLimits(verbose_errors=False)
    try:
        source = grammar_of(form, tokenizer)
        found = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    except (ValueError, OverflowError) as error:
        raise _refused(form, str(error)) from None
    trial = found.deep_copy()
    for _ in range(TRIAL_TOKENS):
        if trial.is_error() or trial.is_stopped():
            break
        bits = np.frombuffer(trial.compute_bitmask(), dtype=np.uint8)
        first = np.flatnonzero(bits)[:1]
        if not trial.is_error() and len(first):
            byte = int(bits[first[0]])
            trial.consume_token(int(first[0]) * 8 + (byte & -byte).bit_length() - 1)
    warnings = [] if form.grammar is not None else found.get_grammar_warnings()  # a grammar may ask to be lenient
    problems = [trial.get_error()] if trial.is_error() else warnings
    if problems:
        text = problems[0]
        raise _refused(form, NO_TEXT if "NoExtension" in text else text)
    return found


def grammar_of(form: StructuredOutputsParams, tokenizer: "LLTokenizer | None" = None) -> str:
    """Write a form in llguidance's own notation. Raise ValueError if it cannot be read.

    tokenizer: finds the special tokens in the marks of a structural tag.
    """
    import llguidance

    matcher = llguidance.LLMatcher
    if form.json is not None or form.json_object:
        whitespace = {"whitespace_pattern": form.whitespace_pattern or WHITESPACE}
        overrides = {
            "lenient": False,
            **({"whitespace_flexible": False} if form.disable_any_whitespace else whitespace),
        }
        schema = str(form.json) if form.json is not None else json.dumps({"type": "object"})
        _check_bounds(json.loads(schema))
        if "(?!" in schema:
            schema = json.dumps(_without_lookahead(json.loads(schema)))
        return matcher.grammar_from_json_schema(schema, overrides=overrides)  # type: ignore[arg-type]  # a TypedDict
    if form.regex is not None:
        return matcher.grammar_from_regex(form.regex)
    if form.choice is not None:
        return matcher.grammar_from_regex("|".join(map(_escaped, form.choice)))
    if form.structural_tag is not None:
        grammar = structural_grammar(json.loads(str(form.structural_tag)), partial(_spelled, tokenizer))
        return llguidance.grammar_from("grammar", grammar)
    return llguidance.grammar_from("grammar", form.grammar or "")


def _spelled(tokenizer: "LLTokenizer | None", text: str) -> str:
    """Write a text as terms of a grammar: its special tokens as tokens, and what is between them as texts."""
    found, plain = list[str](), b""
    for token_id in [] if tokenizer is None else tokenizer.tokenize_str(text, parse_special=True):
        if tokenizer is not None and tokenizer.is_special_token(token_id):
            found += [*([literal(plain.decode())] if plain else []), f"<[{token_id}]>"]
            plain = b""
        elif tokenizer is not None:
            plain += tokenizer.decode_bytes([token_id])
    return " ".join([*found, *([literal(plain.decode())] if plain else [])]) if found else literal(text) if text else ""


def _without_lookahead(schema: Any) -> Any:
    """Replace a negative look-ahead for a text of certain characters only, as pydantic writes it for Decimal, by a
    second pattern: some other character. llguidance intersects patterns, and refuses all other look-aheads."""
    if isinstance(schema, list):
        return [_without_lookahead(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: item if key in DATA else _without_lookahead(item) for key, item in schema.items()}
    pattern = found.get("pattern")
    match = LOOKAHEAD.match(pattern) if isinstance(pattern, str) else None
    if match is not None and isinstance(pattern, str):
        found["pattern"] = f"^{pattern[match.end() :]}"
        found["allOf"] = [*found.get("allOf", ()), {"pattern": f"[^{match[1]}]"}]
    return found


def _check_bounds(schema: Any) -> None:
    """Raise ValueError for an exclusive integer bound less than 1 from the other bound: llguidance would then allow the
    bound itself."""
    if isinstance(schema, list):
        for item in schema:
            _check_bounds(item)
    if not isinstance(schema, dict):
        return
    exclusive = [schema.get(f"exclusive{name}") for name in ("Minimum", "Maximum")]
    ends = [
        schema.get(name.lower()) if end is None else end
        for name, end in zip(("Minimum", "Maximum"), exclusive, strict=True)
    ]
    low, high = (float(end) if isinstance(end, int | float) else math.inf for end in ends)
    is_whole = any(isinstance(end, int | float) and end == int(end) for end in exclusive)
    if is_whole and math.isfinite(low) and high - low < 1:
        raise ValueError(f"exclusive bounds less than 1 apart are not supported: {low:g} to {high:g}")
    for item in schema.values():
        _check_bounds(item)


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in SPECIAL else char for char in text)


def _refused(form: StructuredOutputsParams, reason: str) -> InvalidRequestError:
    name = next(name for name in FORMS if getattr(form, name))
    return InvalidRequestError(f"{FIELD}.{name}: {_shortened(reason)}", param=FIELD, code="invalid_structured_outputs")


def _shortened(text: str) -> str:
    return one_line(text.replace("<non-verbose/>", "").replace("<state>", ""))


def _num_chars(key: tuple[Any, ...]) -> int:
    return sum(
        len(part) if isinstance(part, str) else sum(map(len, part)) for part in key if isinstance(part, str | tuple)
    )


def _num_shared(one: list[int], other: list[int]) -> int:
    """Count the leading tokens that two answers share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


# --- structural tags: forms that begin at a mark in a free text, in vLLM's and XGrammar's notation --------------------
#
#   {"type": "structural_tag", "format": FORMAT}
#   {"type": "structural_tag", "structures": [{"begin", "schema", "end"}, ...], "triggers": [TEXT, ...]}   the older one

Spell = Callable[[str], str]
TAG_KEYS = {  # type of a format -> its keys, those that are required first
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "regex": ("pattern",),
    "any_text": (),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
}
TAG_OPTIONAL = ("at_least_one", "stop_after_first")


def structural_grammar(tag: Mapping[str, Any], spell: Spell) -> str:
    """Write the grammar of a structural tag.

    Args:
        spell: writes a text as terms of the grammar, with tokens for the marks in it that are special tokens.

    Raises:
        ValueError: it is malformed, or has a format that is not supported.
    """
    if "structures" in tag:
        tags = [
            {
                "type": "tag",
                "begin": item["begin"],
                "content": _schema_of_tag(item.get("schema", {})),
                "end": item["end"],
            }
            for item in _items(tag, "structures", ("begin", "end"))
        ]
        whole: Any = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    else:
        whole = tag.get("format")
    grammar = TagGrammar(spell)
    start = grammar.terms(whole)
    rules = "".join(f"{name}: {rule}\n" for name, rule in grammar.rules.items())
    return f"start: {start}\nTEXT: /(.|\\n)*/\n{rules}"


def _schema_of_tag(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def _items(value: Mapping[str, Any], name: str, required: Sequence[str] = ()) -> list[Any]:
    """Read a list that is not empty, whose items have keys."""
    items = value.get(name)
    if not isinstance(items, list) or not items:
        raise ValueError(f"{name} must be a list of at least one item")
    for item in items:
        if required and not (isinstance(item, Mapping) and all(isinstance(item.get(key), str) for key in required)):
            raise ValueError(f"an item of {name} must have {' and '.join(required)}, which are texts")
    return items


def _kind_of_tag(given: Any) -> str:
    """Check the keys of a format, and return its type."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(kind, str) or kind not in TAG_KEYS:
        raise ValueError(f"the format {json.dumps(kind)[:60]} is not supported; {', '.join(TAG_KEYS)} are")
    keys = TAG_KEYS[kind]
    for key in given:
        if key not in (*keys, "type"):
            raise ValueError(f"{kind}: unknown key {json.dumps(key)[:60]}")
    for key in keys:
        if key not in given and key not in TAG_OPTIONAL:
            raise ValueError(f"{kind}: no {key} is given")
    return kind


class TagGrammar:
    """Collects the rules of a grammar."""

    def __init__(self, spell: Spell) -> None:
        self.rules: dict[str, str] = {}
        self._spell = spell

    def terms(self, given: Any) -> str:
        """Write a format as terms, with rules for its parts."""
        return str(getattr(self, f"_{_kind_of_tag(given)}")(given))

    def _rule(self, rule: str, attributes: str = "") -> str:
        name = f"part_{len(self.rules)}"
        self.rules[name + attributes] = rule
        return name

    def _const_string(self, given: Mapping[str, Any]) -> str:
        return self._spell(str(given["value"]))

    def _json_schema(self, given: Mapping[str, Any]) -> str:
        schema = given["json_schema"]
        guidance = {"x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": False}}
        return self._rule(f"%json {json.dumps({**schema, **guidance} if isinstance(schema, Mapping) else schema)}")

    def _regex(self, given: Mapping[str, Any]) -> str:
        pattern = str(given["pattern"]).replace("\n", "\\n").replace("/", "\\/")
        return self._rule(f"/{pattern}/")

    def _any_text(self, given: Mapping[str, Any]) -> str:
        return "TEXT"

    def _sequence(self, given: Mapping[str, Any]) -> str:
        return " ".join(f"({self.terms(item)})" for item in _items(given, "elements"))

    def _or(self, given: Mapping[str, Any]) -> str:
        return " | ".join(f"({self.terms(item)})" for item in _items(given, "elements"))

    def _tag(self, given: Mapping[str, Any], begin: str | None = None) -> str:
        """begin: the rest of its beginning, after a trigger; None: all of it."""
        ends = [given["end"]] if isinstance(given["end"], str) else _items(given, "end")
        opening = self._spell(str(given["begin"]) if begin is None else begin)
        if isinstance(given["content"], Mapping) and given["content"].get("type") == "any_text":
            inner = " | ".join(self._until(str(end)) for end in ends)
            return f"{opening} ({inner})"
        closing = " | ".join(self._spell(str(end)) or '""' for end in ends)
        return f"{opening} ({self.terms(given['content'])}) ({closing})"

    def _until(self, mark: str) -> str:
        """Write the rule of a text up to and including the first mark."""
        term = self._spell(mark)
        return self._rule(f"TEXT {term}", "" if term.startswith("<[") or not mark else "[lazy]")

    def _triggered_tags(self, given: Mapping[str, Any]) -> str:
        triggers, by_trigger = _items(given, "triggers"), dict[str, list[str]]()
        for tag in _items(given, "tags", ("begin",)):
            trigger = next((text for text in triggers if isinstance(text, str) and tag["begin"].startswith(text)), "")
            if not trigger:
                raise ValueError("the beginning of each tag must begin with one of the triggers")
            if _kind_of_tag(tag) != "tag":
                raise ValueError("the tags must have the type tag")
            by_trigger.setdefault(trigger, []).append(self._tag(tag, tag["begin"][len(trigger) :]))
        tags = [f"{self._until(trigger)} ({' | '.join(found)})" for trigger, found in by_trigger.items()]
        one = f"({' | '.join(tags)})"
        if given.get("stop_after_first"):
            return one if given.get("at_least_one") else f"({one} | TEXT)"
        return f"{one}{'+' if given.get('at_least_one') else '*'} TEXT"

    def _tags_with_separator(self, given: Mapping[str, Any]) -> str:
        one = f"({' | '.join(self.terms(tag) for tag in _items(given, 'tags', ('begin',)))})"
        several = one if given.get("stop_after_first") else f"{one} ({self._spell(str(given['separator']))} {one})*"
        return several if given.get("at_least_one") else f"({several})?"
