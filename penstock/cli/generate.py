"""`penstock generate`: from prompts to text in the terminal, or to one JSON object per choice."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import add_generation_options, load_llm, sampling_options
from penstock.cli.terminal import StreamPrinter, handle_signals, note, progress, show_choices
from penstock.client.input_processor import PROMPT_KEYS
from penstock.errors import InvalidRequestError
from penstock.interface.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from penstock.entrypoints.llm import LLM
    from penstock.interface.outputs import CompletionOutput, LogprobsAt, RequestOutput

DESCRIPTION = "Generate text from prompts, streaming to the terminal."
EXAMPLES = """examples:
  penstock generate -p "Once upon a time" --temperature 0
  penstock generate /models/llama -p "The capital of France is" --max-tokens 8 --json
  penstock generate demo --prompts prompts.jsonl --json > answers.jsonl

FILE.jsonl holds one prompt per line: a JSON string, or an object with "prompt" or "prompt_token_ids".
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_generation_options(parser)
    parser.add_argument("-p", "--prompt", action="append", default=[], metavar="TEXT", help="a prompt (repeatable)")
    parser.add_argument("--prompts", metavar="FILE.jsonl", help="a file of prompts, one per line; - is stdin")
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt, and nothing else")


def run(args: argparse.Namespace) -> int:
    prompts = [*args.prompt, *(read_prompts(args.prompts) if args.prompts else [])]
    if not prompts:
        raise InvalidRequestError("give a prompt with -p TEXT or --prompts FILE.jsonl (which must hold one)")
    if (hasattr(args, "logprobs") or hasattr(args, "prompt_logprobs")) and not args.json:
        raise InvalidRequestError("logprobs: log-probabilities are shown with --json only", param="logprobs")
    with load_llm(args) as llm:
        handle_signals()
        params = llm.default_params(**sampling_options(args))
        started = time.perf_counter()
        outputs = list((_print_json if args.json else _print_text)(llm, prompts, params))
        seconds = time.perf_counter() - started
    num_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    note(f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s")
    return 1 if any(output.error is not None for output in outputs) else 0


def read_prompts(name: str) -> list[Any]:
    """Return the prompts of a JSONL file; "-" is standard input.

    Raises:
        InvalidRequestError: the file cannot be read, or a line is not a prompt; the message names it.
    """
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"prompts: cannot read {name!r}: {error}", param="prompts") from error
    lines = text.split("\n")  # splitlines() would also cut inside JSON strings
    return [_read_prompt(f"{name}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def _read_prompt(place: str, line: str) -> Any:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"prompts: {place} is not JSON: {error}", param="prompts") from error
    if not isinstance(value, str) and not (isinstance(value, dict) and value and set(value) <= set(PROMPT_KEYS)):
        message = f"prompts: {place} must be a string or an object with prompt or prompt_token_ids, and nothing else"
        raise InvalidRequestError(message, param="prompts")
    return value


def _stream(llm: "LLM", prompts: list[Any], params: SamplingParams) -> Iterator[tuple[int, "RequestOutput"]]:
    """Yield from llm.stream, showing the choices once the prompts are accepted: a refusal must be one line."""
    for number, item in enumerate(llm.stream(prompts, params)):
        if number == 0:
            show_choices(llm.engine.model_info)
        yield item


def _print_text(llm: "LLM", prompts: list[Any], params: Any) -> Iterator["RequestOutput"]:
    """Stream the prompts one after the other, and yield every output.

    Several choices of one prompt cannot share a terminal while they grow, so they are printed when complete.
    """
    params = replace(params, output_kind=RequestOutputKind.DELTA if params.n == 1 else RequestOutputKind.FINAL_ONLY)
    printer = StreamPrinter([prompt if isinstance(prompt, str) else prompt.get("prompt", "") for prompt in prompts])
    for index, output in _stream(llm, prompts, params):
        printer.show(index, output)
        yield output


def _print_json(llm: "LLM", prompts: list[Any], params: Any) -> Iterator["RequestOutput"]:
    """Print the results as JSON once all are there, in the order of the prompts, and yield them."""
    results: dict[int, RequestOutput] = {}
    with progress("prompts", len(prompts)) as advance:
        for index, output in _stream(llm, prompts, replace(params, output_kind=RequestOutputKind.FINAL_ONLY)):
            results[index] = output
            advance(1)
    for _, output in sorted(results.items()):
        for choice in output.outputs:
            print(json.dumps(_json_object(output, choice), ensure_ascii=False))
        yield output
    sys.stdout.flush()


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
