"""The samplers' bits on a real engine: alone, in a crowd that is preempted, and resumed after every token."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.assembly import build_engine
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.errors import InvalidRequestError
from penstock.interface.messages import EngineOutput, EngineRequest
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import SamplerState
from tests.hf_models import make_llama, random_ids
from tests.kernels.packed import levels

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")
NUM_TOKENS = 14
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "kernels": "cpu", "threads": 1}
KINDS: list[dict[str, Any]] = [
    {"mirostat": 1, "mirostat_tau": 3.0},
    {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.5},
    {"xtc_probability": 0.5, "xtc_threshold": 0.001},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1, "temperature": 0.0},
    {"typical_p": 0.8, "top_h": 0.9, "no_repeat_ngram_size": 1},
    {"exponential_decay_length_penalty": [3, 1.5], "suppress_tokens": [4], "forced_eos_token_id": 9},
    {"allowed_token_ids": [3, 5, 40, 41, 42, 90], "temperature": 2.0},
    {"thinking_token_budget": 4, "thinking_token_ids": ((), (9,)), "temperature": 2.0},
    {},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"))[1]


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    made = build_engine(EngineConfig.from_options(model=str(directory), max_num_seqs=8, **OPTIONS)).engine
    yield made
    made.shutdown()


def request(index: int) -> EngineRequest:
    params = SamplingParams(seed=5, max_tokens=NUM_TOKENS, ignore_eos=True, **KINDS[index % len(KINDS)])
    return EngineRequest(str(index), random_ids(5 + 3 * index, index), params)


def ask(engine: Engine, *requests: EngineRequest, preempt: bool = False) -> dict[str, list[EngineOutput]]:
    found: dict[str, list[EngineOutput]] = {}
    for item in requests:
        engine.add_request(item)
    steps = 0
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            found.setdefault(output.request_id, []).append(output)
        steps += 1
        if preempt and steps > 1 and steps < 40 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[steps % len(engine.scheduler.running)])
    engine.check_integrity()
    return found


def told(outputs: list[EngineOutput]) -> list[tuple[int, SamplerState | None]]:
    """Each token, with the sampler's state after it."""
    return [(token, output.sampler_state) for output in outputs for token in output.new_token_ids]


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[list[tuple[int, SamplerState | None]]]:
    return [told(ask(engine, request(index))[str(index)]) for index in range(len(KINDS))]


@pytest.mark.covers("C11", "C12")
def test_in_a_crowd_that_is_preempted(engine: Engine, alone: list[Any]) -> None:
    """Guards against mirostat's state lost with the row, noise that a preemption shifts, and a neighbour's shape."""
    before = engine.stats().num_preemptions_total
    found = ask(engine, *(request(index) for index in range(len(KINDS))), preempt=True)
    assert engine.stats().num_preemptions_total > before + 5
    assert [told(found[str(index)]) for index in range(len(KINDS))] == alone
    assert len({str(answer) for answer in alone}) == len(KINDS)
    assert all(state is not None for _, state in alone[0] + alone[1])
    assert all(state is None for answer in alone[2:] for _, state in answer)
    assert alone[5][-1][0] == 9


@pytest.mark.covers("C11", "C12")
def test_resumed_after_any_token(engine: Engine, alone: list[Any]) -> None:
    """Guards against a resumed request whose state begins afresh: the rest is what would have come."""
    for cut in (1, 6, NUM_TOKENS - 1):
        resumed = [
            replace(request(i), output_token_ids=[token for token, _ in answer[:cut]], sampler_state=answer[cut - 1][1])
            for i, answer in enumerate(alone)
        ]
        found = ask(engine, *resumed, preempt=cut == 6)
        assert [told(found[str(index)]) for index in range(len(KINDS))] == [answer[cut:] for answer in alone]


def test_outputs_without_mirostats_state_are_refused(engine: Engine) -> None:
    """Guards against a request that goes on with another state than it had, in silence; and against one of NaN."""
    for wrong in (None, (), (float("nan"),), (float("inf"),), (1e300,)):
        with pytest.raises(InvalidRequestError) as caught:
            engine.add_request(replace(request(0), output_token_ids=[5], sampler_state=wrong))
        assert caught.value.param == "sampler_state"
    assert not engine.has_work
