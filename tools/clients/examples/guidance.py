# /// script
# dependencies = ["guidance==0.3.1", "openai==3.57.0"]
# ///
"""Guidance with its model for OpenAI's API."""

from features import KEY, MODEL, QUESTION, SCHEMA, Server, check
from guidance import assistant, gen, json, models, user


def ask(server: Server, what: object) -> str:
    model = models.OpenAI(MODEL, api_key=KEY, base_url=server.v1, echo=False)
    with user():
        model += QUESTION
    with assistant():
        model += what
    return model["answer"]


def chat(server: Server) -> None:
    check(ask(server, gen("answer", max_tokens=20, temperature=0.0)))


def structured(server: Server) -> None:
    check(ask(server, json("answer", schema=SCHEMA, temperature=0.0)), '"b"')
