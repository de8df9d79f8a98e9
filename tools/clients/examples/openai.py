# /// script
# dependencies = ["openai==3.57.0"]
# ///
"""OpenAI's client: chat completions with its helpers for streams and schemas; the agent over the Responses API."""

import json

from features import KEY, MODEL, QUESTION, SCHEMA, TOOL, Server, add, check, check_vectors
from openai import OpenAI
from pydantic import BaseModel

ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}


class Sum(BaseModel):
    a: int
    b: int


def client(server: Server) -> OpenAI:
    return OpenAI(base_url=server.v1, api_key=KEY, max_retries=0)


def chat(server: Server) -> None:
    check(client(server).chat.completions.create(**ASKED).choices[0].message.content)


def stream(server: Server) -> None:
    with client(server).chat.completions.stream(**ASKED) as events:
        check("".join(event.delta for event in events if event.type == "content.delta"))


def tools(server: Server) -> None:
    message = client(server).chat.completions.create(**ASKED, tools=[TOOL]).choices[0].message
    (call,) = message.tool_calls
    check(add(**json.loads(call.function.arguments)))


def structured(server: Server) -> None:
    parsed = client(server).chat.completions.parse(**ASKED, response_format=Sum).choices[0].message.parsed
    check(type(parsed).__name__, "Sum")


def embeddings(server: Server) -> None:
    answer = client(server).embeddings.create(model=MODEL, input=["a cat", "a boat"])
    check_vectors((item.embedding for item in answer.data), 2)


def agent(server: Server) -> None:
    function = {"type": "function", "name": "add", "description": "Add two numbers.", "parameters": SCHEMA}
    items: list = [{"role": "user", "content": QUESTION}]
    for _ in range(4):
        answer = client(server).responses.create(model=MODEL, input=items, tools=[function], temperature=0)
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        for call in calls:
            result = str(add(**json.loads(call.arguments)))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        if not calls:
            break
    check(len(items) > 2, "True")
    check(answer.output_text)
