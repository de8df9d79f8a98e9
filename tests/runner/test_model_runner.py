"""ModelRunner and LocalExecutor: caches, prompt log-probabilities, errors of one row and of a whole step."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.errors import EngineError
from penstock.interface.step import CacheGroup, SchedulerOutput, TokenLogprobs
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.tensors import LOGITS_ROWS
from penstock.layers.module import ForwardContext
from penstock.runner.model_runner import ModelRunner, allocate_kv_caches, layer_groups
from tests.fakes import CacheModel, FakeOps, TinyModel, resolved_config, tiny_config

PROMPTS = {"a": [7, 3, 11], "b": list(range(1, 40)), "c": [20]}


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_tokens_come_from_the_right_slots(bench: Callable[..., Any], chunk: int) -> None:
    """Guards against a key stored in, or read from, another request's slot, in any cut of the prompt."""
    made = bench(CacheModel([None]))
    for name, prompt in PROMPTS.items():
        made.scheduler.add(name, prompt)
    for _ in range(60):
        made.step(chunk=chunk)
    for name, prompt in PROMPTS.items():
        tokens = made.scheduler.requests[name].token_ids
        assert len(tokens) > len(prompt) + 15
        assert tokens == [*prompt, *made.model.continued(prompt, len(tokens) - len(prompt))]


def test_rows_that_are_not_scheduled_keep_their_state(bench: Callable[..., Any]) -> None:
    """Guards against packing by row number instead of by what was scheduled, and against its order."""
    made = bench(CacheModel([None]))
    for name, prompt in PROMPTS.items():
        made.scheduler.add(name, prompt)
    made.step()
    for only in (["c"], ["b", "a"], ["a"], ["c", "b"]):
        made.step(only=only)
    for name, prompt in PROMPTS.items():
        tokens = made.scheduler.requests[name].token_ids
        assert tokens[len(prompt) :] == made.model.continued(prompt, len(tokens) - len(prompt))


@pytest.mark.parametrize("chunk", [1, 37, 1000])
def test_prompt_logprobs_in_chunks_equal_whole(bench: Callable[..., Any], chunk: int) -> None:
    """Guards against a prompt token scored twice or never at a chunk's edge, and against unbounded logits."""
    made = bench(max_model_len=512)
    long = [(7 * i * i + 3) % 40 for i in range(2 * LOGITS_ROWS + 9)]
    prompts = {"a": long, "b": [4, 1, 8], "c": [21, 22, 23, 24, 25, 26, 27]}
    asked = {"a": 2, "b": None, "c": 0}
    for name, prompt in prompts.items():
        made.scheduler.add(name, prompt, prompt_logprobs=asked[name])
    found: dict[str, list[TokenLogprobs]] = {name: [] for name in prompts}
    while made.scheduler.requests["a"].num_computed < len(long):
        for name, result in made.step(chunk=chunk).items():
            found[name] += result.prompt_logprobs or []
    assert found["b"] == []
    check_scores(made.model, prompts["a"], found["a"], 2)
    check_scores(made.model, prompts["c"], found["c"], 0)
    assert max(made.model.logits_rows) <= LOGITS_ROWS


def check_scores(model: TinyModel, prompt: list[int], found: list[TokenLogprobs], num_top: int) -> None:
    assert [entry.token_ids[0] for entry in found] == prompt[1:]
    for position, entry in enumerate(found):
        raw = torch.log_softmax(model.logits(prompt[position], position), -1)
        assert entry.logprobs == pytest.approx(raw[entry.token_ids].tolist(), abs=1e-6)
        assert entry.token_ids[1:] == raw.topk(num_top).indices.tolist()
        assert entry.rank == 1 + int((raw > raw[prompt[position + 1]]).sum())


