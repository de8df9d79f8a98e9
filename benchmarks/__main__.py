"""`make compare`: install the peers, run the workloads in turn, and write the table, the JSON and the picture."""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import report
from benchmarks.checkpoint import SHAPES, read_shape
from benchmarks.environments import Workshop
from benchmarks.machine import Machine, describe
from benchmarks.peers import ALL, OURS, find
from benchmarks.picture import draw, read_table
from benchmarks.process import ROOT
from benchmarks.runner import PRECISIONS, Plan, Runner
from benchmarks.store import Store
from benchmarks.workloads import parse_workloads


def main(argv: list[str]) -> int:
    args = _parse(argv)
    out = Path(args.out)
    try:
        config = read_shape(args.shape)
        peers = [find(name) for name in dict.fromkeys([OURS, *args.peers.replace(",", " ").split()])]
        workloads = parse_workloads(args.workloads)
        precisions = tuple(args.weights.replace(",", " ").split()) or PRECISIONS
        if unknown := {*precisions} - {*PRECISIONS}:
            raise ValueError(f"weights: {', '.join(sorted(unknown))}: none of {', '.join(PRECISIONS)}")
        model = f"Llama shape {args.shape}" if args.shape in SHAPES else f"the shape of {args.shape}"
        run = {"build": build_name(), "machine": describe(args.threads), "model": model, "config": config}
        store = Store(out, run)
    except ValueError as error:
        print(f"make compare: {error}", file=sys.stderr)
        return 2
    for peer in peers:
        print(f"{peer.name}: {', '.join(peer.requirements) or run['build']}")
    plan = Plan(workloads, args.threads, args.rounds, args.time_limit, args.patience, precisions)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting")
        runner = Runner(
            plan,
            peers,
            Workshop(config, out / "logs"),
            store,
            Machine(args.threads),
            lambda text, done, total: progress.update(task, description=text, completed=done, total=total),
        )
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            runner.run()
        except KeyboardInterrupt:
            progress.console.print("stopped; the same command goes on from here")
    engines = [peer.name for peer in peers]
    rows = report.make_rows(store, engines, workloads)
    report.print_table(rows, engines)
    write_files(out, rows, engines, store)
    return 0


def write_files(out: Path, rows: list[report.Row], engines: list[str], store: Store) -> None:
    """Write table.md, result.json and speed.svg."""
    page = report.write_markdown(rows, engines, store)
    (out / "table.md").write_text(page, encoding="utf-8")
    (out / "result.json").write_text(json.dumps(report.to_json(rows, store), indent=2) + "\n", encoding="utf-8")
    (out / "speed.svg").write_text(draw(*read_table(page)), encoding="utf-8")
    print(f"{out / 'table.md'}, {out / 'result.json'}, {out / 'speed.svg'}")


def build_name() -> str:
    """Return the commit of this tree, with "-dirty" if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return f"penstock {done.stdout.strip() or 'of unknown commit'}"


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    others = ",".join(name for name in ALL if name != OURS)
    parser.add_argument("--peers", default=others, metavar="NAMES", help=f"default: {others}")
    parser.add_argument("--shape", default="1b", help="1b, 3b, or a directory with the config.json of a Llama")
    parser.add_argument("--workloads", default="", help="W1 to W7, also with sizes: W3=8x64+32 (default: all)")
    parser.add_argument("--weights", default="", metavar="NAMES", help=f"{', '.join(PRECISIONS)} (default: all)")
    parser.add_argument("--out", default="build/compare", metavar="DIR", help="default: build/compare")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, metavar="N", help="of every engine (default: all cores)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="most samples of each (default: 3)")
    parser.add_argument(
        "--time-limit", type=float, default=0, metavar="MIN", help="minutes of measuring (default: none)"
    )
    help_text = "end a peer's sample after so many times Penstock's time, but at least 30 s (default: 3)"
    parser.add_argument("--patience", type=float, default=3.0, metavar="N", help=help_text)
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
