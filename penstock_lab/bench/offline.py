"""Measure the throughput and latency of an engine in this process, on random token ids.

The limits of the machine, with the same threads, or those of the GPU are probed during the run (meter.py); the times
leave the probes out.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock import (
    EngineConfig,
    EngineError,
    FinishReason,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from penstock.assembly import BuiltEngine, build_engine, plan_engine
from penstock.client.step_client import InProcessClient
from penstock.config import TRITON
from penstock.errors import check_int, invalid
from penstock.interface.messages import ModelInfo
from penstock.kernels.cpu.ops import CpuOps
from penstock_lab.bench.machine import MachineLimits, Progress
from penstock_lab.bench.meter import StepMeter
from penstock_lab.bench.profile import NO_LIMITS, OTHER_PROCESSES, Profile, Run
from penstock_lab.bench.split_meter import SplitMeter

Meter = StepMeter | SplitMeter


@dataclass(frozen=True, slots=True)
class Workload:
    """num_prompts requests of input_len random ids that generate output_len tokens each, after `warmup` such runs.

    prefix_len: additional random ids before those of a request, the same for all requests of a run.
    form: the form of the answers; each answer must be longer than output_len.
    """

    num_prompts: int
    input_len: int
    output_len: int
    warmup: int
    prefix_len: int = 0
    form: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        for name, low in (("num_prompts", 1), ("input_len", 1), ("output_len", 1), ("warmup", 0), ("prefix_len", 0)):
            check_int(name, getattr(self, name), low, 10**6)

    @property
    def prompt_len(self) -> int:
        return self.prefix_len + self.input_len


def measure_offline(
    options: dict[str, Any],
    workload: Workload,
    *,
    announce: Callable[[ModelInfo], None],
    progress: Progress,
    profile: Profile | None = None,
) -> dict[str, Any]:
    """Build an engine from EngineConfig options, run the workload, and return the figures.

    Args:
        announce: called with the engine's description of its model before the first run.
        profile: collects the measured run.

    Raises:
        InvalidRequestError: an option is invalid, or the workload does not fit into the context.
        EngineError: a request failed.
    """
    config = EngineConfig.from_options(**options)
    limits = _gpu_limits(config)
    built = build_engine(config)
    info, cache = built.info, built.config.cache
    if workload.prompt_len + workload.output_len > info.max_model_len:
        raise invalid("input_len", f"prefix_len + input_len + output_len exceed max_model_len = {info.max_model_len}")
    is_split = _is_split(built, profile)
    announce(info)
    meter = SplitMeter(built) if is_split else StepMeter(built, limits)
    client = InProcessClient(built.engine, info, None, forms=built.forms)
    with progress("tokens", (workload.warmup + 1) * workload.num_prompts * workload.output_len) as advance:
        for index in range(workload.warmup + 1):
            meter.begin_run(profile if index == workload.warmup else None)
            run = _run(client, meter, workload, index, advance)
    client.shutdown()
    output_tokens = workload.num_prompts * workload.output_len
    return {
        "model": info.model,
        "system_fingerprint": info.system_fingerprint,
        "threads": built.config.numerics.threads,
        "kv_cache_dtype": cache.kv_cache_dtype,
        **{name: getattr(workload, name) for name in ("num_prompts", "prefix_len", "input_len", "output_len")},
        "prefix_caching": cache.enable_prefix_caching,
        "structured_outputs": workload.form is not None,
        "seconds": run.seconds,
        "output_tokens_per_s": output_tokens / run.seconds,
        "total_tokens_per_s": (output_tokens + workload.num_prompts * workload.prompt_len) / run.seconds,
        **run.figures(meter.limits, OTHER_PROCESSES if is_split else NO_LIMITS),
        **({"between_processes": meter.between_processes()} if isinstance(meter, SplitMeter) else {}),
        "attention": meter.attention(),
        "peak_rss_bytes": meter.peak_rss_bytes(),
        **({} if profile is None or is_split else {"profile": profile.figures()}),
    }


def _gpu_limits(config: EngineConfig) -> MachineLimits | None:
    """Measure the limits of the GPU that computes the model, before the engine takes its memory; None: none does."""
    numerics = plan_engine(config).config.numerics
    if numerics.kernels != TRITON or config.parallel.num_ranks > 1:
        return None
    import torch

    from penstock_lab.bench.device import DeviceLimits

    return DeviceLimits(torch.device(numerics.device))


def _is_split(built: BuiltEngine, profile: Profile | None) -> bool:
    """True if several processes compute the model. Their operations cannot be shown."""
    if profile is not None and not isinstance(built.ops, CpuOps):
        raise invalid("profile", f"{NO_LIMITS}")
    parallel = built.config.parallel
    is_split = parallel.num_ranks * parallel.pipeline_parallel_size > 1 and built.config.numerics.load_format != "mock"
    if is_split and profile is not None and profile.shows_operations:
        raise invalid("profile", f"{OTHER_PROCESSES}; leave it out, and --trace draws the stages of a pipeline")
    return is_split


def _check_length(output: RequestOutput, workload: Workload) -> None:
    """Raise InvalidRequestError if an answer is complete too early, because the runs would not be comparable."""
    if any(choice.finish_reason is FinishReason.STOP for choice in output.outputs):
        message = f"an answer was complete before {workload.output_len} tokens; require longer answers"
        raise invalid("json_schema_file", message)


def _run(client: InProcessClient, meter: Meter, workload: Workload, index: int, advance: Callable[[int], None]) -> Run:
    """Run the workload once, with prompts that depend on `index`, so that no run hits the prefixes of another."""
    rng = random.Random(index)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=workload.output_len,
        ignore_eos=True,
        detokenize=False,
        structured_outputs=workload.form,
        output_kind=RequestOutputKind.DELTA,
    )
    vocabulary = range(client.model_info.vocab_size)
    prefix = rng.choices(vocabulary, k=workload.prefix_len)
    run, started = Run(), meter.watch.now()
    for _ in range(workload.num_prompts):
        client.add_request(None, prefix + rng.choices(vocabulary, k=workload.input_len), params)
    while client.has_unfinished_requests():
        outputs, step = meter.step(client.step)
        with meter.watch.paused():
            phase = run.phases[step.phase]
            phase.add(step)
            num_new = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
            phase.output_tokens += num_new
            for output in outputs:
                _check_length(output, workload)
                if output.error is not None:
                    raise EngineError(f"a request failed, so nothing was measured: {output.error}")
                run.add_token(output.request_id, meter.watch.now() - started)
            advance(num_new)
    run.seconds = meter.watch.now() - started
    for stretch in meter.end_run():
        run.phases[stretch.phase].samples.append(stretch.sample)
    return run
