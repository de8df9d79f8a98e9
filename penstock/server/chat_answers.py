"""The answers of one chat call in OpenAI's format: messages or stream deltas, with reasoning and tool calls.

The output for a choice, including the ids of tool calls, depends on its tokens alone, so that a stream can be computed
again.
"""

from penstock.interface.outputs import CompletionOutput, FinishReason
from penstock.server.openai_responses import ChatMessage, Delta, FunctionCall, ToolCall
from penstock.server.tools import Rules
from penstock.tokenizer.answer_formats import Kind, Part
from penstock.tokenizer.answers import AnswerParser, Message, ReasoningCounter, call_id
from penstock.tokenizer.tokenizer import Tokenizer

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
