"""Prints the growing texts of several prompts on one terminal: in order, side by side, or all of them anew."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console, Group

    from penstock.interface.outputs import RequestOutput

LINE_INTERVAL = 16  # tokens, about one line of text


@dataclass(slots=True)
class _Stream:
    """The text of one choice, and the number of tokens since it was last printed."""

    label: str
    text: str
    tokens: int = 0
    finished: bool = False


class Printer:
    """Prints the DELTA outputs of several prompts to standard output.

    Args:
        prompts: the texts of the prompts, which are printed first.
        interval: number of new tokens after which a choice is printed again.
        num_choices: choices per prompt.
    """

    def __init__(self, prompts: Sequence[str], interval: int, num_choices: int) -> None:
        self._interval = interval
        self._num_choices = num_choices
        self._streams = [
            _Stream(f"[{number}] " if num_choices == 1 else f"[{number}.{choice}] ", prompt)
            for number, prompt in enumerate(prompts, 1)
            for choice in range(num_choices)
        ]

    def show(self, index: int, output: "RequestOutput") -> None:
        """Take an output of the prompt `index`, and print the text that is due."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Print the remaining text."""

    def _take(self, index: int, output: "RequestOutput") -> list[_Stream]:
        """Add the new text to each choice in an output, and return the streams of these choices."""
        taken = []
        for item in output.outputs:
            stream = self._streams[index * self._num_choices + item.index]
            stream.text += item.text + (_failure(output) if item.finish_reason == "error" else "")
            stream.tokens += len(item.token_ids)
            stream.finished = stream.finished or item.finished
            taken.append(stream)
        return taken


class InOrder(Printer):
    """Prints one prompt after the other: the first unfinished one as it grows, later ones when their turn comes.

    Several choices of one prompt cannot grow in the same place, so they come as final outputs.
    """

    def __init__(self, prompts: Sequence[str], interval: int = 1) -> None:
        super().__init__([("\n" if index else "") + prompt for index, prompt in enumerate(prompts)], interval, 1)
        self._current = 0

    def show(self, index: int, output: "RequestOutput") -> None:
        stream, several = self._streams[index], len(output.outputs) > 1
        stream.text += "".join(f"\n[{item.index}]{item.text}" if several else item.text for item in output.outputs)
        stream.text += _failure(output) + "\n" if output.finished else ""
        stream.tokens += sum(len(item.token_ids) for item in output.outputs)
        stream.finished = output.finished
        while self._current < len(self._streams):
            stream = self._streams[self._current]
            if stream.finished or stream.tokens >= self._interval:
                sys.stdout.write(stream.text)
                stream.text, stream.tokens = "", 0
            if not stream.finished:
                break
            self._current += 1
        sys.stdout.flush()


class Concurrent(Printer):
    """Prints all choices as they grow, each piece on separate lines that begin with its label: [2], or [2.0] if a
    prompt has several choices. A piece ends at the end of a word if possible, so that the lines are readable."""

    def __init__(self, prompts: Sequence[str], interval: int = LINE_INTERVAL, num_choices: int = 1) -> None:
        super().__init__(prompts, interval, num_choices)

    def show(self, index: int, output: "RequestOutput") -> None:
        for stream in self._take(index, output):
            if stream.finished or stream.tokens >= self._interval:
                self._print(stream)
        sys.stdout.flush()

    def _print(self, stream: _Stream) -> None:
        end = len(stream.text) if stream.finished else max(map(stream.text.rfind, " \n")) + 1 or len(stream.text)
        piece, stream.text, stream.tokens = stream.text[:end], stream.text[end:], 0
        lines = (line.strip(" ") for line in piece.split("\n"))
        sys.stdout.write("".join(f"{stream.label}{line}\n" for line in lines if line))


class Reprint(Printer):
    """Prints all choices anew when they have grown: on a terminal, as many of the last lines of each as fit. At the
    end it prints the whole texts one after the other; without a terminal it prints nothing before."""

    def __init__(
        self, prompts: Sequence[str], interval: int = 1, num_choices: int = 1, console: "Console | None" = None
    ) -> None:
        """Print to `console` if it is given, else to standard output."""
        from rich.console import Console
        from rich.live import Live

        super().__init__(prompts, interval, num_choices)
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def show(self, index: int, output: "RequestOutput") -> None:
        growing = (self._streams[index * self._num_choices + item.index] for item in output.outputs)
        if self._console.is_terminal and any(stream.tokens >= self._interval for stream in growing):
            self._live.update(self._screen(), refresh=True)  # includes the other choices' tokens of the same step
            for stream in self._streams:
                stream.tokens = 0
        self._take(index, output)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        texts = (f"{stream.label}{stream.text}\n" for stream in self._streams)
        self._console.file.write("\n".join(texts))
        self._console.file.flush()

    def _screen(self) -> "Group":
        from rich.console import Group
        from rich.text import Text

        rows = max(1, (self._console.height - 1) // len(self._streams))
        texts = (Text(f"{stream.label}{stream.text}".rstrip()) for stream in self._streams)
        wrapped = (text.wrap(self._console, self._console.width) for text in texts)
        return Group(*(line for lines in wrapped for line in lines[-rows:]))


def _failure(output: "RequestOutput") -> str:
    return "" if output.error is None else f"\n(failed: {output.error})"
