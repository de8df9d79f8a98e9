"""SplitMeter: measures the steps of an engine whose model is computed by several processes.

It measures how long steps take, how many bytes the processes exchange for them, and what the stages of a pipeline do
meanwhile. The kernels of the processes are not timed.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from penstock.assembly import BuiltEngine
from penstock.engine.observer import EngineObserver
from penstock.interface.step import SchedulerOutput, StepOutput
from penstock.ranks.build import degrees_of
from penstock.ranks.sharding import Share, cut_all
from penstock.weights.sources import read_parameters
from penstock_lab.bench.meter import Watch, peak_rss_bytes
from penstock_lab.bench.phases import PromptTokens
from penstock_lab.bench.pipeline import StageTime, bubble
from penstock_lab.bench.profile import DECODE, PREFILL, Profile, Step, Stretch
from penstock_lab.bench.traffic import Traffic, handed_on, predict

Result = TypeVar("Result")


@runtime_checkable
class Pipelined(Protocol):
    """An executor with stages.

    Attributes:
        spans: what the stages did, step by step.
    """

    spans: Sequence[StageTime]


class SplitMeter(EngineObserver):
    """An observer of an engine; meter.StepMeter is its counterpart for one process.

    Attributes:
        watch: the clock, which leaves nothing out.
        limits: None, because limits are not known for other processes.
    """

    limits = None

    def __init__(self, built: BuiltEngine) -> None:
        self._executor = built.engine.executor
        self.watch = Watch()
        self._traffic = predicted(built)
        self._prompts = PromptTokens()
        self._plans: deque[tuple[SchedulerOutput, int, float]] = deque()  # plan, prompt tokens, submission time
        self._last: tuple[SchedulerOutput, int, float] = SchedulerOutput(0, [], []), 0, 0.0
        self._collected = 0.0
        self.begin_run(None)
        built.engine.observe(self)

    def begin_run(self, profile: Profile | None) -> None:
        """Forget the steps so far. profile: collects this run."""
        self._profile, self._began = profile, time.perf_counter()
        self._num_steps = self._received = self._predicted = 0

    def end_run(self) -> list[Stretch]:
        """Add the stages to the trace, if the run is traced."""
        if self._profile is not None:
            self._profile.add_stages(self._stages())
        return []

    def step(self, compute: Callable[[], Result]) -> tuple[Result, Step]:
        """Compute a step of the engine, and return its result with its measurements."""
        begin = time.perf_counter()
        result = compute()
        end = time.perf_counter()
        plan, prompt_tokens, submitted = self._last
        step = Step(
            phase=PREFILL if prompt_tokens else DECODE,
            input_tokens=prompt_tokens,
            tokens=plan.num_tokens,
            edges=(begin, max(begin, submitted), self._collected, end),
            seconds=end - begin,
            execution_seconds=self._collected - submitted,
            kernel_seconds=0.0,
        )
        if self._profile is not None:
            self._profile.add_outline(step)
        return result, step

    def submitting(self, plan: SchedulerOutput) -> None:
        self._plans.append((plan, self._prompts.note(plan), time.perf_counter()))

    def collected(self, plan: SchedulerOutput, output: StepOutput, seconds: float) -> None:
        self._last = self._plans.popleft()
        self._collected = time.perf_counter()
        num_logits = sum(bool(item.new_token_ids) for item in output.results.values())
        self._num_steps += 1
        self._received += output.bytes_received
        self._predicted += self._traffic.of(plan.num_tokens, num_logits)

    def peak_rss_bytes(self) -> int:
        """Return the peak memory of the engine's process."""
        return peak_rss_bytes()

    def attention(self) -> dict[str, int]:
        """Return an empty dict: the plans of other processes are not counted."""
        return {}

    def between_processes(self) -> dict[str, Any]:
        """Return the bytes that rank 0 of each stage received, the predicted bytes, and the pipeline's bubble."""
        stages = self._stages()
        return {
            "bytes_received": self._received,
            "predicted_bytes_received": self._predicted,
            "bytes_received_per_step": self._received / max(1, self._num_steps),
            "bubble": bubble(stages, 1 + max(item.stage for item in stages)) if stages else None,
        }

    def _stages(self) -> list[StageTime]:
        if not isinstance(self._executor, Pipelined):
            return []
        return [item for item in self._executor.spans if item.begin >= self._began and item.num_tokens]


def predicted(built: BuiltEngine) -> Traffic:
    """Return the traffic that rank 0 of each stage should receive, computed from the split alone."""
    config, model = built.config, built.model_config
    share = Share(0, degrees_of(config, model))
    cuts = cut_all(read_parameters(model), share, model).values()
    layers = predict(cuts, share, model, 4 if config.numerics.dtype == "float32" else 2)
    return layers + handed_on(config.parallel.pipeline_parallel_size, model)
