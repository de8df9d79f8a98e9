# /// script
# dependencies = ["llm==0.36"]
# ///
"""llm, with a model of its own kind for OpenAI's API, as extra-openai-models.yaml makes it."""

from features import KEY, MODEL, QUESTION, SCHEMA, Server, add, check
from llm.default_plugins.openai_models import Chat


def model(server: Server) -> Chat:
    found = Chat("penstock", model_name=MODEL, api_base=server.v1, supports_tools=True, supports_schema=True)
    found.key = KEY
    return found


def chat(server: Server) -> None:
    check(model(server).prompt(QUESTION, stream=False, temperature=0).text())


def stream(server: Server) -> None:
    check("".join(model(server).prompt(QUESTION, temperature=0)))


def tools(server: Server) -> None:
    (call,) = model(server).prompt(QUESTION, tools=[add], temperature=0).tool_calls()
    check(add(**call.arguments))


def structured(server: Server) -> None:
    check(model(server).prompt(QUESTION, schema=SCHEMA, temperature=0).text(), '"b"')


def agent(server: Server) -> None:
    chain = model(server).chain(QUESTION, tools=[add], options={"temperature": 0})
    check(chain.text())
    check(len(list(chain.responses())), "2")
