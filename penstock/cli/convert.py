"""`penstock convert`: pack a checkpoint once, so that loading it is a map of a file. Flags -> EngineConfig, no more."""

import argparse
import os
import time
from pathlib import Path

from penstock.cli.options import add_weight_options, engine_options
from penstock.cli.terminal import progress, take_interrupts, take_termination, tell
from penstock.config import EngineConfig
from penstock.validation import check_str

EXAMPLES = """examples:
  penstock convert /models/llama /models/llama-int8 --quantization int8
  penstock convert demo /tmp/demo-packed && penstock generate /tmp/demo-packed -p "Once upon a time"
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Pack, and quantise if asked, a model once: its packed form is mapped, not loaded."
    parser.epilog = EXAMPLES
    parser.add_argument("src", metavar="SRC", help="a Hugging Face directory, a hub name, or demo")
    parser.add_argument(
        "dst",
        metavar="DST",
        help="a directory to make; it must not exist, or be empty (leftovers of a killed run are replaced)",
    )
    add_weight_options(parser.add_argument_group("weights"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_str("src", args.src)
    check_str("dst", args.dst)
    config = EngineConfig.from_options(model=args.src, **engine_options(args))
    from penstock.planner.memory import free_memory_bytes
    from penstock.weights.convert import convert_model

    take_interrupts()  # what is written so far is removed again
    take_termination()
    started = time.perf_counter()
    with progress("layers", 100) as advance:
        shown = 0

        def show(done: int, total: int) -> None:
            nonlocal shown
            percent = 100 * done // total
            advance(percent - shown)
            shown = percent

        destination = Path(os.path.expanduser(args.dst))
        size = convert_model(config, destination, show, free_memory=free_memory_bytes)
    tell(f"penstock: {args.dst}: {size / 2**20:,.1f} MiB of weights, written in {time.perf_counter() - started:.1f} s")
    return 0
