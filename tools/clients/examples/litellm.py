# /// script
# dependencies = ["litellm==1.110.2"]
# ///
"""LiteLLM as `openai/`, `hosted_vllm/`, `anthropic/`, `ollama/` and `ollama_chat/`: a feature over all that have it."""

import json

import litellm
from features import KEY, MODEL, QUESTION, SCHEMA, TOOL, Server, add, check, check_vectors

MESSAGES = [{"role": "user", "content": QUESTION}]


def ask(way: str, server: Server, **more: object) -> object:
    base = server.v1 if way in ("openai", "hosted_vllm") else server.url
    fields = {"messages": MESSAGES, "max_tokens": 200, "temperature": 0, **more}
    return litellm.completion(model=f"{way}/{MODEL}", api_base=base, api_key=KEY, num_retries=0, **fields)


def chat(server: Server) -> None:
    for way in ("openai", "hosted_vllm", "anthropic", "ollama", "ollama_chat"):
        check(ask(way, server).choices[0].message.content)


def stream(server: Server) -> None:
    for way in ("openai", "hosted_vllm", "anthropic", "ollama", "ollama_chat"):
        check("".join(part.choices[0].delta.content or "" for part in ask(way, server, stream=True)))


def tools(server: Server) -> None:
    for way in ("openai", "hosted_vllm", "anthropic", "ollama_chat"):
        (call,) = ask(way, server, tools=[TOOL]).choices[0].message.tool_calls
        check(add(**json.loads(call.function.arguments)))


def structured(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}}
    for way in ("openai", "hosted_vllm", "anthropic", "ollama", "ollama_chat"):
        check(ask(way, server, response_format=form).choices[0].message.content, '"b"')


def embeddings(server: Server) -> None:
    for way in ("openai", "hosted_vllm", "ollama"):
        base = server.url if way == "ollama" else server.v1
        answer = litellm.embedding(model=f"{way}/{MODEL}", input=["a cat", "a boat"], api_base=base, api_key=KEY)
        check_vectors((item["embedding"] for item in answer.data), 2)


def agent(server: Server) -> None:
    for way in ("openai", "hosted_vllm", "anthropic", "ollama_chat"):
        messages = list(MESSAGES)
        for _ in range(4):
            message = ask(way, server, messages=messages, tools=[TOOL]).choices[0].message
            messages.append(message.model_dump())
            for call in message.tool_calls or ():
                result = str(add(**json.loads(call.function.arguments)))
                messages.append({"role": "tool", "tool_call_id": call.id, "name": "add", "content": result})
            if not message.tool_calls:
                break
        check(len(messages) > 2, "True")
        check(message.content)
