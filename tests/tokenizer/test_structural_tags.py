"""Structural tags: which texts they allow, token by token, and what is refused."""

import json
from typing import Any

import pytest

from penstock.errors import InvalidRequestError
from penstock.interface.structured_outputs import StructuredOutputsParams
from penstock.tokenizer.grammars import Grammars
from penstock.tokenizer.hf import load_tokenizer
from penstock.weights.hub import MODEL_DIR

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CALL = {"type": "tag", "begin": "<call=f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</call>"}
NAMED = {"type": "tag", "begin": "<call=g>", "content": {"type": "regex", "pattern": "[0-9]+/[a-z]"}, "end": ["!", "?"]}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<call="], "tags": [CALL, NAMED]}
SEVERAL = {"type": "tags_with_separator", "tags": [CALL, NAMED], "separator": ", "}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(MODEL_DIR)


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(lambda: tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id])


def allows(grammars: Grammars, tokenizer: Any, tag: Any, text: str) -> bool:
    """Whether a text, given as the tokenizer writes it, is a whole answer."""
    matcher = grammars.start(StructuredOutputsParams(structural_tag=tag))
    try:
        matcher.follow(tokenizer.encode(text, add_special_tokens=False))
    except ValueError:
        return False
    return bool(matcher.allowed()[tokenizer.eos_token_id])


def of(form: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


@pytest.mark.parametrize(("form", "allowed", "forbidden"), [
    (TRIGGERED, ["", "Hi < there", 'x <call=f>{"a": 1}</call> y', "<call=g>12/b!<call=g>1/c? z"],
     ["<call=h>", '<call=f>{"b": 1}</call>', "<call=g>12!", 'x <call=f>{"a": 1}', "<call=f>x</call>"]),
    ({**TRIGGERED, "at_least_one": True}, ["a <call=g>1/b!"], ["", "Hi"]),
    ({**TRIGGERED, "stop_after_first": True, "at_least_one": True}, ["a <call=g>1/b!"], ["a <call=g>1/b! c"]),
    (SEVERAL, ["", '<call=f>{"a": 1}</call>', '<call=g>1/b!, <call=f>{"a":2}</call>'],
     ["x", "<call=g>1/b!<call=g>1/b!"]),
    ({**SEVERAL, "stop_after_first": True, "at_least_one": True}, ["<call=g>1/b!"], ["", "<call=g>1/b!, <call=g>1/b!"]),
    ({"type": "sequence", "elements": [{"type": "const_string", "value": "Yes, "},
      {"type": "or", "elements": [{"type": "const_string", "value": "sir"}, {"type": "regex", "pattern": "ma+m"}]}]},
     ["Yes, sir", "Yes, maam"], ["Yes, ", "No, sir", "Yes, mm"]),
    ({"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
     ["<think></think>", "<think>a < b</think>"], ["<think>a", "<think>a</think>b", "a"]),
])  # fmt: skip
def test_what_a_tag_allows(
    grammars: Grammars, tokenizer: Any, form: Any, allowed: list[str], forbidden: list[str]
) -> None:
    """Guards against text that is not free outside of tags, tags that are not enforced, and ends passed over."""
    for text in allowed:
        assert allows(grammars, tokenizer, of(form), text), text
    for text in forbidden:
        assert not allows(grammars, tokenizer, of(form), text), text


def test_the_older_notation(grammars: Grammars, tokenizer: Any) -> None:
    """Guards against another meaning, and the text of the tag instead of the object."""
    structure = {"begin": "<call=f>", "schema": SCHEMA, "end": "</call>"}
    old = {"type": "structural_tag", "structures": [structure], "triggers": ["<call="]}
    for given in (old, json.dumps(old)):
        assert allows(grammars, tokenizer, given, 'Hi <call=f>{"a": 3}</call>')
        assert not allows(grammars, tokenizer, given, "Hi <call=f>{}</call>")


def test_special_tokens_are_tokens(grammars: Grammars, tokenizer: Any) -> None:
    """Guards against marks that would have to be spelt in letters, though the model writes one token."""
    special = next(tokenizer.token_to_text(i) for i in sorted(tokenizer.special_ids) if i != tokenizer.eos_token_id)
    assert len(tokenizer.encode(special, add_special_tokens=False)) == 1
    content = {"type": "const_string", "value": "x"}
    tag = {"type": "tag", "begin": f"{special}do ", "content": content, "end": special}
    triggered = {"type": "triggered_tags", "triggers": [special], "tags": [tag], "at_least_one": True}
    for form in (tag, triggered):
        assert allows(grammars, tokenizer, of(form), f"{special}do x{special}")
        assert not allows(grammars, tokenizer, of(form), f"{special}do y{special}")


@pytest.mark.parametrize("wrong", [
    {"format": {"type": "grammar", "grammar": "root ::= x"}}, {"format": None}, {}, {"structures": []},
    {"format": {**TRIGGERED, "triggers": ["<x"]}}, {"format": {**CALL, "ends": ""}}, {"format": {"type": "tag"}},
    {"structures": [{"begin": 1, "end": ""}], "triggers": ["<"]}, {"format": {"type": "regex", "pattern": "("}},
    {"format": {"type": "sequence", "elements": "x"}}, {"format": {"type": ["tag"]}},
])  # fmt: skip
def test_what_is_refused(grammars: Grammars, wrong: dict[str, Any]) -> None:
    """Guards against an error of another type, which would be the server's, or a part that is ignored."""
    with pytest.raises(InvalidRequestError, match="structural_tag"):
        grammars.check(StructuredOutputsParams(structural_tag={"type": "structural_tag", **wrong}))
