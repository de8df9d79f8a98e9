"""Reports of what a machine did: its figures, and a trace for chrome://tracing and Perfetto."""

from typing import Any

from penstock_lab.chips.device import COUNTED, Device
from penstock_lab.chips.machine import Machine

MICROSECONDS = 1e6
METADATA, COMPLETE = "M", "X"  # kinds of events in the trace format


def figures(machine: Machine) -> dict[str, Any]:
    """Return what each chip held and did, and the totals of all chips, as JSON."""
    chips = [_chip(device) for device in machine.devices]
    steps = len({span.step for span in machine.spans})
    totals = {name: sum(chip[name] for chip in chips) for name in COUNTED}
    return {"steps": steps, "epochs": machine.num_epochs, "seconds": machine.seconds, **totals, "chips": chips}


def _chip(device: Device) -> dict[str, Any]:
    return {
        "chip": device.chip,
        "peak_sram_bytes": device.sram.peak,
        "sram_bytes": device.sram.budget,
        "peak_dram_bytes": device.dram.peak,
        "dram_bytes": device.dram.budget,
        "busy_seconds": device.busy,
        **device.counts,
    }


def chrome_trace(machine: Machine) -> dict[str, Any]:
    """Return every call of every chip as a trace in Chrome's format. Times are simulated microseconds."""
    names: list[dict[str, Any]] = [
        {"ph": METADATA, "pid": 0, "tid": device.chip, "name": "thread_name", "args": {"name": f"chip {device.chip}"}}
        for device in machine.devices
    ]
    events = [
        {
            "ph": COMPLETE,
            "pid": 0,
            "tid": span.chip,
            "name": f"{span.operation}.{span.what}",
            "cat": f"step {span.step}",
            "ts": MICROSECONDS * span.begin,
            "dur": MICROSECONDS * span.seconds,
            "args": {"step": span.step, **{name: getattr(span.work, name) for name in (*COUNTED, "buffers")}},
        }
        for span in machine.spans
    ]
    return {"displayTimeUnit": "ms", "traceEvents": names + events}
