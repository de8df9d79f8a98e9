"""Tools and reasoning: how the answers to a chat request are parsed, and which grammar they have to follow."""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.client.prompts import PromptRequest
from penstock.errors import InvalidRequestError, NotSupportedError
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.structured_outputs import WHITESPACE, StructuredOutputsParams
from penstock.server.context import ServerContext
from penstock.server.openai_requests import ChatRequest
from penstock.server.options import ServerOptions
from penstock.server.tool_fields import NamedChoice
from penstock.tokenizer.answer_formats import ToolFormat, tool_format_of
from penstock.tokenizer.answers import END_OF_THINKING, THINK, AnswerParser, Calls, Function, answer_grammar, literal

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
    reasoning = _is_told_apart(options, template) and not _has_another_form(body)
    tail = tokenizer.decode(prompt.token_ids[-TAIL:], skip_special_tokens=False) if reasoning else ""
    opened, closed = (tail.rstrip().endswith(mark) for mark in (THINK, END_OF_THINKING))
    is_thinking = reasoning and (opened or (options.reasoning_parser == "deepseek_r1" and not closed))
    if not body.offered:
        return Rules(reasoning=reasoning, is_thinking=is_thinking)
    tool_format = tool_format_of(template, options.tool_call_parser)
    return Rules(tool_format, body.callable_names, reasoning, is_thinking)


def _is_told_apart(options: ServerOptions, template: str) -> bool:
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
    many = body.parallel_tool_calls is not False and not _is_one(body)
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


def _is_one(body: ChatRequest) -> bool:
    return isinstance(body.tool_choice, NamedChoice)


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
