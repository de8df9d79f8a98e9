"""Whole engines in Triton's interpreter: the tokens and log-probabilities of Transformers, and a request's own bits.

Models are as small as they can be, because an operation of a program takes 20 microseconds there.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="an extra")

from penstock import LLM, RequestOutput, SamplingParams
from tests.families.case import all_cases
from tests.hf_models import Made, random_ids

SMALL = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen3": SMALL | {"head_dim": 8},
    "gemma2": SMALL | {"head_dim": 8},
    "mixtral": SMALL | {"num_hidden_layers": 1},
    "falcon-7b": {"vocab_size": 67, "hidden_size": 32, "num_attention_heads": 2},
    "gpt2": {"vocab_size": 67, "n_embd": 32, "n_head": 4},
    "bloom": {"vocab_size": 67, "hidden_size": 32, "num_attention_heads": 4},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2)
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.05}


def made(name: str, directory: Path, **fields: Any) -> Made:
    case = next(case for case in all_cases() if case.name == name)
    return case.make(directory, **FAMILIES[name] | fields)


def start(directory: Path, **options: Any) -> LLM:
    defaults = {"kernels": "triton", "max_model_len": 160, "max_num_seqs": 4, "dtype": "float32"}
    return LLM(model=str(directory), **defaults | options)


def check(model: Any, prompt: list[int], output: RequestOutput, tolerance: float) -> None:
    """The tokens are Transformers', with its log-probabilities."""
    ids, found = output.outputs[0].token_ids, output.outputs[0].logprobs
    assert output.error is None
    assert found is not None
    assert len(ids) == GREEDY.max_tokens
    with torch.no_grad():
        expected = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    for place, token_id, row in zip(found, ids, expected, strict=True):
        assert float(row.max() - row[token_id]) <= 2 * tolerance
        for other, entry in place.items():
            assert abs(entry.logprob - float(row[other])) < tolerance


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    """Guards against a layer whose arguments only other backends take, and against rows that read each other's."""
    model, directory = made(name, tmp_path)
    prompts = [random_ids(21, 0, 67), random_ids(5, 1, 67)]
    llm = start(directory, max_num_batched_tokens=16)  # the long prompt is computed in two chunks, beside the other
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        check(model, prompt, output, TOLERANCE["float32"])
