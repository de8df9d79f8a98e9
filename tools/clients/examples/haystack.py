# /// script
# dependencies = ["haystack-ai==3.4.1"]
# ///
"""Haystack with its components for OpenAI's API."""

from features import KEY, MODEL, QUESTION, SCHEMA, Server, add, check, check_vectors
from haystack import Document
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAIDocumentEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

MESSAGES = [ChatMessage.from_user(QUESTION)]
FORM = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}}


def generator(server: Server, **more: object) -> OpenAIChatGenerator:
    fields = {"temperature": 0, **more}
    return OpenAIChatGenerator(Secret.from_token(KEY), MODEL, api_base_url=server.v1, generation_kwargs=fields)


def chat(server: Server) -> None:
    check(generator(server).run(MESSAGES)["replies"][0].text)


def stream(server: Server) -> None:
    parts: list[str] = []
    generator(server).run(MESSAGES, streaming_callback=lambda part: parts.append(part.content))
    check("".join(parts))


def tools(server: Server) -> None:
    (call,) = generator(server).run(MESSAGES, tools=[create_tool_from_function(add)])["replies"][0].tool_calls
    check(add(**call.arguments))


def structured(server: Server) -> None:
    check(generator(server, response_format=FORM).run(MESSAGES)["replies"][0].text, '"b"')


def embeddings(server: Server) -> None:
    embedder = OpenAIDocumentEmbedder(Secret.from_token(KEY), MODEL, api_base_url=server.v1, progress_bar=False)
    found = embedder.run([Document(content="a cat"), Document(content="a boat")])["documents"]
    check_vectors((document.embedding for document in found), 2)


def agent(server: Server) -> None:
    messages = Agent(chat_generator=generator(server), tools=[create_tool_from_function(add)]).run(MESSAGES)["messages"]
    check([message.role.value for message in messages], "tool")
    check(messages[-1].text)
