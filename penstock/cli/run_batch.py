"""`penstock run-batch`: answers a file of OpenAI's batch requests and writes a file of answers."""

import argparse
import asyncio
from typing import TYPE_CHECKING

from penstock.cli.options import add_engine_options, add_model, engine_options
from penstock.cli.terminal import handle_signals, note
from penstock.client.prompts import progress
from penstock.errors import invalid

if TYPE_CHECKING:
    from penstock.server.batch import Counts, Line, Output

DESCRIPTION = "Answer a file of requests in OpenAI's batch format."
EXAMPLES = """examples:
  penstock run-batch -i requests.jsonl -o answers.jsonl
  penstock run-batch /models/llama -i requests.jsonl -o answers.jsonl --max-concurrency 64

A line of the input:
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 64}}

Started again with the same files, it goes on with the requests that have no answer yet.
Exit code 0: every request has its answer. 1: some failed; their lines say why. 2: bad input.
"""
DEFAULT_MAX_NUM_SEQS = 32


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE.jsonl", help="the requests, one per line")
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE.jsonl", help="where the answers go")
    help_text = "requests that are open at the same time (default: twice --max-num-seqs)"
    parser.add_argument("--max-concurrency", type=int, metavar="N", help=help_text)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    from penstock.server.batch import Output, read_input

    concurrency = args.max_concurrency
    if concurrency is None:
        concurrency = 2 * getattr(args, "max_num_seqs", DEFAULT_MAX_NUM_SEQS)
    if not 1 <= concurrency <= 4096:
        raise invalid("max_concurrency", f"{concurrency} is not from 1 to 4096")
    lines = read_input(args.input_file)
    options = engine_options(args)
    output = Output(args.output_file)
    handle_signals(terminate=True)
    try:
        counts = asyncio.run(_run(options, lines, output, concurrency))
    finally:
        output.close()
    skipped = f", {counts.skipped} of them in an earlier run" if counts.skipped else ""
    note(f"{counts.total} requests answered{skipped}; {counts.failed} failed")
    return 1 if counts.failed else 0


async def _run(options: dict[str, object], lines: "list[Line]", output: "Output", concurrency: int) -> "Counts":
    from penstock.client.async_llm import AsyncLLM
    from penstock.server.batch import run_batch

    seed = options.get("seed", 0)
    async with AsyncLLM(**options) as llm:  # type: ignore[arg-type]  # checked by engine_options
        with progress("requests", len(lines)) as advance:
            return await run_batch(
                llm.client, lines, output, seed=int(str(seed)), max_concurrency=concurrency, advance=advance
            )
