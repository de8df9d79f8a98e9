"""`penstock plan`: memory and speed from config.json alone."""

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import add_engine_options, add_model, engine_options, parse_size
from penstock.cli.terminal import check_writable, note, saying
from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError
from penstock.planner.machines import MOST_DEVICES, THIS, Hardware, load_hardware, this_file
from penstock.planner.yaml_file import MOST_BYTES

if TYPE_CHECKING:  # numpy takes longer to import than a mistake to find
    from penstock.planner.fit import Budget
    from penstock.planner.placement import Placement

DESCRIPTION = "Say what a model takes and how fast it will be, from its config.json, before anything is loaded."
EXAMPLES = """examples:
  penstock plan demo                                        on this machine, as the engine would start
  penstock plan /models/llama --hardware tpu-v5e-8          the fewest chips that it fits on
  penstock plan /models/llama --devices 8x16GB --max-model-len 4096
  penstock plan /models/llama --memory 8GiB --batch 1 8 32 --prompt-len 128 1024 --context 1024 4096
  penstock plan /models/falcon-40b --hardware wormhole-galaxy --placement falcon-40b-galaxy
  penstock plan /models/falcon-40b --hardware wormhole-galaxy --placement falcon-40b-galaxy --run --hidden-size 64
Exit code 1 where it does not fit.
"""
DEVICES = re.compile(r"(\d{1,9})(?:x(.+))?", re.ASCII)
PICTURES = (".html", ".svg")
DOES_NOT_FIT = 1


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    machine = parser.add_argument_group("hardware")
    help_text = "a YAML file, a name of the package's, or this: what `penstock bench machine` measured (default: this)"
    machine.add_argument("--hardware", metavar="FILE", help=help_text)
    help_text = "devices to split the model over, and their memory, like 8x16GB (default: the hardware's)"
    machine.add_argument("--devices", type=_parse_devices, metavar="N", help=help_text)
    help_text = "a YAML file, or a name of the package's: chips of each part of the model, checked"
    machine.add_argument("--placement", metavar="FILE", help=help_text)
    chips = parser.add_argument_group("simulated chips")
    help_text = "compute the placement: each chip runs its part with the real kernels; compare with a run without chips"
    chips.add_argument("--run", action="store_true", dest="is_run", help=help_text)  # run is the command
    help_text = "of a narrower model, with random weights, that --run computes instead"
    chips.add_argument("--hidden-size", type=parse_size, metavar="N", help=help_text)
    help_text = (
        "steps of --run in flight, each with some of the rows, where layers have chips of their own (default: 1)"
    )
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


def _parse_devices(text: str) -> tuple[int, int | None]:
    match = DEVICES.fullmatch(text.replace("×", "x"))
    count = int(match[1]) if match else 0
    if match is None or not 1 <= count <= MOST_DEVICES:
        message = f"{text!r} is not from 1 to {MOST_DEVICES} devices; write it like 8 or 8x16GB"
        raise argparse.ArgumentTypeError(message)
    size = parse_size(match[2]) if match[2] else None
    if size is not None and not 1 <= size <= MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r}: {match[2]} is not from 1 to {MOST_BYTES} bytes")
    return count, size


