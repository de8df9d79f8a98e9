"""Tools and reasoning: which grammar the answers to a chat request have to follow, and how they are parsed and shown.

The output for a choice, including the ids of tool calls, depends on its tokens alone, so that a stream can be computed
again.
"""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.client.input_processor import PromptRequest
from penstock.errors import InvalidRequestError, NotSupportedError
from penstock.interface.outputs import CompletionOutput, FinishReason
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.structured_outputs import WHITESPACE, StructuredOutputsParams
from penstock.server.context import ServerContext
from penstock.server.openai_requests import ChatRequest, NamedChoice
from penstock.server.openai_responses import ChatMessage, Delta, FunctionCall, ToolCall
from penstock.server.options import ServerOptions
from penstock.tokenizer.answer_formats import Kind, Part, ToolFormat, tool_format_of
from penstock.tokenizer.answers import (
    END_OF_THINKING,
    THINK,
    AnswerParser,
    Calls,
    Function,
    Message,
    ReasoningCounter,
    answer_grammar,
    call_id,
    literal,
)
from penstock.tokenizer.tokenizer import Tokenizer

PLACE = re.compile(r" at (\d+)\(\d+\): failed to compile JSON schema: (.*)", re.DOTALL)  # in llguidance's messages
RULE = re.compile(r"call_(\d+)_arguments: %json")
TAIL = 16  # tokens at the end of a prompt in which <think> is looked for


@dataclass(frozen=True, slots=True)
class Rules:
    """How an answer is parsed.

    Attributes:
        tool_format: how its tool calls are written; None: it has no tool calls.
        names: the functions that it may call.
        reasoning, is_thinking: as in AnswerParser.
    """

    tool_format: ToolFormat | None = None
    names: Sequence[str] = ()
    reasoning: bool = False
    is_thinking: bool = False

    def parser(self) -> AnswerParser | None:
        """Return a parser for one answer; None if all of it is content."""
        if self.tool_format is None and not self.reasoning:
            return None
        return AnswerParser(self.tool_format, self.names, reasoning=self.reasoning, is_thinking=self.is_thinking)

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the texts that separate the parts of an answer."""
        thoughts = (THINK, END_OF_THINKING) if self.reasoning else ()
        return (*thoughts, *(() if self.tool_format is None else self.tool_format.marks))


def rules_of(context: ServerContext, body: ChatRequest, prompt: PromptRequest) -> Rules:
    """Return the rules for a request's answers. They depend only on data that a journal keeps."""
    tokenizer, options = context.tokenizer(), context.options
    template = "" if tokenizer.chat_template is None else tokenizer.chat_template.text
    reasoning = _separates_reasoning(options, template) and not _has_another_form(body)
    tail = tokenizer.decode(prompt.token_ids[-TAIL:], skip_special_tokens=False) if reasoning else ""
    opened, closed = (tail.rstrip().endswith(mark) for mark in (THINK, END_OF_THINKING))
    is_thinking = reasoning and (opened or (options.reasoning_parser == "deepseek_r1" and not closed))
    if not body.offered:
        return Rules(reasoning=reasoning, is_thinking=is_thinking)
    tool_format = tool_format_of(template, options.tool_call_parser)
    return Rules(tool_format, body.callable_names, reasoning, is_thinking)


def _separates_reasoning(options: ServerOptions, template: str) -> bool:
    if options.reasoning_parser == "auto":
        return END_OF_THINKING in template
    return options.reasoning_parser != "none"


def _has_another_form(body: ChatRequest) -> bool:
    """Return whether the answer must have a form other than JSON, which leaves no room for reasoning."""
    given = body.structured_outputs or {}
    kinds = ("regex", "choice", "grammar")
    return any(given.get(kind) is not None or getattr(body, f"guided_{kind}") is not None for kind in kinds)


