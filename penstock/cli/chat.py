"""`penstock chat`: a conversation in the terminal, with history and chat template."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from penstock.cli.options import add_generation_options, load_llm, sampling_options
from penstock.cli.terminal import handle_signals, note, show_choices
from penstock.errors import InvalidRequestError
from penstock.interface.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from penstock.entrypoints.llm import LLM

DESCRIPTION = "Talk to a model in the terminal."
EXAMPLES = """examples:
  penstock chat                                talk to the bundled demo model
  penstock chat /models/llama --system "Answer in one sentence." --temperature 0.7
  echo "What is 7 + 5?" | penstock chat --temperature 0

Commands: /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_generation_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")


def run(args: argparse.Namespace) -> int:
    with load_llm(args) as llm:
        handle_signals()
        show_choices(llm.engine.model_info)
        params = llm.default_params(**sampling_options(args), output_kind=RequestOutputKind.DELTA)
        if params.n != 1:
            raise InvalidRequestError("n: a conversation has one answer at a time", param="n")
        note("/reset forgets the conversation, /exit leaves")
        _talk(llm, params, args.system)
    return 0


def _talk(llm: "LLM", params: SamplingParams, system: str | None) -> None:
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
    """Return the user's next line; None at the end of the input."""
    interactive = sys.stdin.isatty()
    try:
        return (input("> ") if interactive else input()).strip()
    except (EOFError, KeyboardInterrupt):
        if interactive:
            print()
        return None


def _answer(llm: "LLM", params: SamplingParams, history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Stream the answer and return the history with it, or without its question if the context is too short."""
    texts: list[str] = []
    try:
        for text in llm.stream_chat(history, params):
            texts.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        note(" (stopped)")
    except InvalidRequestError as error:
        if error.code != "context_length_exceeded":
            raise
        note(f"{error}; /reset begins a new conversation")
        return history[:-1]
    print(flush=True)
    return [*history, {"role": "assistant", "content": "".join(texts)}]
