"""The command `penstock`: picks a command and turns errors into one line and an exit code.

    0 done      1 something failed      2 bad input: one line names the option, the value and what is allowed

Nothing heavy is imported here: `--version` and `--help` answer without torch.
"""

import argparse
import importlib
import os
import signal
import sys
from typing import NoReturn

from penstock import __version__
from penstock.errors import EngineError, InvalidRequestError, ModelLoadError

COMMANDS = {
    "generate": "generate text from prompts",
    "chat": "talk to a model in the terminal",
    "serve": "serve a model over the OpenAI API",
    "bench": "measure throughput and latency",
    "convert": "write a checkpoint in another form: packed, merged, separate",
    "check": "compare a model with Transformers, layer by layer",
    "table": "print a model's parameter table, or a template for a new one",
}
PLANNED = {
    "bench serve": "load on a running server",
    "plan": "predict memory and speed before loading",
    "simulate": "run the real scheduler on a virtual clock",
}
FLAGS = {  # where a field is no flag
    "drain_timeout_s": "drain_timeout",
    "served_model_names": "served_model_name",
    "imports": "import",
}
POSITIONAL = ("model", "prompt", "src", "dst")
EPILOG = """examples:
  penstock generate -p "Once upon a time"          the bundled demo model tells a story
  penstock chat                                    talk to it
  penstock serve /models/llama --port 8000         the OpenAI API on http://127.0.0.1:8000/v1
  penstock bench offline /models/llama --json out.json
"""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        print(f"penstock: {message}", file=sys.stderr)
        raise SystemExit(2)


def version_text() -> str:
    from penstock.kernels.cpu.library import best_level

    level = best_level()
    native = "no native library" if level is None else f"native kernels: {level}"
    return f"penstock {__version__} ({native})"


def build_parser(argv: list[str]) -> argparse.ArgumentParser:
    """The parser; only the command that argv names gets its own flags, so that the others cost no import."""
    raw = argparse.RawDescriptionHelpFormatter
    description = "An inference and serving engine for language models."
    parser = Parser(prog="penstock", description=description, epilog=EPILOG, formatter_class=raw)
    parser.add_argument("--version", action="store_true", help="print the version and what the processor can do")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, help_text in COMMANDS.items():
        command = commands.add_parser(name, help=help_text, formatter_class=raw)
        if name == chosen:
            importlib.import_module(f"penstock.cli.{name}").configure(command)
    for name, help_text in PLANNED.items():
        if " " in name:  # its command shows it
            continue
        commands.add_parser(name, help=f"(not built yet) {help_text}", add_help=False)
    return parser


def option_message(error: InvalidRequestError, args: argparse.Namespace) -> str:
    """The error with its field spelt as the flag, if it is one: "max_num_seqs: 0 ..." -> "--max-num-seqs: 0 ..."."""
    param = error.param or ""
    flag = FLAGS.get(param, param)
    known = hasattr(args, flag) and flag not in POSITIONAL
    if known and error.message.startswith(f"{param}:"):
        return f"--{flag.replace('_', '-')}{error.message[len(param) :]}"
    return error.message


def main(argv: list[str] | None = None) -> int:
    """Run one command line. Returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    parser = build_parser(words)
    planned = next((name for name in PLANNED if words[: len(name.split())] == name.split()), None)
    if planned is not None:
        parser.error(f"{planned} is planned but not built yet")
    args = parser.parse_args(words)
    # Until a command takes Ctrl-C into its own hands it simply ends the process: raised in the middle of an import it
    # would leave half a library behind.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if args.version:
        print(version_text())
        return 0
    if args.command is None:
        parser.print_help()
        return 0
    return _guarded(args)


def _guarded(args: argparse.Namespace) -> int:
    try:
        return int(args.run(args))
    except InvalidRequestError as error:
        print(f"penstock: {option_message(error, args)}", file=sys.stderr)
        return 2
    except ModelLoadError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    except EngineError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone: `penstock generate | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a full disk under our output, say
        print(f"penstock: {error.strerror or error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
