# /// script
# dependencies = [
#   "llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0",
#   "llama-index-llms-ollama==0.11.0",
# ]
# ///
"""LlamaIndex with its packages for servers like OpenAI's, and for Ollama's: chats and streams are tried over both."""

import asyncio

from features import KEY, MODEL, QUESTION, Server, add, check, check_vectors
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

MESSAGES = [ChatMessage(role="user", content=QUESTION)]


class Sum(BaseModel):
    """Two numbers."""

    a: int
    b: int


def model(server: Server) -> OpenAILike:
    kinds = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 1024, "max_tokens": 200}
    return OpenAILike(model=MODEL, api_base=server.v1, api_key=KEY, temperature=0, max_retries=0, **kinds)


def models(server: Server) -> list:
    return [model(server), Ollama(model=MODEL, base_url=server.url, temperature=0, context_window=1024)]


def chat(server: Server) -> None:
    for each in models(server):
        check(each.chat(MESSAGES).message.content)


def stream(server: Server) -> None:
    for each in models(server):
        check("".join(part.delta for part in each.stream_chat(MESSAGES)))


def tools(server: Server) -> None:
    for each in models(server):
        answer = each.chat_with_tools([FunctionTool.from_defaults(add)], QUESTION)
        (call,) = each.get_tool_calls_from_response(answer)
        check(add(**call.tool_kwargs))


def structured(server: Server) -> None:
    for each in models(server):
        check(type(each.as_structured_llm(Sum).chat(MESSAGES).raw).__name__, "Sum")


def embeddings(server: Server) -> None:
    embedder = OpenAILikeEmbedding(model_name=MODEL, api_base=server.v1, api_key=KEY)
    check_vectors(embedder.get_text_embedding_batch(["a cat", "a boat"]), 2)


def agent(server: Server) -> None:
    async def run() -> object:
        return await FunctionAgent(tools=[add], llm=model(server), streaming=False).run(QUESTION)

    check(asyncio.run(run()))
