# /// script
# dependencies = ["openai-agents==0.24.0"]
# ///
"""OpenAI's Agents SDK, over chat completions and over the Responses API."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from features import KEY, MODEL, QUESTION, Server, add, check
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel

set_tracing_disabled(disabled=True)


class Sum(BaseModel):
    a: int
    b: int


def agents(server: Server, **more: object) -> list[Agent]:
    def model(kind: type) -> object:
        return kind(MODEL, AsyncOpenAI(base_url=server.v1, api_key=KEY, max_retries=0))

    models, settings = map(model, (OpenAIChatCompletionsModel, OpenAIResponsesModel)), ModelSettings(temperature=0)
    return [Agent(name="a", model=each, model_settings=settings, **more) for each in models]


def chat(server: Server) -> None:
    for each in agents(server):
        check(Runner.run_sync(each, QUESTION).final_output)


def stream(server: Server) -> None:
    async def text(each: Agent) -> str:
        events = [event async for event in Runner.run_streamed(each, QUESTION).stream_events()]
        parts = [event.data for event in events if event.type == "raw_response_event"]
        return "".join(part.delta for part in parts if isinstance(part, ResponseTextDeltaEvent))

    for each in agents(server):
        check(asyncio.run(text(each)))


def tools(server: Server) -> None:
    for each in agents(server, tools=[function_tool(add)], tool_use_behavior="stop_on_first_tool"):
        check(Runner.run_sync(each, QUESTION).final_output)


def structured(server: Server) -> None:
    for each in agents(server, output_type=Sum):
        check(type(Runner.run_sync(each, QUESTION).final_output).__name__, "Sum")


def agent(server: Server) -> None:
    for each in agents(server, tools=[function_tool(add)]):
        result = Runner.run_sync(each, QUESTION)
        check([item.type for item in result.new_items], "tool_call_output_item")
        check(result.final_output)
