"""Throughput and latency of an engine in this process, on random token ids.

Every step is attributed to prefill (it computed prompt tokens, perhaps beside decodes) or decode (it did not).

    bandwidth_fraction         bytes of weights and cache that had to be read, over the time, of the memory's bandwidth
    compute_fraction           operations over the rate at which their type multiplies, of the time
    python_overhead_fraction   of the time, what was spent outside the kernels

The limits are measured right after the run, with the same threads. With reference kernels, which have no limits of
their own, these are null, and `reason` says so.
"""

import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from penstock import validation as check
from penstock.bench.costs import ModelCosts, Work
from penstock.bench.machine import KINDS, MachineLimits
from penstock.build import BuiltEngine, build_engine
from penstock.client.in_process import InProcessClient
from penstock.config import EngineConfig
from penstock.errors import EngineError, InvalidRequestError
from penstock.interface.messages import ModelInfo
from penstock.interface.sampling_params import RequestOutputKind, SamplingParams
from penstock.interface.step import Executor, SchedulerOutput, StepOutput
from penstock.kernels.attention.key import describe_key
from penstock.kernels.cpu.ops import CpuOps

FRACTIONS = ("bandwidth_fraction", "compute_fraction", "python_overhead_fraction")
NO_LIMITS = "only native kernels (--kernels cpu) are timed and held against the machine's limits"
LIMIT_PROBES = 5


@dataclass(frozen=True, slots=True)
class Workload:
    """num_prompts requests of input_len random ids, output_len tokens generated for each, `warmup` runs before."""

    num_prompts: int
    input_len: int
    output_len: int
    warmup: int

    def __post_init__(self) -> None:
        for name, low in (("num_prompts", 1), ("input_len", 1), ("output_len", 1), ("warmup", 0)):
            check.check_int(name, getattr(self, name), low, 10**6)


@dataclass(slots=True)
class _Phase:
    """Time, tokens and work of the steps of one kind."""

    seconds: float = 0.0
    kernel_seconds: float = 0.0
    steps: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    work: Work = field(default_factory=Work)

    def figures(self, limits: MachineLimits | None) -> dict[str, Any]:
        tokens = self.input_tokens + self.output_tokens
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "output_tokens_per_s": _rate(self.output_tokens, self.seconds),
            "total_tokens_per_s": _rate(tokens, self.seconds),
            "step_ms": _rate(1000 * self.seconds, self.steps),
            "python_overhead_ms": None
            if limits is None
            else _rate(1000 * (self.seconds - self.kernel_seconds), self.steps),
            **_fractions(self, limits),
        }


def _rate(count: float, of: float) -> float | None:
    """count / of; null where there is nothing."""
    return count / of if of else None


def _fractions(phase: _Phase, limits: MachineLimits | None) -> dict[str, float | None]:
    """The three fractions of a phase."""
    if limits is None or not phase.seconds:
        return dict.fromkeys(FRACTIONS)
    at_least = sum(count / 1e9 / limits.multiply_gop_s[kind] for kind, count in phase.work.operations.items())
    values = (
        phase.work.read_bytes / 1e9 / limits.read_gb_s / phase.seconds,
        at_least / phase.seconds,
        1 - phase.kernel_seconds / phase.seconds,
    )
    return dict(zip(FRACTIONS, values, strict=True))


class _RecordingExecutor:
    """Passes steps on to the real executor and keeps the last plan, to tell what a step was."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.last: SchedulerOutput | None = None

    def submit(self, scheduler_output: SchedulerOutput) -> Any:
        self.last = scheduler_output
        return self._inner.submit(scheduler_output)

    def collect(self, handle: Any) -> StepOutput:
        return self._inner.collect(handle)

    def shutdown(self) -> None:
        self._inner.shutdown()


@dataclass(slots=True)
class _Run:
    """What is observed of one run."""

    prefill: _Phase = field(default_factory=_Phase)
    decode: _Phase = field(default_factory=_Phase)
    seconds: float = 0.0
    first_token: dict[str, float] = field(default_factory=dict)  # request -> seconds from the start
    last_token: dict[str, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)  # between the tokens of a request


@contextmanager
def no_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows nothing."""
    yield lambda count: None


def measure_offline(
    options: dict[str, Any],
    workload: Workload,
    *,
    announce: Callable[[ModelInfo], None] = lambda info: None,
    progress: Callable[[str, int], AbstractContextManager[Callable[[int], None]]] = no_progress,
) -> dict[str, Any]:
    """Build an engine from EngineConfig options, run the workload, return the figures.

    Args:
        announce: called with what the engine says of its model, before anything runs.
        progress: (what is counted, how many) -> a context that yields `advance(count)`.

    Raises:
        InvalidRequestError: an option is wrong, or the workload does not fit the context.
    """
    built = build_engine(EngineConfig.from_options(**options))
    if workload.input_len + workload.output_len > built.info.max_model_len:
        message = f"input_len + output_len exceed max_model_len = {built.info.max_model_len}"
        raise InvalidRequestError(f"input_len: {message}", param="input_len")
    announce(built.info)
    recorder = _RecordingExecutor(built.engine.executor)
    built.engine.executor = recorder
    client = InProcessClient(built.engine, built.info, None)
    meter = _Meter(built)
    with progress("tokens", (workload.warmup + 1) * workload.num_prompts * workload.output_len) as advance:
        for index in range(workload.warmup):
            _run(client, recorder, meter, workload, index, advance)
        run = _run(client, recorder, meter, workload, workload.warmup, advance)
    peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    attention = meter.attention()
    limits = meter.limits()
    client.shutdown()
    figures = _figures(run, workload, built.info, built.config, limits)
    return {**figures, "attention": attention, "peak_rss_bytes": peak_rss_bytes}


