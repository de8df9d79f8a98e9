"""The options that select the devices for which a model is planned."""

import argparse
import re
from typing import TYPE_CHECKING

from penstock import EngineConfig
from penstock.cli.options import parse_size
from penstock.config import TRITON
from penstock.errors import invalid
from penstock_lab.planner.machines import MAX_DEVICES, Hardware
from penstock_lab.planner.yaml_file import MAX_BYTES

if TYPE_CHECKING:  # an error in the options must not wait for the import of numpy
    from penstock_lab.planner.fit import Budget

Devices = tuple[int, int | None]  # (number of devices, bytes of memory of each)
ENGINE_RUNTIME = 57 * 2**20  # memory of an engine's process before it loads, without torch; measured
DEVICES = re.compile(r"(\d{1,9})(?:x(.+))?", re.ASCII)


def add_hardware(group: argparse._ArgumentGroup, help_text: str) -> None:
    """Add --hardware, with `help_text` as its help, and --devices."""
    group.add_argument("--hardware", metavar="FILE", help=help_text)
    help_text = "devices to split the model over, and their memory, like 8x16GB (default: the hardware's)"
    group.add_argument("--devices", type=parse_devices, metavar="N", help=help_text)


def parse_devices(text: str) -> Devices:
    """Parse the number and memory of devices from a text like 8 or 8x16GB."""
    match = DEVICES.fullmatch(text.replace("×", "x"))
    count = int(match[1]) if match else 0
    if match is None or not 1 <= count <= MAX_DEVICES:
        message = f"{text!r} is not from 1 to {MAX_DEVICES} devices; write it like 8 or 8x16GB"
        raise argparse.ArgumentTypeError(message)
    size = parse_size(match[2]) if match[2] else None
    if size is not None and not 1 <= size <= MAX_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r}: {match[2]} is not from 1 to {MAX_BYTES} bytes")
    return count, size


def check_ranks(config: EngineConfig, hardware: Hardware | None, devices: Devices | None) -> None:
    """Raise InvalidRequestError if the model is to be split over more devices than there are."""
    if devices is None and hardware is None:
        return  # the ranks are processes on this machine
    count = devices[0] if devices is not None else hardware.devices if hardware is not None else 1
    if (ranks := config.parallel.num_ranks * config.parallel.pipeline_parallel_size) > count:
        raise invalid("devices", f"{count} are too few for a model that is split over {ranks}; give --devices {ranks}")


def budget_of(config: EngineConfig, hardware: Hardware | None, devices: Devices | None) -> "Budget":
    """Find the memory of each device: from --memory, else --devices, else the hardware, else what is free here.

    Without --devices and other hardware, the ranks of a model are processes that share this machine's memory.
    """
    from penstock.kernels.cpu.host import free_memory_bytes, resident_bytes
    from penstock_lab.planner.fit import Budget

    count, size = devices or (hardware.devices if hardware is not None else 1, None)
    shared = devices is None and hardware is None
    runtime = max(resident_bytes(), ENGINE_RUNTIME) if shared else ENGINE_RUNTIME
    if hardware is not None and hardware.kernels == TRITON:
        runtime = 0  # the process is in the host's memory
    given = config.cache.memory or size or (hardware.memory_bytes if hardware is not None else None)
    if given is not None:
        return Budget(given, runtime, None, count, shared)
    free = free_memory_bytes()
    return Budget(runtime + free, runtime, free, count, shared)
