"""Measure the costs of steps: the model itself computes a mix of steps, which a flight recorder records."""

import random
import time
from typing import Any

from penstock import EngineConfig, SamplingParams
from penstock.assembly import BuiltEngine, build_engine
from penstock.client.recorder import Recorder, describe
from penstock.client.records import Bundle, Ring, make_bundle
from penstock.interface.messages import EngineRequest
from penstock_lab.simulator.costs import LinearCosts, MeasuredStep, fit_costs
from penstock_lab.simulator.recorded import measured_steps

RING_BYTES = 2**26
SECONDS = 8.0  # time after which no further load begins, except in the first round
MAX_PROMPT_TOKENS = 1024  # tokens of a prompt
LONG_PROMPTS = 4  # long prompts in a load; more prompts are shorter, so that a round of a large model takes a minute
OUTPUT_LEN = 24


def measure_costs(options: dict[str, Any]) -> LinearCosts:
    return fit_costs(measure_steps(options))


def measure_steps(options: dict[str, Any]) -> list[MeasuredStep]:
    """Load the model of EngineConfig options and measure its steps here, for about SECONDS or at least one round.

    Raises:
        ModelLoadError, InvalidRequestError: as `build_engine`.
    """
    return measured_steps(record_mix(build_engine(EngineConfig.from_options(**options))))


def record_mix(built: BuiltEngine) -> Bundle:
    """Record a mix of loads: few and many sequences, short and long prompts, alone and beside streams."""
    engine = built.engine
    ring = Ring.create(RING_BYTES)
    engine.observe(Recorder(ring, describe(engine, built.config, built.info)))
    rng, ended_at, round_number = random.Random(0), time.monotonic() + SECONDS, 0
    longest = max(1, min(MAX_PROMPT_TOKENS, engine.max_model_len - OUTPUT_LEN))
    while round_number == 0 or time.monotonic() < ended_at:
        count = 1
        while count <= engine.scheduler.max_num_seqs:
            for index in range(count):
                prompt_len = longest // rng.choice((1, 4, 16)) // max(1, count // LONG_PROMPTS)
                _send(built, f"{round_number}-{count}-{index}", rng, prompt_len)
            while engine.has_work:
                engine.step()
            count *= 2
            if round_number and time.monotonic() > ended_at:
                break
        round_number += 1
    engine.shutdown()
    bundle = make_bundle(ring.read(), "calibration").decoded()
    return bundle


def _send(built: BuiltEngine, name: str, rng: random.Random, prompt_len: int) -> None:
    ids = rng.choices(range(built.info.vocab_size), k=max(1, prompt_len))
    output_len = rng.randint(2, OUTPUT_LEN)  # requests end one after the other, so that all numbers of sequences occur
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    built.engine.add_request(EngineRequest(name, ids, params))
