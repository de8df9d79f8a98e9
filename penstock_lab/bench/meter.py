"""Meter an engine's steps: their work, and the limits of the machine or the GPU about every STRETCH_SECONDS.

    probe | stretch: steps, or a part of a long one | probe | stretch | probe ...

A probe runs between two native calls or two steps; on a GPU, between two steps. A Watch leaves out the time that
measuring takes, so the times of steps and tokens are those of the engine alone.
"""

import ctypes
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TypeVar

from penstock.assembly import BuiltEngine
from penstock.engine.observer import EngineObserver
from penstock.errors import fail
from penstock.interface.step import SchedulerOutput, StepOutput
from penstock.kernels.cpu.calls import Arguments
from penstock.kernels.cpu.library import PenstockCall, PenstockSpan
from penstock.kernels.cpu.ops import CpuOps
from penstock_lab.bench.costs import Cost, ModelCosts
from penstock_lab.bench.machine import MachineLimits
from penstock_lab.bench.native import describe_key, expert_counts, kernel_seconds, trace
from penstock_lab.bench.profile import DECODE, PREFILL, Profile, ProfiledStep, PromptTokens, Span, Stretch
from penstock_lab.bench.samples import Rates, Sample, Work

STRETCH_SECONDS = 0.05
MAX_SPANS = 2**17  # maximum number of native calls between two probes whose times are kept

Result = TypeVar("Result")


