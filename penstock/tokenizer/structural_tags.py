"""Structural tags, in vLLM's and XGrammar's notation, as a grammar: forms that begin at a mark in a free text.

    {"type": "structural_tag", "format": FORMAT}
    {"type": "structural_tag", "structures": [{"begin", "schema", "end"}, ...], "triggers": [TEXT, ...]}   the older one

The grammar is in Lark's notation as llguidance reads it, which compiles it (grammars.py).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.interface.structured_outputs import WHITESPACE

Spell = Callable[[str], str]
KEYS = {  # type of a format -> its keys, those that are required first
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
OPTIONAL = ("at_least_one", "stop_after_first")


def structural_grammar(tag: Mapping[str, Any], spell: Spell) -> str:
    """Write the grammar of a structural tag.

    Args:
        spell: writes a text as terms of the grammar, with tokens for the marks in it that are special tokens.

    Raises:
        ValueError: it is malformed, or has a format that is not supported.
    """
    if "structures" in tag:
        tags = [
            {"type": "tag", "begin": item["begin"], "content": _schema(item.get("schema", {})), "end": item["end"]}
            for item in _items(tag, "structures", ("begin", "end"))
        ]
        whole: Any = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    else:
        whole = tag.get("format")
    grammar = _Grammar(spell)
    start = grammar.terms(whole)
    rules = "".join(f"{name}: {rule}\n" for name, rule in grammar.rules.items())
    return f"start: {start}\nTEXT: /(.|\\n)*/\n{rules}"


def _schema(schema: Any) -> dict[str, Any]:
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


def _kind(given: Any) -> str:
    """Check the keys of a format, and return its type."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(kind, str) or kind not in KEYS:
        raise ValueError(f"the format {json.dumps(kind)[:60]} is not supported; {', '.join(KEYS)} are")
    keys = KEYS[kind]
    for key in given:
        if key not in (*keys, "type"):
            raise ValueError(f"{kind}: unknown key {json.dumps(key)[:60]}")
    for key in keys:
        if key not in given and key not in OPTIONAL:
            raise ValueError(f"{kind}: no {key} is given")
    return kind


class _Grammar:
    """Collects the rules of a grammar."""

    def __init__(self, spell: Spell) -> None:
        self.rules: dict[str, str] = {}
        self._spell = spell

    def terms(self, given: Any) -> str:
        """Write a format as terms, with rules for its parts."""
        return str(getattr(self, f"_{_kind(given)}")(given))

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
            if _kind(tag) != "tag":
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
