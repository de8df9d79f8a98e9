"""`penstock plan`: predicts memory and speed from config.json alone."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import EngineConfig
from penstock.cli.options import add_engine_options, add_model, engine_options, parse_size
from penstock.cli.terminal import check_writable, note, saying
from penstock.errors import invalid
from penstock_lab.cli.hardware import add_hardware, budget_of, check_ranks
from penstock_lab.planner.machines import THIS_MACHINE, Hardware, load_hardware, this_file

if TYPE_CHECKING:  # an error in the options must not wait for the import of numpy
    from penstock_lab.planner.placement import Placement

DESCRIPTION = "Predict a model's memory and speed from its config.json, before anything is loaded."
EXAMPLES = """examples:
  penstock plan demo                                        on this machine, as the engine would start
  penstock plan /models/llama --hardware tpu-v5e-8          the fewest chips that it fits on
  penstock plan /models/llama --devices 8x16GB --max-model-len 4096
  penstock plan /models/llama --memory 8GiB --batch 1 8 32 --prompt-len 128 1024 --context 1024 4096
  penstock plan /models/falcon-40b --hardware wormhole-galaxy --placement falcon-40b-galaxy
  penstock plan /models/falcon-40b --hardware wormhole-galaxy --placement falcon-40b-galaxy --run --hidden-size 64
Exit code 1 where it does not fit.
"""
PICTURES = (".html", ".svg")
DOES_NOT_FIT = 1


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    machine = parser.add_argument_group("hardware")
    help_text = (
        "a YAML file, the name of a bundled one, or this: what `penstock bench machine` measured (default: this)"
    )
    add_hardware(machine, help_text)
    help_text = (
        "a YAML file, or the name of a bundled one, with the chips of each part of the model; the plan checks it"
    )
    machine.add_argument("--placement", metavar="FILE", help=help_text)
    chips = parser.add_argument_group("simulated chips")
    help_text = "compute the placement, each chip its part with the real kernels, and compare with a run without chips"
    chips.add_argument("--run", action="store_true", dest="is_run", help=help_text)  # args.run is the command
    help_text = "hidden size of a narrower model, with random weights, that --run computes instead"
    chips.add_argument("--hidden-size", type=parse_size, metavar="N", help=help_text)
    help_text = "steps of --run in flight, each with some of the rows, if layers have chips of their own (default: 1)"
    chips.add_argument("--micro-batches", type=parse_size, metavar="N", help=help_text)
    help_text = "write what the chips of --run did, for chrome://tracing or Perfetto"
    chips.add_argument("--trace", metavar="FILE", help=help_text)
    load = parser.add_argument_group("load")
    several: dict[str, Any] = {"type": parse_size, "nargs": "+", "action": "extend", "metavar": "N"}
    load.add_argument("--batch", **several, help="streams at once (default: 1 and --max-num-seqs)")
    load.add_argument("--prompt-len", **several, help="tokens of each prompt (default: 128 and 1024)")
    load.add_argument("--context", **several, help="tokens of each stream while it decodes (default: 1024)")
    parser.add_argument("--plot", metavar="FILE", help="draw the plan, as html (a page without a network) or svg")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and nothing else")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Make the plan, and print it as tables or JSON."""
    config = EngineConfig.from_options(**engine_options(args))
    for name in ("hidden_size", "micro_batches", "trace"):
        if getattr(args, name) is not None and not args.is_run:
            raise invalid(name, "only allowed with --run")
    # Without --hardware, use the measurement of this machine, if there is one.
    name = THIS_MACHINE if args.hardware is None and this_file().is_file() else args.hardware
    hardware = None if name is None else load_hardware(name)
    elsewhere = hardware if args.hardware not in (None, THIS_MACHINE) else None
    check_ranks(config, elsewhere, args.devices)
    if args.plot is not None and Path(args.plot).suffix not in PICTURES:
        raise invalid("plot", f"{args.plot!r} must end with {' or '.join(PICTURES)}")
    placement = None
    if args.placement is not None:
        from penstock_lab.planner.placement import load_placement

        placement = load_placement(args.placement)
    from penstock_lab.planner.forecast import Load
    from penstock_lab.planner.planned import PlannedModel
    from penstock_lab.planner.report import Question, answer

    load = Load(args.batch or (), args.prompt_len or (), args.context or ())
    planned = PlannedModel.read(config, hardware)
    result = answer(planned, Question(budget_of(config, elsewhere, args.devices), hardware, load, placement))
    _note_what_is_unknown(hardware, args.devices)
    if args.is_run:
        result["run"] = _computed(config, placement, hardware, args)
    if args.plot is not None:
        _draw(args.model, result, Path(args.plot))
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        from penstock_lab.cli.plan_tables import print_plan

        print_plan(args.model, result)
    return 0 if result["fits"] and result.get("run", {}).get("equal", True) else DOES_NOT_FIT


def _computed(
    config: EngineConfig, placement: "Placement | None", hardware: Hardware | None, args: argparse.Namespace
) -> dict[str, Any]:
    """Compute the placement on simulated chips, write the trace if asked to, and return the figures."""
    from penstock_lab.bench.placement import Trial, run_placement, write_trace

    if placement is None or hardware is None:
        raise invalid("run", "it needs a --placement, and a --hardware for its times")
    if args.trace is not None:
        check_writable(Path(args.trace), "trace")
    with saying("penstock: computing the placement ..."):
        trial = Trial.of(config, placement, hardware, args.hidden_size)
        figures, machine = run_placement(trial, args.micro_batches or 1)
    if args.trace is not None:
        write_trace(machine, Path(args.trace))
    return figures


def _note_what_is_unknown(hardware: Hardware | None, devices: tuple[int, int | None] | None) -> None:
    if hardware is None or not hardware.has_rates:
        note("penstock: no times: measure this machine with `penstock bench machine`, or name a --hardware")
    elif devices is not None and devices[0] > 1 and not hardware.link_bytes_per_s:
        note(f"penstock: {hardware.name} has no link_bytes_per_s, so the times leave out what devices exchange")


def _draw(model: str, result: dict[str, Any], path: Path) -> None:
    from penstock_lab.planner.picture import picture, plan_page

    check_writable(path, "plot")
    text = plan_page(model, result) if path.suffix == ".html" else picture(result)
    path.write_text(text, encoding="utf-8")
    note(f"penstock: drawn in {path}")
