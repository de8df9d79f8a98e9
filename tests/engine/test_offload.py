"""Blocks beyond the cache: planned on a scripted executor, whose every step checks what its blocks hold."""

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes_engine import ScriptedExecutor, expected_outputs, make_engine, request, run, token_ids

pytestmark = pytest.mark.covers("J23")


@dataclass
class ForgetfulStore:
    """Says of what was saved that it is there, and finds at random that it is not."""

    executor: ScriptedExecutor
    survives: bool
    loss: float
    random: Random

    def holds(self, group: int, block_hash: bytes) -> bool:
        return (group, block_hash) in self.executor.stored

    def fetch(self, group: int, block_hash: bytes) -> bool:
        if self.random.random() < self.loss:
            del self.executor.stored[group, block_hash]
        return self.holds(group, block_hash)

    def counters(self) -> dict[str, int]:
        return {"num_saved_blocks_total": len(self.executor.stored)}


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    blocks=st.integers(11, 26),
    chunk=st.integers(4, 70),
    windows=st.sampled_from([(None,), (20,), (None, 9), (33, 1)]),
    sinks=st.sampled_from([0, 20]),
    survives=st.booleans(),
    loss=st.sampled_from([0.0, 0.2, 1.0]),
    salts=st.booleans(),
)
def test_any_crowd_gets_its_solo_tokens(seed, blocks, chunk, windows, sinks, survives, loss, salts):
    """Guards against a block that is saved too late, loaded to the wrong place, shared before it is loaded, or lost."""
    random = Random(seed)
    engine = make_engine(
        num_blocks=blocks,
        windows=windows,
        sinks=sinks,
        max_num_seqs=4,
        max_num_batched_tokens=chunk,
        store=lambda executor: ForgetfulStore(executor, survives, loss, random),
    )
    heads = [[random.randrange(997) for _ in range(100)] for _ in range(3)]
    for _ in range(4):
        prompts = {}
        for index in range(random.randint(1, 6)):
            prompt = random.choice(heads)[: random.randint(1, 100)] + [random.randrange(9)] * random.randint(0, 20)
            prompts[str(index)] = prompt[:120]
            salt = random.choice([None, "a"]) if salts else None
            engine.add_request(request(str(index), prompts[str(index)], max_tokens=6, cache_salt=salt))
        outputs = run(engine)
        for name, prompt in prompts.items():
            assert token_ids(outputs[name]) == expected_outputs(prompt, 6, min((w for w in windows if w), default=None))
        engine.check_integrity()
        assert not engine.has_work
        assert engine.kv_cache.num_free == engine.kv_cache.num_blocks


@pytest.mark.parametrize("survives", [False, True])
def test_what_fell_out_comes_back(survives):
    """Guards against a store that is filled and never asked, and against equal prompts that each load the same."""
    engine = make_engine(num_blocks=12, store=lambda executor: ForgetfulStore(executor, survives, 0.0, Random(1)))
    prompts = [[start + i for i in range(100)] for start in (0, 200, 400)]
    for index, prompt in enumerate(prompts):
        engine.add_request(request(str(index), prompt))
        run(engine)
    for choice in range(2):
        engine.add_request(request(f"again {choice}", prompts[0]))
    outputs = run(engine)
    assert [outputs[f"again {choice}"][0].num_cached_tokens for choice in range(2)] == [96, 96]
    assert engine.stats().num_loaded_blocks_total == 6
    assert engine.stats().num_saved_blocks_total > 6
