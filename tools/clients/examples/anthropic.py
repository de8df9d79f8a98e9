# /// script
# dependencies = ["anthropic==2.14.0"]
# ///
"""Anthropic's client, on /v1/messages."""

from anthropic import Anthropic
from features import KEY, MODEL, QUESTION, SCHEMA, Server, add, check

ASKED = {
    "model": MODEL,
    "max_tokens": 200,
    "messages": [{"role": "user", "content": QUESTION}],
    "extra_body": {"temperature": 0},
}
ADD = {"name": "add", "description": "Add two numbers.", "input_schema": SCHEMA}


def client(server: Server) -> Anthropic:
    return Anthropic(base_url=server.url, api_key=KEY, max_retries=0)


def chat(server: Server) -> None:
    check(client(server).messages.create(**ASKED).content[0].text)


def stream(server: Server) -> None:
    with client(server).messages.stream(**ASKED) as events:
        check("".join(events.text_stream))


def tools(server: Server) -> None:
    message = client(server).messages.create(**ASKED, tools=[ADD], tool_choice={"type": "tool", "name": "add"})
    check(add(**message.content[0].input))


def structured(server: Server) -> None:
    wanted = {"format": {"type": "json_schema", "schema": SCHEMA}}
    check(client(server).messages.create(**ASKED, output_config=wanted).content[0].text, '"b"')


def agent(server: Server) -> None:
    messages = list(ASKED["messages"])
    for _ in range(4):
        answer = client(server).messages.create(**{**ASKED, "messages": messages}, tools=[ADD])
        messages.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason != "tool_use":
            break
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": str(add(**block.input))}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    check(len(messages) > 2, "True")
    check(answer.content[-1].text)
