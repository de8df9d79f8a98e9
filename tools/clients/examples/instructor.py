# /// script
# dependencies = ["instructor==1.17.0", "anthropic==2.14.0"]
# ///
"""Instructor: the schema of an answer in each of its modes for OpenAI's API and for Anthropic's.

JSON, MD_JSON and ANTHROPIC_JSON ask for the schema in the prompt, which the demo model does not follow: for these, an
answer is enough.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import instructor
from anthropic import Anthropic
from features import KEY, MODEL, QUESTION, Server, check
from instructor import Mode
from instructor.core import InstructorError
from openai import OpenAI
from pydantic import BaseModel, Field

ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "max_retries": 0}


class add(BaseModel):  # the name of the function that the model is offered
    a: int = Field(ge=0, le=999)
    b: int = Field(ge=0, le=999)


def answered(server: Server, mode: Mode, kind: Any = add, on_answer: Callable[[Any], None] = bool) -> Any:
    if mode.value.startswith("anthropic"):
        client: Any = instructor.from_anthropic(Anthropic(base_url=server.url, api_key=KEY), mode=mode)
    else:
        client = instructor.from_openai(OpenAI(base_url=server.v1, api_key=KEY), mode=mode)
    client.on("completion:response", on_answer)
    messages = [{"role": "user", "content": QUESTION}]
    return client.chat.completions.create(response_model=kind, messages=messages, **ASKED)


def tools(server: Server) -> None:
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.FUNCTIONS, Mode.RESPONSES_TOOLS, Mode.ANTHROPIC_TOOLS):
        check(type(answered(server, mode)).__name__, "add")
    for mode in (Mode.PARALLEL_TOOLS, Mode.ANTHROPIC_PARALLEL_TOOLS):
        check([type(call).__name__ for call in answered(server, mode, Iterable[add])], "add")


def structured(server: Server) -> None:
    check(type(answered(server, Mode.JSON_SCHEMA)).__name__, "add")
    for mode in (Mode.JSON, Mode.MD_JSON, Mode.ANTHROPIC_JSON):
        answers: list[Any] = []
        with suppress(InstructorError):
            answered(server, mode, on_answer=answers.append)
        check(len(answers), "1")
