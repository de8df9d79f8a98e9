"""Measure throughput and latency of an engine in this process, on random token ids.

The machine's limits are measured right after the run, with the same threads.
"""

import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock import validation as check
from penstock.bench.costs import ModelCosts, Work
from penstock.bench.machine import KINDS, MachineLimits, Progress
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
    """num_prompts requests of input_len random ids that generate output_len tokens each, after `warmup` such runs."""

    num_prompts: int
    input_len: int
    output_len: int
    warmup: int

    def __post_init__(self) -> None:
        for name, low in (("num_prompts", 1), ("input_len", 1), ("output_len", 1), ("warmup", 0)):
            check.check_int(name, getattr(self, name), low, 10**6)


def measure_offline(
    options: dict[str, Any], workload: Workload, *, announce: Callable[[ModelInfo], None], progress: Progress
) -> dict[str, Any]:
    """Build an engine from EngineConfig options, run the workload, return the figures.

    Args:
        announce: called with the engine's description of its model before the first run.

    Raises:
        InvalidRequestError: an option is invalid, or the workload does not fit into the context.
        EngineError: a request failed.
    """
    built = build_engine(EngineConfig.from_options(**options))
    info = built.info
    if workload.input_len + workload.output_len > info.max_model_len:
        message = f"input_len: input_len + output_len exceed max_model_len = {info.max_model_len}"
        raise InvalidRequestError(message, param="input_len")
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
    """A wrapper around an engine's executor that counts the work of steps and the time in kernels.

    Attributes:
        last: the last step that was submitted.
    """

    def __init__(self, built: BuiltEngine) -> None:
        self._inner, built.engine.executor = built.engine.executor, self
        self._ops = built.ops if isinstance(built.ops, CpuOps) else None
        self._costs = ModelCosts(built.model, built.model_config, built.config)
        self._counters = self._read_counters()
        self.last = SchedulerOutput(0, [], [])

    def submit(self, scheduler_output: SchedulerOutput) -> Any:
        self.last = scheduler_output
        return self._inner.submit(scheduler_output)

    def collect(self, handle: Any) -> StepOutput:
        return self._inner.collect(handle)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def _read_counters(self) -> tuple[float, int, int]:
        return (0.0, 0, 0) if self._ops is None else (self._ops.kernel_seconds(), *self._ops.expert_counts())

    def last_step(self) -> tuple[float, Work]:
        """Return the seconds in kernels and the work of the last step; call it once after every step."""
        before, self._counters = self._counters, self._read_counters()
        seconds, experts_read, expert_rows = (now - then for now, then in zip(self._counters, before, strict=True))
        work = self._costs.step(self.last)
        work.add(self._costs.experts(int(experts_read), int(expert_rows)))
        return seconds, work

    def attention(self) -> dict[str, int]:
        """Return the number of attention plans of each kind, over all steps and cache groups, warmup included."""
        counts = {} if self._ops is None else self._ops.plan_counts
        return {describe_key(key): count for key, count in counts.items()}

    def limits(self) -> MachineLimits | None:
        """Return the machine's limits with the engine's threads; None for reference kernels."""
        if self._ops is None:
            return None
        limits = MachineLimits(self._ops)
        for _ in range(LIMIT_PROBES):
            limits.probe(*KINDS)
        return limits


def _run(
    client: InProcessClient, meter: _MeteredExecutor, workload: Workload, index: int, advance: Callable[[int], None]
) -> Run:
    """Run the workload once, with prompts that depend on `index`, so that no run has prefix hits of another."""
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
        begun = time.perf_counter()
        outputs = client.step()
        now = time.perf_counter()
        kernel_seconds, work = meter.last_step()
        prompt_tokens = sum(
            max(0, min(item.num_new_tokens, workload.input_len - item.num_computed_tokens))
            for item in meter.last.scheduled
        )
        phase = run.prefill if prompt_tokens else run.decode
        phase.steps += 1
        phase.seconds += now - begun
        phase.kernel_seconds += kernel_seconds
        phase.input_tokens += prompt_tokens
        phase.output_tokens += len(outputs)
        phase.work.add(work)
        for output in outputs:
            if output.error is not None:
                raise EngineError(f"a request failed, so nothing was measured: {output.error}")
            run.add_token(output.request_id, now - started)
        advance(len(outputs))
    run.seconds = time.perf_counter() - started
    return run
