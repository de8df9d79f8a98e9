"""Machine: the chips of a placement, its epochs, and a clock that runs by a hardware file's rates.

    a step     epoch of layer 0 -> epoch of layer 1 -> ... -> epoch of the head
    an epoch   each of its operations takes the SRAM that it needs on its chips: the buffer that its weights stream
               through (unless they stay there), its part of this layer's cache, and buffers for operands and results;
               all of it is freed at the end of the epoch
    a call     one product or one attention on all chips of an operation; the next call begins when the last chip is
               done

Chips are idle until their epoch begins. Two steps with different requests may overlap, as in a pipeline, when their
epochs are on different chips. `chrome_trace` shows what every chip did.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock import InvalidRequestError
from penstock.errors import invalid
from penstock.interface.step import SchedulerOutput, StepOutput
from penstock.runner.model_runner import LocalExecutor, ModelRunner
from penstock.spec.model_config import ModelConfig
from penstock.spec.param_table import Parameter
from penstock_lab.chips.parts import Heads, heads_of, parts_of, share
from penstock_lab.planner.machines import Hardware
from penstock_lab.planner.placement import RESIDENT, WEIGHT_BYTES, Operation, PlacementPlan, branch_of, operation_of

WEIGHTS = "bfloat16"  # the type of weights that a placement counts
MICROSECONDS = 1e6
METADATA, COMPLETE = "M", "X"  # kinds of events in the trace format


class OverBudgetError(InvalidRequestError):
    """A chip has no room for something that it is to hold. None of it was stored."""

    def __init__(self, chip: int, memory: "Memory", what: str, num_bytes: int) -> None:
        over = memory.used + num_bytes - memory.budget
        message = (
            f"placement: chip {chip}: {what}: {num_bytes} bytes of {memory.name}, {over} more than are left of its "
            f"{memory.budget}"
        )
        super().__init__(message, param="placement")
        self.chip = chip


@dataclass(slots=True)
class Memory:
    """The contents of one memory of a chip, in bytes by name.

    Attributes:
        peak: the maximum number of bytes that it has held at once.
    """

    chip: int
    name: str
    budget: int
    used: int = 0
    peak: int = 0
    _held: dict[str, int] = field(default_factory=dict)

    def hold(self, what: str, num_bytes: int) -> None:
        """Hold `num_bytes` more under a name. Raise OverBudgetError if there is no room."""
        if self.used + num_bytes > self.budget:
            raise OverBudgetError(self.chip, self, what, num_bytes)
        self._held[what] = self._held.get(what, 0) + num_bytes
        self.used += num_bytes
        self.peak = max(self.peak, self.used)

    def free(self, what: str) -> None:
        """Free what is held under a name, if anything is."""
        self.used -= self._held.pop(what, 0)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one chip in one call of an operation.

    Attributes:
        streamed: bytes of weights that are read from its DRAM through its SRAM.
        operations: arithmetic operations of products and attention; a multiply-add counts as two.
        received, from_host, to_host: bytes over the chip's links.
        buffers: bytes of SRAM for operands and results during the call.
    """

    chip: int
    streamed: int = 0
    operations: int = 0
    received: int = 0
    from_host: int = 0
    to_host: int = 0
    buffers: int = 0

    @property
    def linked(self) -> int:
        """The bytes over all links."""
        return self.received + self.from_host + self.to_host


COUNTED = ("streamed", "operations", "received", "from_host", "to_host")


@dataclass(slots=True)
class Device:
    """One chip.

    Attributes:
        free_at: when its last operation ended, in simulated seconds.
        busy: seconds in which it computed, streamed or waited for its own links.
        counts: totals of its work, by the names in COUNTED.
    """

    chip: int
    sram: Memory
    dram: Memory
    free_at: float = 0.0
    busy: float = 0.0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))

    @classmethod
    def of(cls, chip: int, budgets: Sequence[int]) -> "Device":
        """Make a chip whose budgets are the bytes of SRAM and of DRAM, in this order."""
        return cls(chip, Memory(chip, "SRAM", budgets[0]), Memory(chip, "DRAM", budgets[1]))

    def count(self, work: Work, seconds: float) -> None:
        """Add work that took `seconds`."""
        self.busy += seconds
        for name in COUNTED:
            self.counts[name] += getattr(work, name)


@dataclass(frozen=True, slots=True)
class Span:
    """The work of one chip in one call, in simulated seconds."""

    chip: int
    step: int
    operation: str
    what: str
    begin: float
    seconds: float
    work: Work


