"""LLM after exceptions that are not its own: of signal handlers at any point of a call, of a tokenizer, and aborts."""

import inspect
import signal
import sys
import threading
from collections import deque
from contextlib import contextmanager
from random import Random

import pytest

from penstock import LLM, InvalidRequestError, SamplingParams
from penstock.client.open_requests import OpenRequest
from penstock.client.step_client import HeldSignals
from penstock.errors import EngineDeadError
from penstock.interface.sampling_params import RequestOutputKind

PROMPTS = ["Once upon a time", "One day"]
PARAMS = [SamplingParams(max_tokens=4, seed=1), SamplingParams(temperature=0.0, max_tokens=3, n=2)]
ENDLESS = SamplingParams(max_tokens=900, ignore_eos=True, seed=1, output_kind=RequestOutputKind.CUMULATIVE)


@pytest.fixture(scope="module")
def llm():
    with LLM(model="demo", threads=1) as made:
        yield made


class Interruption:
    """Raises a signal where Python calls the handlers of signals: at the beginning of a function, or after C code.

    Not where a generator goes on: an exception of sys.setprofile would skip its `finally`, unlike that of a signal.
    """

    def __init__(self, number, at=None):
        self.number = number
        self.at = at
        self.num_events = 0

    def __call__(self, frame, event, _):
        is_generator = frame.f_code.co_flags & inspect.CO_GENERATOR
        if frame.f_code is Interruption.__exit__.__code__:
            return  # what is to be interrupted has returned already
        self.num_events += event == "c_return" or (event == "call" and not is_generator)
        if self.num_events == self.at:
            self.at = None
            signal.raise_signal(self.number)

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)


@contextmanager
def handler(number, function):
    before = signal.signal(number, function)
    try:
        yield
    finally:
        signal.signal(number, before)


def time_out(*_):
    raise TimeoutError("the program's own")


SIGNALS = [(signal.SIGINT, KeyboardInterrupt, signal.default_int_handler), (signal.SIGALRM, TimeoutError, time_out)]


@pytest.mark.parametrize(("number", "error", "function"), SIGNALS)
@pytest.mark.parametrize("in_process", [True, False])
def test_an_exception_of_a_handler_reaches_the_caller_and_harms_nothing(llm, in_process, number, error, function):
    """Guards against a step left in the executor, requests left in the client, and an exception taken for a failed
    step, wherever in a call of `generate` the handler of a signal raises."""
    expected = [output.outputs for output in llm.generate(PROMPTS, PARAMS)]
    other = llm if in_process else LLM(model="demo", engine_in_process=False)
    with handler(number, function):
        assert [output.outputs for output in other.generate(PROMPTS, PARAMS)] == expected
        with Interruption(number) as counting:
            other.generate(PROMPTS, PARAMS)
        num_raised = 0
        points = sorted(Random(0).sample(range(1, counting.num_events), 120 if in_process else 25))
        for at in points:
            try:
                with Interruption(number, at):
                    other.generate(PROMPTS, PARAMS)
            except error:
                num_raised += 1
            assert signal.getsignal(number) is function
            assert not other.engine.has_unfinished_requests(), at
            assert [output.outputs for output in other.generate(PROMPTS, PARAMS)] == expected, at
        assert num_raised > 0.8 * len(points)  # the other calls had fewer events than the one that was counted
    if in_process:
        other.built.engine.check_integrity()
    else:
        other.shutdown()


def test_outputs_of_an_interrupted_call_of_step_are_returned_by_the_next(llm):
    """Guards against deltas that are lost with the exception of a handler."""
    with handler(signal.SIGALRM, time_out):
        llm.engine.add_request("a", "Once", SamplingParams(temperature=0.0, max_tokens=8, output_kind="delta"))
        ids, at = [], 0
        while llm.engine.has_unfinished_requests():
            at += 150
            try:
                with Interruption(signal.SIGALRM, at):
                    outputs = llm.engine.step()
            except TimeoutError:
                continue
            ids += [token for output in outputs for token in output.outputs[0].token_ids]
    assert ids == llm.generate("Once", SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0].token_ids


def test_signals_are_held_and_come_once():
    """Guards against a handler that is lost with another one's exception, and against a nested block that lets go."""
    calls = []

    def note(number, _):
        calls.append(number)
        raise TimeoutError(number)

    def block():
        with HeldSignals():
            with HeldSignals():
                for number in (signal.SIGALRM, signal.SIGUSR1, signal.SIGALRM):
                    signal.raise_signal(number)
            assert calls == []

    with handler(signal.SIGALRM, note), handler(signal.SIGUSR1, note):
        with pytest.raises(TimeoutError) as caught:
            block()
        assert calls == [signal.SIGALRM, signal.SIGUSR1]
        assert str(caught.value.__context__) == str(signal.SIGALRM.value)
        assert signal.getsignal(signal.SIGALRM) is note


def test_a_second_ctrl_c_ends_a_step_at_once():
    """Guards against a step that hangs and that nobody can end. The model may be half-way through anything then."""

    def twice(*_):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with LLM(model="demo", threads=1) as llm, handler(signal.SIGINT, signal.default_int_handler):
        llm.built.engine.executor.submit = twice
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, PARAMS)
        with pytest.raises(EngineDeadError, match="broken off"):
            llm.generate(PROMPTS, PARAMS)


