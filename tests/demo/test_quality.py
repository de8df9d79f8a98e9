"""The demo model on our own engine: the promises of its card, measured by the same code that wrote the card."""

from collections.abc import Sequence

import pytest

from penstock import LLM, SamplingParams
from penstock.demo.evaluate import (
    ENDING_PROMPTS,
    JSON_PROMPTS,
    SUM_PROMPTS,
    Completion,
    answered,
    parsed_json,
    sum_shares,
)


@pytest.fixture(scope="module")
def generate():
    with LLM(model="demo", threads=1, max_num_seqs=64) as llm:

        def run(texts: Sequence[str], temperature: float, max_tokens: int) -> list[Completion]:
            tokenizer = llm.get_tokenizer()
            prompts = [{"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)} for text in texts]
            params = SamplingParams(temperature=temperature, seed=0, max_tokens=max_tokens)
            outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
            return [Completion(output.text, output.finish_reason == "stop") for output in outputs]

        yield run


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_45_of_50_fixed_prompts_end_by_themselves(generate, temperature):
    pairs = answered(generate, ENDING_PROMPTS, temperature, 400)
    assert len(pairs) == 50
    assert sum(completion.ended for _, completion in pairs) >= 45


def test_8_of_10_sums_are_right(generate):
    """All 441 sums up to 20 + 20, the ones that training never stated among them."""
    found = sum_shares(answered(generate, SUM_PROMPTS, 0.0, 80))
    assert found["all"] >= 0.8
    assert found["held_out"] >= 0.8


def test_9_of_10_json_answers_parse(generate):
    pairs = answered(generate, JSON_PROMPTS, 0.0, 80)
    parsed = [parsed_json(completion.text) is not None for _, completion in pairs]
    assert sum(parsed) >= 0.9 * len(parsed) > 20
