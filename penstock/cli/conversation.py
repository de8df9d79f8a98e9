"""A conversation in the terminal, which `penstock chat` and `penstock run` share: its messages, commands and speed."""

import argparse
import json
import os
import shlex
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from penstock.cli.answers import TOO_LONG, Answerer, Pieces
from penstock.cli.options import add_sampling_options, sampling_options
from penstock.cli.terminal import WordWrap, note
from penstock.errors import InvalidRequestError, PenstockError
from penstock.interface.sampling_params import SamplingParams

MAX_LINE = 2**24  # characters of a line that is not typed
COMMANDS = '''\
/help              these lines
/retry             answer the last message again (with --temperature above 0 and no --seed: differently)
/system TEXT       begin a new conversation with this system message; without TEXT: with none
/set               show the sampling parameters; /set temperature 0.7 changes one, /set temperature default drops it
/save FILE         write the conversation as JSON; /load FILE goes on with one
/reset             forget the conversation
/bye, Ctrl-D       leave
//TEXT             send TEXT with its slash: //help sends /help
"""                begins a message of several lines, which ends with """; a \\ at the end of a line continues it
Ctrl-C             stop an answer, or drop the line being typed
'''
HISTORY_LINES = 1000
QUOTES = '"""'


class Conversation:
    """The messages so far. The oldest ones are left out when the context is full.

    Args:
        options: fields of SamplingParams that the user has set.
        system: the system message, which is never left out.
    """

    def __init__(self, answerer: Answerer, options: dict[str, Any], system: str | None) -> None:
        self._answerer = answerer
        self._options = options
        self.begin(system)

    def begin(self, system: str | None) -> None:
        self._system = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        """Forget all messages except the system message."""
        self._messages: list[dict[str, str]] = []

    def say(self, text: str) -> None:
        """Send a message and print its answer as it comes."""
        self._messages.append({"role": "user", "content": text})
        self._answer()

    def retry(self) -> None:
        """Answer the last message again."""
        while self._messages and self._messages[-1]["role"] == "assistant":
            self._messages.pop()
        if self._messages:
            self._answer()
        else:
            note("there is no message to answer yet")

    def set(self, words: str) -> None:
        """Show the sampling parameters, or change one."""
        name, *values = shlex.split(words) or [""]
        name = name.replace("-", "_")
        if not name:
            note("\n".join(f"{key} {value}" for key, value in self._options.items()) or "the model's defaults")
        elif values == ["default"]:
            self._options.pop(name, None)
        else:
            changed = self._options | _parsed(name, values)
            SamplingParams(**changed)
            self._options = changed

    def save(self, file: str) -> None:
        """Write the messages to a file."""
        written = {"model": self._answerer.name, "messages": self._system + self._messages}
        Path(file).expanduser().write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        note(f"saved {len(self._messages)} messages in {file}")

    def load(self, file: str) -> None:
        """Replace the messages by those of a file."""
        found = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
        messages = found.get("messages") if isinstance(found, dict) else found
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise ValueError("it holds no list of messages, each with a role and a content")
        kept = [{"role": message["role"], "content": message["content"]} for message in messages]
        self._system = [message for message in kept if message["role"] == "system"]
        self._messages = [message for message in kept if message["role"] != "system"]
        note(f"{len(self._messages)} messages from {file}")

    def _answer(self) -> None:
        """Answer the last message. If that fails, it is taken back."""
        try:
            text = show(self._pieces())
        except InvalidRequestError as error:
            self._messages.pop()
            if error.code != TOO_LONG:
                raise
            note(f"not sent: {error}")
        except PenstockError:
            self._messages.pop()
            raise
        else:
            self._messages.append({"role": "assistant", "content": text})

    def _pieces(self) -> Pieces:
        """Begin an answer, without the oldest turns if the rest would not fit."""
        kept = self._messages
        while True:
            try:
                pieces = self._answerer.answer(self._system + kept, self._options)
            except InvalidRequestError as error:
                turns = [at for at, message in enumerate(kept) if at and message["role"] == "user"]
                if error.code != TOO_LONG or not turns:
                    raise
                kept = kept[turns[0] :]  # whole turns, because templates expect alternating roles
            else:
                if left_out := len(self._messages) - len(kept):
                    note(f"(the context is full: the oldest {left_out} messages are left out from here on)")
                    self._messages = kept
                return pieces


