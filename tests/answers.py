"""Requests, and what an engine answers to them, to the bit: shared by the tests that nothing changes it."""

from collections.abc import Iterable
from typing import Any

from penstock.engine.engine import Engine
from penstock.interface.messages import EngineOutput, EngineRequest
from penstock.interface.sampling_params import SamplingParams
from tests.hf_models import random_ids

MAX_MODEL_LEN = 112
LENGTHS = [5, 17, 33, 48, 1, 80, 20, 16, 31, 2, 40, 7, 63, 12]
PROMPTS = [random_ids(length, seed) for seed, length in enumerate(LENGTHS)]
PROMPTS[8] = PROMPTS[5][:40] + PROMPTS[8]  # begins like another one, and goes on differently: a prefix in part
WATCHED = [0, 1, 2, 4, 5, 8]  # whose answers are compared
NUM_TOKENS = 12

Answer = tuple[Any, ...]


def request(index: int, *, prompt_logprobs: bool = True, output_token_ids: Iterable[int] = ()) -> EngineRequest:
    """Odd ones are sampled. No cached prefix has the prompt's log-probabilities, so who asks for them reuses none."""
    params = SamplingParams(
        temperature=0.8 * (index % 2),
        seed=3,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=1 if prompt_logprobs else None,
    )
    return EngineRequest(str(index), PROMPTS[index], params, output_token_ids=list(output_token_ids))


def ask(engine: Engine, requests: Iterable[EngineRequest]) -> dict[int, list[EngineOutput]]:
    """What the engine says to these requests, asked together."""
    outputs: dict[int, list[EngineOutput]] = {}
    for item in requests:
        engine.add_request(item)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            outputs.setdefault(int(output.request_id), []).append(output)
    return outputs


def answer(outputs: list[EngineOutput]) -> Answer:
    """Ids, every reported log-probability, and the prompt's, exactly."""
    ids = [token for output in outputs for token in output.new_token_ids]
    logprobs = [entry for output in outputs for entry in output.logprobs or []]
    assert len(ids) == len(logprobs)
    return ids, logprobs, [entry for output in outputs for entry in output.prompt_logprobs or []]


def ask_alone(engine: Engine, indices: Iterable[int] = WATCHED) -> dict[int, Answer]:
    """What each request answers by itself."""
    return {index: answer(ask(engine, [request(index)])[index]) for index in indices}


def check(found: dict[int, list[EngineOutput]], alone: dict[int, Answer], *, prompts: bool = True) -> None:
    """The answers of those watched are the ones they gave alone."""
    for index, expected in alone.items():
        got = answer(found[index])
        assert got[0] == expected[0], f"ids of prompt {index}"
        assert got[1] == expected[1], f"log-probabilities of prompt {index}"
        assert not prompts or got[2] == expected[2], f"log-probabilities in prompt {index}"


def check_resumed(engine: Engine, alone: dict[int, Answer]) -> None:
    """Some of an answer's tokens come back as outputs: the rest follows, as if nothing had happened."""
    cuts = {index: 1 + index % (NUM_TOKENS - 1) for index in alone}
    found = ask(engine, [request(index, output_token_ids=alone[index][0][:cut]) for index, cut in cuts.items()])
    for index, cut in cuts.items():
        ids, logprobs, _ = answer(found[index])
        assert ids == alone[index][0][cut:], f"prompt {index} from token {cut} on"
        assert logprobs == alone[index][1][cut:], f"prompt {index} from token {cut} on"
