"""An adapter that is merged into the weights: the logits are PEFT's, and no request has to name it."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.assembly import build_engine
from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError
from penstock.runner.forward_pass import Wanted
from penstock_lab.check.run import Options, check_model
from tests.hf_models import make_llama, make_qwen2
from tests.lora.peft_adapters import logits_of, make_adapter
from tests.lora.test_peft import PROMPT, TOLERANCE

FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "DoRA with biases": {"use_dora": True},
    "with the head": {"modules_to_save": ["lm_head"]},
    "with head and embedding": {"modules_to_save": ["lm_head", "embed_tokens"]},
}


@pytest.mark.parametrize("fields", FIELDS)
def test_merged(fields: str, tmp_path: Path) -> None:
    """Guards against rows that meet others, a bias that DoRA scales, and whole weights that are not replaced; and
    against a cache of another engine's that takes the merged model for the base model."""
    model, directory = make_qwen2(tmp_path)
    adapted = make_adapter(copy.deepcopy(model), tmp_path / "adapter", **FIELDS[fields])
    options = {"model": str(directory), "dtype": "float32", "max_model_len": 64, "threads": 1}
    base = build_engine(EngineConfig.from_options(**options))
    built = build_engine(EngineConfig.from_options(**options, merge_lora=str(tmp_path / "adapter")))
    expected = logits_of(adapted, PROMPT).numpy()
    found, before = (item.forward_pass.run(PROMPT, Wanted()).logits for item in (built, base))
    assert found is not None
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
    assert before is not None
    assert np.abs(before - expected).max() > 0.05 * np.abs(expected).max()
    assert built.info.system_fingerprint != base.info.system_fingerprint


def test_one_or_the_other() -> None:
    """Guards against an option that is ignored beside another one."""
    with pytest.raises(InvalidRequestError, match="merge_lora"):
        EngineConfig.from_options(merge_lora="x", enable_lora=True)
    with pytest.raises(InvalidRequestError, match="max_loras"):
        EngineConfig.from_options(max_loras=4)


@pytest.mark.parametrize("fields", [{}, {"use_dora": True, "r": 9}], ids=["plain", "DoRA"])
def test_the_check(fields: dict[str, Any], tmp_path: Path) -> None:
    """Guards against a check that compares the base models, or an adapter with itself."""
    model, directory = make_llama(tmp_path)
    make_adapter(model, tmp_path / "adapter", **fields)
    report = check_model(Options(model=str(directory), adapter=str(tmp_path / "adapter"), dtype="float32"))
    assert report.passed, report.first_difference
    assert "PEFT" in report.against
    assert report.certificate is None
