"""Measure the cost of LoRA adapters: the same requests on an engine without LoRA, and on one with it, alternately.

On the second engine, requests have no adapter, all the same one, or take turns with all. The adapters are random,
written in PEFT's format and loaded as a user's would be; their values change the tokens, but not the time.
"""

import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from penstock import EngineConfig, SamplingParams
from penstock.assembly import BuiltEngine, build_engine
from penstock.errors import check_int
from penstock.interface.messages import EngineRequest, ModelInfo
from penstock.layers.lora import is_adaptable
from penstock.weights.sources import read_parameters
from penstock_lab.bench.machine import Progress

LENGTH = 1e-3  # of the random values


@dataclass(frozen=True, slots=True)
class LoraContest:
    """num_prompts simultaneous requests of input_len random ids, which generate output_len tokens each, with `adapters`
    adapters of the engine's max_lora_rank for all products. They run `rounds` times in each way."""

    num_prompts: int
    input_len: int
    output_len: int
    adapters: int
    rounds: int = 5

    def __post_init__(self) -> None:
        for name, low in (("num_prompts", 1), ("input_len", 1), ("output_len", 2), ("adapters", 1), ("rounds", 1)):
            check_int(name, getattr(self, name), low, 10**6)


def measure_lora(
    options: dict[str, Any], contest: LoraContest, *, announce: Callable[[ModelInfo], None], progress: Progress
) -> dict[str, Any]:
    """Build both engines from EngineConfig options and return the figures. Only steps that decode for all are timed.

    Raises:
        InvalidRequestError: an option is invalid.
    """
    plain = build_engine(EngineConfig.from_options(**options))
    lora = {"enable_lora": True, "max_loras": contest.adapters} | {
        name: options[name] for name in ("max_lora_rank",) if name in options
    }
    built = build_engine(EngineConfig.from_options(**options | lora))
    announce(built.info)
    with tempfile.TemporaryDirectory(prefix="penstock-lora-") as scratch:
        for index in range(contest.adapters):
            write_adapter(built, Path(scratch) / str(index), index)
            built.engine.add_adapter(str(index), str(Path(scratch) / str(index)))
    ways: dict[str, tuple[BuiltEngine, int]] = {"plain": (plain, 0), "none": (built, 0), "one": (built, 1)}
    ways["all"] = built, contest.adapters
    steps: dict[str, list[float]] = {name: [] for name in ways}
    shares: dict[str, list[float]] = {name: [] for name in ways}
    with progress("runs", len(ways) * (contest.rounds + 1)) as advance:
        for index in range(contest.rounds + 1):  # the first round warms up
            found = {}
            for name, (engine, count) in ways.items():
                found[name] = _run(engine, contest, count, index)
                advance(1)
            for name, times in found.items() if index else ():
                steps[name] += times
                shares[name].append(median(found["plain"]) / median(times))
    for engine in (plain, built):
        engine.engine.shutdown()
    return {
        "model": built.info.model,
        "system_fingerprint": built.info.system_fingerprint,
        "threads": built.config.numerics.threads,
        "rank": built.config.lora.max_lora_rank,
        **{name: getattr(contest, name) for name in ("num_prompts", "input_len", "output_len", "adapters", "rounds")},
        **{f"{name}_step_ms": 1e3 * median(times) for name, times in steps.items()},
        **{f"{name}_throughput": median(share) for name, share in shares.items()},
    }


def _run(built: BuiltEngine, contest: LoraContest, count: int, seed: int) -> list[float]:
    """Return the time of each step that decoded for all requests. count: adapters that they take turns with."""
    engine, draw = built.engine, random.Random(seed)
    params = SamplingParams(temperature=0.0, max_tokens=contest.output_len, ignore_eos=True)
    for index in range(contest.num_prompts):
        prompt = draw.choices(range(built.info.vocab_size), k=contest.input_len)
        adapter = str(index % count) if count else None
        engine.add_request(EngineRequest(f"{seed} {index}", prompt, params, adapter=adapter))
    times = []
    while engine.has_work:
        began = time.perf_counter()
        if len(engine.step()) == contest.num_prompts:
            times.append(time.perf_counter() - began)
    return times[1:]


def write_adapter(built: BuiltEngine, directory: Path, seed: int) -> None:
    """Write a random adapter of the engine's largest rank for every product of a model that can have one."""
    draw, rank = np.random.default_rng(seed), built.config.lora.max_lora_rank
    tensors: dict[str, Any] = {}
    for parameter in filter(is_adaptable, read_parameters(built.model_config).values()):
        layout, k = parameter.layouts[0], parameter.shape[1]
        for name, shape in layout.sources.items():
            module = f"base_model.model.{name.removesuffix('.weight')}"
            rows = shape[-1 if layout.transposed else 0]
            tensors[f"{module}.lora_A.weight"] = LENGTH * draw.standard_normal((rank, k), np.float32)
            tensors[f"{module}.lora_B.weight"] = LENGTH * draw.standard_normal((rows, rank), np.float32)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
