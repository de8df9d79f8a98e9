"""`penstock bench`: measures throughput, latency, a running server and kernels."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.cli.options import add_engine_options, add_model, engine_options, parse_size, read_schema
from penstock.cli.terminal import check_writable, note, saying, show_choices
from penstock.client.prompts import progress
from penstock.errors import check_int, fail, invalid
from penstock_lab.cli import bench_serve

DESCRIPTION = "Measure throughput and latency, in this process or of a running server, and the speed of kernels."
EXAMPLES = """examples:
  penstock bench offline demo --num-prompts 32 --input-len 64 --output-len 64
  penstock bench offline /models/llama --json result.json
  penstock bench offline DIR --load-format dummy        DIR holds only a config.json
  penstock bench offline /models/llama --profile --trace trace.json
  penstock bench offline demo --speculative-config '{"method": "ngram"}' --dataset repeat
  penstock bench offline DIR --load-format dummy --num-prompts 32 --lora 8    8 LoRA adapters beside none
  penstock bench ops --json ops.json                    every kernel against the machine's limits
  penstock bench ops --dtype bf16 int8 --rows 1 512 --shape 5632x2048
  penstock bench ops --op attend_decode attend_prefill  attention only
  penstock bench ops demo --dtype int8                  the shapes of that model
  penstock bench machine                                what this machine can do, for penstock plan
  penstock bench machine --device cuda                  what a GPU can do
  penstock bench serve --help                           how to measure a running server
