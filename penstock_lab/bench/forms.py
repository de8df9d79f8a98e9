"""Measure the cost of a form of the answers: the same requests with and without it, alternately on one engine.

A run sends all requests at once. The time to the first token is measured with one request alone, after the form has
been used, so that compiling the form is not counted. Tokens that the form determines need no step of the model, so a
run with the form may have fewer steps than a run without it.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from penstock import (
    EngineConfig,
    EngineError,
    FinishReason,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from penstock.assembly import build_engine
from penstock.client.step_client import InProcessClient
from penstock.errors import check_int, invalid
from penstock.interface.messages import ModelInfo
from penstock_lab.bench.machine import Progress

FIRST_TOKENS = 3  # pairs of first tokens in each round


@dataclass(frozen=True, slots=True)
class FormContest:
    """num_prompts simultaneous requests of input_len random ids, which generate output_len tokens each.

    They run `rounds` times without the form and with it. Every answer must be longer than output_len.
    """

    num_prompts: int
    input_len: int
    output_len: int
    form: StructuredOutputsParams
    rounds: int = 5

    def __post_init__(self) -> None:
        for name, low in (("num_prompts", 1), ("input_len", 1), ("output_len", 2), ("rounds", 1)):
            check_int(name, getattr(self, name), low, 10**6)


@dataclass(slots=True)
class _Run:
    """One run: its time, the time of each step that decoded for all requests, and the time of its first token."""

    seconds: float = 0.0
    first_token_s: float = 0.0
    steps: list[float] = field(default_factory=list)


def measure_forms(
    options: dict[str, Any], contest: FormContest, *, announce: Callable[[ModelInfo], None], progress: Progress
) -> dict[str, Any]:
    """Build an engine from EngineConfig options and return the figures.

    Raises:
        InvalidRequestError: an option is invalid, or an answer is complete too early.
        EngineError: a request failed.
    """
    built = build_engine(EngineConfig.from_options(**{"enable_prefix_caching": False, **options}))
    announce(built.info)
    client = InProcessClient(built.engine, built.info, None, forms=built.forms)
    runs: list[tuple[_Run, _Run]] = []
    firsts: list[tuple[float, float]] = []
    with progress("runs", 2 * contest.rounds + 2) as advance:
        for index in range(contest.rounds + 1):  # the first round warms up
            rng = random.Random(index)
            prompts = [
                rng.choices(range(built.info.vocab_size), k=contest.input_len) for _ in range(contest.num_prompts)
            ]
            plain = _run(client, prompts, contest.output_len, None)
            advance(1)
            runs.append((plain, _run(client, prompts, contest.output_len, contest.form)))
            advance(1)
            for prompt in prompts[:FIRST_TOKENS]:
                pair = [_run(client, [prompt], 1, form).first_token_s for form in (None, contest.form)]
                firsts.append((pair[0], pair[1]))
    client.shutdown()
    return {
        "model": built.info.model,
        "system_fingerprint": built.info.system_fingerprint,
        "threads": built.config.numerics.threads,
        **{name: getattr(contest, name) for name in ("num_prompts", "input_len", "output_len", "rounds")},
        **_figures(runs[1:], contest.num_prompts * contest.output_len),
        "first_token_ms": 1e3 * median(plain for plain, _ in firsts[FIRST_TOKENS:]),
        "extra_first_token_ms": 1e3 * median(formed - plain for plain, formed in firsts[FIRST_TOKENS:]),
    }


def _run(
    client: InProcessClient, prompts: list[list[int]], output_len: int, form: StructuredOutputsParams | None
) -> _Run:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=output_len,
        ignore_eos=True,
        detokenize=False,
        structured_outputs=form,
        output_kind=RequestOutputKind.DELTA,
    )
    run, began = _Run(), time.perf_counter()
    for prompt in prompts:
        client.add_request(None, prompt, params)
    while client.has_unfinished_requests():
        step_began = time.perf_counter()
        outputs = client.step()
        now = time.perf_counter()
        for output in outputs:
            if output.error is not None:
                raise EngineError(f"a request failed, so nothing was measured: {output.error}")
            if any(choice.finish_reason is FinishReason.STOP for choice in output.outputs):
                message = f"an answer was complete before {output_len} tokens; require longer answers"
                raise invalid("json_schema_file", message)
        if outputs and run.first_token_s:
            run.steps.append(now - step_began)
        elif outputs:
            run.first_token_s = now - began
    run.seconds = time.perf_counter() - began
    return run


def _figures(pairs: list[tuple[_Run, _Run]], num_tokens: int) -> dict[str, Any]:
    """Compute medians over rounds, and the ratio of the two runs of each round, which are neighbours in time."""
    shares = sorted(plain.seconds / formed.seconds for plain, formed in pairs)
    figures: dict[str, Any] = {}
    for place, name in enumerate(("plain", "formed")):
        figures[f"{name}_tokens_per_s"] = median(num_tokens / pair[place].seconds for pair in pairs)
        figures[f"{name}_steps"] = sum(len(pair[place].steps) + 1 for pair in pairs)
        figures[f"{name}_step_ms"] = 1e3 * median(step for pair in pairs for step in pair[place].steps)
    return {**figures, "throughput": median(shares), "throughput_low": shares[0], "throughput_high": shares[-1]}
