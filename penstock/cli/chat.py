"""`penstock chat`: a conversation in the terminal, with a model in this process or with a server."""

import argparse
import os

from penstock.cli.answers import Answerer, LocalModel, Server
from penstock.cli.conversation import COMMANDS, Conversation, talk
from penstock.cli.options import DEFAULT_MODEL, add_generation_options, engine_options, load_llm, sampling_options
from penstock.cli.terminal import handle_signals, note, show_choices
from penstock.errors import invalid

KEY_VARIABLES = ("PENSTOCK_API_KEY", "OPENAI_API_KEY")
DESCRIPTION = "Talk to a model, or to any server with OpenAI's API, in the terminal."
EXAMPLES = f"""examples:
  penstock chat                                talk to the bundled demo model
  penstock chat /models/llama --system "Answer in one sentence." --temperature 0.7
  penstock chat --url http://127.0.0.1:8000    talk to a server: Penstock, vLLM, llama.cpp, Ollama, ...
  echo "What is 7 + 5?" | penstock chat --temperature 0

commands:
{COMMANDS}
When the context is full, the oldest messages are left out.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_generation_options(parser, max_tokens=None)
    add_conversation_options(parser)
    group = parser.add_argument_group("server")
    help_text = "talk to this server instead of a model in this process; MODEL is then its name there"
    group.add_argument("--url", metavar="URL", help=help_text)
    key = next((value for name in KEY_VARIABLES if (value := os.environ.get(name))), None)
    help_text = f"its key (default: {' or '.join(KEY_VARIABLES)} in the environment)"
    group.add_argument("--api-key", default=key, metavar="KEY", help=help_text)


def add_conversation_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    help_text = "show every choice that was made for the engine, with its reason"
    parser.add_argument("--verbose", action="store_true", help=help_text)


def run(args: argparse.Namespace) -> int:
    if args.url is not None:
        options = sampling_options(args)
        for name in [*engine_options(args, seed=False), *options]:
            if name == "structured_outputs" or (name not in options and name != "model"):
                raise invalid(name, "not with --url: the server has its own")
        handle_signals()
        begin(Server(args.url, None if args.model == DEFAULT_MODEL else args.model, args.api_key), args)
        return 0
    with load_llm(args) as llm:
        handle_signals()
        if args.verbose:
            show_choices(llm.engine.model_info)
        model = LocalModel(llm, args.model)
        model.params(sampling_options(args))  # a wrong one is refused before the first message
        begin(model, args)
    return 0


def begin(answerer: Answerer, args: argparse.Namespace) -> None:
    """Hold a conversation."""
    note(f"penstock: {answerer.name}, {answerer.about}")
    talk(Conversation(answerer, sampling_options(args), args.system))
