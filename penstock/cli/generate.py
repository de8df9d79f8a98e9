"""`penstock generate`: from prompts to text in the terminal, or to one JSON object a prompt. Flags -> LLM, no more."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import (
    add_engine_options,
    add_model,
    add_sampling_options,
    engine_options,
    sampling_options,
)
from penstock.cli.terminal import StreamPrinter, progress, take_interrupts, tell, tell_choices
from penstock.client.input_processor import PROMPT_KEYS
from penstock.errors import InvalidRequestError
from penstock.interface.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from penstock.entrypoints.llm import LLM
    from penstock.interface.outputs import LogprobsAt, RequestOutput

EXAMPLES = """examples:
  penstock generate -p "Once upon a time" --temperature 0
  penstock generate /models/llama -p "The capital of France is" --max-tokens 8 --json
  penstock generate demo --prompts prompts.jsonl --json > answers.jsonl

FILE.jsonl holds one prompt a line: a JSON string, or an object with "prompt" or "prompt_token_ids".
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Generate text from prompts, streaming to the terminal."
    parser.epilog = EXAMPLES
    add_model(parser)
    parser.add_argument("-p", "--prompt", action="append", default=[], metavar="TEXT", help="a prompt (repeatable)")
    parser.add_argument("--prompts", metavar="FILE.jsonl", help="a file of prompts, one a line; - is stdin")
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt, and nothing else")
    add_sampling_options(parser)
    add_engine_options(parser, seed=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    prompts = [*args.prompt, *(read_prompts(args.prompts) if args.prompts else [])]
    if not prompts:
        raise InvalidRequestError("give a prompt with -p TEXT or --prompts FILE.jsonl (which must hold one)")
    if (hasattr(args, "logprobs") or hasattr(args, "prompt_logprobs")) and not args.json:
        raise InvalidRequestError("logprobs: log-probabilities are shown with --json only", param="logprobs")
    SamplingParams(**sampling_options(args))  # a wrong value is said before the model is loaded
    options = engine_options(args, seed=False)
    from penstock.entrypoints.llm import LLM

    with LLM(**options) as llm:
        take_interrupts()
        params = llm.default_params(**sampling_options(args))
        started = time.perf_counter()
        done = _print_json(llm, prompts, params) if args.json else _print_text(llm, prompts, params)
        seconds = time.perf_counter() - started
    tell(f"{done.num_tokens} tokens in {seconds:.2f} s, {done.num_tokens / seconds:.1f} tokens/s")
    return 1 if done.num_failed else 0


@dataclass(slots=True)
class _Done:
    """What came of all prompts together."""

    num_tokens: int = 0
    num_failed: int = 0

    def count(self, output: "RequestOutput") -> None:
        self.num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        self.num_failed += output.error is not None


def read_prompts(name: str) -> list[Any]:
    """The prompts of a JSONL file; "-" is standard input.

    Raises:
        InvalidRequestError: the file cannot be read, or a line is not a prompt; the message says which.
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
    known = isinstance(value, str) or (isinstance(value, dict) and value and set(value) <= set(PROMPT_KEYS))
    if not known:
        message = f"prompts: {place} must be a string or an object with prompt or prompt_token_ids, and nothing else"
        raise InvalidRequestError(message, param="prompts")
    return value


def _stream(llm: "LLM", prompts: list[Any], params: SamplingParams) -> Iterator[tuple[int, "RequestOutput"]]:
    """llm.stream, saying what was chosen once the prompts are accepted: a refusal is to be one line."""
    told = False
    for item in llm.stream(prompts, params):
        if not told:
            tell_choices(llm.engine.model_info)
            told = True
        yield item


def _print_text(llm: "LLM", prompts: list[Any], params: Any) -> _Done:
    """Stream: the first unfinished prompt's text as it comes, the others' when their turn is.

    Several choices of a prompt cannot share a terminal while they grow: they are printed when they are complete.
    """
    params = replace(params, output_kind=RequestOutputKind.DELTA if params.n == 1 else RequestOutputKind.FINAL_ONLY)
    printer = StreamPrinter([prompt if isinstance(prompt, str) else prompt.get("prompt", "") for prompt in prompts])
    done = _Done()
    for index, output in _stream(llm, prompts, params):
        done.count(output)
        printer.show(index, output)
    return done


def _print_json(llm: "LLM", prompts: list[Any], params: Any) -> _Done:
    final = replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
    results: list[RequestOutput | None] = [None] * len(prompts)
    with progress("prompts", len(prompts)) as advance:
        for index, output in _stream(llm, prompts, final):
            results[index] = output
            advance(1)
    done = _Done()
    for output in (output for output in results if output is not None):
        done.count(output)
        print("\n".join(json_lines(output)))
    sys.stdout.flush()
    return done


def json_lines(output: "RequestOutput") -> list[str]:
    """One JSON object a choice (there is one, unless --n asks for more)."""
    return [json.dumps(_json_object(output, index), ensure_ascii=False) for index in range(len(output.outputs))]


def _json_object(output: "RequestOutput", index: int) -> dict[str, Any]:
    choice = output.outputs[index]
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
        found["prompt_logprobs"] = [
            None if position is None else _by_id(position) for position in output.prompt_logprobs
        ]
    return found


def _by_id(position: "LogprobsAt") -> dict[str, float]:
    return {str(token_id): entry.logprob for token_id, entry in position.items()}
