"""The whole engine against Transformers: the same tokens and log-probabilities, however a request is computed.

In float32. Every way of computing a request must give Transformers' greedy tokens; where the two best tokens differ by
less than NEAR_TIE either passes (the reference kernels promise a tolerance, not bits), and such sequences are counted:
at most 1 % of all. What only the engine does (a request alone, preempted or resumed) is tried with one family for each
kind of attention and of mixture; test_engine.py shows of every family that its bits stay the same.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, RequestOutput, SamplingParams
from penstock.interface.messages import EngineRequest
from tests.families.case import Case, all_cases, for_cases
from tests.hf_models import Made, random_ids

NEAR_TIE = 1e-4
LENGTHS = [5, 17, 33, 48, 1, 64]  # the windows are 16 tokens: prompts of three windows and more
NUM_TOKENS = 64
MODELS = for_cases(all_cases(shapes=False))
FULL = for_cases([case for case in all_cases() if case.full])
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)


@dataclass
class Oracle:
    """A model, prompts, and what Transformers makes of them."""

    directory: Path
    model: torch.nn.Module
    prompts: list[list[int]]
    expected: list[list[int]]
    batch: list[RequestOutput] = field(default_factory=list)  # ours of all prompts at once
    compared: int = 0
    near_ties: int = 0

    def llm(self, **options: Any) -> LLM:
        options = {"max_num_seqs": 8, "threads": 1, **options}
        return LLM(model=str(self.directory), dtype="float32", **options)

    def check(self, index: int, token_ids: list[int], start: int = 0) -> None:
        """The tokens after `start` outputs are the expected ones, or leave them at a near tie."""
        expected = self.expected[index][start:]
        assert len(token_ids) == len(expected)
        self.compared += 1
        for position, (ours, theirs) in enumerate(zip(token_ids, expected, strict=True)):
            if ours != theirs:
                context = self.prompts[index] + self.expected[index][: start + position]
                logprobs = self.model(torch.tensor([context])).logits[0, -1].log_softmax(-1)
                assert abs(float(logprobs[ours] - logprobs[theirs])) < NEAR_TIE, f"token {position} of prompt {index}"
                self.near_ties += 1
                return

    def check_all(self, outputs: list[RequestOutput]) -> None:
        for index, output in enumerate(outputs):
            self.check(index, output.outputs[0].token_ids)


def greedy(model: torch.nn.Module, prompt: list[int], count: int, draft: list[int]) -> list[int]:
    """Transformers' greedy tokens, whatever the draft: as many of its tokens as are right are found in one pass."""
    logits = model(torch.tensor([prompt + draft]), use_cache=False).logits[0, len(prompt) - 1 :]
    best = logits.argmax(-1).tolist()
    right = next((at for at, (ours, theirs) in enumerate(zip(draft, best, strict=False)) if ours != theirs), len(draft))
    found = best[: min(right + 1, count)]
    return found if len(found) == count else found + generate(model, prompt + found, count - len(found))