def run(args: argparse.Namespace) -> int:
    """Plan, and print tables or JSON."""
    config = EngineConfig.from_options(**engine_options(args))
    for name in ("hidden_size", "micro_batches", "trace"):
        if getattr(args, name) is not None and not args.is_run:
            raise InvalidRequestError(f"{name}: it belongs to --run", param=name)
    hardware = _hardware(args.hardware)
    elsewhere = hardware if args.hardware not in (None, THIS) else None
    _check_ranks(config, elsewhere, args.devices)
    if args.plot is not None and Path(args.plot).suffix not in PICTURES:
        raise InvalidRequestError(f"plot: {args.plot!r} must end with {' or '.join(PICTURES)}", param="plot")
    placement = None
    if args.placement is not None:
        from penstock.planner.placement_file import load_placement

        placement = load_placement(args.placement)
    from penstock.planner.forecast import Load
    from penstock.planner.report import Question, answer
    from penstock.weights.planned import PlannedModel

    load = Load(args.batch or (), args.prompt_len or (), args.context or ())
    planned = PlannedModel.read(config)
    result = answer(planned, Question(_budget(config, elsewhere, args.devices), hardware, load, placement))
    _note_what_is_unknown(hardware, args.devices)
    if args.is_run:
        result["run"] = _computed(config, placement, hardware, args)
    if args.plot is not None:
        _draw(args.model, result, Path(args.plot))
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        from penstock.cli.plan_tables import print_plan

        print_plan(args.model, result)
    return 0 if result["fits"] and result.get("run", {}).get("equal", True) else DOES_NOT_FIT


def _computed(
    config: EngineConfig, placement: "Placement | None", hardware: Hardware | None, args: argparse.Namespace
) -> dict[str, Any]:
    """Compute the placement on simulated chips, and write the trace. Return the figures."""
    from penstock.bench.placement import Trial, run_placement, write_trace

    if placement is None or hardware is None:
        raise InvalidRequestError("run: it needs a --placement, and a --hardware for its times", param="run")
    if args.trace is not None:
        check_writable(Path(args.trace), "trace")
    with saying("penstock: computing the placement ..."):
        trial = Trial.of(config, placement, hardware, args.hidden_size)
        figures, machine = run_placement(trial, args.micro_batches or 1)
    if args.trace is not None:
        write_trace(machine, Path(args.trace))
    return figures


def _check_ranks(config: EngineConfig, hardware: Hardware | None, devices: tuple[int, int | None] | None) -> None:
    """Refuse a model that is to be split over more devices than there are."""
    if devices is None and hardware is None:
        return  # processes of this machine
    count = devices[0] if devices is not None else hardware.devices if hardware is not None else 1
    if (ranks := config.parallel.num_ranks) > count:
        message = f"devices: {count} are too few for a model that is split over {ranks}; give --devices {ranks}"
        raise InvalidRequestError(message, param="devices")


def _note_what_is_unknown(hardware: Hardware | None, devices: tuple[int, int | None] | None) -> None:
    if hardware is None or not hardware.has_rates:
        note("penstock: no times: measure this machine with `penstock bench machine`, or name a --hardware")
    elif devices is not None and devices[0] > 1 and not hardware.link_bytes_per_s:
        note(f"penstock: {hardware.name} has no link_bytes_per_s: what devices exchange is not in the times")


def _draw(model: str, result: dict[str, Any], path: Path) -> None:
    from penstock.planner.picture import picture, plan_page

    check_writable(path, "plot")
    text = plan_page(model, result) if path.suffix == ".html" else picture(result)
    path.write_text(text, encoding="utf-8")
    note(f"penstock: drawn in {path}")


def _hardware(name: str | None) -> Hardware | None:
    """Return the hardware of a name; without one, what was measured here, if anything was."""
    if name is None and not this_file().is_file():
        return None
    return load_hardware(THIS if name is None else name)


def _budget(config: EngineConfig, hardware: Hardware | None, devices: tuple[int, int | None] | None) -> "Budget":
    """Return what each device offers: what --memory says, else --devices, else the hardware, else what is free here.

    Without --devices and a hardware elsewhere the ranks of a model are processes that share this machine's memory.
    """
    from penstock.planner.fit import Budget
    from penstock.planner.memory import free_memory_bytes, resident_bytes

    count, size = devices or (hardware.devices if hardware is not None else 1, None)
    runtime, shared = resident_bytes(), devices is None and hardware is None
    given = config.cache.memory or size or (hardware.memory_bytes if hardware is not None else None)
    if given is not None:
        return Budget(given, runtime, None, count, shared)
    free = free_memory_bytes()
    return Budget(runtime + free, runtime, free, count, shared)
