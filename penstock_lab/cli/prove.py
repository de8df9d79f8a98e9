"""`penstock prove`: proves the promises of docs/guarantees.md on this machine with the user's model."""

import argparse
import ctypes
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from penstock import InvalidRequestError
from penstock.cli.options import add_engine_options, add_model, engine_options
from penstock.cli.terminal import handle_signals
from penstock.client.prompts import progress
from penstock.errors import check_int

if TYPE_CHECKING:
    from penstock_lab.prove.proof import Outcome

DESCRIPTION = "Prove on this machine what Penstock promises: the same bits, and no stream dropped."
EXAMPLES = """examples:
  penstock prove                                 the bundled demo model, five minutes
  penstock prove /models/llama --minutes 60      a model of yours, with more trials
  penstock prove --only engine-deaths            one proof
  penstock prove --json proof.json

Exit code 0: every promise was kept. 1: one was broken, or a proof could not be made. 2: bad input.
"""
MAX_TRIALS = 10**9
PIPED_WIDTH = 120  # characters per line of a table that goes to a file or another program
NEWS_S = 10.0  # between two lines about the progress of a proof
PR_SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--minutes", type=float, default=5.0, metavar="N", help="minutes for all proofs together (default: 5)"
    )
    help_text = "trials of each proof at most (default: as many as docs/guarantees.md says, within --minutes)"
    parser.add_argument("--trials", type=int, default=None, metavar="N", help=help_text)
    parser.add_argument("--only", nargs="+", default=[], metavar="PROOF", help="the proofs to make (default: all)")
    help_text = "write the results, with a description of each trial that went wrong, to this file"
    parser.add_argument("--json", metavar="FILE", help=help_text)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    from penstock_lab.prove.proof import Subject
    from penstock_lab.prove.run import chosen, run_proofs

    if not (math.isfinite(args.minutes) and args.minutes > 0):
        raise InvalidRequestError(f"minutes: {args.minutes} is not a number above 0", param="minutes")
    check_int("trials", args.trials, 1, MAX_TRIALS, optional=True)
    options = {name: value for name, value in engine_options(args).items() if name not in ("model", "seed")}
    proofs = chosen(args.only)
    handle_signals(terminate=True)
    if (code := _go_on_in_child()) is not None:
        return code
    seed = getattr(args, "seed", 0)
    outcomes = []
    limits = {"minutes": args.minutes, "trials": args.trials}
    for outcome in run_proofs(Subject(args.model, options), proofs, **limits, seed=seed, progress=_progress):
        outcomes.append(outcome)
    _print_table(outcomes)
    passed = all(outcome.passed for outcome in outcomes)
    if args.json:
        result = {"model": args.model, "seed": seed, "passed": passed}
        rows = [asdict(outcome) | {"passed": outcome.passed} for outcome in outcomes]
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result | {"proofs": rows}, file, indent=2)
    return 0 if passed else 1


def _go_on_in_child() -> int | None:
    """Continue in a child process, and return None there. The parent waits, and returns the child's exit code.

    The threads of a proof may wait for a server for minutes. So after a signal the parent kills the child with all
    that it has started, and removes their temporary files.
    """
    folder = tempfile.mkdtemp(prefix="penstock-prove-")
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # to wait for what the child has started, too
    child = os.fork()
    os.setpgid(child, child or os.getpid())  # in both: neither knows whether the other was faster
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        return None
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        with suppress(OSError):
            os.killpg(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-child, 0)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _progress(name: str, goal: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, and elsewhere a line now and then."""
    began, told, made = time.monotonic(), -NEWS_S, 0

    def advance(number: int) -> None:
        nonlocal told, made
        made += number
        bar(number)
        if (now := time.monotonic() - began) > told + NEWS_S and not sys.stderr.isatty():
            told = now
            print(f"{name}: {made:,} of {goal:,}, {now:.0f} s", file=sys.stderr, flush=True)

    with progress(name, goal) as bar:
        advance(0)
        yield advance


def _print_table(outcomes: "list[Outcome]") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("promise", "tried", "broken", "measured"):
        table.add_column(column, overflow="fold", justify="right" if column in ("tried", "broken") else "left")
    for outcome in outcomes:
        figures = ", ".join(f"{name} {_short(value)}" for name, value in outcome.figures.items())
        broken = "not tried" if outcome.skipped else str(outcome.num_wrong) if outcome.tried else "not tried"
        tried = f"{outcome.tried:,} {outcome.unit}"
        table.add_row(outcome.promise, tried, broken, outcome.skipped or figures)
    console.print(table)
    for outcome in outcomes:
        for what in outcome.wrong:
            console.print(f"{outcome.name}: {what}", markup=False)


def _short(value: float | int | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