async def with_rules(context: ServerContext, body: ChatRequest, rules: Rules, params: SamplingParams) -> SamplingParams:
    """Return parameters that enforce the request's tools, and keep marks that are special tokens in the text.

    Raises:
        InvalidRequestError: the requested form cannot be combined with the tools, or it is not known how the model
            calls tools.
    """
    is_raw = context.options.tool_call_parser == "none" and not _constrains(body)
    if body.offered and rules.tool_format is None and not is_raw:
        message = "tools: how this model calls them is not known; start the server with --tool-call-parser"
        raise NotSupportedError(message, param="tools")
    if not rules.marks:
        return params
    tokens = await _tokens_of(context, rules.marks)
    if context.tokenizer().special_ids.intersection(tokens.values()):
        params = params.settled(skip_special_tokens=False)
    is_constrained = rules.tool_format is not None and _constrains(body)
    if not is_constrained and params.structured_outputs is None:
        return params
    functions = [tool.as_function() for tool in body.offered if tool.function.name in rules.names]
    many = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedChoice)
    calls = Calls(functions, body.must_call, many, _answer_schema(params.structured_outputs, body))
    grammar = answer_grammar(
        rules.tool_format, calls, partial(_term, tokens), reasoning=rules.reasoning, is_thinking=rules.is_thinking
    )
    form = StructuredOutputsParams(grammar=grammar)
    try:
        await context.client.check_form(form)
    except InvalidRequestError as error:
        raise _refusal(error, grammar.splitlines(), functions) from None
    return params.settled(structured_outputs=form)


def _refusal(error: InvalidRequestError, lines: list[str], functions: Sequence[Function]) -> InvalidRequestError:
    """Turn an error about the generated grammar into an error about the function whose schema caused it."""
    place = PLACE.search(error.message)
    rule = None if place is None else RULE.match(lines[int(place[1]) - 1])
    if place is None or rule is None:
        return InvalidRequestError(f"tools: they cannot be enforced: {error.message}", param="tools", code=error.code)
    reason = re.split(r"\s+\d+ \| ", place[2])[0]
    message = f"tools: the parameters of {functions[int(rule[1])].name} cannot be enforced: {reason}"
    return InvalidRequestError(message, param="tools")


def _constrains(body: ChatRequest) -> bool:
    """Return whether a request restricts its tool calls beyond offering the tools."""
    some = len(body.callable_names) < len(body.offered)
    strict = any(tool.function.strict for tool in body.offered)
    return bool(body.offered) and (body.must_call or some or strict or body.parallel_tool_calls is False)


def _answer_schema(form: StructuredOutputsParams | None, body: ChatRequest) -> str | None:
    """Return the JSON schema of an answer without a tool call; None if its form is free."""
    if form is None:
        return None
    if body.must_call:
        message = "response_format: not allowed if tool_choice requires a call, because then there is no answer"
        raise InvalidRequestError(message, param="response_format")
    if form.json is None and not form.json_object:
        message = (
            "structured_outputs: with tools only json and json_object are allowed; tool_choice none leaves them out"
        )
        raise InvalidRequestError(message, param="structured_outputs")
    schema = {"type": "object"} if form.json is None else json.loads(str(form.json))
    guidance: dict[str, Any] = {"whitespace_pattern": form.whitespace_pattern or WHITESPACE}
    if form.disable_any_whitespace:
        guidance = {"whitespace_flexible": False}
    return json.dumps({**schema, "x-guidance": guidance} if isinstance(schema, dict) else schema)


async def _tokens_of(context: ServerContext, marks: Sequence[str]) -> dict[str, int]:
    """Return the marks that are a single token, with the token's id."""
    tokenizer = context.tokenizer()
    unknown = [mark for mark in marks if mark not in context.mark_tokens]
    encode = partial(tokenizer.encode, add_special_tokens=False)
    for mark in unknown:
        ids = await asyncio.to_thread(encode, mark)
        is_one = len(ids) == 1 and tokenizer.token_to_text(ids[0]) == mark
        context.mark_tokens[mark] = ids[0] if is_one else None
    return {mark: token_id for mark in marks if (token_id := context.mark_tokens[mark]) is not None}


