"""How long streams wait for other requests' prompts: on a virtual clock, with steps that take time per token."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.interface.step import SchedulerOutput
from tests.engine.test_engine import prompt_of
from tests.engine.timed import Timed
from tests.fakes_engine import request

Cost = Callable[[int, int, float], float]  # tokens of streams, of prompts, and pairs of a prompt token and one it sees


def parts(timed: Timed, step: SchedulerOutput) -> tuple[int, int, float]:
    """Tokens of streams and of prompts in a step, and how many tokens the latter attend to."""
    prompts = [item for item in step.scheduled if item.request_id not in timed.first]
    num_tokens = sum(item.num_new_tokens for item in prompts)
    pairs = sum(item.num_new_tokens * (item.num_computed_tokens + item.num_new_tokens / 2) for item in prompts)
    return step.num_tokens - num_tokens, num_tokens, pairs


def run_timed(timed: Timed, cost: Cost) -> tuple[list[float], list[int]]:
    """Run to the end. The time by which prompts made each step with streams longer, and their tokens in it."""
    stalls, chunks = [], []

    def seconds(step: SchedulerOutput) -> float:
        streams, prompts, pairs = parts(timed, step)
        if streams and prompts:
            stalls.append(cost(streams, prompts, pairs) - cost(streams, 0, 0.0))
            chunks.append(prompts)
        return cost(streams, prompts, pairs)

    timed.cost = seconds
    timed.run()
    return stalls, chunks


@settings(max_examples=20)
@given(
    fixed=st.floats(0.001, 0.2),
    stream=st.floats(0.0, 0.005),
    prompt=st.floats(1e-5, 0.003),
    free=st.integers(0, 24),
    pair=st.floats(0.0, 1.0),
    stall=st.floats(0.004, 0.2),
    prompts=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 12)), min_size=2, max_size=6),
)
def test_no_stream_waits_longer_than_that(
    fixed: float, stream: float, prompt: float, free: int, pair: float, stall: float, prompts: list[tuple[int, int]]
) -> None:
    """Guards against a chunk that is chosen before its cost is known: by a step that was shorter, had fewer streams or
    a shorter context, or in which the tokens beside the streams were free."""
    timed = Timed.make(max_stall_s=stall, num_blocks=200, max_num_batched_tokens=256, enable_prefix_caching=False)
    free = min(free, int(fixed / prompt))  # computing them takes no longer than reading the weights

    def cost(streams: int, tokens: int, pairs: float) -> float:
        return fixed + stream * streams + prompt * max(0, tokens - free) + prompt * pair * pairs / 1024

    for index, (length, count) in enumerate(prompts):
        timed.add(request(str(index), prompt_of(length, index), count))
        timed.cost = lambda step: cost(*parts(timed, step))
        timed.step()
    stalls, _ = run_timed(timed, cost)
    most = stall + prompt * (1 + pair * 0.3)  # a further token, of at most 300 before it, is tried
    assert all(seconds <= most * (1 + 1e-9) for seconds in stalls)


def test_the_chunk_uses_what_it_may() -> None:
    """Guards against a bound that is kept by computing next to nothing: at 1 ms a token, 30 ms are 30 tokens, after a
    few steps, also for a prompt that comes when the last one has ended with a small rest."""
    timed = Timed.make(max_stall_s=0.030, num_blocks=200, max_num_batched_tokens=256, max_num_seqs=4)
    timed.cost = lambda step: 0.02 + 0.001 * step.num_tokens
    timed.add(request("stream", [1, 2], 200))
    timed.step()
    timed.step()
    for name in ("a", "b"):
        timed.add(request(name, prompt_of(400, ord(name)), 1))
    _, chunks = run_timed(timed, lambda streams, tokens, pairs: 0.02 + 0.001 * (streams + tokens))
    assert sum(chunks) == 800
    assert len(chunks) <= 36
    assert sorted(chunks)[len(chunks) // 2] >= 28
    assert max(chunks) <= 30


def test_without_streams_prompts_have_the_whole_step() -> None:
    """Guards against a bound that slows prompts down where nobody waits for them."""
    timed = Timed.make(max_stall_s=0.001, num_blocks=200, max_num_batched_tokens=256)
    for name in "abc":
        timed.add(request(name, prompt_of(256, ord(name)), 1))
    timed.run()
    assert [step.num_tokens for step in timed.executor.steps] == [256, 256, 256]


@pytest.mark.parametrize("stall", [1e-6, 1e-3])
def test_a_bound_that_is_too_tight_starves_no_prompt(stall: float) -> None:
    """Guards against prompts that are never computed: a token of a step is always theirs."""
    timed = Timed.make(max_stall_s=stall, num_blocks=200)
    timed.add(request("stream", [1, 2], 120))
    timed.step()
    timed.add(request("other", prompt_of(60), 1))
    timed.run()
    assert timed.ended["other"] < timed.ended["stream"]


def test_a_step_that_was_slow_by_chance_is_forgotten() -> None:
    """Guards against one hiccup of the machine after which prompts are computed token by token for ever."""
    timed = Timed.make(max_stall_s=0.030, num_blocks=200, max_num_batched_tokens=256)
    timed.add(request("stream", [1, 2], 200))
    timed.step()
    timed.step()
    timed.add(request("a", prompt_of(400), 1))
    costs = iter([0.05] * 4 + [2.0])
    timed.cost = lambda step: next(costs, 0.02 + 0.001 * step.num_tokens)
    for _ in range(5):
        timed.step()
    _, chunks = run_timed(timed, lambda streams, tokens, pairs: 0.02 + 0.001 * (streams + tokens))
    assert max(chunks) >= 28
