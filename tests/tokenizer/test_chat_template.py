"""ChatTemplate against Transformers' apply_chat_template."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.tokenizer.chat_template import ChatTemplate, takes_several_calls
from penstock.tokenizer.tokenizer import turn_of
from tests.tokenizer import templates
from tests.tokenizer import vocabularies as voc

TOKENS = {"bos_token": voc.BOS, "eos_token": voc.EOS}
USER = {"role": "user", "content": '  What is 1 < 2 & "3"?\n'}
ANSWER = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nTrue, é 🙂 "}
TOOL = {"type": "function", "function": {"name": "add", "description": "Füge <x>", "parameters": {"type": "object"}}}
ARGUMENTS = {"b": [1, 2.5, None, True], "a": "ü"}
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": ARGUMENTS}}

CONVERSATIONS = {
    "one turn": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "three turns": [USER, ANSWER, USER],
    "ends with the assistant": [USER, ANSWER],
    "bad order": [ANSWER, USER],
    "two users": [USER, USER],
    "odd role": [USER, {"role": "critic", "content": "hm"}],
    "tool call": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "3"}],
    "reasoning": [USER, {"role": "assistant", "content": "Yes.", "reasoning": "Hm.", "tool_calls": None}, USER, ANSWER],
    "thinking": [USER, {"role": "assistant", "content": "Yes.", "thinking": "Hm.", "reasoning_content": "Ha."}],
    "parts": [
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": "See "}, {"type": "text", "text": "it?"}],
        }
    ],
    "no content": [{"role": "user"}],
    "long": [USER, ANSWER] * 4,
}
WITH_EMPTY_CONTENT = [{**message, "content": message["content"] or ""} for message in CONVERSATIONS["tool call"]]
OPTIONS = [
    {},
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "tools": [TOOL], "documents": [{"title": "t", "text": "x"}]},
    {"continue_final_message": True},
]
VARIABLES = {"enable_thinking": False, "date_string": "26 Jul 2024", "pad": "<pad>"}


@pytest.fixture(scope="module")
def oracle():
    return PreTrainedTokenizerFast(tokenizer_object=voc.byte_level(), **TOKENS)


def theirs(oracle, source, messages, options, variables):
    """Their text, or None where they raise."""
    try:
        return oracle.apply_chat_template(messages, chat_template=source, tokenize=False, **options, **variables)
    except Exception:  # the oracle raises all kinds of things for what a template refuses
        return None


def ours(template, messages, options, variables):
    """Our text, or None where a template refuses. `add_generation_prompt` is on by default here, off there."""
    try:
        return template.render(messages, template_kwargs=variables, **{"add_generation_prompt": False, **options})
    except InvalidRequestError:
        return None


@pytest.mark.parametrize("name", templates.ALL)
def test_equals_transformers(oracle, name):
    """Guards against a prompt that the model was not trained on: one wrong newline costs quality and shows nowhere."""
    source = templates.ALL[name]
    template = ChatTemplate(source, TOKENS)
    rendered = 0
    for messages in CONVERSATIONS.values():
        for options in OPTIONS:
            for variables in ({}, VARIABLES):
                expected = theirs(oracle, source, messages, options, variables)
                rendered += expected is not None
                if expected is None and messages is CONVERSATIONS["tool call"]:
                    # where they refuse a call without content, because the template wants a text, ours is empty
                    expected = theirs(oracle, source, WITH_EMPTY_CONTENT, options, variables)
                assert ours(template, messages, options, variables) == expected
    assert rendered or name == "UNDEFINED"


CONTENT = st.text(alphabet="ab \n{}%<é", max_size=8)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": CONTENT}), max_size=4
)


@settings(max_examples=100)
@given(name=st.sampled_from(list(templates.ALL)), messages=MESSAGES, options=st.sampled_from(OPTIONS))
def test_any_conversation(oracle, name, messages, options):
    """Guards against differences in rare texts: braces, spaces at the ends, a final message without text."""
    source = templates.ALL[name]
    assert ours(ChatTemplate(source, TOKENS), messages, options, {}) == theirs(oracle, source, messages, options, {})


class TestErrors:
    def test_the_templates_own_message(self):
        """Guards against hiding why a conversation was refused."""
        with pytest.raises(InvalidRequestError, match=r"^System role not supported$") as caught:
            ChatTemplate(templates.GEMMA, TOKENS).render(CONVERSATIONS["system"])
        assert caught.value.param == "messages"

    @pytest.mark.parametrize(
        "source",
        [
            "{% if %}",
            "{{ x",
            "{% nonsense %}",
            "{% generation %}",
            "{{ x | no_such_filter }}",
            "{{ " + "(" * 6000 + "1" + ")" * 6000 + " }}",
            5,
            [],
            [{"name": "rag", "template": "x"}],
            [{"name": "default"}],
            {"default": 5},
        ],
        ids=lambda source: repr(source)[:20],
    )
    def test_broken_templates(self, source):
        """Guards against a RecursionError or a traceback at start-up for a malformed template."""
        with pytest.raises(ModelLoadError, match="chat_template"):
            ChatTemplate(source).compile()

    @pytest.mark.parametrize("messages", [[], None, "hi", {}, [5], ["hi"], [[]], [None], [{"content": object()}]])
    def test_wrong_messages(self, messages):
        """Guards against a TypeError for what a user sends."""
        with pytest.raises(InvalidRequestError) as caught:
            ChatTemplate(templates.CHATML, TOKENS).render(messages)
        assert caught.value.param == "messages"

    @pytest.mark.parametrize(
        "source",
        [
            *("{{ 1 / 0 }}", "{{ 'a' + 1 }}", "{{ [][0].x }}", "{{ '%d' % 'x' }}", "{{ {}['k'].k }}", "{{ x() }}"),
            *("{{ range(10**9) | list }}", "{{ messages.append(1) }}", "{{ messages | tojson(indent=messages) }}"),
            *("{{ raise_exception() }}", "{{ strftime_now(5) }}"),
            "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        ],
    )
    def test_python_errors(self, source):
        """Guards against Python's own exceptions out of a template becoming a 500."""
        with pytest.raises(InvalidRequestError):
            ChatTemplate(source).render([USER])

    def test_deep_messages(self):
        """Guards against a RecursionError for messages nested thousands deep."""
        deep = []
        for _ in range(5000):
            deep = [deep]
        with pytest.raises(InvalidRequestError, match="deep"):
            ChatTemplate("x").render([{"role": "user", "content": deep}])

    @pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "tokenize", "add_generation_prompt"])
    def test_reserved_names(self, name):
        """Guards against a request that brings its own template or messages in chat_template_kwargs."""
        with pytest.raises(InvalidRequestError, match=name):
            ChatTemplate("x").render([USER], template_kwargs={name: "x"})

    def test_both_ends(self):
        """Guards against one of two contradicting options being ignored."""
        with pytest.raises(InvalidRequestError) as caught:
            ChatTemplate("x").render([USER], continue_final_message=True)
        assert caught.value.param == "continue_final_message"


