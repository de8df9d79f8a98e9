"""`penstock replay`: computes a record of an engine's last minutes again and compares it bit for bit."""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from penstock.cli.options import add_imports
from penstock.cli.terminal import handle_signals, note

if TYPE_CHECKING:
    from penstock_lab.prove.recompute import ReplayReport

DESCRIPTION = "Compute a record of an engine's last minutes again, step by step, and name the first bit that differs."
EXAMPLES = """examples:
  penstock serve --record-dir records            leaves a record when the engine dies or a request fails
  penstock replay records/penstock-20261122T101500-4711-1.record
  penstock replay FILE --model /models/llama     where the model has moved since
  penstock replay FILE --json

Exit code 0: the same bits, and no block was given out wrongly. 1: something differs; the first difference is named.
2: the file is no record, or does not fit the model. A record without text is checked, but not computed.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="a file that the flight recorder wrote")
    parser.add_argument("--model", metavar="DIR", help="directory or name of the model (default: as recorded)")
    add_imports(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    from penstock_lab.bench.record_history import read_bundle
    from penstock_lab.prove.replay import replay

    handle_signals(terminate=True)
    bundle = read_bundle(args.bundle)
    imports = tuple(getattr(args, "import", ()))
    report = replay(bundle, model=args.model, imports=imports, announce=lambda line: note(f"penstock: {line}"))
    if args.json:
        print(json.dumps({"passed": report.passed, **asdict(report)}))
    else:
        _print(report)
    return 0 if report.passed else 1


def _print(report: "ReplayReport") -> None:
    print(f"reason for the record: {report.reason}")
    for remark in report.remarks:
        print(remark)
    for finding in report.findings:
        print(f"unsound: {finding}")
    done = "computed again" if report.computed else "checked"
    print(f"{report.steps:,} steps {done}, {report.tokens:,} tokens compared, {report.restored:,} restored")
    if report.differences:
        first = report.differences[0]
        where = f"step {first.step_id}"
        if first.request_id is not None:
            where += f", request {first.request_id}, position {first.position}"
        print(f"first difference: {where}: {first.what}: {first.recorded} in the record, {first.replayed} here")
        others = [item for item in report.differences[1:] if item.request_id is not None]
        if others:
            print(f"also different in the same step: {', '.join(str(item.request_id) for item in others)}")
    elif report.computed:
        print("the same bits")
