"""Against PEFT: with the same base weights, adapter and tokens, equal logits in float32 and equal greedy tokens."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.assembly import BuiltEngine, build_engine
from penstock.config import EngineConfig
from penstock.interface.messages import EngineRequest
from penstock.interface.sampling_params import SamplingParams
from penstock.runner.forward_pass import Wanted
from tests.families.case import all_cases
from tests.hf_models import Made, make_llama, make_qwen2, make_qwen3, random_ids
from tests.kernels.packed import levels
from tests.lora.peft_adapters import greedy, logits_of, make_adapter

CASES = {case.name: case for case in all_cases()}
MODELS: dict[str, Callable[[Path], Made]] = {
    "llama": make_llama,
    "qwen2": make_qwen2,
    "qwen3": make_qwen3,
    **{name: CASES[name].make for name in ("gemma", "mixtral", "phi3", "gpt2", "falcon-40b", "falcon-7b", "glm4")},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank 1": {"r": 1},
    "rank-stabilised": {"use_rslora": True, "r": 6},
    "DoRA": {"use_dora": True},
    "some layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "a pattern": {"target_modules": r".*\.(q_proj|down_proj)"},
    "all linear": {"target_modules": "all-linear"},
    "ranks by pattern": {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7}, "alpha_pattern": {"q_proj": 5}},
    "bias of B": {"lora_bias": True},
}
TOLERANCE = 1e-5  # of logits, over the largest of them
PROMPT = random_ids(33, seed=4)
KERNELS = ["reference", *(["cpu"] if levels() else [])]


def engine_of(directory: Path, adapter: Path, kernels: str = KERNELS[-1], **options: Any) -> BuiltEngine:
    """An engine in float32 that has loaded an adapter as "a"."""
    fixed = {"dtype": "float32", "threads": 1, "max_model_len": 128, "max_num_seqs": 4, "max_lora_rank": 8}
    config = fixed | {"enable_lora": True, "lora_modules": [f"a={adapter}"], "kernels": kernels} | options
    return build_engine(EngineConfig.from_options(model=str(directory), **config))


def compare(built: BuiltEngine, model: Any, adapter: str | None = "a") -> None:
    """The logits of a prompt and the greedy tokens after it."""
    expected = logits_of(model, PROMPT).numpy()
    slot = -1 if adapter is None else 0
    found = built.forward_pass.run(PROMPT, Wanted(), adapter=slot).logits
    assert found is not None
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
    engine, tokens = built.engine, list[int]()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.add_request(EngineRequest("r", PROMPT, params, adapter=adapter))
    while engine.has_work:
        tokens += [token for output in engine.step() for token in output.new_token_ids]
    assert tokens == greedy(model, PROMPT, 8)


@pytest.mark.parametrize("name", MODELS)
def test_families(name: str, tmp_path: Path) -> None:
    """Guards against an adapter that meets another product than in PEFT, or other rows of a fused one. Without the
    adapter, the same engine gives what the base model gives."""
    model, directory = MODELS[name](tmp_path)
    adapted = make_adapter(copy.deepcopy(model), tmp_path / "adapter")
    built = engine_of(directory, tmp_path / "adapter")
    compare(built, adapted)
    with adapted.disable_adapter():
        compare(built, adapted, None)
    expected = logits_of(adapted, PROMPT)
    with adapted.disable_adapter():  # an adapter that changed nothing would prove nothing
        assert (expected - logits_of(adapted, PROMPT)).abs().max() > 0.05 * expected.abs().max()


@pytest.mark.parametrize("option", OPTIONS)
def test_options(option: str, tmp_path: Path) -> None:
    """Guards against an option of PEFT's that is read wrongly, or not at all."""
    model, directory = make_qwen2(tmp_path)
    adapted = make_adapter(model, tmp_path / "adapter", **OPTIONS[option])
    compare(engine_of(directory, tmp_path / "adapter"), adapted)


@pytest.mark.parametrize("fields", [{}, {"use_dora": True}], ids=["plain", "DoRA"])
def test_the_reference_kernels(fields: dict[str, Any], tmp_path: Path) -> None:
    """Guards against a specification that differs from PEFT."""
    model, directory = make_llama(tmp_path)
    adapted = make_adapter(model, tmp_path / "adapter", **fields)
    compare(engine_of(directory, tmp_path / "adapter", "reference"), adapted)


def test_files_of_torch(tmp_path: Path) -> None:
    """Guards against adapters that were saved without safetensors, as older ones are."""
    model, directory = make_llama(tmp_path)
    adapted = make_adapter(model, tmp_path / "adapter")
    adapted.save_pretrained(tmp_path / "adapter", safe_serialization=False)
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    compare(engine_of(directory, tmp_path / "adapter"), adapted)
