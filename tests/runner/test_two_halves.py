"""The halves of a step, with a device whose results come late and whose programs have a few sizes."""

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.interface.messages import EngineRequest
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import CacheGroup, SchedulerOutput, StepOutput
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.sampling import SamplingTensors, TokenScores
from penstock.kernels.tensors import Array
from penstock.models.config_json import load_model_config
from penstock.runner.model_runner import LocalExecutor, ModelRunner, Pending
from penstock.weights.loader import load_model
from tests.kernels.packed import levels
from tests.runner.test_with_engine import LLAMA, VOCAB, engine_for

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")
CODE = -1000  # ids from here down stand for ids that are not there yet
SIZES = (3, 8, 20)  # tokens of programs


class LateOps(CpuOps):
    """Results exist only after a fetch has waited for them. Until then, ids are codes, and all else is wrong."""

    def __init__(self) -> None:
        super().__init__(np.dtype(np.float32))
        self._ids: list[int] = []  # by code
        self._late: dict[int, tuple[Array, Array]] = {}  # by identity: what was handed out, and what it will be
        self._rng = random.Random(0)
        self.num_padded = 0

    def program_rows(self, tokens: int) -> int:
        rows = min((size for size in SIZES if size >= tokens), default=0)
        self.num_padded += rows > tokens
        return rows

    def choose(self, logits: Array, params: SamplingTensors) -> tuple[Array, Array]:
        ids, healthy = super().choose(logits, params)
        codes = CODE - len(self._ids) - np.arange(len(ids))
        self._ids += ids.tolist()
        return codes, self._hidden(healthy, False)

    def token_scores(self, logits: Array, ids: Array, num_top: int) -> TokenScores:
        found = super().token_scores(logits, self._decoded(ids), num_top)
        return TokenScores(*(self._hidden(part, -1) for part in astuple(found)))

    def fetch(self, tensors: Sequence[Array]) -> Callable[[], list[Array]]:
        def wait() -> list[Array]:
            time.sleep(self._rng.choice([0.0, 0.001, 0.002]))
            return [self._late.pop(id(item))[1] if id(item) in self._late else self._decoded(item) for item in tensors]

        return wait

    def _hidden(self, array: Array, value: int) -> Array:
        shown = np.full_like(array, value)
        self._late[id(shown)] = shown, array
        return shown

    def _decoded(self, ids: Array) -> Array:
        return np.array([self._ids[CODE - code] if code <= CODE else code for code in ids.tolist()], dtype=np.int64)


class Halves(LocalExecutor):
    """Begins a step when it is submitted, and finishes it when it is collected."""

    _pending: Pending

    def submit(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        assert self._runner is not None
        self._pending = self._runner.begin(scheduler_output)
        return super().submit(scheduler_output)

    def collect(self, handle: SchedulerOutput) -> StepOutput:
        assert self._runner is not None
        assert self._submitted.popleft() is handle
        return self._runner.finish(self._pending)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "logprobs": 2},
    {"temperature": 0.8, "top_p": 0.7, "prompt_logprobs": 1},
    {"temperature": 0.0, "logprobs": 0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "mirostat": 2, "logprobs": 1},
    {"temperature": 1.0, "typical_p": 0.7},
    {"temperature": 0.7, "logits_processors": {"only_token_7": {}}, "logprobs": 3},
    {"temperature": 0.0, "suppress_tokens": list(range(VOCAB)), "logprobs": 1},  # fails: nothing may be chosen
]


def answers(ops: CpuOps, make_executor: Callable[[ModelRunner], LocalExecutor], directory: Path) -> tuple[Any, int]:
    """What requests get that come, end and are aborted at random, and how often one was preempted."""
    config = load_model_config(directory)
    model = load_model(directory, config, ops, "dummy")
    engine = engine_for(
        model, ops, [CacheGroup((0, 1), None, 12, 16)], model_config=config, make_executor=make_executor,
        max_num_batched_tokens=24,
    )  # fmt: skip
    rng, found, waiting, running = random.Random(1), dict[str, list[Any]](), list(range(24)), list[str]()
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.4:
            seed = waiting.pop(0)
            prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 5, 30)))]
            params = SamplingParams(seed=seed, max_tokens=rng.choice((3, 40)), **KINDS[seed % len(KINDS)])
            engine.add_request(EngineRequest(str(seed), prompt, params))
            running.append(str(seed))
        if running and rng.random() < 0.05:
            engine.abort(running.pop(rng.randrange(len(running))))
        for output in engine.step():
            entry = output.new_token_ids, output.logprobs, output.prompt_logprobs, output.error
            found.setdefault(output.request_id, []).append(entry)
    engine.check_integrity()
    return found, engine.stats().num_preemptions_total


def test_late_results_and_padded_programs_have_the_same_bits(tmp_path: Path) -> None:
    """Guards against a result that `begin` reads before it is there, a buffer that the second half finds overwritten,
    and rows of padding that are sampled, stored in the cache, or change a neighbour."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    expected, preemptions = answers(CpuOps(np.dtype(np.float32)), LocalExecutor, tmp_path)
    late = LateOps()
    assert answers(late, Halves, tmp_path) == (expected, preemptions)
    assert preemptions > 0
    assert late.num_padded > 50
    assert sum(entries[-1][-1] is not None for entries in expected.values()) == 3
