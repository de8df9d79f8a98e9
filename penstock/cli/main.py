"""The command line `penstock`: runs a command and turns an error into one line and an exit code.

    0 done      1 something failed      2 bad input: one line names the option, the value and what is allowed

Nothing heavy is imported here, so `--version` and `--help` work without importing torch.
"""

import argparse
import importlib
import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from penstock import __version__
from penstock.errors import (
    EXTRAS,
    EngineError,
    InvalidRequestError,
    ModelLoadError,
    PenstockError,
    hint,
    missing,
    shown,
)
from penstock.interface import entry_points

COMMANDS = {
    "run": "from a name to a conversation: fetch a model, choose what fits, talk to it",
    "chat": "talk to a model, or to any OpenAI-compatible server, in the terminal",
    "serve": "serve a model over the OpenAI API",
    "pull": "download a model from the Hugging Face hub",
    "list": "list the downloaded models, and what fits this machine",
    "show": "show what a model is, and how it fits this machine",
    "rm": "delete downloaded models",
    "generate": "generate text from prompts",
    "run-batch": "answer a file of OpenAI's batch requests",
}
POSITIONAL = {"model": "model", "prompt": "prompt", "src": "SRC", "dst": "DST", "bundle": "BUNDLE"}  # as errors name it
EPILOG = """examples:
  penstock run qwen3:0.6b                          fetch a model, and talk to it
  penstock generate -p "Once upon a time"          the bundled demo model tells a story
  penstock serve /models/llama --port 8000         the OpenAI API on http://127.0.0.1:8000/v1
  penstock bench offline /models/llama --json out.json
"""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line. For an unknown option it suggests what may have been meant.

    Options are not abbreviated: another engine's --model is not --model-impl.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, allow_abbrev=False)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse all arguments; unknown ones end the process with an error."""
        words = list(sys.argv[1:] if args is None else args)
        # Other engines' short flags of several letters, which argparse would take apart: -hf is not -h with an f.
        other = next(
            (word for word in words[: end_of_flags(words)] if re.match("-[a-z]{2}", word) and self._hint(word)), ""
        )
        found, unknown = (argparse.Namespace(), [other]) if other else super().parse_known_args(words, namespace)
        if len(unknown) == 1 and not unknown[0].startswith("-") and getattr(found, "prompt", "") is None:
            found.prompt = unknown.pop()  # argparse takes all arguments without a flag from one place
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{''.join(map(self._hint, unknown))}")
        return found, unknown

    def _hint(self, word: str) -> str:
        """Write advice about an unknown flag as a further part of the error; "" if there is none."""
        from penstock.cli.options import flag_of
        from penstock.config import hint as advice  # here, because a command line without a mistake needs no advice

        flag = word.partition("=")[0]
        known = [name.lstrip("-").replace("-", "_") for name in self._option_string_actions]
        found = advice(flag.lstrip("-").replace("-", "_"), known, flag_of) if flag.startswith("-") else ""
        return f"; {flag}: {found}" if found else ""

    def error(self, message: str) -> NoReturn:
        print(f"penstock: {message}", file=sys.stderr)
        raise SystemExit(2)


def added_commands() -> dict[str, tuple[str, str]]:
    """Find the commands that other installed packages add: {name: (package of its module, help)}."""
    found: dict[str, tuple[str, str]] = {}
    for name in entry_points.names("commands"):
        package = entry_points.load("commands", name, name)
        found |= {command: (package.__name__, help_text) for command, help_text in package.COMMANDS.items()}
    return found


def build_parser(argv: list[str]) -> argparse.ArgumentParser:
    """Build the parser. Only the command named in argv is imported and gets its own flags."""
    raw = argparse.RawDescriptionHelpFormatter
    description = "An inference and serving engine for language models."
    parser = Parser(prog="penstock", description=description, epilog=EPILOG, formatter_class=raw)
    parser.add_argument("--version", action="store_true", help="print the version and the level of the native kernels")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    chosen = next((word for word in argv if not word.startswith("-")), None)
    known = {name: ("penstock.cli", help_text) for name, help_text in COMMANDS.items()}
    if chosen not in COMMANDS and "--version" not in argv:
        known |= added_commands()
    if chosen is not None and chosen not in known and "--version" not in argv:
        parser.error(not_a_command(chosen, known))
    for name, (package, help_text) in known.items():
        command = commands.add_parser(name, help=help_text, formatter_class=raw)
        if name == chosen:
            from penstock.cli import settings

            module = importlib.import_module(f"{package}.{name.replace('-', '_')}")
            command.description, command.epilog = module.DESCRIPTION, module.EXAMPLES
            command.set_defaults(run=module.run)
            module.configure(command)
            settings.add_config(command)
            settings.settle(command, argv)
    return parser


