"""A planner that remembers plans what the planner without memory does."""

import random
from dataclasses import fields

import numpy as np
import pytest

from penstock.kernels.attention.items import TILE
from penstock.kernels.attention.plan import AttentionPlan, Planner, steps_with_same_tiles
from tests.kernels.test_attention_plan import LLAMA, Step


def same(one: AttentionPlan, other: AttentionPlan) -> bool:
    pairs = ((getattr(one, field.name), getattr(other, field.name)) for field in fields(AttentionPlan))
    return all(np.array_equal(a, b) and getattr(a, "dtype", None) == getattr(b, "dtype", None) for a, b in pairs)


@pytest.mark.parametrize(
    ("window", "sinks", "chunked"), [(None, 0, False), (100, 0, False), (100, 70, False), (100, 0, True)]
)
@pytest.mark.parametrize("cores", [1, 2, 64])
@pytest.mark.covers("A28")
def test_steps_of_decoding_in_a_row(window: int | None, sinks: int, cores: int, chunked: bool) -> None:
    """Guards against: a plan kept where a tile, the window, the batch, a block table or the kind of step changed."""
    chosen = random.Random(cores)
    cached, kept = [60, 2040, 4100, 1], 0
    planner = Planner(LLAMA, 16, window, sinks, cores, chunked)
    for number in range(150):
        new = [1] * len(cached)
        if number % 40 == 20:
            new[0] = 70  # a chunk of a prompt beside decoding
        elif number % 50 > 35:
            new = [1 + (index + number // 50) % 4 for index in range(len(cached))]  # drafts
        shared = [chosen.choice([0, 2048]) if number % 30 > 25 else 0 for _ in cached[1:]]
        step = Step(list(zip(cached, new, strict=True)), LLAMA, 16, window, sinks, cores, shared, chunked)
        before = list(planner._plans.values())
        found = planner.plan(step.query_start_loc, step.seq_lens, step.block_table)
        assert same(found, step.plan())
        kept += list(planner._plans.values()) == before and planner._seen is not None
        if planner._seen is not None:
            assert planner.renew(found, step.seq_lens)
            assert same(found, step.plan())
        cached = [length + count for length, count in zip(cached, new, strict=True)]
        if number % 25 == 24:
            cached = [*cached[1:], chosen.randrange(5000)]
        elif number % 35 == 34:
            cached.append(TILE - 1)
    assert kept > 60  # it does remember


@pytest.mark.parametrize(("window", "chunked"), [(None, False), (100, False), (100, True), (7, True)])
def test_steps_for_which_a_plan_holds(window: int | None, chunked: bool) -> None:
    """Guards against a draft model that computes a step with the plan of other tiles, or makes a plan for each."""
    planner = Planner(LLAMA, 16, window, chunked=chunked)
    tables = np.zeros((1, 1), np.int32), np.array([0, 1], np.int32)

    def tiles(length: int) -> AttentionPlan:
        return planner.plan(tables[1], np.array([length], np.int32), tables[0])

    lengths = range(1, 330)
    plans = [tiles(length).items.tobytes() for length in range(1, 460)]
    for length in lengths:
        (steps,) = steps_with_same_tiles(np.array([length], np.int32), window, chunked=chunked)
        assert len(set(plans[length - 1 : length - 1 + steps])) == 1
        if window is None:
            assert steps == TILE - (length - 1) % TILE
