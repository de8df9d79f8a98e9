"""Output of the commands: text on standard output, everything else on standard error."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.interface.messages import ModelInfo
    from penstock.interface.outputs import RequestOutput

DIM, RESET = "\033[2m", "\033[0m"


def note(text: str) -> None:
    """Print a line to standard error, dimmed on a terminal."""
    plain = not sys.stderr.isatty()
    print(text if plain else f"{DIM}{text}{RESET}", file=sys.stderr, flush=True)


def show_choices(info: "ModelInfo") -> None:
    """Print what was chosen automatically, and why."""
    note(f"penstock: {info.model}, {info.dtype}, {info.system_fingerprint}")
    for option, reason in info.choices_made.items():
        note(f"  {option} = {reason}")


def handle_signals(*, terminate: bool = False) -> None:
    """Make Ctrl-C raise KeyboardInterrupt; called once everything is imported (see `cli.main`).

    terminate: make SIGTERM raise SystemExit too, so that unfinished files are removed.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if terminate:
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error if that is a terminal; yield `advance(count)`."""
    if not sys.stderr.isatty() or total < 2:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


class StreamPrinter:
    """Prints several streams one after the other: the first unfinished one live, the others from a buffer."""

    def __init__(self, prompts: Sequence[str | None]) -> None:
        self._texts = [["\n" if index else "", prompt or ""] for index, prompt in enumerate(prompts)]
        self._finished: set[int] = set()
        self._current = 0

    def show(self, index: int, output: "RequestOutput") -> None:
        """Take a DELTA output of the stream `index`, or a final one that has several choices."""
        several = len(output.outputs) > 1
        self._texts[index] += [f"\n[{item.index}]{item.text}" if several else item.text for item in output.outputs]
        if output.error is not None:
            self._texts[index].append(f"\n(failed: {output.error})")
        if output.finished:
            self._texts[index].append("\n")
            self._finished.add(index)
        while self._current < len(self._texts):
            sys.stdout.write("".join(self._texts[self._current]))
            self._texts[self._current].clear()
            if self._current not in self._finished:
                break
            self._current += 1
        sys.stdout.flush()