def not_a_command(word: str, commands: Iterable[str]) -> str:
    """Say what to write in place of a word that is no command."""
    if word == "demo" or "/" in word or word.endswith(".gguf") or os.path.isdir(word):
        return f"{shown(word)} is a model; a command comes before it: penstock run {word}, or penstock serve {word}"
    return f"{shown(word)} is not a command{hint(word, commands)}; there are {', '.join(commands)}"


def end_of_flags(words: Sequence[str]) -> int:
    """Find the place of "--", after which no word is a flag."""
    return words.index("--") if "--" in words else len(words)


def dashed(words: list[str]) -> list[str]:
    """Put dashes in the flags of a command line, where vLLM and Falcon also allow underscores."""
    end = end_of_flags(words)
    split = [word.partition("=") for word in words[:end]]
    parts = [(name.replace("_", "-") if name.startswith("--") else name, *rest) for name, *rest in split]
    return ["".join(part) for part in parts] + words[end:]


def error_line(error: PenstockError, args: argparse.Namespace) -> str:
    """Write the error with its field as the user wrote it: "max_num_seqs: 0" -> "--max-num-seqs: 0"."""
    from penstock.cli.options import FLAGS, flag_of

    text, name = str(error), getattr(error, "param", None) or ""
    if not hasattr(args, FLAGS.get(name, name)) or not text.startswith(f"{name}:"):
        return text
    written = args.sources.get(FLAGS.get(name, name)) or POSITIONAL.get(name, flag_of(name))
    return str(written) + text[len(name) :]


def open_standard_streams() -> None:
    """Open /dev/null in place of each standard stream that the caller has closed, as in `penstock serve <&- >&-`.

    Otherwise the first socket or file would get its descriptor, and what is printed would end up there. Processes that
    are started later inherit these streams.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The system gives it the lowest descriptor that is free: this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  # open as long as the process


def main(argv: list[str] | None = None) -> int:
    open_standard_streams()
    words = sys.argv[1:] if argv is None else argv
    try:
        try:
            return run(words)
        finally:  # also after --help, which raises SystemExit
            sys.stdout.flush()  # at the exit of Python, an error would be reported as that of its own object
    except BrokenPipeError:  # the reader of standard output has closed it, as in `penstock generate | head`
        drop_output()
        return 1
    except OSError as error:  # standard output is on a full disk, for instance
        print(f"penstock: {error.strerror or error}", file=sys.stderr)
        drop_output()
        return 1


def run(words: list[str]) -> int:
    """Run one command line and return the exit code. Raise OSError if standard output cannot be written."""
    words = dashed(words)
    args = build_parser(words).parse_args(words)
    if "quantization_file" in args:
        args.model = f"{args.model}:{args.quantization_file}"  # as weights/hub.py reads it
    # Until a command handles it, Ctrl-C simply ends the process: a KeyboardInterrupt in the middle of an import could
    # leave a library half initialised.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if args.version:
        from penstock.kernels.cpu.library import best_level

        level = best_level()
        print(f"penstock {__version__} ({f'native kernels: {level}' if level else 'no native library'})")
        return 0
    if args.command is None:
        build_parser(words).print_help()
        return 0
    try:
        return int(args.run(args))
    except (InvalidRequestError, ModelLoadError, EngineError) as error:
        print(f"penstock: {error_line(error, args)}", file=sys.stderr)
        return 1 if isinstance(error, EngineError) else 2
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in EXTRAS:
            raise
        what = f"{args.command} {args.kind}" if "kind" in args else args.command  # "bench ops"
        print(f"penstock: {missing(what, library)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def drop_output() -> None:
    """Let what is left in the buffer of standard output go to /dev/null, so that Python can write it at the exit."""
    with suppress(OSError, ValueError):  # ValueError: a test has replaced it by a stream without a descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