class TestSandbox:
    @pytest.mark.parametrize(
        "source",
        [
            "{{ lipsum.__globals__['os'].popen('id').read() }}",
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ messages.__class__.__base__.__subclasses__() }}",
            "{{ cycler.__init__.__globals__.os }}",
            "{{ raise_exception.__globals__ }}",
            "{{ strftime_now.__globals__['datetime'] }}",
            "{{ dict.__call__.__globals__ }}",
            "{{ dict.fromkeys.__func__.__globals__ }}",
            "{{ namespace.__init__.__globals__ }}",
            "{{ '{0.__class__}'.format(1) }}",
            "{{ ('%s' | attr('__class__')) }}",
            "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns }}",
            "{{ namespace(__class__=1) }}",
            "{{ self.__init__.__globals__ }}",
            "{% include '/etc/passwd' %}",
            "{% import 'os' as os %}{{ os }}",
        ],
    )
    def test_attribute_attacks_do_nothing(self, source):
        """Guards against code execution by a template (CVE-2024-34359, CVE-2026-5760): it gets nothing or an error."""
        try:
            text = ChatTemplate(source, TOKENS).render([USER])
        except InvalidRequestError:
            return
        assert text.strip() in ("", "{}")

    def test_messages_are_not_changed(self):
        """Guards against the mark of continue_final_message, or a template, writing into the caller's messages."""
        messages = [USER, {"role": "assistant", "content": [{"type": "text", "text": "Ye"}], "name": None}]
        before = repr(messages)
        text = ChatTemplate(templates.PARTS, TOKENS).render(
            messages, add_generation_prompt=False, continue_final_message=True
        )
        assert text.endswith("assistant: Ye")
        assert repr(messages) == before

    def test_attributes_of_strings(self):
        """Guards against objects with methods (an Enum, say) reaching the template."""

        class Loud(str):
            def shout(self):
                return "no"

        template = ChatTemplate("{{ messages[0].role.shout is defined }}")
        assert template.render([{"role": Loud("user")}]) == "False"


