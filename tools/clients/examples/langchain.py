# /// script
# dependencies = [
#   "langchain==1.5.2", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10", "langchain-ollama==1.1.0",
# ]
# ///
"""LangChain with its packages for OpenAI's, Anthropic's and Ollama's APIs: every feature is tried over all three."""

from features import KEY, MODEL, QUESTION, Server, add, check, check_vectors
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class Sum(BaseModel):
    """Two numbers."""

    a: int
    b: int


def models(server: Server) -> list:
    return [
        ChatOpenAI(model=MODEL, base_url=server.v1, api_key=KEY, temperature=0, max_retries=0),
        ChatAnthropic(model=MODEL, base_url=server.url, api_key=KEY, temperature=0, max_retries=0, max_tokens=200),
        ChatOllama(model=MODEL, base_url=server.url, temperature=0),
    ]


def chat(server: Server) -> None:
    for model in models(server):
        check(model.invoke(QUESTION).text)


def stream(server: Server) -> None:
    for model in models(server):
        check("".join(part.text for part in model.stream(QUESTION)))


def tools(server: Server) -> None:
    for model in models(server):
        (call,) = model.bind_tools([add]).invoke(QUESTION).tool_calls
        check(add(**call["args"]))


def structured(server: Server) -> None:
    for model in models(server):
        check(type(model.with_structured_output(Sum, method="json_schema").invoke(QUESTION)).__name__, "Sum")


def embeddings(server: Server) -> None:
    known = OpenAIEmbeddings(model=MODEL, base_url=server.v1, api_key=KEY, check_embedding_ctx_length=False)
    for model in (known, OllamaEmbeddings(model=MODEL, base_url=server.url)):
        check_vectors(model.embed_documents(["a cat", "a boat"]), 2)


def agent(server: Server) -> None:
    for model in models(server):
        messages = create_agent(model, [add]).invoke({"messages": [("user", QUESTION)]})["messages"]
        check([message.type for message in messages], "'tool'")
        check(messages[-1].text)