@pytest.mark.parametrize("in_process", [True, False])
def test_a_request_that_another_thread_aborts_ends_with_what_it_has(llm, in_process):
    """Guards against a call of `generate` that waits for ever for a request that was aborted."""
    other = llm if in_process else LLM(model="demo", engine_in_process=False)
    last = {}
    for index, output in other.stream(PROMPTS, ENDLESS):
        if index == 0 and index not in last:
            thread = threading.Thread(target=other.engine.abort, args=[output.request_id])
            thread.start()
            thread.join()
        last[index] = output
        if last.get(0, output).finished:
            break
    (aborted,) = last[0].outputs
    assert (last[0].finished, aborted.finish_reason) == (True, "abort")
    whole = other.generate(PROMPTS[0], SamplingParams(max_tokens=len(aborted.token_ids), ignore_eos=True, seed=1))[0]
    assert whole.outputs[0].token_ids == aborted.token_ids != []
    if not in_process:
        other.shutdown()


@pytest.mark.parametrize("use", ["add_request", "step"])
def test_an_abort_during_any_use_of_the_engine_is_done_at_its_end(llm, monkeypatch, use):
    """Guards against outputs after an abort: one that came while a request was added, or during a step that failed, was
    only done after the next step."""
    llm.engine.add_request("a", "Once", ENDLESS)

    def used(*_):
        thread = threading.Thread(target=llm.engine.abort, args=["a"])
        thread.start()
        thread.join()
        raise ValueError("scripted")

    monkeypatch.setattr(llm.built.engine, use, used)
    with pytest.raises(ValueError, match="scripted"):
        llm.engine.step() if use == "step" else llm.engine.add_request("b", "Once", ENDLESS)
    assert not llm.engine.has_unfinished_requests()


def test_aborts_at_any_time_leave_nothing_behind(llm):
    """Guards against outputs that are returned twice, or never, if a request is aborted while a step returns them."""
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=1, output_kind=RequestOutputKind.DELTA)
    for seed in range(10):
        chosen, names, is_over = Random(seed), [], threading.Event()

        def abort_some(chosen=chosen, names=names, is_over=is_over):
            while not is_over.is_set():
                if names:
                    llm.engine.abort(chosen.choice(names))

        thread = threading.Thread(target=abort_some)
        thread.start()
        last = {}
        for index, output in llm.stream(PROMPTS * 3, params):
            assert index not in last or not last[index].finished
            last[index] = output
            if index % 2:
                names.append(output.request_id)
        is_over.set()
        thread.join()
        assert [last[index].finished for index in range(6)] == [True] * 6
    assert not llm.engine.has_unfinished_requests()
    llm.built.engine.check_integrity()


def test_blocks_to_save_are_no_requests(tmp_path):
    """Guards against a second call that is refused because the first one has left blocks to save to a directory."""
    prompt, params = {"prompt_token_ids": list(range(1, 33))}, SamplingParams(temperature=0.0, max_tokens=1)
    with LLM(model="demo", threads=1, kv_offload_dir=str(tmp_path)) as llm:
        first = llm.generate(prompt, params)
        assert llm.generate(prompt, params)[0].outputs == first[0].outputs
        assert not llm.engine.has_unfinished_requests()
        assert llm.built.engine.stats().num_saved_blocks_total > 0


def test_an_output_that_cannot_be_made_text_ends_its_request_only(llm, monkeypatch):
    """Guards against a tokenizer's error that loses the outputs of the same step for all other requests."""
    make_output = OpenRequest.make_output

    def broken(request):
        if request.request_id == "bad":
            raise KeyError("scripted")
        return make_output(request)

    monkeypatch.setattr(OpenRequest, "make_output", broken)
    params = SamplingParams(temperature=0.0, max_tokens=5, output_kind="delta")
    for name in ("bad", "good"):
        llm.engine.add_request(name, "Once", params)
    found = {"bad": [], "good": []}
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            found[output.request_id].append(output)
    assert "scripted" in found["bad"][0].error
    assert (len(found["bad"]), found["bad"][0].outputs[0].finish_reason) == (1, "error")
    assert len([token for output in found["good"] for token in output.outputs[0].token_ids]) == 5


def test_ids_that_nobody_has_chosen_meet_no_others(llm):
    """Guards against a request that is refused because of an id that its user has not chosen."""
    first = llm.engine.add_request(None, "Once", ENDLESS)
    word, number = first.split("-")
    chosen = [f"{word}-{int(number) + more}" for more in (1, 3)]
    for name in chosen:
        llm.engine.add_request(name, "Once", ENDLESS)
    names = [first, *chosen, llm.engine.add_request(None, "Once", ENDLESS)]
    assert len(set(names)) == len(names)
    assert all(llm.engine.abort(name) for name in names)


def test_streams_that_begin_at_the_same_time_exclude_each_other(llm, monkeypatch):
    """Guards against two threads that both find no request under way, and then take each other's outputs."""
    is_busy, refusals = llm.client.has_unfinished_requests, []

    def other():
        with pytest.raises(InvalidRequestError, match="under way") as caught:
            next(llm.stream(PROMPTS, ENDLESS))
        refusals.append(caught.value)

    def asked():
        answer = is_busy()
        monkeypatch.undo()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return answer

    monkeypatch.setattr(llm.client, "has_unfinished_requests", asked)
    assert len(llm.generate(PROMPTS, PARAMS)) == 2
    assert len(refusals) == 1
    assert len(llm.generate(PROMPTS, PARAMS)) == 2


class EmptiedMeanwhile(deque):
    """A queue that another thread empties right after the first look at it."""

    num_looks = 0

    def __bool__(self):
        self.num_looks += 1
        return self.num_looks == 1 or len(self) > 0


def test_two_threads_that_abort_at_once(llm, monkeypatch):
    """Guards against an IndexError in the slower of two threads that abort requests."""
    queue = EmptiedMeanwhile()
    monkeypatch.setattr(llm.engine, "_to_abort", queue)
    llm.engine._abort_all()
    assert queue.num_looks == 3
