"""Compare predictions of `penstock plan` for this machine with measurements.

python -m penstock_lab.simulator.plan_check MODEL

The weights are random if MODEL's directory has only a config.json. For each form of the weights, two kinds of cases are
predicted and measured: the step of some streams, and the time to the first token of one prompt. Every round
measures each case once.

The rates that predictions are based on are those of `penstock bench machine`, measured right before and right after the
cases of a form, because the rates of a shared machine change within minutes; a prediction is the mean of both. The exit
code is 1 if one prediction is more than 15 % from the mean of its measurements, or if the median of these errors is
more than 7 %.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock import EngineConfig, SamplingParams
from penstock.assembly import BuiltEngine, build_engine
from penstock.interface.messages import EngineRequest
from penstock.weights.hub import resolve_model
from penstock_lab.planner.fit import Budget
from penstock_lab.planner.forecast import DECODE, PREFILL, Load
from penstock_lab.planner.machines import Hardware, load_hardware
from penstock_lab.planner.planned import PlannedModel
from penstock_lab.planner.report import Question, answer
from penstock_lab.simulator.this_machine import as_hardware, measure_machine

FORMS = ("none", "int8", "int4")
STREAMS = (1, 8, 32)
PROMPT_LENS = (128, 1024, 3072)
PROMPT_OF_STREAMS = 32  # prompt tokens of each stream
STEPS, WARMUP_STEPS = 16, 2  # steps in a measurement, and steps before it
RAMP_STEPS = 128  # maximum number of steps until all streams have begun
ONE_LIMIT, MEDIAN_LIMIT = 0.15, 0.07
UNLIMITED = 2**50

Case = tuple[str, int]  # a phase, and its number of streams or the length of its prompt


def main(argv: list[str] | None = None) -> int:
    """Print every prediction beside its measurement. Return 1 if the errors exceed the limits."""
    parser = argparse.ArgumentParser(prog="penstock_lab.simulator.plan_check", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--quantization", nargs="+", default=FORMS, metavar="FORM")
    parser.add_argument("--streams", nargs="*", type=int, default=STREAMS, metavar="N")
    parser.add_argument("--prompt-len", nargs="*", type=int, default=PROMPT_LENS, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument(
        "--hardware", metavar="NAME", help="predict for this hardware instead of the machine that was measured"
    )
    args = parser.parse_args(argv)
    rates = _measured_rates if args.hardware is None else partial(load_hardware, args.hardware)
    cases = [*((DECODE, count) for count in args.streams), *((PREFILL, length) for length in args.prompt_len)]
    errors, after = [], rates()
    for form in args.quantization:
        options = _options(args.model, form, cases)
        measured = measure(options, cases, args.rounds)
        before, after = after, rates()
        predicted = [predict(options, cases, hardware) for hardware in (before, after)]
        for case in cases:
            errors.append(_compare(form, case, [found[case] for found in predicted], measured[case]))
    median = statistics.median(errors)
    print(f"median {median:.1%}, largest {max(errors):.1%} of {len(errors)}")
    return 0 if median <= MEDIAN_LIMIT and max(errors) <= ONE_LIMIT else 1


def _options(model: str, form: str, cases: list[Case]) -> dict[str, Any]:
    longest = max([PROMPT_OF_STREAMS + STEPS + RAMP_STEPS, *(size for phase, size in cases if phase == PREFILL)])
    has_weights = any(resolve_model(model, weights=False).glob("*.safetensors"))
    return {
        "model": model,
        "quantization": None if form == "none" else form,
        "load_format": "auto" if has_weights else "dummy",
        "max_model_len": longest + 16,
        "max_num_seqs": max([1, *(size for phase, size in cases if phase == DECODE)]),
        "enable_prefix_caching": False,
    }


def predict(options: dict[str, Any], cases: list[Case], hardware: Hardware) -> dict[Case, dict[str, Any]]:
    """Compute what `penstock plan` predicts for each case."""
    streams = [size for phase, size in cases if phase == DECODE]
    prompt_lens = [size for phase, size in cases if phase == PREFILL]
    load = Load(sorted({1, *streams}), prompt_lens or [1], [PROMPT_OF_STREAMS + STEPS // 2])
    planned = PlannedModel.read(EngineConfig.from_options(**options))
    result = answer(planned, Question(Budget(UNLIMITED, 0), hardware, load))
    found: dict[Case, dict[str, Any]] = {}
    for item in result["predictions"]:
        if item["phase"] == DECODE:
            found[DECODE, item["batch"]] = item
        elif item["batch"] == 1:
            found[PREFILL, item["prompt_len"]] = item
    return found


def measure(options: dict[str, Any], cases: list[Case], rounds: int) -> dict[Case, list[float]]:
    """Measure the seconds of each case in every round."""
    built = build_engine(EngineConfig.from_options(**options))
    rng = random.Random(0)
    found: dict[Case, list[float]] = {case: [] for case in cases}
    for number in range(rounds + 1):
        for phase, size in cases:
            take: Callable[[BuiltEngine, random.Random, int], float]
            take = _step_seconds if phase == DECODE else _first_token_seconds
            if number or phase == DECODE:  # the first round records the program of a step (runner/model_runner.py)
                found[phase, size].append(take(built, rng, size))
    built.engine.shutdown()
    return found


def _step_seconds(built: BuiltEngine, rng: random.Random, streams: int) -> float:
    """Measure the seconds of a step that gives each of the streams a token."""
    engine = built.engine
    for index in range(streams):
        _send(built, rng, str(index), PROMPT_OF_STREAMS, STEPS + RAMP_STEPS)
    while len(engine.step()) < streams:  # until no stream still computes its prompt
        pass
    for _ in range(WARMUP_STEPS):
        engine.step()
    started = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    seconds = time.perf_counter() - started
    for index in range(streams):
        engine.abort(str(index))
    while engine.has_work:
        engine.step()
    return seconds / STEPS


def _first_token_seconds(built: BuiltEngine, rng: random.Random, prompt_len: int) -> float:
    """Measure the seconds from a prompt to its first token."""
    _send(built, rng, "prompt", prompt_len, 1)
    started = time.perf_counter()
    while built.engine.has_work:
        built.engine.step()
    return time.perf_counter() - started


def _send(built: BuiltEngine, rng: random.Random, name: str, prompt_len: int, output_len: int) -> None:
    ids = rng.choices(range(built.info.vocab_size), k=prompt_len)
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    built.engine.add_request(EngineRequest(name, ids, params))


def _measured_rates() -> Hardware:
    return as_hardware(measure_machine())


def _compare(form: str, case: Case, predicted: list[dict[str, Any]], measured: list[float]) -> float:
    """Print a case. Return the relative error of the mean of its predictions."""
    phase, size = case
    times = [float(item["seconds"]) for item in predicted]
    error = statistics.mean(times) / statistics.mean(measured) - 1
    what = f"a step of {size} streams" if phase == DECODE else f"first token after {size}"
    print(f"{form:<8} {what:<24} predicted {_in_ms(times)}  measured {_in_ms(measured)}  {error:+7.1%}", flush=True)
    return abs(error)


def _in_ms(times: list[float]) -> str:
    return f"{1e3 * statistics.mean(times):9.1f} ms ({1e3 * min(times):.1f} to {1e3 * max(times):.1f})"


if __name__ == "__main__":
    sys.exit(main())