def _term(tokens: dict[str, int], mark: str) -> str:
    """Return a mark as a term of the grammar: as a token if it is a single token, else as text."""
    return f"<[{tokens[mark]}]>" if mark in tokens else literal(mark)


# --- answers ----------------------------------------------------------------------------------------------------------


TOOL_CALLS = "tool_calls"


class ChatAnswers:
    """Parses the choices of one call according to its rules.

    Attributes:
        num_reasoning_tokens: in all choices so far.
    """

    def __init__(self, answer_id: str, rules: Rules, tokenizer: Tokenizer | None) -> None:
        self.num_reasoning_tokens = 0
        self._id = answer_id
        self._rules = rules
        self._tokenizer = tokenizer  # None: all is content
        self._parsers: dict[int, AnswerParser] = {}
        self._counters: dict[int, ReasoningCounter] = {}

    def message(self, choice: CompletionOutput) -> ChatMessage:
        """Return a whole choice as a message. If it has tool calls and no text, its content is null."""
        message = Message()
        message.add(self.parts(choice))
        shaped = ChatMessage(role="assistant", content=message.content)
        if message.reasoning:
            shaped.reasoning_content = shaped.reasoning = message.reasoning
        if message.calls:
            shaped.content = message.content or None
            shaped.tool_calls = [
                ToolCall(
                    id=self.call_id(choice.index, number),
                    type="function",
                    function=FunctionCall(name=call.name, arguments=call.arguments),
                )
                for number, call in enumerate(message.calls)
            ]
        return shaped

    def deltas(self, choice: CompletionOutput) -> list[Delta]:
        """Return the deltas for the new part of a choice, one per parsed part."""
        return [self._delta(choice.index, part) for part in self.parts(choice)]

    def finish_reason(self, choice: CompletionOutput) -> str | None:
        """Return why a choice has ended; None while it runs."""
        if choice.finish_reason is None:
            return None
        parser = self._parsers.get(choice.index)
        calls = parser is not None and parser.num_calls and choice.finish_reason is FinishReason.STOP
        return TOOL_CALLS if calls else choice.finish_reason.value

    def parts(self, choice: CompletionOutput) -> list[Part]:
        """Return the parsed parts of a choice: those that its new text adds, or all of a whole choice."""
        parser = self._parsers.get(choice.index) or self._rules.parser()
        if parser is None:
            return [Part(Kind.CONTENT, choice.text)] if choice.text else []
        self._parsers[choice.index] = parser
        self._count(choice)
        return parser.push(choice.text) + (parser.finish() if choice.finish_reason is not None else [])

    def call_id(self, choice: int, call: int) -> str:
        """Return the id of tool call number `call` of a choice, counted from 0."""
        assert self._rules.tool_format is not None
        return call_id(self._rules.tool_format, self._id, choice, call)

    def _count(self, choice: CompletionOutput) -> None:
        if not self._rules.reasoning or self._tokenizer is None:
            return
        counter = self._counters.setdefault(choice.index, ReasoningCounter(is_thinking=self._rules.is_thinking))
        before = counter.count
        for token_id in choice.token_ids:
            counter.add(self._tokenizer.token_to_bytes(token_id))
        self.num_reasoning_tokens += counter.count - before

    def _delta(self, index: int, part: Part) -> Delta:
        if part.kind is Kind.CONTENT:
            return Delta(content=part.text)
        if part.kind is Kind.REASONING:
            return Delta(reasoning_content=part.text, reasoning=part.text)
        call = ToolCall(index=part.call, function=FunctionCall(arguments=part.text))
        if part.kind is Kind.CALL:
            call.id, call.type = self.call_id(index, part.call), "function"
            call.function = FunctionCall(name=part.text, arguments="")
        return Delta(tool_calls=[call])