def generate(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        use_cache=getattr(model.config, "sliding_window", None) != 1,  # a cache that keeps no token keeps all of them
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def answers() -> dict[str, tuple[list[list[int]], list[list[int]], list[RequestOutput]]]:
    """Prompts, what Transformers makes of them and what we do, by case: pytest takes a case up again for other lists of
    cases."""
    return {}


@pytest.fixture(scope="module")
def oracle(case: Case, made: Made, answers: dict[str, Any]) -> Iterator[Oracle]:
    model, directory = made
    with torch.inference_mode():
        if case.name not in answers:
            lengths = LENGTHS[::2] if case.shape else LENGTHS
            prompts = [random_ids(length, seed) for seed, length in enumerate(lengths)]
            with Oracle(directory, model, prompts, []).llm() as llm:
                batch = ask(llm, prompts)
                llm.engine.engine.check_integrity()
            texts = zip(prompts, (output.outputs[0].token_ids for output in batch), strict=True)
            expected = [greedy(model, prompt, NUM_TOKENS, draft) for prompt, draft in texts]
            answers[case.name] = prompts, expected, batch
        oracle = Oracle(directory, model, *answers[case.name])
        yield oracle
    assert 100 * oracle.near_ties <= oracle.compared


def ask(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY)


def run(oracle: Oracle, llm: LLM, prompts=None) -> list[RequestOutput]:
    outputs = ask(llm, prompts or oracle.prompts)
    llm.engine.engine.check_integrity()
    return outputs


@FULL
def test_alone(oracle):
    with oracle.llm() as llm:
        for index in (1, 4, 5):  # 17 tokens, one and 64
            oracle.check(index, run(oracle, llm, [oracle.prompts[index]])[0].outputs[0].token_ids)


@pytest.mark.covers("C8")
@pytest.mark.matrix("float32")
def test_in_a_batch_of_mixed_lengths(oracle):
    oracle.check_all(oracle.batch)


@FULL
@pytest.mark.covers("M10", "M11", "J2")
def test_in_chunks_of_7(oracle):
    with oracle.llm(max_num_batched_tokens=7) as llm:
        oracle.check_all(run(oracle, llm))


@FULL
def test_with_a_warm_prefix(oracle):
    with oracle.llm() as llm:
        run(oracle, llm)
        outputs = run(oracle, llm)
        assert [output.num_cached_tokens for output in outputs] == [0, 16, 32, 32, 0, 48]
        oracle.check_all(outputs)


@FULL
def test_after_forced_preemptions(oracle):
    """Every few steps a running request loses its blocks, in the middle of its prompt or of its answer."""
    with oracle.llm(max_num_batched_tokens=40, enable_prefix_caching=False) as llm:
        scheduler, outputs = llm.engine.engine.scheduler, {}
        for index, prompt in enumerate(oracle.prompts):
            llm.engine.add_request(str(index), {"prompt_token_ids": prompt}, GREEDY)
        for step in range(10_000):
            if not llm.engine.has_unfinished_requests():
                break
            if step % 7 == 3 and scheduler.running:
                scheduler.preempt(scheduler.running[step % len(scheduler.running)])
            outputs.update((output.request_id, output) for output in llm.engine.step())
        assert scheduler.num_preemptions > 10
        llm.engine.engine.check_integrity()
    for index in range(len(oracle.prompts)):
        oracle.check(index, outputs[str(index)].outputs[0].token_ids)


@FULL
def test_resumed_half_way(oracle):
    """Tokens come back as outputs: the rest follows, as if nothing had happened."""
    half = NUM_TOKENS // 2
    params = replace(GREEDY, seed=0)
    with oracle.llm() as llm:
        engine, outputs = llm.engine.engine, {}
        for index, prompt in enumerate(oracle.prompts):
            engine.add_request(
                EngineRequest(str(index), prompt, params, output_token_ids=oracle.expected[index][:half])
            )
        while engine.has_work:
            for output in engine.step():
                outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
        for index in range(len(oracle.prompts)):
            oracle.check(index, outputs[str(index)], start=half)


@FULL
def test_prompt_logprobs_agree_with_transformers(oracle):
    with oracle.llm(max_num_batched_tokens=40) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in oracle.prompts], params)
    for prompt, output in zip(oracle.prompts, outputs, strict=True):
        expected = oracle.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for position, found in enumerate(output.prompt_logprobs[1:], 1):
            assert next(iter(found)) == prompt[position]
            for token_id, entry in found.items():
                assert math.isclose(entry.logprob, float(expected[position - 1, token_id]), abs_tol=1e-4)


@MODELS
def test_what_was_generated_scores_as_reported(oracle):
    """Generated by decode in a crowd, scored again in one pass: proves cache, positions, masks and batching at once."""
    with oracle.llm(max_num_batched_tokens=24) as llm:
        outputs = run(oracle, llm)
        texts = [prompt + output.outputs[0].token_ids for prompt, output in zip(oracle.prompts, outputs, strict=True)]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        scored = llm.generate([{"prompt_token_ids": text} for text in texts], params)
    for prompt, output, score in zip(oracle.prompts, outputs, scored, strict=True):
        reported = [next(iter(entry.values())).logprob for entry in output.outputs[0].logprobs]
        again = [next(iter(entry.values())).logprob for entry in score.prompt_logprobs[len(prompt) :]]
        torch.testing.assert_close(torch.tensor(reported), torch.tensor(again), atol=1e-4, rtol=0)
        assert math.isclose(output.outputs[0].cumulative_logprob, sum(reported), abs_tol=1e-3)


@FULL
def test_24_requests_through_6_rows(oracle):
    """Lengths 1 to 400 at once, more than fit: Transformers' tokens for all 24, nothing lost."""
    prompts = [random_ids(1 + (index * 53) % 400, seed=index) for index in range(24)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    with oracle.llm(max_num_seqs=6, max_num_batched_tokens=256) as llm:
        crowd = llm.generate(asked, params)
        llm.engine.engine.check_integrity()
        stats = llm.engine.engine.stats()
        assert stats.kv_blocks_free == stats.kv_blocks_total
    drafts = [output.outputs[0].token_ids for output in crowd]
    expected = [greedy(oracle.model, prompt, 4, draft) for prompt, draft in zip(prompts, drafts, strict=True)]
    wide = replace(oracle, prompts=prompts, expected=expected)
    wide.check_all(crowd)
    oracle.compared, oracle.near_ties = wide.compared, wide.near_ties
