"""Measure the cost of the flight recorder: `python -m penstock_lab.bench.recorder`.

Times decode steps of 32 requests that compute nothing, with and without the recorder, and the checksums
of logits that the runner adds. Prints medians in microseconds.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock import SamplingParams
from penstock.client.recorder import Recorder
from penstock.client.records import EngineDescription, Ring
from penstock.interface.step import (
    CacheGroup,
    NewRequest,
    RequestStepOutput,
    ScheduledRequest,
    SchedulerOutput,
    StepOutput,
)
from penstock.runner.model_runner import logits_checksums

NUM_REQUESTS = 32
PROMPT = 512
STEPS = 2000
BLOCK_SIZE = 16
VOCABULARIES = (2048, 32_000, 128_256)


RESULT = RequestStepOutput([17_000], checksum=2**63 + 1)


def main() -> None:
    ring = Ring.create(2**25)
    group = CacheGroup((0,), None, NUM_REQUESTS * 256, BLOCK_SIZE)
    engine = EngineDescription("bench", {}, [group], 32_000, 4096, NUM_REQUESTS, 2048)
    costs = [_median(_run(recorder)) for recorder in (None, Recorder(ring, engine))]
    written = sum(len(record) + 8 for segment in ring.read() for record in segment.records)
    print(f"a step of {NUM_REQUESTS} requests: {costs[0]:.1f} us alone, {costs[1]:.1f} us recorded")
    print(f"recorded: {costs[1] - costs[0]:.1f} us and {written / STEPS:.0f} bytes per step")
    for vocab_size in VOCABULARIES:
        logits = np.random.default_rng(0).standard_normal((NUM_REQUESTS, vocab_size), np.float32)
        samples = [_timed(logits_checksums, logits, step) for step in range(STEPS)]
        print(f"checksums of {NUM_REQUESTS} rows of {vocab_size:,} logits: {_median(samples):.1f} us")


def _run(recorder: Recorder | None) -> list[float]:
    """Time each decode step, whose results are always the same, in microseconds."""

    def compute(plan: SchedulerOutput) -> None:
        if recorder is not None:
            recorder.submitting(plan)
        output = StepOutput(plan.step_id, {item.request_id: RESULT for item in plan.scheduled})
        if recorder is not None:
            recorder.collected(plan, output, 0.0)

    params = SamplingParams(seed=1)
    names = [f"cmpl-{index:032x}" for index in range(NUM_REQUESTS)]
    new = [
        NewRequest(name, [5] * PROMPT, PROMPT, params, 0, [list(range(index * 256, index * 256 + 33))])
        for index, name in enumerate(names)
    ]
    samples = []
    for step in range(STEPS):
        end = PROMPT + step
        blocks = [[1]] if end % BLOCK_SIZE == 0 else [[]]
        scheduled = [ScheduledRequest(name, end - 1, 1, blocks, [0], 1) for name in names]
        plan = SchedulerOutput(step, new if step == 0 else [], scheduled)
        samples.append(_timed(compute, plan))
    return samples


def _timed(function: Callable[..., Any], *args: Any) -> float:
    started = time.perf_counter()
    function(*args)
    return 1e6 * (time.perf_counter() - started)


def _median(samples: list[float]) -> float:
    return statistics.median(samples)


if __name__ == "__main__":
    main()
