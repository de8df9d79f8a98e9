"""With native kernels a step does no float arithmetic in torch or numpy: a sum there could depend on the batch.

Here with every kind of sampling; families/test_engine.py does it for every family of models.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.assembly import build_engine
from penstock.config import EngineConfig
from penstock.interface.messages import EngineOutput, EngineRequest
from penstock.interface.sampling_params import SamplingParams
from penstock.kernels.cpu.ops import CpuOps
from tests.kernels.packed import levels
from tests.runner.test_with_engine import LLAMA
from tests.watcher import WatchedArray, Watcher, watch_arrays

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., dict[str, list[EngineOutput]]]:
    """Makes an engine and runs requests of every kind to their end, all at once."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"attention_bias": True}))

    def run(watcher: Watcher, **options: Any) -> dict[str, list[EngineOutput]]:
        config = EngineConfig.from_options(
            model=str(tmp_path), load_format="dummy", kernels="cpu", threads=2, max_num_seqs=16,
            max_num_batched_tokens=80, kv_cache_memory_bytes=2**22, **options,
        )  # fmt: skip
        engine, outputs = build_engine(config).engine, {}
        for index, params in enumerate(KINDS):
            prompt = [1 + (index * step) % 49 for step in range(3, 40)]
            engine.add_request(EngineRequest(str(index), prompt, SamplingParams(max_tokens=6, **params)))
        with watcher:
            while engine.has_work:
                for output in engine.step():
                    outputs.setdefault(output.request_id, []).append(output)
        return outputs

    return run


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 5, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.3, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": -0.5},
    {"temperature": 0.0, "logit_bias": {3: 5.0}, "min_tokens": 3, "bad_words_token_ids": ((4,), (5, 6))},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 1.0, "seed": 4, "logprobs": 0, "prompt_logprobs": 3},
]
OPTIONS: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"dtype": "float32", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int4", "quantization_group_size": 32},
    {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_a_step_does_no_float_arithmetic_in_python(
    options: dict[str, Any], run: Callable[..., dict[str, list[EngineOutput]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a norm, an activation, a softmax or a sum of numpy's in prefill, decode, sampling with every
    parameter, or log-probabilities; and against torch, which a bundled family does not use at all."""
    arrays, watcher = watch_arrays(monkeypatch, CpuOps), Watcher()
    outputs = run(watcher, **options)
    assert len(outputs) == len(KINDS)
    assert all(output.error is None for made in outputs.values() for output in made)
    assert arrays.seen >= {"greater", "greater_equal", "negative"}  # it does look
    assert not arrays.forbidden
    assert not watcher.seen


def test_the_watcher_sees_arithmetic() -> None:
    """Guards against a watcher that lets everything through."""
    x, n = torch.rand(3, 4), torch.arange(4)
    with Watcher() as watcher:
        n.add(1)
        assert not watcher.forbidden
        for compute in (
            lambda: x + 1,
            lambda: x.softmax(-1),
            lambda: x @ x.T,
            lambda: x.sum(dim=1),
            lambda: x.cumsum(1),
            lambda: x.bfloat16(),
        ):
            watcher.forbidden.clear()
            compute()
            assert watcher.forbidden


def test_the_arrays_see_arithmetic() -> None:
    """Guards against arrays that let everything through."""
    x, n = np.ones((3, 4), np.float32).view(WatchedArray), np.arange(4).view(WatchedArray)
    WatchedArray.forbidden.clear()
    assert (n + 1 > 2).any()
    assert (x[1:] > 2).sum() == 0
    assert not WatchedArray.forbidden
    for compute in (
        lambda: x + 1,
        lambda: x[:, 1:] * x[:, 1:],
        lambda: np.exp(x),
        lambda: x @ x.T,
        lambda: x.sum(axis=1),
        lambda: x.cumsum(1),
        lambda: x.astype(np.float64),
    ):
        WatchedArray.forbidden.clear()
        compute()
        assert WatchedArray.forbidden
