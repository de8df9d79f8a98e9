# /// script
# dependencies = ["smolagents[openai]==1.26.0"]
# ///
"""Hugging Face's smolagents with its model for OpenAI's API."""

from features import KEY, MODEL, QUESTION, SCHEMA, Server, check
from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

MESSAGES = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def model(server: Server) -> OpenAIServerModel:
    return OpenAIServerModel(MODEL, api_base=server.v1, api_key=KEY, temperature=0, max_tokens=200)


def chat(server: Server) -> None:
    check(model(server).generate(MESSAGES).content)


def stream(server: Server) -> None:
    check("".join(part.content or "" for part in model(server).generate_stream(MESSAGES)))


def tools(server: Server) -> None:
    answer = model(server).generate(MESSAGES, tools_to_call_from=[add])
    check(answer.tool_calls[0].function.name, "add")


def structured(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}}
    check(model(server).generate(MESSAGES, response_format=form).content, '"b"')


def agent(server: Server) -> None:
    """Its prompt has more tokens than the demo model's context, so a short one is given. The model does not find the
    sum then; what counts is that its calls are carried out, and that the loop ends."""
    short = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": "Use the tools."}
    solver = ToolCallingAgent([add], model(server), prompt_templates=short, max_steps=3, verbosity_level=0)
    solver.run(QUESTION)
    check([call.name for step in solver.memory.steps for call in getattr(step, "tool_calls", None) or ()], "add")
