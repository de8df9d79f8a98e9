"""Throughput and latency of an engine in this process, on random token ids.

The machine's limits are measured right after the run, with the same threads.
"""

import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock import validation as check
from penstock.bench.costs import ModelCosts, Work
from penstock.bench.machine import KINDS, MachineLimits, Progress, no_progress
from penstock.bench.phases import Run
from penstock.build import BuiltEngine, build_engine
from penstock.client.in_process import InProcessClient
from penstock.config import EngineConfig
from penstock.errors import EngineError, InvalidRequestError
from penstock.interface.messages import ModelInfo
from penstock.interface.sampling_params import RequestOutputKind, SamplingParams
from penstock.interface.step import SchedulerOutput, StepOutput
from penstock.kernels.attention.plan import describe_key
from penstock.kernels.cpu.ops import CpuOps

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


def measure_offline(
    options: dict[str, Any],
    workload: Workload,
    *,
    announce: Callable[[ModelInfo], None] = lambda info: None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Build an engine from EngineConfig options, run the workload, return the figures.

    Args:
        announce: called with the engine's description of its model before anything runs.

    Raises:
        InvalidRequestError: an option is wrong, or the workload does not fit the context.
    """
    built = build_engine(EngineConfig.from_options(**options))
    info = built.info
    if workload.input_len + workload.output_len > info.max_model_len:
        message = f"input_len + output_len exceed max_model_len = {info.max_model_len}"
        raise InvalidRequestError(f"input_len: {message}", param="input_len")
    announce(info)
    meter = _MeteredExecutor(built)
    client = InProcessClient(built.engine, info, None)
    with progress("tokens", (workload.warmup + 1) * workload.num_prompts * workload.output_len) as advance:
        for index in range(workload.warmup + 1):
            run = _run(client, meter, workload, index, advance)
    peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    attention, limits = meter.attention(), meter.limits()
    client.shutdown()
    output_tokens = workload.num_prompts * workload.output_len
    total_tokens = output_tokens + workload.num_prompts * workload.input_len
    return {
        "model": info.model,
        "system_fingerprint": info.system_fingerprint,
        "threads": built.config.numerics.threads,
        "kv_cache_dtype": built.config.cache.kv_cache_dtype,
        "num_prompts": workload.num_prompts,
        "input_len": workload.input_len,
        "output_len": workload.output_len,
        "seconds": run.seconds,
        "output_tokens_per_s": output_tokens / run.seconds,
        "total_tokens_per_s": total_tokens / run.seconds,
        **run.figures(limits),
        "attention": attention,
        "peak_rss_bytes": peak_rss_bytes,
    }


class _MeteredExecutor:
    """Takes the place of an engine's executor, and counts the work of the last step and the time in kernels."""

    def __init__(self, built: BuiltEngine) -> None:
        self._inner = built.engine.executor
        built.engine.executor = self
        self._ops = built.ops if isinstance(built.ops, CpuOps) else None
        if isinstance(built.model, nn.Module):
            self._costs = ModelCosts(built.model, built.model_config, built.config)
        self._expert_counts = (0, 0) if self._ops is None else self._ops.expert_counts()
        self.last: SchedulerOutput | None = None

    def submit(self, scheduler_output: SchedulerOutput) -> Any:
        self.last = scheduler_output
        return self._inner.submit(scheduler_output)

    def collect(self, handle: Any) -> StepOutput:
        return self._inner.collect(handle)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def kernel_seconds(self) -> float:
        return 0.0 if self._ops is None else self._ops.kernel_seconds()

    def work(self) -> Work:
        """Return the work of the last step."""
        work = Work() if self.last is None else self._costs.step(self.last)
        if self._ops is not None:
            counts, before = self._ops.expert_counts(), self._expert_counts
            self._expert_counts = counts
            work.add(self._costs.experts(counts[0] - before[0], counts[1] - before[1]))
        return work

    def attention(self) -> dict[str, int]:
        """Return how often each kind of attention plan was made, for every step and cache group, warmup included."""
        counts = {} if self._ops is None else self._ops.plan_counts
        return {describe_key(key): count for key, count in counts.items()}

    def limits(self) -> MachineLimits | None:
        """Measure the machine's limits with the threads that have just computed; None for reference kernels."""
        if self._ops is None:
            return None
        limits = MachineLimits(self._ops)
        for _ in range(LIMIT_PROBES):
            limits.probe(*KINDS)
        return limits


def _run(
    client: InProcessClient, meter: _MeteredExecutor, workload: Workload, index: int, advance: Callable[[int], None]
) -> Run:
    """Run the workload once, on its own prompts, so that no run finds another's prefixes in the cache."""
    rng = random.Random(index)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=workload.output_len,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    run = Run()
    started = time.perf_counter()
    for _ in range(workload.num_prompts):
        client.add_request(None, rng.choices(range(client.model_info.vocab_size), k=workload.input_len), params)
    while client.has_unfinished_requests():
        kernels_before, begun = meter.kernel_seconds(), time.perf_counter()
        outputs = client.step()
        now = time.perf_counter()
        prompt_tokens = sum(
            max(0, min(item.num_new_tokens, workload.input_len - item.num_computed_tokens))
            for item in (meter.last.scheduled if meter.last is not None else ())
        )
        phase = run.prefill if prompt_tokens else run.decode
        phase.steps += 1
        phase.seconds += now - begun
        phase.kernel_seconds += meter.kernel_seconds() - kernels_before
        phase.input_tokens += prompt_tokens
        phase.output_tokens += len(outputs)
        phase.work.add(meter.work())
        for output in outputs:
            if output.error is not None:
                raise EngineError(f"a request failed, so nothing was measured: {output.error}")
            run.add_token(output.request_id, now - started)
        advance(len(outputs))
    run.seconds = time.perf_counter() - started
    return run