class _Meter:
    """Counts the work of steps, and what kernels took for it."""

    def __init__(self, built: BuiltEngine) -> None:
        self._ops = built.ops if isinstance(built.ops, CpuOps) else None
        if isinstance(built.model, nn.Module):
            self._costs = ModelCosts(built.model, built.model_config, built.config)
        self._expert_counts = (0, 0) if self._ops is None else self._ops.expert_counts()

    def kernel_seconds(self) -> float:
        return 0.0 if self._ops is None else self._ops.kernel_seconds()

    def work(self, step: SchedulerOutput | None) -> Work:
        """Of the step that was just made."""
        work = Work() if step is None else self._costs.step(step)
        if self._ops is not None:
            counts, before = self._ops.expert_counts(), self._expert_counts
            self._expert_counts = counts
            work.add(self._costs.experts(counts[0] - before[0], counts[1] - before[1]))
        return work

    def attention(self) -> dict[str, int]:
        """How attention was planned so far, warming up included, in words: steps of each kind and cache group."""
        counts = {} if self._ops is None else self._ops.plan_counts
        return {describe_key(key): count for key, count in counts.items()}

    def limits(self) -> MachineLimits | None:
        """What the machine can do, by the threads that have just computed."""
        if self._ops is None:
            return None
        limits = MachineLimits(self._ops)
        for _ in range(LIMIT_PROBES):
            limits.probe(*KINDS)
        return limits


def _run(
    client: InProcessClient,
    recorder: _RecordingExecutor,
    meter: _Meter,
    workload: Workload,
    index: int,
    advance: Callable[[int], None],
) -> _Run:
    """One run, on prompts of its own, so that no run finds another's prefixes."""
    rng = random.Random(index)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=workload.output_len,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    run = _Run()
    started = time.perf_counter()
    for _ in range(workload.num_prompts):
        client.add_request(None, rng.choices(range(client.model_info.vocab_size), k=workload.input_len), params)
    while client.has_unfinished_requests():
        kernels_before, begun = meter.kernel_seconds(), time.perf_counter()
        outputs = client.step()
        now = time.perf_counter()
        phase = _attribute(run, recorder, workload, now - begun, len(outputs))
        phase.kernel_seconds += meter.kernel_seconds() - kernels_before
        phase.work.add(meter.work(recorder.last))
        for output in outputs:
            if output.error is not None:
                raise EngineError(f"a request failed, so there is nothing to measure: {output.error}")
            _note_token(run, output.request_id, now - started)
        advance(len(outputs))
    run.seconds = time.perf_counter() - started
    return run


def _attribute(run: _Run, recorder: _RecordingExecutor, workload: Workload, seconds: float, num_outputs: int) -> _Phase:
    """Add a step to the phase that it belongs to, and return that."""
    scheduled = recorder.last.scheduled if recorder.last is not None else []
    prompt_tokens = sum(
        max(0, min(item.num_new_tokens, workload.input_len - item.num_computed_tokens)) for item in scheduled
    )
    phase = run.prefill if prompt_tokens else run.decode
    phase.seconds += seconds
    phase.steps += 1
    phase.input_tokens += prompt_tokens
    phase.output_tokens += num_outputs
    return phase


def _note_token(run: _Run, request_id: str, at: float) -> None:
    if request_id in run.last_token:
        run.gaps.append(at - run.last_token[request_id])
    else:
        run.first_token[request_id] = at
    run.last_token[request_id] = at


def _figures(
    run: _Run, workload: Workload, info: ModelInfo, config: EngineConfig, limits: MachineLimits | None
) -> dict[str, Any]:
    whole = _Phase(run.seconds, run.prefill.kernel_seconds + run.decode.kernel_seconds)
    for phase in (run.prefill, run.decode):
        whole.work.add(phase.work)
    output_tokens = workload.num_prompts * workload.output_len
    total_tokens = output_tokens + workload.num_prompts * workload.input_len
    return {
        "model": info.model,
        "system_fingerprint": info.system_fingerprint,
        "threads": config.numerics.threads,
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "num_prompts": workload.num_prompts,
        "input_len": workload.input_len,
        "output_len": workload.output_len,
        "seconds": run.seconds,
        "output_tokens_per_s": output_tokens / run.seconds,
        "total_tokens_per_s": total_tokens / run.seconds,
        "ttft_ms": _percentiles(list(run.first_token.values())),
        "itl_ms": _percentiles(run.gaps),
        **_fractions(whole, limits),
        "reason": dict.fromkeys(FRACTIONS, NO_LIMITS) if limits is None else {},
        "machine": None if limits is None else limits.figures(),
        "prefill": run.prefill.figures(limits),
        "decode": run.decode.figures(limits),
    }


def _percentiles(seconds: list[float]) -> dict[str, float | None]:
    """p50 and p99 in milliseconds, by nearest rank; null where there is nothing to rank."""
    ranked = sorted(seconds)
    if not ranked:
        return {"p50": None, "p99": None}
    return {f"p{q}": 1000 * ranked[max(0, -(-len(ranked) * q // 100) - 1)] for q in (50, 99)}
