"""SplitMeter: measures the steps of an engine whose model is computed by several processes.

It measures how long steps take, how many bytes the processes exchange for them, and what the stages of a pipeline do
meanwhile. The kernels of the processes are not timed. `Traffic` is how many bytes a rank should receive in a step,
computed from the model's split.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from penstock.assembly import BuiltEngine
from penstock.engine.observer import EngineObserver
from penstock.interface.step import SchedulerOutput, StepOutput
from penstock.ranks.build import degrees_of
from penstock.ranks.sharding import EXPERT, IN_A_LAYER, Cut, Share, cut_all, is_beginning, is_looked_up
from penstock.spec.model_config import ModelConfig
from penstock.weights.sources import read_parameters
from penstock_lab.bench.meter import Watch, peak_rss_bytes
from penstock_lab.bench.pipeline import StageTime, bubble
from penstock_lab.bench.profile import DECODE, PREFILL, Profile, ProfiledStep, PromptTokens, Stretch

FLOAT32_BYTES = 4
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a rank receives for each token that a step computes, and for each row of logits."""

    per_token: int = 0
    per_logits: int = 0

    def of(self, num_tokens: int, num_logits: int) -> int:
        return num_tokens * self.per_token + num_logits * self.per_logits

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.per_token + other.per_token, self.per_logits + other.per_logits)


def predict(cuts: Iterable[Cut], share: Share, config: ModelConfig, element: int) -> Traffic:
    """Count what a rank with these cuts receives. element: bytes of an activation that a product multiplies."""
    per_token = per_logits = 0
    mixtures: set[str] = set()  # modules whose experts the ranks share
    for cut in cuts:
        if EXPERT.search(cut.own.name):
            mixtures.add(EXPERT.split(cut.own.name)[0])
        elif len(cut.own.shape) < 2:
            continue
        elif is_looked_up(cut.whole):
            per_token += FLOAT32_BYTES * _of_table(cut)
        elif not IN_A_LAYER.search(cut.own.name):  # the LM head
            per_logits += FLOAT32_BYTES * (cut.whole.shape[0] - cut.own.shape[0])
        else:
            per_token += _of_product(cut, element, share.rank)
    results = config.num_experts_per_tok * config.hidden_size
    per_token += len(mixtures) * (share.degrees.mixture - 1) * results * FLOAT32_BYTES
    return Traffic(per_token, per_logits)


def handed_on(num_stages: int, config: ModelConfig) -> Traffic:
    """Count what the stages of a pipeline receive: the residual stream and the branch not yet added to it. (OLMo 2 has
    no such branch, so its stages receive half of that.)
    """
    return Traffic((num_stages - 1) * 2 * config.hidden_size * FLOAT32_BYTES)


def _of_table(cut: Cut) -> int:
    if not cut.ranges:
        return 0
    columns = cut.whole.shape[1]
    return (cut.part.degree - 1) * columns if cut.axis == 0 else columns - cut.own.shape[1]


def _of_product(cut: Cut, element: int, rank: int) -> int:
    """Count the bytes received for a product's input and result, per token."""
    received = 0
    if cut.wiring.gathers_input:
        received += element * _others(cut.wiring.gathers_input, rank % (len(cut.wiring.gathers_input) - 1))
    if cut.is_summed:
        received += FLOAT32_BYTES * (cut.part.degree - 1) * cut.own.shape[0]
    if cut.wiring.gathers_result:
        is_activated = is_beginning(cut.whole) and cut.whole.unit is None
        received += (element if is_activated else FLOAT32_BYTES) * _others(cut.wiring.gathers_result, cut.part.index)
    return received


def _others(borders: tuple[int, ...], own: int) -> int:
    """Count the columns of the other ranks."""
    return borders[-1] - (borders[own + 1] - borders[own])


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

    def step(self, compute: Callable[[], Result]) -> tuple[Result, ProfiledStep]:
        """Compute a step of the engine, and return its result with its measurements."""
        begin = time.perf_counter()
        result = compute()
        end = time.perf_counter()
        plan, prompt_tokens, submitted = self._last
        step = ProfiledStep(
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
        return peak_rss_bytes()

    def attention(self) -> dict[str, int]:
        """Count nothing: the plans are in other processes."""
        return {}

    def between_processes(self) -> dict[str, Any]:
        """Report the bytes that rank 0 of each stage received, the predicted bytes, and the pipeline's bubble."""
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
    """Compute the traffic that rank 0 of each stage should receive, from the split alone."""
    config, model = built.config, built.model_config
    share = Share(0, degrees_of(config, model))
    cuts = cut_all(read_parameters(model), share, model).values()
    layers = predict(cuts, share, model, 4 if config.numerics.dtype == "float32" else 2)
    return layers + handed_on(config.parallel.pipeline_parallel_size, model)
