"""What quantisation costs: the demo model's loss on its held-out text, through the engine, against bfloat16."""

import json
from functools import cache
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.kernels.cpu.library import best_level
from penstock.weights.hub import MODEL_DIR
from penstock_lab.training.corpus import read_heldout

pytestmark = pytest.mark.skipif(best_level() is None, reason="no native library")
STATED = json.loads((MODEL_DIR / "training.json").read_text(encoding="utf-8"))["heldout_loss"]["all"]
MAX_PROMPT = 1000  # of the model's 1024 tokens


@cache
def heldout_loss(quantization: str | None = None, group_size: int | None = None, kv_cache_dtype: str = "auto") -> float:
    """Mean negative log-likelihood of every token but the first, in nats."""
    options: dict[str, Any] = {
        "quantization": quantization,
        "quantization_group_size": group_size,
        "kv_cache_dtype": kv_cache_dtype,
    }
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with LLM(model="demo", dtype="bfloat16", kernels="cpu", **options) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        documents = [tokenizer.encode(text, add_special_tokens=False)[:MAX_PROMPT] for text in read_heldout()]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in documents], params)
    total, count = 0.0, 0
    for ids, output in zip(documents, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, logprobs in zip(ids[1:], output.prompt_logprobs[1:], strict=True):
            assert logprobs is not None
            total -= logprobs[token].logprob
            count += 1
    assert count > 8000
    return total / count


@pytest.mark.parametrize(
    ("quantization", "group_size", "allowed"),
    [("int8", None, 0.005), ("int8-x2", None, 0.001), ("int4", 32, 0.03), ("int4-a16", 32, 0.03)],
)
def test_loss_of_quantised_weights(quantization: str, group_size: int | None, allowed: float) -> None:
    """Guards against a scale, a group or a sum that is slightly wrong: text stays fluent long after the loss tells."""
    exact, quantised = heldout_loss(), heldout_loss(quantization, group_size)
    assert exact == pytest.approx(STATED, rel=1e-3)
    assert quantised == pytest.approx(exact, rel=allowed)


def test_loss_of_an_int8_cache() -> None:
    """Guards against scales, offsets or slices that are slightly wrong."""
    exact, quantised = heldout_loss(), heldout_loss(kv_cache_dtype="int8")
    assert quantised != exact
    assert quantised == pytest.approx(exact, rel=0.001)
