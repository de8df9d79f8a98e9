"""Profile whatever an engine of this process computes, for `penstock generate --profile`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock import LLM
from penstock.assembly import BuiltEngine
from penstock.engine.observer import EngineObserver
from penstock.errors import invalid
from penstock.kernels.cpu.ops import CpuOps
from penstock_lab.bench.meter import StepMeter
from penstock_lab.bench.profile import NO_LIMITS, Profile
from penstock_lab.bench.report import print_profile


@dataclass(frozen=True, slots=True)
class _EveryStep(EngineObserver):
    """Meters every step of the engine, whoever asks for it."""

    meter: StepMeter

    def step_began(self) -> None:
        self.meter.begin_step()

    def step_ended(self) -> None:
        self.meter.end_step()


@contextmanager
def printed_profile(llm: LLM) -> Iterator[None]:
    """Measure each operation of the native kernels inside the block, and print a table to standard error.

    Raises:
        InvalidRequestError: the engine's kernels are not the native ones.
    """
    profile = Profile()
    with profiling(llm.built, profile):
        yield
    print_profile(profile.figures(), stderr=True)


@contextmanager
def profiling(built: BuiltEngine, profile: Profile) -> Iterator[None]:
    """Collect the steps that the engine computes inside the block. Measuring changes no token.

    Raises:
        InvalidRequestError: the engine's kernels are not the native ones.
    """
    if not isinstance(built.ops, CpuOps):
        raise invalid("profile", f"{NO_LIMITS}")
    meter = StepMeter(built)
    steps = _EveryStep(meter)
    built.engine.observe(steps)
    meter.begin_run(profile)
    try:
        yield
    finally:
        meter.end_run()
        for observer in (steps, meter):
            built.engine.stop_observing(observer)
