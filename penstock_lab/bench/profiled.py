"""Profile whatever an in-process client computes, for `penstock generate --profile`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from unittest.mock import patch

from penstock.assembly import BuiltEngine
from penstock.client.llm import LLM
from penstock.errors import InvalidRequestError
from penstock.interface.outputs import RequestOutput
from penstock.kernels.cpu.ops import CpuOps
from penstock_lab.bench.meter import MeteredExecutor
from penstock_lab.bench.phases import NO_LIMITS
from penstock_lab.bench.profile import Profile
from penstock_lab.bench.report import print_profile


class Stepping(Protocol):
    """A client that computes its engine's steps."""

    def step(self) -> list[RequestOutput]: ...


@contextmanager
def printed_profile(llm: LLM) -> Iterator[None]:
    """Measure each operation of the native kernels inside the block, and print a table to standard error.

    Raises:
        InvalidRequestError: the engine's kernels are not the native ones.
    """
    profile = Profile()
    with profiling(llm.built, llm.client, profile):
        yield
    print_profile(profile.figures(), stderr=True)


@contextmanager
def profiling(built: BuiltEngine, client: Stepping, profile: Profile) -> Iterator[None]:
    """Collect the steps that the client computes inside the block. Measuring changes no token.

    Raises:
        InvalidRequestError: the engine's kernels are not the native ones.
    """
    if not isinstance(built.ops, CpuOps):
        raise InvalidRequestError(f"profile: {NO_LIMITS}", param="profile")
    inner, step = built.engine.executor, client.step
    meter = MeteredExecutor(built)
    meter.begin_run(profile)
    try:
        with patch.object(client, "step", lambda: meter.step(step)[0]):
            yield
    finally:
        meter.end_run()
        built.engine.executor = inner
