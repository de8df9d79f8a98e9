"""`penstock chat`: a conversation in the terminal, with history and chat template. Flags -> LLM, no more."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from penstock.cli.options import (
    add_engine_options,
    add_model,
    add_sampling_options,
    engine_options,
    sampling_options,
)
from penstock.cli.terminal import take_interrupts, tell, tell_choices
from penstock.errors import InvalidRequestError
from penstock.interface.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from penstock.entrypoints.llm import LLM

EXAMPLES = """examples:
  penstock chat                                talk to the bundled demo model
  penstock chat /models/llama --system "Answer in one sentence." --temperature 0.7
  echo "What is 7 + 5?" | penstock chat --temperature 0

Commands: /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Talk to a model in the terminal."
    parser.epilog = EXAMPLES
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    add_sampling_options(parser)
    add_engine_options(parser, seed=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    SamplingParams(**sampling_options(args))  # a wrong value is said before the model is loaded
    options = engine_options(args, seed=False)
    from penstock.entrypoints.llm import LLM

    with LLM(**options) as llm:
        take_interrupts()
        tell_choices(llm.engine.model_info)
        params = llm.default_params(**sampling_options(args), output_kind=RequestOutputKind.DELTA)
        if params.n != 1:
            raise InvalidRequestError("n: a conversation has one answer at a time", param="n")
        tell("/reset forgets the conversation, /exit leaves")
        _talk(llm, params, args.system)
    return 0


def _talk(llm: "LLM", params: "SamplingParams", system: str | None) -> None:
    start = [{"role": "system", "content": system}] if system else []
    history: list[dict[str, Any]] = list(start)
    while (line := _read_line()) is not None:
        if line == "/exit":
            return
        if line == "/reset":
            history = list(start)
        elif line:
            history.append({"role": "user", "content": line})
            history = _answer(llm, params, history)


def _read_line() -> str | None:
    """What the user says next; None at the end of the input."""
    interactive = sys.stdin.isatty()
    try:
        return (input("> ") if interactive else input()).strip()
    except (EOFError, KeyboardInterrupt):
        if interactive:
            print()
        return None


def _answer(llm: "LLM", params: "SamplingParams", history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Stream the answer; the history with it. A conversation too long for the context is not answered."""
    texts: list[str] = []
    try:
        for text in llm.stream_chat(history, params):
            texts.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        tell(" (stopped)")
    except InvalidRequestError as error:
        if error.code != "context_length_exceeded":
            raise
        tell(f"{error}; /reset begins a new conversation")
        return history[:-1]
    print(flush=True)
    return [*history, {"role": "assistant", "content": "".join(texts)}]
