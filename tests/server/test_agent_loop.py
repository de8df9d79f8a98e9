"""Agents that call a function ten times, through the openai client, with a scripted model.

Each format of calls is tried with a plain template. `make real` also runs this with real models' chat templates
(PENSTOCK_TEMPLATES names their directory): there, the model's answers are what the template itself writes for the call.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidRequestError
from penstock.server.options import ServerOptions
from penstock.tokenizer.answer_formats import ToolFormat, reasoning_format_of, tool_format_of, tool_formats
from penstock.tokenizer.chat_template import ChatTemplate
from penstock.tokenizer.tokenizer import turn_of
from tests.official import official_client
from tests.server.fakes import Behaviour, FakeEngineClient
from tests.server.harness import running

NUM_CALLS = 10
SCHEMA = {
    "type": "object",
    "description": "What to look up.",
    "properties": {
        "text": {"type": "string", "description": "a text"},
        "count": {"type": "integer", "description": "a number"},
        "options": {"type": "object", "description": "more", "properties": {}},
    },
    "required": ["text", "count"],
}
TOOL: Any = {"type": "function", "function": {"name": "lookup", "description": "Looks it up.", "parameters": SCHEMA}}
PLAIN = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
DIRECTORY = os.environ.get("PENSTOCK_TEMPLATES")
REAL = sorted(Path(DIRECTORY).glob("*.jinja")) if DIRECTORY else []


def arguments_of(number: int) -> dict[str, Any]:
    return {"text": f'a "{number}", [b]\nç', "count": number, "options": {"x": [1, True, None], "y": {"z": "}"}}}


def written(form: ToolFormat, number: int) -> str:
    """A call as the model writes it, with nested arguments."""
    arguments = arguments_of(number)
    if form.argument:
        quote = {"raw": "", "python": '"'}.get(form.values, form.values)
        texts = {"count": str(number), "options": json.dumps(arguments["options"], ensure_ascii=False)}
        text = arguments["text"] if form.values != "python" else json.dumps(arguments["text"], ensure_ascii=False)[1:-1]
        texts = {"text": f"{quote}{text}{quote}", **texts}
        items = [
            form.argument.replace("IS_STRING", str(key == "text").lower()).replace("KEY", key).replace("VALUE", value)
            for key, value in texts.items()
        ]
        shown = form.join.join(items)
    else:
        shown = json.dumps(arguments, ensure_ascii=False)
    call = form.call.replace("NAME", "lookup").replace("NUMBER", "0").replace("ARGUMENTS", shown)
    return form.before + call + form.after


class Agent:
    """A client with its conversation, and the model's script."""

    def __init__(self, engine: FakeEngineClient, client: Any, *, streams: bool) -> None:
        self.engine, self._client, self._streams = engine, client, streams
        self.last = "That is all."
        self.messages: list[Any] = [{"role": "user", "content": "Look these up."}]

    def ask(self, answer: str) -> Any:
        """The message that a scripted answer becomes. It is added to the conversation."""
        self.engine.behaviour = Behaviour(text=answer)
        fields: dict[str, Any] = {"model": "fake", "messages": self.messages, "tools": [TOOL], "max_tokens": 4000}
        if self._streams:
            with self._client.chat.completions.stream(**fields) as stream:
                for _ in stream:
                    pass
                message = stream.get_final_completion().choices[0].message
        else:
            message = self._client.chat.completions.create(**fields).choices[0].message
        self.messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        return message

    def run(self, answers: Iterator[str]) -> None:
        for number in range(NUM_CALLS):
            message = self.ask(next(answers))
            assert not (message.content or "").strip(), message.content
            (call,) = message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("lookup", arguments_of(number))
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps({"found": number})})
        assert self.ask(self.last).content == "That is all."


def loop(template: ChatTemplate, answers: Any, *, streams: bool, parser: str = "auto") -> None:
    engine = FakeEngineClient(max_model_len=10**6)
    engine.tokenizer.chat_template = template
    options = ServerOptions(port=0, access_log=False, tool_call_parser=parser)
    with running(engine, options) as server, official_client(server.url) as client:
        agent = Agent(engine, client, streams=streams)
        prompt = template.render(agent.messages, tools=[TOOL])
        agent.last = after_thinking(template, prompt, agent.last)
        agent.run(answers(agent))


STREAMED = ("hermes", "qwen3_coder", "openai", "pythonic")  # a stream takes seconds; its parser is tested elsewhere
TRIED = [(name, False) for name in tool_formats()] + [(name, True) for name in STREAMED]


@pytest.mark.parametrize(("name", "streams"), TRIED)
def test_ten_calls(name: str, streams: bool) -> None:
    """Guards against a call that is read once but cannot be sent back, and arguments that change on their way."""
    form = tool_formats()[name]
    answers = (written(form, number) for number in range(NUM_CALLS))
    loop(ChatTemplate(PLAIN, TOKENS), lambda agent: answers, streams=streams, parser=name)


def answer_of(template: ChatTemplate, messages: list[Any], number: int) -> str:
    """What the template writes for the next call, from its first mark to its last."""
    arguments = json.dumps(arguments_of(number), ensure_ascii=False)
    call = {"id": f"call{number:05}", "type": "function", "function": {"name": "lookup", "arguments": arguments}}
    turns = [turn_of(item) for item in (*messages, {"role": "assistant", "content": None, "tool_calls": [call]})]
    whole = template.render(turns, tools=[TOOL], add_generation_prompt=False)
    form = tool_format_of(template.text)
    assert form is not None
    name = whole.rfind("lookup")
    openers = [form.opener or "{", *(opener for other in form.others() for opener in other.openers)]
    start = max(whole.rfind(opener, 0, name + 1) for opener in openers)
    closing = (form.after or form.parts[2]).strip() or "}"
    end = whole.rfind(closing)
    answer = whole[start : end + len(closing)] if name >= 0 and start >= 0 and end > name else ""
    return after_thinking(template, template.render(turns[:-1], tools=[TOOL]), answer)


def after_thinking(template: ChatTemplate, prompt: str, answer: str) -> str:
    """The answer after some reasoning, if the prompt has begun it."""
    reasoning = reasoning_format_of(template.text)
    if reasoning is None or not prompt.rstrip().endswith(reasoning.begin) or reasoning.end in answer:
        return answer
    return f"Hm.{reasoning.end}{answer}"


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("file", REAL, ids=lambda file: file.stem)
def test_ten_calls_with_real_templates(file: Path, streams: bool) -> None:
    """Guards against a parser that does not read what the model's own template writes."""
    source = file.read_text(encoding="utf-8")
    if tool_format_of(source) is None:
        pytest.skip("no parser: the template has no tools, or writes them in a way that is not known")
    template = ChatTemplate(source, TOKENS)
    try:
        first = answer_of(template, [{"role": "user", "content": "x"}], 0)
    except InvalidRequestError as error:
        pytest.skip(f"the template refuses calls, here and in Transformers: {error}")
    if "[b]" not in first:  # of the arguments; a template may show the function among the tools
        pytest.skip("the template does not show the assistant's calls")
    if "tools" not in source:
        pytest.skip("the template does not show the tools to the model")
    loop(
        template,
        lambda agent: (answer_of(template, agent.messages, number) for number in range(NUM_CALLS)),
        streams=streams,
    )


if not REAL:  # only `make real` has them
    del test_ten_calls_with_real_templates