"""

Result = dict[str, Any]
Bench = tuple[Callable[[], Result], Callable[[Result], None]]  # (function that measures, function that prints)


def configure(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="{offline,serve,ops,machine}")
    shown: dict[str, Any] = {"epilog": EXAMPLES, "formatter_class": argparse.RawDescriptionHelpFormatter}
    offline = kinds.add_parser("offline", help="throughput and latency in this process", **shown)
    add_model(offline)
    offline.add_argument("--num-prompts", type=parse_size, default=8, metavar="N", help="requests (default: 8)")
    offline.add_argument(
        "--input-len", type=parse_size, default=128, metavar="N", help="tokens per prompt (default: 128)"
    )
    help_text = "length of a prefix that all prompts share, in addition to these tokens (default: 0)"
    offline.add_argument("--prefix-len", type=parse_size, default=0, metavar="N", help=help_text)
    help_text = "tokens generated per prompt (default: 128)"
    offline.add_argument("--output-len", type=parse_size, default=128, metavar="N", help=help_text)
    offline.add_argument("--warmup", type=parse_size, default=1, metavar="N", help="warm-up runs (default: 1)")
    help_text = "with --speculative-config: prompts of random ids, or texts of the demo model: random, repeat, demo"
    offline.add_argument("--dataset", default=argparse.SUPPRESS, metavar="NAME", help=help_text)
    help_text = "with --speculative-config: drafts that are right with this probability, instead of the method's drafts"
    offline.add_argument("--acceptance", type=float, default=argparse.SUPPRESS, metavar="P", help=help_text)
    help_text = "how often to run without and with --speculative-config, --json-schema-file or --lora (default: 5)"
    offline.add_argument("--rounds", type=parse_size, default=argparse.SUPPRESS, metavar="N", help=help_text)
    help_text = "every answer is JSON that the schema in FILE allows; the model needs a tokenizer"
    offline.add_argument("--json-schema-file", type=read_schema, metavar="FILE", help=help_text)
    help_text = (
        "compare with this number of random LoRA adapters of --max-lora-rank, over which the requests are spread"
    )
    offline.add_argument("--lora", type=parse_size, metavar="N", help=help_text)
    offline.add_argument("--profile", action="store_true", help="show the calls, time and limits of each operation")
    offline.add_argument("--trace", metavar="FILE", help="write the run for chrome://tracing or Perfetto")
    add_engine_options(offline)
    ops = kinds.add_parser("ops", help="each kernel against the machine's measured limits", **shown)
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    help_text = "measure the shapes of this model (default: those of a 1.1B and a 7B Llama)"
    ops.add_argument("model", nargs="?", metavar="MODEL", help=help_text)
    ops.add_argument(
        "--op", **several, metavar="NAME", help="linear, experts, attend_decode, attend_prefill (default: all)"
    )
    ops.add_argument("--dtype", **several, metavar="NAME", help="types of weights and caches (default: all)")
    ops.add_argument("--rows", **several, type=int, metavar="M", help="rows of the products (default: 1 to 512)")
    ops.add_argument("--shape", **several, type=_parse_shape, metavar="NxK", help="weight shapes, like 5632x2048")
    ops.add_argument("--threads", type=int, metavar="N", help="cores that compute (default: all)")
    ops.add_argument("--device", metavar="{cpu,cuda[:N]}", help="measure the kernels of a GPU there (default: cpu)")
    serve = kinds.add_parser(
        "serve",
        help="a running server under load",
        epilog=bench_serve.EXAMPLES,
        formatter_class=shown["formatter_class"],
    )
    bench_serve.configure(serve)
    machine = kinds.add_parser("machine", help="what this machine can do, for `penstock plan`", **shown)
    machine.add_argument("--threads", type=int, metavar="N", help="cores that compute (default: all)")
    help_text = "measure how fast a GPU copies and multiplies (default: cpu)"
    machine.add_argument("--device", default="cpu", metavar="{cpu,cuda[:N]}", help=help_text)
    for command in (offline, serve, ops, machine):
        command.add_argument("--json", metavar="FILE", help="write the figures to FILE (- is standard output)")


def _parse_shape(text: str) -> tuple[int, int]:
    n, _, k = text.partition("x")
    if not (n.isdecimal() and k.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NxK, like 5632x2048")
    return int(n), int(k)


def run(args: argparse.Namespace) -> int:
    """Measure, write the figures to a file if asked to, and print a table. With `--json -`, print only JSON."""
    prepare = {
        "offline": _prepare_offline,
        "serve": bench_serve.prepare,
        "ops": _prepare_ops,
        "machine": _prepare_machine,
    }[args.kind]
    measure, show = prepare(args)
    to_file = args.json and args.json != "-"
    if to_file:
        check_writable(Path(args.json), "json")
    result = measure()
    text = json.dumps(result, indent=2)
    if to_file:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    if args.json == "-":
        print(text)
    else:
        show(result)
    return 0


def _prepare_offline(args: argparse.Namespace) -> Bench:
    options = engine_options(args)
    given = {name: getattr(args, name) for name in ("dataset", "acceptance", "rounds") if hasattr(args, name)}
    if args.lora is not None:
        return _prepare_lora(args, options)
    if "speculative_config" in options:
        if args.json_schema_file is not None:
            raise invalid("json_schema_file", "not allowed with speculative_config, whose runs are compared")
        return _prepare_speculation(args, options, given)
    if args.json_schema_file is not None and set(given) == {"rounds"}:
        return _prepare_forms(args, options)
    if given:
        name = next(iter(given))
        raise invalid(name, "only allowed with --speculative-config")
    if args.trace:
        check_writable(Path(args.trace), "trace")
    from penstock_lab.bench.offline import Workload, measure_offline
    from penstock_lab.bench.profile import Profile
    from penstock_lab.bench.report import print_offline

    lengths = (args.input_len, args.output_len, args.warmup, args.prefix_len)
    workload = Workload(args.num_prompts, *lengths, args.json_schema_file)
    profile = Profile(shows_operations=args.profile) if args.profile or args.trace else None

    def measure() -> Result:
        result = measure_offline(options, workload, announce=show_choices, progress=progress, profile=profile)
        if profile is not None and args.trace:
            profile.write_trace(Path(args.trace))
        return result

    return measure, print_offline


def _prepare_forms(args: argparse.Namespace, options: dict[str, Any]) -> Bench:
    if args.profile or args.trace:
        name = "trace" if args.trace else "profile"
        raise invalid(name, "not allowed with rounds, whose runs are compared")
    from penstock_lab.bench.forms import FormContest, measure_forms
    from penstock_lab.bench.report import print_forms

    contest = FormContest(args.num_prompts, args.input_len, args.output_len, args.json_schema_file, args.rounds)
    return lambda: measure_forms(options, contest, announce=show_choices, progress=progress), print_forms


def _prepare_lora(args: argparse.Namespace, options: dict[str, Any]) -> Bench:
    from penstock_lab.bench.lora import LoraContest, measure_lora
    from penstock_lab.bench.report import print_lora

    given = {"rounds": args.rounds} if hasattr(args, "rounds") else {}
    contest = LoraContest(args.num_prompts, args.input_len, args.output_len, args.lora, **given)
    return lambda: measure_lora(options, contest, announce=show_choices, progress=progress), print_lora


def _prepare_speculation(args: argparse.Namespace, options: dict[str, Any], given: dict[str, Any]) -> Bench:
    if args.profile or args.trace:
        name = "trace" if args.trace else "profile"
        raise invalid(name, "not allowed with speculative_config, whose runs are compared")
    from penstock_lab.bench.report import print_speculation
    from penstock_lab.bench.speculation import Contest, measure_speculation

    contest = Contest(args.num_prompts, args.input_len, args.output_len, **given)
    return lambda: measure_speculation(options, contest, announce=show_choices, progress=progress), print_speculation


def _prepare_ops(args: argparse.Namespace) -> Bench:
    from penstock_lab.bench.ops import Selection, measure_ops, model_operands
    from penstock_lab.bench.report import print_ops

    shapes, heads = args.shape, None
    if args.model is not None:
        if shapes:
            raise invalid("shape", "give a model or shapes, not both")
        shapes, heads = model_operands(args.model)
    if args.op is not None and "linear" not in args.op and (args.rows or args.shape):
        name = "rows" if args.rows else "shape"
        raise invalid(name, "only allowed with --op linear")
    given = {"ops": args.op, "dtypes": args.dtype, "rows": args.rows, "threads": args.threads, "device": args.device}
    given |= {"shapes": shapes, "heads": heads}
    selection = Selection(**{name: value for name, value in given.items() if value is not None})
    command = {"command": shlex.join(["penstock", *sys.argv[1:]])}
    return lambda: command | measure_ops(selection, progress=progress), print_ops


def _prepare_machine(args: argparse.Namespace) -> Bench:
    if args.threads is not None:
        check_int("threads", args.threads, 1, 1024)
        if args.device != "cpu":
            raise fail("threads", args.threads, f"left out with device = {args.device}")
    from penstock_lab.bench.report import print_machine
    from penstock_lab.planner.machines import this_file
    from penstock_lab.simulator.this_machine import measure_gpu, measure_machine, write_machine

    def measure() -> Result:
        with saying("penstock: measuring this machine ..."):
            result = measure_machine(args.threads) if args.device == "cpu" else measure_gpu(args.device)
        path = this_file(args.device)
        write_machine(result, path)
        note(f"penstock: kept in {path}" if args.device == "cpu" else f"penstock: for plan --hardware {path}")
        return result

    return measure, print_machine
