# /// script
# dependencies = ["ollama==0.6.3"]
# ///
"""Ollama's client, on /api."""

from features import MODEL, QUESTION, SCHEMA, Server, add, check, check_vectors
from ollama import Client

ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "options": {"temperature": 0}}


def chat(server: Server) -> None:
    check(Client(server.url).chat(**ASKED).message.content)


def stream(server: Server) -> None:
    check("".join(part.message.content for part in Client(server.url).chat(**ASKED, stream=True)))


def tools(server: Server) -> None:
    (call,) = Client(server.url).chat(**ASKED, tools=[add]).message.tool_calls
    check(add(**call.function.arguments))


def structured(server: Server) -> None:
    check(Client(server.url).chat(**ASKED, format=SCHEMA).message.content, '"b"')


def embeddings(server: Server) -> None:
    check_vectors(Client(server.url).embed(model=MODEL, input=["a cat", "a boat"]).embeddings, 2)


def agent(server: Server) -> None:
    messages = list(ASKED["messages"])
    for _ in range(4):
        message = Client(server.url).chat(**{**ASKED, "messages": messages}, tools=[add]).message
        messages.append(message)
        for call in message.tool_calls or ():
            result = str(add(**call.function.arguments))
            messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
        if not message.tool_calls:
            break
    check(len(messages) > 2, "True")
    check(message.content)
