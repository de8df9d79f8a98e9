"""LLM with its engine in another process: the calls and answers of one in this process, and deaths in between."""

import os
import signal
import subprocess
import sys

import pytest

from penstock import LLM, EngineDeadError, InvalidRequestError, ModelLoadError, NotSupportedError, SamplingParams
from penstock.kernels.cpu.library import load_library
from tests.client.test_process import HARM, HARMFUL

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
LONG = SamplingParams(max_tokens=400, ignore_eos=True, seed=3)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    plugin = tmp_path_factory.mktemp("user") / "harmful.py"
    plugin.write_text(HARMFUL)
    with LLM(model="demo", engine_in_process=False, max_num_seqs=8, imports=[str(plugin)]) as made:
        yield made


@pytest.mark.skipif(load_library() is None, reason="the reference kernels do not promise the same bits")
@pytest.mark.covers("F36")
def test_the_answers_of_an_engine_in_this_process_also_after_a_death(llm):
    """Guards against other seeds, and tokens that are lost with the process."""
    prompts, params = ["Once upon a time", "One day", [1, 462]], [SamplingParams(n=2, max_tokens=40), LONG, GREEDY]
    with LLM(model="demo", engine_in_process=False) as other, LLM(model="demo") as ours:
        expected = ours.generate(prompts, params)
        assert other.generate(prompts, params) == expected
    died = False
    answers = {}
    for index, output in llm.stream(prompts, params):
        if not died and index == 1:
            os.kill(llm.client.status().pid, signal.SIGKILL)
            died = True
        answers[index] = output
    assert [answers[index].outputs[0].text for index in (1, 2)] == [e.outputs[0].text for e in expected[1:]]
    assert llm.client.status().restarts == 1


def test_one_step_at_a_time(llm):
    assert llm.engine is llm.client
    llm.engine.add_request("a", "Once upon a time", GREEDY)
    with pytest.raises(InvalidRequestError, match="in use"):
        llm.engine.add_request("a", "One day", GREEDY)
    assert llm.engine.add_request(None, "One day", LONG) != "a"
    with pytest.raises(InvalidRequestError, match="under way"):
        llm.generate("Once")
    last = {}
    while "a" not in last or not last["a"].finished:
        last |= {output.request_id: output for output in llm.engine.step()}
    llm.engine.add_request("a", "One day", LONG)  # the id is free at once
    assert all(llm.engine.abort(name) for name in last)
    assert not llm.engine.abort("a")
    assert llm.engine.step() == []
    assert not llm.engine.has_unfinished_requests()
    assert last["a"].outputs == llm.generate("Once upon a time", GREEDY)[0].outputs


def test_refusals_leave_nothing_behind(llm):
    with pytest.raises(InvalidRequestError):
        llm.generate(["One day", ""], GREEDY)
    for _ in llm.stream(["One day", "Once"], LONG):
        break
    assert not llm.client.has_unfinished_requests()
    assert llm.client.status().journal_requests == 0
    answer = llm.chat([{"role": "user", "content": "What is 3 + 4?"}], GREEDY)
    assert answer[0].finished


def test_a_request_that_kills_engines_ends_with_its_error_alone(llm):
    """Guards against an exception that costs the caller the answers of all other prompts."""
    good, bad = llm.generate(["Once", "Once"], [GREEDY, HARM])
    assert (good.error, len(good.outputs[0].token_ids)) == (None, 12)
    assert "died each of the 3 times" in bad.error
    assert (bad.finished, bad.outputs[0].finish_reason) == (True, "error")


def test_what_cannot_work_is_refused_by_name(llm):
    with pytest.raises(NotSupportedError, match="engine: it is in another process"):
        _ = llm.engine.engine
    with pytest.raises(NotSupportedError, match="engine_in_process"):
        LLM(model=object(), engine_in_process=False)
    with pytest.raises(InvalidRequestError, match="standby"):
        LLM(model="demo", standby=True)
    with pytest.raises(ModelLoadError):
        LLM(model="/nowhere/at/all", engine_in_process=False)
    with pytest.raises(InvalidRequestError, match="max_model_len"):  # only the engine process knows the model's context
        LLM(model="demo", engine_in_process=False, max_model_len=2048)


def test_the_end(llm):
    with LLM(model="demo", engine_in_process=False) as other:
        other.client.add_request("a", "Once", LONG)
    other.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        other.generate("Once")
    assert not other.client.abort("a")


INTERRUPTED = """
import os, signal, threading
from penstock import LLM, SamplingParams
with LLM(model="demo", engine_in_process=False) as llm:
    params = SamplingParams(max_tokens=1000, ignore_eos=True, seed=1)
    try:
        for number, _ in enumerate(llm.stream(["Once"], params)):
            if number == 3:
                os.kill(os.getpid(), signal.SIGSTOP)  # until the test has sent its signal
    except KeyboardInterrupt:
        print("interrupted", llm.client.has_unfinished_requests(), flush=True)
    print(len(llm.generate("Once", SamplingParams(max_tokens=5, ignore_eos=True))[0].outputs[0].token_ids), flush=True)
"""


def test_ctrl_c_ends_a_call_and_not_the_engine():
    """Guards against a wait that cannot be interrupted, and an engine that the terminal's signal ends."""
    script = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            os.killpg(process.pid, signal.SIGINT)  # to the engine too, as a terminal does
            os.kill(process.pid, signal.SIGCONT)
            assert process.stdout.read() == "interrupted False\n5\n"
            assert process.wait() == 0
        finally:
            process.kill()