def test_logits_only_where_somebody_looks(bench: Callable[..., Any]) -> None:
    """Guards against logits for every token of a prompt: for 128k ids that is most of the work."""
    made = bench()
    made.scheduler.add("a", list(range(1, 30)))
    made.step(chunk=10)
    assert made.model.logits_rows == []
    made.step(chunk=19)
    assert made.model.logits_rows == [1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_row_fails_alone(bench: Callable[..., Any], bad: float) -> None:
    """Guards against one request's NaN that ends the step, or that shifts the other rows' tokens and parameters."""
    healthy = {"a": {"temperature": 1.0, "seed": 1}, "c": {"temperature": 1.0, "seed": 2, "logprobs": 1}}
    alone = {name: bench().generate(name, [4, 5], 3, **params) for name, params in healthy.items()}
    made = bench(TinyModel(nan_token=39, bad=bad))
    made.scheduler.add("a", [4, 5], **healthy["a"])
    made.scheduler.add("bad", [4, 39])
    made.scheduler.add("c", [4, 5], **healthy["c"])
    made.scheduler.add("scored", [39, 4], prompt_logprobs=0)
    results = made.step()
    for name in ("bad", "scored"):
        assert "not finite" in results[name].error
        assert results[name].new_token_ids == []
        assert results[name].prompt_logprobs is None
        made.scheduler.remove(name)
    made.step()
    made.step()
    assert {name: made.scheduler.requests[name].token_ids[2:] for name in healthy} == alone


def test_only_bad_rows(bench: Callable[..., Any]) -> None:
    """Guards against a sampler called with no rows at all."""
    made = bench(TinyModel(nan_token=39))
    made.scheduler.add("bad", [39])
    assert made.step()["bad"].error is not None


class FailingModel(TinyModel):
    """Raises whenever token 13 is in the batch."""

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        if 13 in input_ids.tolist():
            raise RuntimeError("thirteen")
        return super().__call__(input_ids, ctx)


def test_a_failed_step_leaves_the_executor_usable(bench: Callable[..., Any]) -> None:
    """Guards against rows that leak, or requests that cannot come back, after a step raised as a whole."""
    made = bench(FailingModel(), max_num_seqs=2)
    made.scheduler.add("a", [1, 2])
    made.step()
    made.scheduler.add("b", [13])
    handle = made.executor.submit(made.scheduler.step())
    with pytest.raises(RuntimeError, match="thirteen"):
        made.executor.collect(handle)
    made.scheduler.remove("a")
    made.scheduler.remove("b")
    for name in "ac":
        made.scheduler.add(name, [1, 2])
    results = made.step()
    assert results["a"].new_token_ids == results["c"].new_token_ids


def test_steps_are_collected_in_order_and_once(bench: Callable[..., Any]) -> None:
    """Guards against two steps swapped: the second would run before its keys are cached."""
    made = bench()
    first, second = (made.executor.submit(SchedulerOutput(step_id, [], [])) for step_id in range(2))
    with pytest.raises(EngineError, match="in which they were submitted"):
        made.executor.collect(second)
    assert [made.executor.collect(handle).step_id for handle in (first, second)] == [0, 1]
    with pytest.raises(EngineError, match="once each"):
        made.executor.collect(first)


def test_a_step_without_tokens_only_forgets(bench: Callable[..., Any]) -> None:
    """Guards against an empty batch handed to a model."""
    made = bench(max_num_seqs=1)
    made.scheduler.add("a", [1])
    made.step()
    made.scheduler.remove("a")
    assert made.step() == {}
    made.scheduler.add("b", [1])
    assert made.step()["b"].error is None


def test_shutdown_twice(bench: Callable[..., Any]) -> None:
    """Guards against a second shutdown that fails, and against a step after it that fails obscurely."""
    made = bench()
    made.executor.shutdown()
    made.executor.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        made.executor.collect(made.executor.submit(SchedulerOutput(0, [], [])))


def test_caches_follow_their_groups() -> None:
    """Guards against layers that share a cache, or get another group's number of blocks."""
    groups = [CacheGroup((0, 2), None, 3, 16), CacheGroup((1,), 20, 5, 32)]
    assert layer_groups(groups, 3) == (0, 1, 0)
    model_config = tiny_config(40, (2, 2, 4), num_hidden_layers=3)
    caches = allocate_kv_caches(FakeOps(), groups, resolved_config(), model_config)
    assert [len(cache.slots) for cache in caches] == [48, 160, 48]
    assert len({id(cache) for cache in caches}) == 3
    for layers in [((0, 1), (1,)), ((0,), (2,))]:
        with pytest.raises(EngineError, match="exactly once"):
            layer_groups([CacheGroup(part, None, 1, 16) for part in layers], 2)


def test_runner_refuses_what_does_not_fit() -> None:
    """Guards against a model with more layers than caches that fails only in its first step."""
    groups = [CacheGroup((0,), None, 1, 16)]
    with pytest.raises(EngineError, match="each of the 2 layers"):
        ModelRunner(TinyModel(), FakeOps(), groups, resolved_config(), tiny_config(40, num_hidden_layers=2))


@pytest.mark.parametrize("ops", [FakeOps(), ReferenceOps(torch.float32)])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5}])
def test_a_row_with_every_token_masked_fails_alone(bench: Callable[..., Any], ops: Any, params: dict[str, Any]) -> None:
    """Guards against id 0 chosen because nothing else was left, although it is masked itself."""
    made = bench(TinyModel(vocab_size=3), ops=ops, eos_token_ids=(0,))
    words = ((1,), (2,))
    made.scheduler.add("a", [1, 2], logprobs=1)
    made.scheduler.add("bad", [1, 2], bad_words_token_ids=words, min_tokens=2, logprobs=1, **params)
    made.scheduler.add("c", [2, 1])
    for _ in range(2):
        results = made.step()
        assert results["bad"].error is not None
        assert "mask" in results["bad"].error
        assert results["bad"].new_token_ids == []
        assert results["bad"].logprobs is None
        batch = made.runner.batch
        assert batch.history(batch.row("bad")).tolist() == [1, 2]
        assert [len(results[name].new_token_ids) for name in "ac"] == [1, 1]
        if "bad" in made.scheduler.requests:
            made.scheduler.remove("bad")
            made.scheduler.add("bad", [1, 2], bad_words_token_ids=words, min_tokens=2, **params)
    tokens = {name: made.scheduler.requests[name].token_ids for name in "ac"}
    alone = bench(TinyModel(vocab_size=3), ops=ops, eos_token_ids=(0,))
    assert tokens["a"][2:] == alone.generate("a", [1, 2], 2)
    assert tokens["c"][2:] == alone.generate("c", [2, 1], 2)