@pytest.mark.parametrize(("options", "text"), [({}, "d"), ({"tools": []}, "t"), ({"tools": [TOOL]}, "t")])
def test_named_templates(options, text):
    """Guards against the tool template used without tools, and the other way round."""
    named = {"default": "d", "tool_use": "t"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=voc.byte_level(), chat_template=named)
    assert ChatTemplate(named).render([USER], **options) == text
    assert theirs.apply_chat_template([USER], tokenize=False, **options) == text


# --- several templates, and how they want calls -----------------------------------------------------------------------

NAMED = [
    {"name": "default", "template": "default"},
    {"name": "tool_use", "template": "tools: {{ tools | length }}"},
    {"name": "rag", "template": "documents: {{ documents | length }}"},
]
ASKED = {"role": "user", "content": "Which part?"}
LOOKUP = {"id": "a", "type": "function", "function": {"name": "lookup_part", "arguments": '{"n": 1}'}}
CONVERSATION = [ASKED, {"role": "assistant", "content": None, "tool_calls": [LOOKUP]},
                {"role": "tool", "tool_call_id": "a", "content": "4"}]  # fmt: skip


def test_templates_are_chosen(tmp_path: Path) -> None:
    """Guards against one template for all conversations, and against a choice that is ignored."""
    template = ChatTemplate(NAMED)
    assert template.render([ASKED]) == "default"
    assert template.render([ASKED], tools=[{}]) == "tools: 1"
    assert template.render([ASKED], documents=[{}, {}]) == "documents: 2"
    assert template.render([ASKED], documents=[{}], tools=[{}, {}]) == "tools: 2"
    assert ChatTemplate(NAMED, chosen="rag").render([ASKED], documents=[{}], tools=[{}]) == "documents: 1"
    file = tmp_path / "mine.jinja"
    file.write_text("mine: {{ messages[0].content }}")
    assert ChatTemplate(NAMED, chosen=str(file)).render([ASKED]) == "mine: Which part?"
    assert ChatTemplate(None, chosen=str(file)).render([ASKED]) == "mine: Which part?"
    with pytest.raises(InvalidRequestError, match="default, rag, tool_use"):
        ChatTemplate(NAMED, chosen="chatml")


CALLS = "{% for c in m.tool_calls %}<call>{{ c.function.name }}:{{ARGUMENTS}}</call>{% endfor %}"


@pytest.mark.parametrize(
    ("shown", "arguments"),
    [
        ("{% if m.role == 'assistant' and m.content is none %}CALLS{% else %}{{ m.content }}{% endif %}", "tojson"),
        ("{{ m.content }}CALLS", "tojson"),
        ("{{ m.content + '' }}{% if m.tool_calls %}CALLS{% endif %}", "tojson"),
        ("{{ m['content'] or '' }}{% if m.tool_calls %}CALLS{% endif %}", "concatenation"),
        ("{% if m['content'] is none %}CALLS{% else %}{{ m.content }}{% endif %}", "concatenation"),
    ],
)
def test_calls_are_given_as_the_template_wants_them(shown: str, arguments: str) -> None:
    """Guards against calls that are lost in silence, "None" in a prompt, and a refusal where a template concatenates
    arguments: DeepSeek V3, R1-Distill, Functionary (findings of users of these templates)."""
    written = {"tojson": " c.function.arguments | tojson ", "concatenation": " '' + c.function.arguments "}[arguments]
    calls = CALLS.replace("ARGUMENTS", written)
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>" + shown.replace("CALLS", calls) + "{% endfor %}")
    expected = '<user>Which part?<assistant><call>lookup_part:{"n": 1}</call><tool>4'
    assert template.render([turn_of(message) for message in CONVERSATION]) == expected


@pytest.mark.parametrize(
    ("source", "several"),
    [
        ("{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{{ (m.tool_calls or [{'function': {}}])[0].function.name }}{% endfor %}", False),
        ("{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one') }}"
         "{% endif %}{{ m.tool_calls[0].function.name }}{% endif %}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", True),
    ],
)  # fmt: skip
def test_templates_that_take_one_call(source: str, several: bool) -> None:
    """Guards against several calls in an answer that could not be sent back, as with Llama 3.1."""
    assert takes_several_calls(ChatTemplate(source)) is several
