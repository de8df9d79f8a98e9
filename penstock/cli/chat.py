"""`penstock chat`: a conversation in the terminal, with line editing, history and the model's chat template."""

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.options import add_generation_options, load_llm, sampling_options
from penstock.cli.terminal import handle_signals, note, show_choices
from penstock.errors import InvalidRequestError
from penstock.interface.sampling_params import RequestOutputKind, SamplingParams
from penstock.tokenizer.tokenizer import render_chat

if TYPE_CHECKING:
    from penstock.client.llm import LLM

MAX_LINE = 2**24  # characters of a line that is not typed
DESCRIPTION = "Talk to a model in the terminal."
COMMANDS = """\
/help          these lines
/retry         answer the last message again (with --temperature above 0 and no --seed: differently)
/system TEXT   begin a new conversation with this system message; without TEXT: with none
/reset         forget the conversation
/exit, Ctrl-D  leave
//TEXT         send TEXT with its slash: //help sends /help
Ctrl-C         stop an answer, or drop the line being typed
"""
EXAMPLES = f"""examples:
  penstock chat                                talk to the bundled demo model
  penstock chat /models/llama --system "Answer in one sentence." --temperature 0.7
  echo "What is 7 + 5?" | penstock chat --temperature 0

commands:
{COMMANDS}
When the context is full, the oldest messages are left out.
"""
HISTORY_LINES = 1000
SHARE_FOR_ANSWER = 4  # 1 / SHARE_FOR_ANSWER of the context is kept free for the answer


def configure(parser: argparse.ArgumentParser) -> None:
    add_generation_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")


def run(args: argparse.Namespace) -> int:
    with load_llm(args) as llm:
        handle_signals()
        show_choices(llm.engine.model_info)
        params = llm.get_default_sampling_params(**sampling_options(args), output_kind=RequestOutputKind.DELTA)
        if params.n != 1:
            raise InvalidRequestError("n: a conversation has one answer at a time", param="n")
        note("/help lists the commands, /exit leaves")
        with _line_editor():
            _talk(Conversation(llm, params, args.system))
    return 0


class Conversation:
    """The messages so far. The oldest ones are dropped when the context is full.

    Args:
        params: sampling parameters of every answer.
        system: the system message, which is never dropped.
    """

    def __init__(self, llm: "LLM", params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
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

    def _answer(self) -> None:
        self._leave_out()
        texts: list[str] = []
        try:
            for text in self._llm.stream_chat(self._system + self._messages, self._params):
                texts.append(text)
                sys.stdout.write(text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            note(" (stopped)")
        except InvalidRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            self._messages.pop()
            note(f"not sent: {error}")
            return
        print(flush=True)
        self._messages.append({"role": "assistant", "content": "".join(texts)})

    def _leave_out(self) -> None:
        """Drop the oldest messages until there is room for an answer. The last message always stays."""
        tokenizer, context = self._llm.get_tokenizer(), self._llm.engine.model_info.max_model_len
        if tokenizer is None:
            return  # answering raises an error that says what is missing
        room = context - min(self._params.max_tokens or context, context // SHARE_FOR_ANSWER)
        before = len(self._messages)
        while len(self._messages) > 1:
            chat = render_chat(tokenizer, self._system + self._messages, add_generation_prompt=True)
            if len(chat.token_ids(tokenizer)) <= room:
                break
            later_turns = [at for at, message in enumerate(self._messages) if at and message["role"] == "user"]
            del self._messages[: later_turns[0]]  # whole turns, because templates expect alternating roles
        if left_out := before - len(self._messages):
            note(f"(the context of {context} tokens is full: the oldest {left_out} messages are left out from here on)")


def _talk(conversation: Conversation) -> None:
    while (line := _read_line()) is not None:
        command, _, rest = line.partition(" ")
        if line.startswith("//"):
            conversation.say(line[1:])
        elif not line.startswith("/"):
            if line:
                conversation.say(line)
        elif command == "/system":
            conversation.begin(rest.strip() or None)
        elif line == "/exit":
            return
        elif line == "/reset":
            conversation.reset()
        elif line == "/retry":
            conversation.retry()
        else:
            note(COMMANDS.rstrip() if line == "/help" else f"there is no command {command}; /help lists them")


def _read_line() -> str | None:
    """Read the user's next line; None at the end of the input."""
    if not sys.stdin.isatty():
        return _read_piped_line()
    while True:
        try:
            return input("> ").strip()
        except KeyboardInterrupt:
            print()
            note("(Ctrl-D or /exit leaves)")
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
    return line.strip() if line else None


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
