# /// script
# dependencies = ["pydantic-ai-slim[openai]==2.68.0"]
# ///
"""Pydantic AI, over chat completions and over the Responses API."""

from features import KEY, MODEL, QUESTION, Server, add, check, check_vectors
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.embeddings import Embedder
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Sum(BaseModel):
    a: int
    b: int


def models(server: Server) -> list:
    provider = OpenAIProvider(base_url=server.v1, api_key=KEY)
    return [OpenAIChatModel(MODEL, provider=provider), OpenAIResponsesModel(MODEL, provider=provider)]


def agents(server: Server, **more: object) -> list[Agent]:
    return [Agent(model, model_settings={"temperature": 0}, **more) for model in models(server)]


def chat(server: Server) -> None:
    for each in agents(server):
        check(each.run_sync(QUESTION).output)


def stream(server: Server) -> None:
    for each in agents(server):
        check("".join(each.run_stream_sync(QUESTION).stream_text(delta=True)))


def structured(server: Server) -> None:
    for each in agents(server, output_type=NativeOutput(Sum)):
        check(type(each.run_sync(QUESTION).output).__name__, "Sum")


def tools(server: Server) -> None:
    for each in agents(server, output_type=Sum):  # its default: the schema as that of a tool
        check(type(each.run_sync(QUESTION).output).__name__, "Sum")


def embeddings(server: Server) -> None:
    model = OpenAIEmbeddingModel(MODEL, provider=OpenAIProvider(base_url=server.v1, api_key=KEY))
    check_vectors(Embedder(model).embed_documents_sync(["a cat", "a boat"]).embeddings, 2)


def agent(server: Server) -> None:
    for each in agents(server, tools=[add]):
        result = each.run_sync(QUESTION)
        check(str(result.all_messages()), "ToolReturnPart")
        check(result.output)
