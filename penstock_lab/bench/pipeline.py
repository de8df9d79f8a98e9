"""Measure how long the stages of a pipeline stand idle: `python -m penstock_lab.bench.pipeline [--stage-ms 20]`.

The engine's own schedule runs on devices that sleep: each of P stages is a thread that takes the same time for a
micro-batch of any size. When a batch passes through once, in M micro-batches, each stage is idle until the first
micro-batch reaches it, and again after the last one:

    stage 1   0 1 2 3 - - -        bubble = (P - 1) / (M + P - 1), here 3 / 7
    stage 2   - 0 1 2 3 - -
    stage 3   - - 0 1 2 3 -
    stage 4   - - - 0 1 2 3

Decoding continues with the next token, so with M >= P the stages stay busy until the batch ends.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from penstock import SamplingParams
from penstock.engine.engine import Engine
from penstock.engine.kv_cache_manager import KVCacheManager
from penstock.engine.policies import Scheduling
from penstock.interface.messages import EngineRequest
from penstock.interface.step import CacheGroup, Executor, SchedulerOutput, StepOutput
from penstock_lab.mock import VOCAB_SIZE, MockExecutor

STAGES, MICRO_BATCHES = (2, 4), (1, 2, 4, 8)
NUM_ROWS = 8
NUM_TOKENS = 16  # tokens of each row when it decodes
ROUNDS = 5  # measurements of one pass, of which the median is reported
GROUPS = [CacheGroup((0,), None, 256, 16)]


class StageTime(Protocol):
    """One step of one stage, as sleeping and real stages report it. Times are those of time.perf_counter."""

    @property
    def stage(self) -> int: ...
    @property
    def step_id(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def begin(self) -> float: ...
    @property
    def end(self) -> float: ...


@dataclass(frozen=True, slots=True)
class StageSpan:
    """One step of a sleeping stage. Implements StageTime."""

    stage: int
    step_id: int
    num_rows: int
    num_tokens: int
    begin: float
    end: float


class SleepingStages:
    """An executor of P stages that sleep.

    Attributes:
        spans: the steps that the stages have done.
    """

    def __init__(self, num_stages: int, depth: int, stage_s: float) -> None:
        self.depth = depth
        self.spans: list[StageSpan] = []
        self._stage_s = stage_s
        self._inner = MockExecutor(GROUPS, depth=depth)
        self._queues: list[SimpleQueue[SchedulerOutput | None]] = [SimpleQueue() for _ in range(num_stages + 1)]
        self._threads = [threading.Thread(target=self._work, args=(stage,)) for stage in range(num_stages)]
        for thread in self._threads:
            thread.start()

    def _work(self, stage: int) -> None:
        while (step := self._queues[stage].get()) is not None:
            begin = time.perf_counter()
            time.sleep(self._stage_s)
            size = len(step.scheduled), step.num_tokens
            self.spans.append(StageSpan(stage, step.step_id, *size, begin, time.perf_counter()))
            self._queues[stage + 1].put(step)
        self._queues[stage + 1].put(None)

    def submit(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        self._queues[0].put(scheduler_output)
        return self._inner.submit(scheduler_output)

    def collect(self, handle: SchedulerOutput) -> StepOutput:
        self._queues[-1].get()
        return self._inner.collect(handle)

    def shutdown(self) -> None:
        """End the threads, after they have done the steps submitted so far."""
        if not self._threads:
            return
        self._queues[0].put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._inner.shutdown()


def formula(num_stages: int, num_micro_batches: int) -> float:
    """Calculate the bubble of one pass."""
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def compute_batch(executor: Executor, num_rows: int, num_tokens: int) -> None:
    """Let an engine compute a batch of num_rows short prompts, with num_tokens output tokens each."""
    engine = Engine(
        executor,
        KVCacheManager(GROUPS),
        scheduling=Scheduling(max_num_seqs=num_rows, max_num_batched_tokens=256),
        max_model_len=64,
        vocab_size=VOCAB_SIZE,
    )
    for row in range(num_rows):
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        engine.add_request(EngineRequest(str(row), [row + 1, 5, 7], params))
    while engine.has_work:
        engine.step()


def bubble(spans: Sequence[StageTime], num_stages: int) -> float:
    """Measure the idle share of the stages' time, from the begin of the first span to the end of the last one."""
    wall = max(span.end for span in spans) - min(span.begin for span in spans)
    return 1 - sum(span.end - span.begin for span in spans) / (num_stages * wall)


def measure(num_stages: int, num_micro_batches: int, stage_s: float, num_tokens: int = 1) -> float:
    """Measure the bubble of a batch on stages that sleep."""
    stages = SleepingStages(num_stages, num_micro_batches, stage_s)
    try:
        compute_batch(stages, NUM_ROWS, num_tokens)
    finally:
        stages.shutdown()
    return bubble(stages.spans, num_stages)


def main() -> None:
    """Measure every number of stages and micro-batches, and print a table."""
    parser = argparse.ArgumentParser(description="Measure how long the stages of a pipeline are idle.")
    parser.add_argument("--stage-ms", type=float, default=20.0, metavar="MS", help="time of a stage for a micro-batch")
    stage_s = parser.parse_args().stage_ms / 1000
    print(f"{NUM_ROWS} rows, a stage takes {1000 * stage_s:g} ms; bubble of one pass, and of {NUM_TOKENS} tokens each")
    print("stages  micro-batches  formula  measured  difference  decoding")
    for num_stages in STAGES:
        for count in MICRO_BATCHES:
            wanted = formula(num_stages, count)
            found = statistics.median(measure(num_stages, count, stage_s) for _ in range(ROUNDS))
            decoding = measure(num_stages, count, stage_s, NUM_TOKENS)
            difference = f"{found / wanted - 1:+.1%}"
            print(f"{num_stages:6}  {count:13}  {wanted:7.3f}  {found:8.3f}  {difference:>10}  {decoding:8.3f}")


if __name__ == "__main__":
    main()
