"""`penstock bench`: measure. Flags -> penstock.bench, no more."""

import argparse
import json
from pathlib import Path

from penstock.cli.options import add_engine_options, add_model, engine_options, parse_size
from penstock.cli.terminal import progress, tell_choices
from penstock.errors import InvalidRequestError

PLANNED = ("serve", "ops")
EXAMPLES = """examples:
  penstock bench offline demo --num-prompts 32 --input-len 64 --output-len 64
  penstock bench offline /models/llama --json result.json
  penstock bench offline DIR --load-format dummy        DIR holds only a config.json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure throughput and latency in this process (serve and ops are not built yet)."
    parser.epilog = EXAMPLES
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="{offline,serve,ops}")
    offline = kinds.add_parser("offline", help="throughput and latency in this process", epilog=EXAMPLES)
    offline.formatter_class = argparse.RawDescriptionHelpFormatter
    add_model(offline)
    offline.add_argument("--num-prompts", type=parse_size, default=8, metavar="N", help="requests (default: 8)")
    offline.add_argument("--input-len", type=parse_size, default=128, metavar="N", help="tokens of each prompt")
    offline.add_argument("--output-len", type=parse_size, default=128, metavar="N", help="tokens generated for each")
    offline.add_argument("--warmup", type=parse_size, default=1, metavar="N", help="runs before the measured one")
    offline.add_argument("--json", metavar="FILE", help="write the figures there (- is standard output)")
    add_engine_options(offline)
    offline.set_defaults(run=run_offline)
    for name in PLANNED:
        kinds.add_parser(name, help="not built yet", add_help=False)


def _check_writable(path: Path) -> None:
    """Said before the run, not after it."""
    try:
        path.open("a").close()
    except OSError as error:
        raise InvalidRequestError(f"json: cannot write {str(path)!r}: {error.strerror}", param="json") from error


def run_offline(args: argparse.Namespace) -> int:
    options = engine_options(args)
    from penstock.bench.offline import Workload, measure_offline
    from penstock.bench.report import print_offline

    workload = Workload(args.num_prompts, args.input_len, args.output_len, args.warmup)
    if args.json and args.json != "-":
        _check_writable(Path(args.json))
    result = measure_offline(options, workload, announce=tell_choices, progress=progress)
    text = json.dumps(result, indent=2)
    if args.json == "-":
        print(text)
        return 0
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    print_offline(result)
    return 0