class Site:
    """An operation of a placement, with its chips. Layers report their work to it."""

    def __init__(self, machine: "Machine", operation: Operation, epoch: int, num_layers: int) -> None:
        self.machine = machine
        self.operation = operation
        self.epoch = epoch
        self.chips = operation.chips
        self.branch = branch_of(operation.name)
        self.is_first = epoch == 0
        self.is_last = epoch == machine.num_epochs - 1
        self.is_layer = epoch < num_layers
        self.is_resident = machine.placement.weights == RESIDENT
        self.weight_bytes = dict.fromkeys(self.chips, 0)
        self.norm_bytes = dict.fromkeys(self.chips, 0)
        self.buffers = dict.fromkeys(self.chips, 0)

    def reserve(self, works: Sequence[Work]) -> None:
        """Reserve buffers for future calls. Calls of one operation do not overlap, so only the largest counts."""
        for work in works:
            self.buffers[work.chip] = max(self.buffers[work.chip], work.buffers)

    def run(self, what: str, works: Sequence[Work]) -> None:
        """Do one call's work on all chips."""
        self.machine.run(self, what, works)


class Machine:
    """The chips of a valid placement.

    Attributes:
        spans: what each chip did in each call, in the order of calls.
        seconds: when the last step ended.
    """

    def __init__(self, plan: PlacementPlan, model: ModelConfig, hardware: Hardware) -> None:
        """Raise InvalidRequestError if the placement is impossible, or the hardware has no rates."""
        if plan.problems:
            raise invalid("placement", f"{'; '.join(plan.problems)}")
        if not hardware.has_rates:
            raise invalid("hardware", f"{hardware.name} has no rates")
        self.placement, self.hardware = plan.placement, hardware
        budgets = (plan.placement.sram_per_chip, plan.placement.dram_per_chip)
        self.devices = [Device.of(chip, budgets) for chip in range(plan.placement.chips)]
        self.num_epochs = len(plan.epochs)
        self._epochs = [
            [Site(self, operation, index, plan.layers) for operation in epoch]
            for index, epoch in enumerate(plan.epochs)
        ]
        self._sites = {site.operation.name: site for epoch in self._epochs for site in epoch}
        self.model = model
        self._branches_together = model.num_parallel_norms > 0
        self.spans: list[Span] = []
        self.seconds = 0.0
        self._step, self._now = -1, 0.0
        self._epoch: int | None = None
        self._clocks: dict[str, float] = {}
        self._ready: dict[str, float] = {}  # by request: when its next token may be computed

    def site(self, parameter: str) -> Site | None:
        """Find the site of a parameter's operation; None if it is on the host."""
        return self.site_of(operation_of(parameter) or "")

    def site_of(self, operation: str) -> Site | None:
        """Find the site of an operation: its own, or that of its branch; None if it is on the host."""
        return self._sites.get(operation) or self._sites.get(branch_of(operation))

    def heads_of(self, site: Site) -> list[Heads]:
        """Split a layer's attention. Raise InvalidRequestError if it cannot be split over these chips."""
        return heads_of(site.operation.name, site.chips, self.model.num_key_value_heads, self.placement.rows)

    def place(self, parameters: Mapping[str, Parameter], head_columns: int) -> None:
        """Reserve room for every parameter in its chips' DRAM (or SRAM, if weights stay there), before any is read.

        A norm's weights are spread over the chips of its operation. head_columns: the LM head's columns with padding.

        Raises:
            OverBudgetError: a chip has no room.
            InvalidRequestError: a weight cannot be split as the placement asks.
        """
        for name, parameter in parameters.items():
            site = self.site(name)
            if site is None:
                continue
            for chip, size in _sizes(parameter, site, head_columns):
                device = self.devices[chip]
                memory = device.sram if self._is_resident else device.dram
                memory.hold(name, size)
                site.weight_bytes[chip] += size
                if len(parameter.shape) == 1:
                    site.norm_bytes[chip] += size

    def check(self) -> None:
        """Try every epoch, after the layers have reserved buffers. Raise OverBudgetError if one does not fit."""
        for epoch in self._epochs:
            self._hold(epoch)
            self._free(epoch)

    @property
    def _is_resident(self) -> bool:
        return self.placement.weights == RESIDENT

    def begin_step(self, step: int, requests: Iterable[str]) -> None:
        """Begin a step at the time when the last tokens of all its requests are there."""
        self._step = step
        self._now = max((self._ready.get(request, 0.0) for request in requests), default=0.0)

    def end_step(self, requests: Iterable[str]) -> None:
        """End the last epoch of a step, which may have failed before its end."""
        self._leave()
        self._ready |= dict.fromkeys(requests, self._now)
        self.seconds = max(self.seconds, self._now)

    def run(self, site: Site, what: str, works: Sequence[Work]) -> None:
        """Do a call's work on the chips of a site. Enter its epoch first, if another one is current."""
        if site.epoch != self._epoch:
            self._leave()
            self._enter(site.epoch)
        if site.branch not in self._clocks:
            self._begin(site.branch)
        self._advance(site, what, works)

    def _advance(self, site: Site, what: str, works: Sequence[Work]) -> None:
        begin, longest = self._clocks[site.branch], 0.0
        for work in works:
            seconds = self._seconds_of(work)
            self.spans.append(Span(work.chip, self._step, site.operation.name, what, begin, seconds, work))
            self.devices[work.chip].count(work, seconds)
            longest = max(longest, seconds)
        self._clocks[site.branch] += longest

    def _seconds_of(self, work: Work) -> float:
        """Time a chip's work: reading and multiplying weights overlap, transfers over links do not."""
        hardware = self.hardware
        seconds = max(work.streamed / hardware.reading(WEIGHTS), work.operations / hardware.multiplying(WEIGHTS))
        if work.linked and hardware.link_bytes_per_s:
            seconds += hardware.link_latency_s + work.linked / hardware.link_bytes_per_s
        return seconds

    def _enter(self, index: int) -> None:
        epoch = self._epochs[index]
        self._hold(epoch)
        self._epoch = index
        self._now = max(self._now, *(self.devices[chip].free_at for site in epoch for chip in site.chips))

    def _begin(self, branch: str) -> None:
        """Begin a branch: beside the epoch's other one if they are parallel, else after it."""
        begin = self._now if self._branches_together else max(self._clocks.values(), default=self._now)
        self._clocks[branch] = begin
        for site in self._epochs[self._epoch or 0]:
            if site.branch == branch and any(site.norm_bytes.values()) and not self._is_resident:
                self._advance(site, "norms", [Work(chip, size) for chip, size in site.norm_bytes.items()])

    def _leave(self) -> None:
        """End the epoch: free what it held. The next epoch may begin when the slowest operation is done."""
        if self._epoch is None:
            return
        epoch, self._epoch = self._epochs[self._epoch], None
        self._free(epoch)
        self._now = max(self._clocks.values(), default=self._now)
        for site in epoch:
            for chip in site.chips:
                self.devices[chip].free_at = self._now
        self._clocks = {}

    def _hold(self, epoch: Sequence[Site]) -> None:
        for site in epoch:
            operation = site.operation
            for chip in site.chips:
                sram = self.devices[chip].sram
                if not self._is_resident:
                    buffer = min(self.placement.stream_buffer, site.weight_bytes[chip])
                    sram.hold(f"{operation.name} weights", buffer)
                if operation.cache_bytes:
                    sram.hold(f"{operation.name} cache", operation.cache_bytes_per_chip)
                sram.hold(f"{operation.name} buffers", site.buffers[chip])

    def _free(self, epoch: Sequence[Site]) -> None:
        for site in epoch:
            for chip in site.chips:
                for kind in ("weights", "cache", "buffers"):
                    self.devices[chip].sram.free(f"{site.operation.name} {kind}")