class Watch:
    """A clock in seconds that stands still while something is measured."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._left_out = clock, 0.0

    def now(self) -> float:
        return self._clock() - self._left_out

    @contextmanager
    def paused(self) -> Iterator[None]:
        started = self._clock()
        try:
            yield
        finally:
            self._left_out += self._clock() - started


class CallMeter:
    """Counts the work of native calls, or of whole steps, in stretches between probes. A CallObserver; `begin_step`
    announces each step."""

    def __init__(
        self,
        costs: ModelCosts,
        watch: Watch,
        *,
        probe: Callable[[], Rates],
        expert_counts: Callable[[], tuple[int, int]] | None,
        keep: Callable[[Stretch], None],
    ) -> None:
        """expert_counts: of native calls; None: whole steps count. keep: called with every stretch, after its second
        probe."""
        self._costs, self._watch, self._probe, self._keep = costs, watch, probe, keep
        self._counts_steps, self._expert_counts = expert_counts is None, expert_counts or (lambda: (0, 0))
        self._counted = self._expert_counts()
        self._phase, self._calls = PREFILL, list[Cost]()
        with watch.paused():
            self._before = probe()
        self._since = watch.now()

    def begin_step(self, phase: str, scheduler_output: SchedulerOutput) -> None:
        """Begin a step. A stretch has steps of one phase only."""
        now = self._watch.now()
        with self._watch.paused():
            if phase != self._phase or now - self._since >= STRETCH_SECONDS:
                self._close(now)
            self._phase = phase
            if self._counts_steps:
                self._calls.append(self._costs.step(scheduler_output))
            else:
                self._costs.begin_step(scheduler_output)

    def call(self, name: str, arguments: Arguments) -> None:
        with self._between_calls():
            self._calls.append(self._costs.call(name, arguments))

    def replay(self, calls: "ctypes.Array[PenstockCall]") -> None:
        with self._between_calls():
            self._calls += self._costs.replay(calls)

    @contextmanager
    def _between_calls(self) -> Iterator[None]:
        """Start a new stretch first if the current one is long enough."""
        now = self._watch.now()
        with self._watch.paused():
            if now - self._since >= STRETCH_SECONDS:
                self._close(now)
            yield

    def close(self) -> None:
        """End the last stretch."""
        now = self._watch.now()
        with self._watch.paused():
            self._close(now)

    def _close(self, now: float) -> None:
        before, self._counted = self._counted, self._expert_counts()
        experts = self._costs.experts(*(new - old for new, old in zip(self._counted, before, strict=True)))
        work = Work()
        for cost in self._calls:
            work.add(cost.work)
        work.add(experts)
        after = self._probe()
        if now > self._since:
            self._keep(Stretch(self._phase, Sample(now - self._since, work, self._before, after), self._calls, experts))
        self._before, self._since, self._calls = after, now, []


class StepMeter(EngineObserver):
    """An observer of an engine that meters its steps.

    Attributes:
        watch: the clock that leaves out the time that measuring takes.
        limits: those of the engine's GPU, or of the machine with its threads; None for reference kernels.
    """

    def __init__(self, built: BuiltEngine, limits: MachineLimits | None = None) -> None:
        """limits: of the engine's GPU, if it has one."""
        if built.config.numerics.load_format == "mock":
            raise fail("load_format", "mock", "auto or dummy: without a model there is nothing to measure")
        self._prompts, self._prompt_tokens = PromptTokens(), 0  # prompt tokens of the last step
        self._ops = built.ops if isinstance(built.ops, CpuOps) else None
        self._costs = ModelCosts(built.model, built.model_config, built.config)
        self._meter: CallMeter | None = None
        self._profile: Profile | None = None
        self._spans = (PenstockSpan * 0)()
        self._stretches: list[Stretch] = []
        self._probe_seconds = 0.0  # time of kernels in probes
        self._last = SchedulerOutput(0, [], [])
        self._submitted = self._collected = 0.0, 0.0  # times by time.perf_counter and by the watch
        self._peak_before = peak_rss_bytes()
        self.watch = Watch()
        self.limits = limits if self._ops is None else MachineLimits(self._ops)
        self._begin = 0.0, 0.0, 0.0  # of the step: by time.perf_counter, by the watch, and seconds of kernels
        built.engine.observe(self)

    def begin_run(self, profile: Profile | None) -> None:
        """Forget the stretches so far, and probe the limits. profile: collects this run."""
        self._stretches, self._profile = [], profile
        ops, limits = self._ops, self.limits
        if limits is None:
            return
        if ops is not None and profile is not None:
            self._spans = (PenstockSpan * MAX_SPANS)()
            trace(ops, self._spans)

        def probe() -> Rates:
            before = self._kernel_seconds()
            rates = limits.probe(*self._costs.kinds)
            self._probe_seconds += self._kernel_seconds() - before
            return rates

        counts = None if ops is None else partial(expert_counts, ops)
        self._meter = CallMeter(self._costs, self.watch, probe=probe, expert_counts=counts, keep=self._keep)
        if ops is not None:
            ops.observer = self._meter

    def end_run(self) -> list[Stretch]:
        """Stop metering, and return the stretches of the run."""
        if self._meter is not None:
            self._meter.close()
        if self._ops is not None:
            self._ops.observer = None
            trace(self._ops, None)
        return self._stretches

    def step(self, compute: Callable[[], Result]) -> tuple[Result, ProfiledStep]:
        """Compute a step of the engine, and return its result with its measurements."""
        self.begin_step()
        result = compute()
        return result, self.end_step()

    def begin_step(self) -> None:
        self._begin = time.perf_counter(), self.watch.now(), self._kernel_seconds()

    def end_step(self) -> ProfiledStep:
        """Finish the measurements of the step that has begun."""
        begin, begun, kernels = self._begin
        ended, end = self.watch.now(), time.perf_counter()
        step = ProfiledStep(
            phase=self._phase(),
            input_tokens=self._prompt_tokens,
            tokens=self._last.num_tokens,
            edges=(begin, self._submitted[0], self._collected[0], end),
            seconds=ended - begun,
            execution_seconds=self._collected[1] - self._submitted[1],
            kernel_seconds=self._kernel_seconds() - kernels,
        )
        if self._profile is not None:
            with self.watch.paused():
                self._profile.add_step(step)
        return step

    def submitting(self, plan: SchedulerOutput) -> None:
        self._submitted = time.perf_counter(), self.watch.now()
        self._last = plan
        self._prompt_tokens = self._prompts.note(plan)
        if self._meter is not None:
            self._meter.begin_step(self._phase(), plan)

    def collected(self, plan: SchedulerOutput, output: StepOutput, seconds: float) -> None:
        self._collected = time.perf_counter(), self.watch.now()

    def peak_rss_bytes(self) -> int:
        """Read the peak memory of the process, without the memory that probes read."""
        read_bytes = 0 if self.limits is None else self.limits.num_bytes
        return max(self._peak_before, peak_rss_bytes() - read_bytes)

    def attention(self) -> dict[str, int]:
        """Count the attention plans of each kind, over all steps and cache groups, including warmup."""
        counts = {} if self._ops is None else self._ops.plan_counts
        return {describe_key(key): count for key, count in counts.items()}

    def _phase(self) -> str:
        return PREFILL if self._prompt_tokens else DECODE

    def _kernel_seconds(self) -> float:
        """Read the seconds spent in native calls so far, without those of probes."""
        return 0.0 if self._ops is None else kernel_seconds(self._ops) - self._probe_seconds

    def _keep(self, stretch: Stretch) -> None:
        self._stretches.append(stretch)
        if self._profile is not None and self._ops is not None:
            count = trace(self._ops, self._spans)
            spans = [Span(_name(span.function), span.begin, span.end) for span in self._spans[:count]]
            self._profile.add_stretch(stretch, spans)


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@lru_cache
def _name(address: int) -> str:
    """Read the text at an address in the native library. The text never moves, so it can be cached."""
    return ctypes.string_at(address).decode()
