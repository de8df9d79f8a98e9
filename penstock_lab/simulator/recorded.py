"""The data that a simulation takes from a flight recorder: the times of steps, and the decisions in them.

The record is a file, or is made here: the model itself computes a mix of steps (`measure_costs`).
"""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock import EngineConfig, InvalidRequestError, SamplingParams
from penstock.assembly import BuiltEngine, build_engine
from penstock.client.recorder import Recorder, describe
from penstock.client.records import MAGIC, Aborted, Arrived, Begun, Bundle, Planned, Ring, make_bundle, unpack_ids
from penstock.errors import invalid
from penstock.interface.messages import EngineRequest
from penstock.interface.step import RequestStepOutput, SchedulerOutput, StepOutput
from penstock_lab.bench.record_history import EngineStart, RecordedStep, history, unpack
from penstock_lab.simulator.costs import LinearCosts, MeasuredStep, Shape, fit_costs, read_costs
from penstock_lab.simulator.replica import MakeEngine, VirtualClock

RING_BYTES = 2**26
SECONDS = 8.0  # time after which no further load begins, except in the first round
MAX_PROMPT_TOKENS = 1024  # tokens of a prompt
LONG_PROMPTS = 4  # long prompts in a load; more prompts are shorter, so that a round of a large model takes a minute
OUTPUT_LEN = 24


def load_costs(path: Path) -> LinearCosts:
    """Read the costs in a file: JSON, or a record whose steps are fitted.

    Raises:
        InvalidRequestError: the file is neither, or the record has too few steps.
    """
    try:
        with path.open("rb") as file:
            is_record = file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise invalid("costs", f"{str(path)!r} cannot be read: {error.strerror}") from None
    return fit_costs(measured_steps(unpack(path.read_bytes()))) if is_record else read_costs(path)


def measured_steps(bundle: Bundle, since: float = 0.0) -> list[MeasuredStep]:
    """List the steps of a record that were immediately followed by another one, because they share a request.

    Their times go from plan to plan, so that they include all that an engine does between two steps.

    since: Unix time in seconds; earlier steps are left out.
    """
    found = []
    for before, after in pairwise(history(bundle.records)):
        if (
            not (isinstance(before, RecordedStep) and isinstance(after, RecordedStep))
            or before.results is None
            or before.time < since
        ):
            continue
        ids = {item.request_id for item in before.plan.scheduled}
        if after.plan.step_id == before.plan.step_id + 1 and any(i.request_id in ids for i in after.plan.scheduled):
            found.append(MeasuredStep(Shape.of(before.plan.scheduled), after.time - before.time))
    return found


class _Replayed:
    """An Executor that answers with recorded results, and keeps the plans that it gets.

    Attributes:
        decided: the plan that the engine has just made.
    """

    depth = 1

    def __init__(self) -> None:
        self.decided: SchedulerOutput | None = None
        self.results = StepOutput(0, {})

    def submit(self, scheduler_output: SchedulerOutput) -> None:
        self.decided = scheduler_output

    def collect(self, handle: None) -> StepOutput:
        return self.results

    def shutdown(self) -> None: ...


def decisions(bundle: Bundle, make_engine: MakeEngine) -> Iterator[tuple[SchedulerOutput, SchedulerOutput]]:
    """Drive a new engine with the arrivals and results of a record. Yield the recorded and the new plan of each step.

    Raises:
        InvalidRequestError: the record does not begin with its engine, or a step of it failed.
    """
    first = bundle.records[0]
    if not isinstance(first, Begun) or first.requests or first.continued:
        raise InvalidRequestError("bundle: it begins after the engine's start, so its decisions cannot be followed")
    requests = _requests(bundle)
    steps = iter([item for item in history(bundle.records) if not isinstance(item, EngineStart)])
    clock, executor = VirtualClock(), _Replayed()
    engine = make_engine(executor, clock)
    for record in bundle.records:
        match record:
            case Arrived():
                clock.now = record.time
                engine.add_request(requests.get(record.request_id) or _stand_in(record))
            case Aborted():
                engine.abort(record.request_id)
            case Planned():
                step = next(steps)
                clock.now = record.time
                executor.results = _results(step)
                engine.step()
                if executor.decided is None:
                    raise InvalidRequestError("bundle: a step was recorded where the engine has nothing to do")
                yield step.plan, replace(executor.decided, checksum_logits=step.plan.checksum_logits)
            case _:
                pass


def _requests(bundle: Bundle) -> dict[str, EngineRequest]:
    """Restore the requests of a record as they were sent."""
    found: dict[str, EngineRequest] = {}
    for record in bundle.records:
        for item in record.new if isinstance(record, Planned) else ():
            ids = unpack_ids(item.token_ids)[: item.num_prompt_tokens]
            request = EngineRequest(item.request_id, ids, item.params, item.choice)
            found.setdefault(item.request_id, request)
    return found


def _stand_in(record: Arrived) -> EngineRequest:
    """Make a substitute for a request that left before its first step, so that only its length is known."""
    params = SamplingParams(temperature=0.0, max_tokens=1)
    return EngineRequest(record.request_id, [0] * record.num_prompt_tokens, params)


def _results(step: RecordedStep) -> StepOutput:
    if step.results is None:
        raise InvalidRequestError("bundle: a step failed, or was not finished; such a record cannot be followed")
    errors, rows = step.results.errors, enumerate(zip(step.plan.scheduled, step.results.token_ids, strict=True))
    results = {item.request_id: RequestStepOutput(ids, error=errors.get(index)) for index, (item, ids) in rows}
    return StepOutput(step.plan.step_id, results)


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
    return make_bundle(ring.read(), "calibration").decoded()


def _send(built: BuiltEngine, name: str, rng: random.Random, prompt_len: int) -> None:
    ids = rng.choices(range(built.info.vocab_size), k=max(1, prompt_len))
    output_len = rng.randint(2, OUTPUT_LEN)  # requests end one after the other, so that all numbers of sequences occur
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    built.engine.add_request(EngineRequest(name, ids, params))
