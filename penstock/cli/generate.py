"""`penstock generate`: generates text from prompts, printed as text or as one JSON object per choice.

The texts of several prompts share one terminal: in order, side by side, or all of them anew (the printers at the end).
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.cli.options import add_generation_options, load_llm, parse_size, sampling_options
from penstock.cli.terminal import handle_signals, note, show_choices
from penstock.client.prompts import STDIN, check_text, progress, read_prompts, read_text
from penstock.errors import InvalidRequestError, check_int, invalid
from penstock.interface import entry_points
from penstock.interface.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from rich.console import Console, Group

    from penstock.client.llm import LLM
    from penstock.interface.outputs import CompletionOutput, LogprobsAt, RequestOutput


DESCRIPTION = "Generate text from prompts, streaming to the terminal."
EXAMPLES = """examples:
  penstock generate -p "Once upon a time" --temperature 0
  echo "Once upon a time" | penstock generate demo
  penstock generate /models/llama -p "The capital of France is" --max-tokens 8 --json
  penstock generate demo --prompts prompts.jsonl --json > answers.jsonl
  penstock generate demo --prompts questions.txt --concurrent

Prompts are computed together; the options under "display" choose how they share the terminal.
FILE holds JSON lines, one JSON array, or plain text with one prompt per line. A prompt in JSON is a string, or an
object with "prompt" or "prompt_token_ids". Without -p and --prompts, the text on standard input is one prompt.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_generation_options(parser)
    parser.add_argument("-p", "--prompt", action="append", default=[], metavar="TEXT", help="a prompt (repeatable)")
    parser.add_argument("--prompts", "--prompts-file", metavar="FILE", help="a file of prompts; - is standard input")
    group = parser.add_argument_group("display")
    group.add_argument("--json", action="store_true", help="print one JSON object per prompt, and nothing else")
    help_text = "print all prompts while they grow, in lines that begin with [1], [2], ..."
    group.add_argument("--concurrent", action="store_true", help=help_text)
    help_text = "on a terminal, print all prompts again whenever one has grown"
    group.add_argument("--reprint", action="store_true", help=help_text)
    group.add_argument("--output-at-end", action="store_true", help="print nothing before all prompts are done")
    help_text = "print a prompt again after every N tokens (default: 1; with --concurrent: 16)"
    group.add_argument("--print-interval", type=parse_size, metavar="N", help=help_text)
    group.add_argument("--profile", action="store_true", help="show the calls, time and limits of each operation")
    # the names of --concurrent and --reprint in Falcon's decode backend
    parser.add_argument("--mode", choices=["concurrent"], help=argparse.SUPPRESS)
    parser.add_argument("--print-option", choices=["reprint"], help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    args.concurrent |= args.mode == "concurrent"
    args.reprint |= args.print_option == "reprint"
    _check_display(args)
    prompts = _prompts(args)
    with load_llm(args) as llm:
        handle_signals()
        params = llm.get_default_sampling_params(**sampling_options(args))
        with entry_points.load("profilers", "operations", "profile")(llm) if args.profile else nullcontext():
            started = time.perf_counter()
            outputs = list((_print_json if args.json else _print_text)(llm, prompts, params, args))
            seconds = time.perf_counter() - started
    num_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    note(f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s")
    return 1 if any(output.error is not None for output in outputs) else 0


def _check_display(args: argparse.Namespace) -> None:
    """Raise InvalidRequestError for display options that would have no effect."""
    if (hasattr(args, "logprobs") or hasattr(args, "prompt_logprobs")) and not args.json:
        raise invalid("logprobs", "log-probabilities are shown with --json only")
    growing = [name for name in ("concurrent", "reprint") if getattr(args, name)]
    for name in ("json", "output_at_end"):
        late = [*growing, *(["print_interval"] if args.print_interval is not None else [])]
        if getattr(args, name) and late:
            message = f"{late[0]}: nothing is printed before the end with --{name.replace('_', '-')}"
            raise InvalidRequestError(message, param=late[0])
    if args.json and args.output_at_end:
        raise invalid("output_at_end", "--json prints at the end already")
    if args.print_interval is not None:
        check_int("print_interval", args.print_interval, 1, 10**6)
        if getattr(args, "n", 1) > 1 and not growing:
            raise invalid("print_interval", "several choices are printed when complete; use --concurrent or --reprint")


def _prompts(args: argparse.Namespace) -> list[Any]:
    """List the prompts of -p, then those of the file. Without either, standard input is one prompt."""
    prompts = [*args.prompt, *([] if args.prompts is None else read_prompts(args.prompts))]
    if not args.prompt and args.prompts is None and not sys.stdin.isatty():
        text = read_text(STDIN)
        prompts = [text.removesuffix("\n").removesuffix("\r")] if text.strip() else []
    if not prompts:
        raise InvalidRequestError("give a prompt with -p TEXT, --prompts FILE (which must hold one) or standard input")
    for prompt in args.prompt:
        check_text(prompt)
    return prompts


def _stream(llm: "LLM", prompts: list[Any], params: SamplingParams) -> Iterator[tuple[int, "RequestOutput"]]:
    """Yield from llm.stream. The engine's choices are shown once the prompts are accepted, so a refusal is one line."""
    for number, item in enumerate(llm.stream(prompts, params)):
        if number == 0:
            show_choices(llm.engine.model_info)
        yield item


def _print_text(llm: "LLM", prompts: list[Any], params: Any, args: argparse.Namespace) -> Iterator["RequestOutput"]:
    """Print the prompts with their generated text, and yield every output."""
    texts = [prompt if isinstance(prompt, str) else prompt.get("prompt") or "" for prompt in prompts]
    grows = not args.output_at_end and (params.n == 1 or args.concurrent or args.reprint)
    params = replace(params, output_kind=RequestOutputKind.DELTA if grows else RequestOutputKind.FINAL_ONLY)
    stream = _all(llm, prompts, params) if args.output_at_end else _stream(llm, prompts, params)
    with closing(_printer(args, texts, params.n)) as printer:
        for index, output in stream:
            printer.show(index, output)
            yield output


def _printer(args: argparse.Namespace, texts: list[str], num_choices: int) -> "Printer":
    if args.reprint:
        return Reprint(texts, args.print_interval or 1, num_choices)
    if args.concurrent:
        return Concurrent(texts, args.print_interval or LINE_INTERVAL, num_choices)
    return InOrder(texts, args.print_interval or 1)


def _print_json(llm: "LLM", prompts: list[Any], params: Any, args: argparse.Namespace) -> Iterator["RequestOutput"]:
    """Print the results as JSON when all are complete, in the order of the prompts, and yield them."""
    for _, output in _all(llm, prompts, replace(params, output_kind=RequestOutputKind.FINAL_ONLY)):
        for choice in output.outputs:
            print(json.dumps(_json_object(output, choice), ensure_ascii=False))
        yield output
    sys.stdout.flush()


def _all(llm: "LLM", prompts: list[Any], params: SamplingParams) -> Iterator[tuple[int, "RequestOutput"]]:
    """Yield the final outputs when all are complete, in the order of the prompts."""
    results: dict[int, RequestOutput] = {}
    with progress("prompts", len(prompts)) as advance:
        for index, output in _stream(llm, prompts, params):
            results[index] = output
            advance(1)
    yield from sorted(results.items())


def _json_object(output: "RequestOutput", choice: "CompletionOutput") -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": choice.token_ids,
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "num_cached_tokens": output.num_cached_tokens,
        "stop_reason": choice.stop_reason,
        "seed": output.seed,
    }
    if len(output.outputs) > 1:
        found["index"] = choice.index
    if output.error is not None:
        found["error"] = output.error
    if choice.logprobs is not None:
        found["logprobs"] = [_by_id(position) for position in choice.logprobs]
    if output.prompt_logprobs is not None:
        found["prompt_logprobs"] = [position and _by_id(position) for position in output.prompt_logprobs]
    return found


def _by_id(position: "LogprobsAt") -> dict[str, float]:
    return {str(token_id): entry.logprob for token_id, entry in position.items()}


# --- the terminal -----------------------------------------------------------------------------------------------------


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

    def close(self) -> None:
        """Print the remaining text."""

    def _add(self, index: int, output: "RequestOutput") -> list[_Stream]:
        """Add the new text to each choice in an output, and return the streams of these choices."""
        grown = []
        for item in output.outputs:
            stream = self._streams[index * self._num_choices + item.index]
            stream.text += item.text + (_failure(output) if item.finish_reason == "error" else "")
            stream.tokens += len(item.token_ids)
            stream.finished = stream.finished or item.finished
            grown.append(stream)
        return grown


class InOrder(Printer):
    """Prints one prompt after the other: the first unfinished one as it grows, later ones when their turn comes.

    Several choices of one prompt cannot grow in the same place, so they come as final outputs.
    """

    def __init__(self, prompts: Sequence[str], interval: int) -> None:
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

    def show(self, index: int, output: "RequestOutput") -> None:
        for stream in self._add(index, output):
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
        self, prompts: Sequence[str], interval: int, num_choices: int, console: "Console | None" = None
    ) -> None:
        """Print to `console` if it is given, else to standard output."""
        from rich.console import Console
        from rich.live import Live

        super().__init__(prompts, interval, num_choices)
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def show(self, index: int, output: "RequestOutput") -> None:
        growing = (self._streams[index * self._num_choices + item.index] for item in output.outputs)
        if self._console.is_terminal and any(stream.tokens >= self._interval for stream in growing):
            self._live.update(self._screen(), refresh=True)  # includes the other choices' tokens of the same step
            for stream in self._streams:
                stream.tokens = 0
        self._add(index, output)

    def close(self) -> None:
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
