"""`penstock simulate`: runs the real scheduler on a virtual clock."""

import argparse
import json
from pathlib import Path
from typing import Any

from penstock import EngineConfig
from penstock.cli.options import add_engine_options, add_model, engine_options, parse_size
from penstock.cli.terminal import check_writable, handle_signals, note, saying
from penstock.client.prompts import progress
from penstock.config import option_names
from penstock.errors import invalid
from penstock_lab.cli.bench_serve import add_arrivals, add_dataset, read_dataset
from penstock_lab.cli.hardware import add_hardware, budget_of, check_ranks
from penstock_lab.planner.machines import THIS_MACHINE, load_hardware

DESCRIPTION = "Simulate a load: the real scheduler and cache on a virtual clock, which the cost of each step advances."
# Options that change a fleet -> options, at least one of which must also be given.
CHANGES = {
    "max_replicas": ("max_replicas",),
    "target_ongoing_requests": ("max_replicas",),
    "upscale_delay": ("max_replicas",),
    "downscale_delay": ("max_replicas",),
    "startup_time": ("max_replicas", "mtbf"),
    "mtbf": ("mtbf",),
    "restart_time": ("mtbf",),
}
EXAMPLES = """examples:
  penstock simulate demo --request-rate 5 10 20 40 --target ttft_p99=2s,itl_p99=100ms --plot sweep.html
  penstock simulate demo --trace load.csv --replicas auto --target ttft_p99=2s --price 1.20
  penstock simulate demo --users 200 --think-time 20 --replicas auto --target ttft_p99=2s
  penstock simulate demo --trace day.csv --replicas 2 --max-replicas 20 --startup-time 90 --mtbf 86400 --restart-time 15
  penstock simulate demo --costs costs.json --json
  penstock simulate /models/llama --hardware h100-sxm --users 200 --replicas auto --target ttft_p99=2s
With --hardware, steps cost what `penstock plan` predicts. Otherwise they cost what --costs says: a record of a running
server (--record-dir), a file of --save-costs, or this, which measures the model on this machine.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    load = parser.add_argument_group("load")
    help_text = "requests per run (default: 1000, or all of the trace)"
    load.add_argument("--num-prompts", type=parse_size, metavar="N", help=help_text)
    add_arrivals(load)
    add_dataset(load)
    help_text = "CSV of arrival_s, prompt_len, output_len, prefix_group, prefix_len, instead of drawn requests"
    load.add_argument("--trace", metavar="FILE", help=help_text)
    help_text = "number of users that send the requests, each after the answer to the previous one is complete"
    load.add_argument("--users", type=parse_size, metavar="N", help=help_text)
    help_text = "mean time that a user takes between an answer and the next request (default: 0)"
    load.add_argument("--think-time", type=float, default=0.0, metavar="SECONDS", help=help_text)
    load.add_argument("--seed", type=int, default=0, metavar="N", help="seed of lengths and arrivals (default: 0)")
    fleet = parser.add_argument_group("fleet")
    help_text = "engines behind the router, or auto: as few as meet the target (default: 1)"
    fleet.add_argument("--replicas", type=_parse_replicas, default=1, metavar="N", help=help_text)
    help_text = "round_robin, least_loaded, by open requests, or cached_prefix, as serve does (default: round_robin)"
    fleet.add_argument("--router", default="round_robin", metavar="NAME", help=help_text)
    help_text = "with the router round_robin: simulate only N replicas, and let them stand for all"
    fleet.add_argument("--sample", type=parse_size, metavar="N", help=help_text)
    help_text = "targets that the fleet must meet, like ttft_p99=2s,itl_p99=100ms,e2e_p50=20s"
    add_changes(fleet)
    fleet.add_argument("--target", metavar="GOALS", help=help_text)
    fleet.add_argument("--price", type=float, metavar="X", help="price of a replica per hour, in any currency")
    help_text = "what steps cost: a record, a file, or this: measured now (default: this)"
    fleet.add_argument("--costs", metavar="FILE", help=help_text)
    help_text = "replicas are on this hardware, and steps cost what `penstock plan` predicts there, instead of --costs"
    add_hardware(fleet, help_text)
    fleet.add_argument("--save-costs", metavar="FILE", help="write what steps cost as JSON, for --costs")
    output = parser.add_argument_group("output")
    output.add_argument("--plot", metavar="FILE", help="draw the figures by request rate, as html, svg, png or pdf")
    help_text = "processes that simulate, for the router round_robin (default: 1)"
    output.add_argument("--processes", type=parse_size, metavar="N", help=help_text)
    output.add_argument("--json", action="store_true", help="print the figures as JSON, and nothing else")
    add_engine_options(parser, [name for name in option_names() if name != "seed"])


def add_changes(group: argparse._ArgumentGroup) -> None:
    """Add the options that change a fleet: autoscaling and failures."""
    help_text = "autoscaling: from --replicas up to this many, as --target-ongoing-requests needs"
    group.add_argument("--max-replicas", type=parse_size, metavar="N", help=help_text)
    seconds: dict[str, Any] = {"type": float, "metavar": "SECONDS"}
    help_text = "ongoing requests per replica, on average (default: max_num_seqs)"
    group.add_argument("--target-ongoing-requests", type=float, metavar="X", help=help_text)
    help_text = "how long more replicas must be needed before they are added (default: 30)"
    group.add_argument("--upscale-delay", **seconds, help=help_text)
    help_text = "how long fewer replicas must suffice before some are removed (default: 600)"
    group.add_argument("--downscale-delay", **seconds, help=help_text)
    help_text = "from the decision to add a replica until it serves (default: 60)"
    group.add_argument("--startup-time", **seconds, help=help_text)
    help_text = "mean time between failures of a replica, whose requests go on elsewhere (default: no failures)"
    group.add_argument("--mtbf", **seconds, help=help_text)
    help_text = "from a failure until the replica serves again (default: --startup-time)"
    group.add_argument("--restart-time", **seconds, help=help_text)


def _parse_replicas(text: str) -> int | None:
    return None if text == "auto" else parse_size(text)


def run(args: argparse.Namespace) -> int:
    """Simulate, and print a table or JSON."""
    from penstock_lab.simulator.report import check_plot, print_simulation, write_plot
    from penstock_lab.simulator.run import as_json, find_costs
    from penstock_lab.simulator.run import run as simulate

    options, load = engine_options(args, seed=False), _load(args)
    if args.plot:
        check_plot(Path(args.plot))
    if args.save_costs:
        check_writable(Path(args.save_costs), "save_costs")
    _check_costs(args)
    load.arrivals(load.rates[0], options["model"])  # refuses a wrong file now, not after the costs were measured
    handle_signals()
    if args.hardware is not None:
        planned, planned_costs = _elsewhere(options, args)
        result = simulate(options, load, planned_costs, progress, planned)
    else:
        with saying(f"penstock: measuring the steps of {args.model} ..."):
            costs = find_costs(options, args.costs or "this")
        if args.save_costs:
            costs.write(Path(args.save_costs))
        result = simulate(options, load, costs, progress)
    if args.plot:
        write_plot(result, Path(args.plot))
        note(f"penstock: drawn in {args.plot}")
    if args.json:
        print(json.dumps(as_json(result), indent=2))
    else:
        print_simulation(result)
    return 0


def _check_costs(args: argparse.Namespace) -> None:
    """Raise InvalidRequestError for options that contradict each other."""
    for name in ("costs", "save_costs"):
        if args.hardware is not None and getattr(args, name) is not None:
            raise invalid(name, "not allowed with --hardware, whose costs are planned; leave one out")
    if args.devices is not None and args.hardware is None:
        raise invalid("devices", "only allowed with --hardware")


def _elsewhere(options: dict[str, Any], args: argparse.Namespace) -> tuple[Any, Any]:
    """Plan a replica on --hardware, and compute the costs of its steps."""
    from penstock_lab.simulator.elsewhere import plan_replica

    config, hardware = EngineConfig.from_options(**options), load_hardware(args.hardware)
    elsewhere = None if args.hardware == THIS_MACHINE else hardware
    check_ranks(config, elsewhere, args.devices)
    return plan_replica(config, hardware, budget_of(config, elsewhere, args.devices))


def _load(args: argparse.Namespace) -> Any:
    from penstock_lab.simulator.run import Options

    names = ("burstiness", "num_prompts", "replicas", "router", "users", "target", "price", "processes",
             "sample", "seed")  # fmt: skip
    return Options(
        dataset=read_dataset(args),
        rates=args.request_rate,
        trace=None if args.trace is None else Path(args.trace),
        think_s=args.think_time,
        changes=_changes(args),
        **{name: getattr(args, name) for name in names},
    )


def _changes(args: argparse.Namespace) -> Any:
    """Read the changes of the fleet. Refuse options of autoscaling or failures without the option that enables it."""
    from penstock_lab.simulator.lifecycle import Changes, Scaling

    given = {name: getattr(args, name) for name in CHANGES if getattr(args, name) is not None}
    for name in given:
        if not any(needed in given for needed in CHANGES[name]):
            needed = " or ".join(f"--{needed.replace('_', '-')}" for needed in CHANGES[name])
            raise invalid(name, f"only allowed with {needed}")
    scaling = None
    if args.max_replicas is not None:
        names = {"upscale_delay": "upscale_delay_s", "downscale_delay": "downscale_delay_s"}
        scaling = Scaling(
            max_replicas=args.max_replicas,
            target_ongoing_requests=given.get("target_ongoing_requests"),
            **{field: given[name] for name, field in names.items() if name in given},
        )
    names = {"startup_time": "startup_s", "mtbf": "mtbf_s", "restart_time": "restart_s"}
    return Changes(scaling=scaling, **{field: given[name] for name, field in names.items() if name in given})