def _sizes(parameter: Parameter, site: Site, head_columns: int) -> list[tuple[int, int]]:
    """Count the bytes of a parameter on each chip of its operation."""
    chips, count = site.chips, len(site.chips)
    if not site.is_layer:
        widths = [share(index, count, head_columns) for index in range(count)]
        elements = [(end - begin) * parameter.shape[1] for begin, end in widths]
    elif len(parameter.shape) == 1:
        elements = [end - begin for begin, end in (share(index, count, parameter.shape[0]) for index in range(count))]
    else:
        return [(part.chip, part.num_bytes) for part in parts_of(parameter, chips)]
    return [(chip, WEIGHT_BYTES * number) for chip, number in zip(chips, elements, strict=True)]


class ChipsExecutor(LocalExecutor):
    """A `step.Executor` whose runner has a model placed on a machine's chips.

    Attributes:
        depth: how many steps are in flight at once, where layers are on chips of their own.
    """

    def __init__(self, runner: ModelRunner, machine: Machine, depth: int = 1) -> None:
        super().__init__(runner)
        self.machine = machine
        self.depth = depth

    def collect(self, handle: SchedulerOutput) -> StepOutput:
        """Compute a step on the chips. Raise as LocalExecutor does, and OverBudgetError."""
        requests = [item.request_id for item in handle.scheduled]
        self.machine.begin_step(handle.step_id, requests)
        try:
            return super().collect(handle)
        finally:
            self.machine.end_step(requests)


def figures(machine: Machine) -> dict[str, Any]:
    """Sum up what each chip held and did, and the totals of all chips, as JSON."""
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
    """Write every call of every chip as a trace in Chrome's format. Times are simulated microseconds."""
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