def show(pieces: Pieces) -> str:
    """Print an answer as it comes, and its speed; return its text without thoughts. Ctrl-C stops it."""
    texts: list[str] = []
    out, count, is_stopped, is_thinking, reason = WordWrap(), 0, False, False, None
    started, first = time.perf_counter(), 0.0
    try:
        with closing(pieces):
            for piece in pieces:
                if piece.text or piece.num_tokens:
                    first = first or time.perf_counter()
                count, reason = count + piece.num_tokens, piece.finish_reason or reason
                if piece.text and is_thinking and not piece.is_thought:
                    out.write("\n\n")
                is_thinking = piece.is_thought or (is_thinking and not piece.text)
                texts.append("" if piece.is_thought else piece.text)
                out.write(piece.text)
    except KeyboardInterrupt:
        is_stopped = True
    if texts or is_stopped:
        out.finish()
    seconds = time.perf_counter() - first
    rate = f"{(count - 1) / seconds:.1f} tokens/s, " if count > 1 and seconds > 0 else ""
    end = ", stopped" if is_stopped else ", ended by max_tokens or the context" if reason == "length" else ""
    if is_stopped and not first:
        note("(stopped)")
    elif first:
        note(f"[{count} tokens, {rate}first after {first - started:.2f} s{end}]")
    return "".join(texts)


def talk(conversation: Conversation) -> None:
    """Read messages and commands from standard input until it ends.

    Raises:
        PenstockError: an answer failed, and nobody is at a terminal to go on.
    """
    note("/help lists the commands, /bye leaves")
    with _line_editor():
        while (line := _read_message()) is not None:
            if line in ("/exit", "/bye"):
                return
            try:
                _obey(conversation, line)
            except PenstockError as error:
                if not sys.stdin.isatty():
                    raise
                note(f"not answered: {error}")


def _obey(conversation: Conversation, line: str) -> None:
    """Send a message, or do what a command says."""
    command, _, rest = line.partition(" ")
    with_text = {"/set": conversation.set, "/save": conversation.save, "/load": conversation.load}
    alone = {"/reset": conversation.reset, "/retry": conversation.retry}
    if line.startswith("//"):
        conversation.say(line[1:])
    elif not line.startswith("/"):
        if line:
            conversation.say(line)
    elif command == "/system":
        conversation.begin(rest.strip() or None)
    elif command in with_text:
        try:
            with_text[command](rest.strip())
        except OSError as error:
            note(f"{command}: {rest.strip()}: {error.strerror or error}")
        except ValueError as error:  # not JSON, or an InvalidRequestError
            note(f"{command}: {error}")
    elif line in alone:
        alone[line]()
    else:
        note(COMMANDS.rstrip() if line == "/help" else f"there is no command {command}; /help lists them")


def _parsed(name: str, values: list[str]) -> dict[str, Any]:
    """Parse the value of a sampling parameter as its flag's. Raise InvalidRequestError if that is not possible."""
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False)
    add_sampling_options(parser, None)
    if (flag := f"--{name.replace('_', '-')}") not in parser.format_usage():
        raise InvalidRequestError(f"{name}: there is no such sampling parameter")
    try:
        found, unknown = parser.parse_known_args([flag, *values])
    except argparse.ArgumentError as error:
        raise InvalidRequestError(f"{name}: {error.message}") from None
    if unknown:
        raise InvalidRequestError(f"{name}: {' '.join(unknown)} is too much")
    return sampling_options(found)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _read_message() -> str | None:
    """Read the user's next message, which may have several lines; None at the end of the input."""
    line = _read_line("> ")
    if line is None:
        return None
    lines, is_quoted = [line], line.startswith(QUOTES)
    if is_quoted:
        lines = [line.removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES) and (more := _read_line("| ")) is not None:
            lines.append(more)
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    else:
        while lines[-1].endswith("\\") and (more := _read_line("| ")) is not None:
            lines[-1] = lines[-1][:-1].rstrip()
            lines.append(more)
    return "\n".join(lines).strip()


def _read_line(prompt: str) -> str | None:
    """Read a line; None at the end of the input. Ctrl-C drops what was typed."""
    if not sys.stdin.isatty():
        return _read_piped_line()
    while True:
        try:
            return input(prompt)
        except KeyboardInterrupt:
            print()
            note("(Ctrl-D or /bye leaves)")
            if prompt != "> ":
                return None
        except EOFError:
            print()
            return None


def _read_piped_line() -> str | None:
    try:
        line = sys.stdin.readline(MAX_LINE + 1)
    except KeyboardInterrupt:
        return None
    if len(line) > MAX_LINE:  # a device, perhaps, which has no end
        raise InvalidRequestError(f"standard input: a line has more than {MAX_LINE} characters")
    return line.rstrip("\n") if line else None


class _line_editor:
    """Line editing, and a history that is kept in a file that only the user can read."""

    def __init__(self) -> None:
        base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        self._file = Path(base) / "penstock" / "chat_history"

    def __enter__(self) -> None:
        if not sys.stdin.isatty():
            return
        with suppress(ImportError, OSError):  # no readline, or no history yet
            import readline  # its import gives input() line editing

            readline.set_history_length(HISTORY_LINES)
            readline.read_history_file(self._file)

    def __exit__(self, *_: object) -> None:
        if not sys.stdin.isatty():
            return
        with suppress(ImportError, OSError):  # failing to save the history is not an error
            import readline

            self._file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(self._file)
            self._file.chmod(0o600)
