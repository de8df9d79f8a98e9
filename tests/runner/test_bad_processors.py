"""Logits processors that misbehave: each ends its own request, with the reason; the others keep their bits."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, AsyncLLM, SamplingParams
from penstock.client import engine_handle
from penstock.interface.plugins import PROCESSORS, TimeLimitError, call_limited, import_files, install_time_limit
from penstock.runner import sampler
from tests.hf_models import make_llama, random_ids

OWN = """
import os, sys, time
import numpy as np
import penstock
import torch

def register(function):
    return penstock.register_logits_processor(function.__name__)(function)

@register
def exits(logits, args):
    sys.exit(3)

@register
def hungry(logits, args):
    raise MemoryError

@register
def deep(logits, args):
    return deep(logits, args)

@register
def cancels(logits, args):
    raise GeneratorExit

@register
def numbers(logits, args):
    return [1.0] * logits.shape[1]

@register
def nothing(logits, args):
    logits += 1

@register
def integers(logits, args):
    return torch.zeros(logits.shape, dtype=torch.int64)

@register
def complexes(logits, args):
    return logits * 1j

@register
def wide(logits, args):
    return torch.cat([logits, logits], dim=1)

@register
def writes_elsewhere(logits, args):
    storage = logits.untyped_storage()  # the whole memory that the row lies in
    torch.tensor([], dtype=torch.float32).set_(storage).fill_(7.0)
    args.append(1)
    args.clear()
    raise RuntimeError("done")

@register
def loops(logits, args):
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            pass

@register
def never_returns(logits, args):
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # as a library that never comes back to Python
    while True:
        time.sleep(60)

@register
def first_argument(logits, args):
    args.append(len(args))
    logits[:, args[0]] = 1e4
    return logits
"""
BAD = {
    "exits": "SystemExit: 3",
    "hungry": "MemoryError",
    "deep": "RecursionError",
    "cancels": "GeneratorExit",
    "numbers": "returned list",
    "nothing": "returned NoneType",
    "integers": "returned torch.int64",
    "complexes": "returned torch.complex64",
    "wide": "returned [1, 398]",
    "writes_elsewhere": "RuntimeError: done",
}
PROMPTS = [random_ids(length, length) for length in (5, 9, 3, 17)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4}


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=5, max_tokens=8, ignore_eos=True, logprobs=2, **fields)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = dict(PROCESSORS)
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)
    yield file
    PROCESSORS.clear()
    PROCESSORS.update(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_llama(tmp_path_factory.mktemp("model"))[1])


@pytest.fixture(scope="module")
def llm(model: str, own: Path) -> Iterator[LLM]:
    import_files([str(own)])
    with LLM(model=model, **OPTIONS) as made:
        yield made


def in_company(llm: LLM, bad: SamplingParams) -> str | None:
    """The error of a bad request, after a look at its company, which must not have noticed it."""
    expected = [llm.generate([prompt], params())[0].outputs[0] for prompt in PROMPTS[1:]]
    outputs = llm.generate(PROMPTS, [bad, *[params()] * 3])
    found = [output.outputs[0] for output in outputs[1:]]
    assert [(item.token_ids, item.logprobs) for item in found] == [(item.token_ids, item.logprobs) for item in expected]
    llm.client.engine.check_integrity()
    return outputs[0].error


@pytest.mark.parametrize("name", BAD)
def test_each_ends_its_own_request(name: str, llm: LLM) -> None:
    """Guards against a user's function that ends the engine or changes a bit of somebody else."""
    error = in_company(llm, params(logits_processors={name: [1, 2]}))
    assert error is not None
    assert error.startswith(f"logits_processors: {name}: {BAD[name]}")


def test_arguments_are_the_requests_own(llm: LLM) -> None:
    """Guards against state that one token's call leaves in the arguments for the next token, choice or request."""
    asked = params(logits_processors={"first_argument": [9]}, n=2)
    for _ in range(2):
        assert [item.token_ids for item in llm.generate([PROMPTS[0]], asked)[0].outputs] == [[9] * 8] * 2


def test_a_slow_one_is_measured_in_the_users_process(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a slow function that everybody waits for at every token."""
    monkeypatch.setattr(sampler, "PROCESSOR_LIMIT_S", 0.0)
    error = in_company(llm, params(logits_processors={"first_argument": [9]}))
    assert error == "logits_processors: first_argument: it took longer than 0 s for one token"


def test_the_alarm_hits_only_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an alarm that comes late and interrupts the engine, and against the loss of a user's handler."""
    before = signal.getsignal(signal.SIGALRM)
    try:
        install_time_limit()
        with pytest.raises(TimeLimitError):
            call_limited(threading.Event().wait, seconds=0.02)
        assert call_limited(lambda: 5, seconds=5.0) == 5
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        os.kill(os.getpid(), signal.SIGALRM)  # nothing is under way
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("name", "message", "silence_s"),
    [
        ("loops", "it took longer than 2 s for one token", 60.0),
        ("never_returns", "the engine process died each of the 3", 1.5),
    ],
)
def test_one_that_does_not_end_fails_alone(
    name: str, message: str, silence_s: float, model: str, own: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a loop in a user's function that takes all streams with it: Python code is interrupted, and an
    engine that cannot be is replaced, until the one request to blame has been tried alone."""
    monkeypatch.setattr(engine_handle, "SILENCE_S", silence_s)
    monkeypatch.setattr(engine_handle, "MAX_DEATHS", 100)  # a busy machine may be silent too
    expected = [llm.generate([prompt], params())[0].outputs[0].token_ids for prompt in PROMPTS[1:]]

    async def ask() -> tuple[str, list[list[int]]]:
        async with AsyncLLM(model=model, **OPTIONS, imports=[str(own)]) as async_llm:

            async def one(prompt: list[int], asked: SamplingParams) -> Any:
                try:
                    async for output in async_llm.generate({"prompt_token_ids": prompt}, asked):
                        last = output
                except Exception as error:
                    return str(error)
                return last.error or last.outputs[0].token_ids

            bad = one(PROMPTS[0], params(logits_processors=[name]))
            others = [one(prompt, params()) for prompt in PROMPTS[1:]]
            error, *answers = await asyncio.gather(bad, *others)
            assert async_llm.status().restarts >= (0 if name == "loops" else 3)
            return error, answers

    error, answers = asyncio.run(ask())
    assert message in error
    assert answers == expected
