"""LLM with its engine in another process: the calls and answers of one in this process, and deaths in between."""

import os
import signal
import subprocess
import sys

import pytest

from penstock import LLM, EngineDeadError, InvalidRequestError, ModelLoadError, NotSupportedError, SamplingParams
from penstock.client.input_processor import InputProcessor, PromptRequest
from penstock.client.open_requests import OpenRequests
from penstock.client.step_client import ChildClient
from penstock.interface.outputs import RequestOutput
from penstock.kernels.cpu.library import load_library
from tests.client.test_process import HARM, HARMFUL
from tests.fakes_engine import model_info

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
    died, answers, before = False, {}, llm.client.status().restarts
    for index, output in llm.stream(prompts, params):
        if not died and index == 1:
            os.kill(llm.client.status().pid, signal.SIGKILL)
            died = True
        answers[index] = output
    assert [answers[index].outputs[0].text for index in (1, 2)] == [e.outputs[0].text for e in expected[1:]]
    assert llm.client.status().restarts == before + 1


def test_one_step_at_a_time(llm):
    assert llm.engine is llm.client
    llm.engine.add_request("a", "Once upon a time", GREEDY)
    with pytest.raises(InvalidRequestError, match="in use"):
        llm.engine.add_request("a", "One day", GREEDY)
    unnamed = llm.engine.add_request(None, "One day", LONG)
    assert unnamed != "a"
    with pytest.raises(InvalidRequestError, match="under way"):
        llm.generate("Once")
    last = {}
    while "a" not in last or not last["a"].finished:
        last |= {output.request_id: output for output in llm.engine.step()}
    llm.engine.add_request("a", "One day", LONG)  # the id is free at once
    assert all(llm.engine.abort(name) for name in ("a", unnamed))
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
import os, signal
from penstock import LLM, SamplingParams
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and Python leaves it so
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
    """Guards against a wait that cannot be interrupted, an engine that the terminal's signal ends, and this test's own
    failure where it is run as a background job."""
    script = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            os.killpg(process.pid, signal.SIGINT)  # to the engine too, as a terminal does
            os.kill(process.pid, signal.SIGCONT)
            assert process.stdout.read() == "interrupted False\n5\n"
            assert process.wait() == 0
        finally:
            process.kill()


class Mailboxes:
    """A ProcessClient without an engine: the test puts the outputs into the mailboxes of requests."""

    def __init__(self):
        self.requests = OpenRequests()
        self.inputs = InputProcessor(None, model_info(512, 100))

    async def start(self):
        pass

    async def open(self, request):
        opened = self.inputs.process(request)
        self.requests.open(opened)
        return opened

    async def next_output(self, request):
        return await request.mailbox.get()

    def close(self, request):
        self.requests.close(request)

    async def shutdown(self):
        pass


@pytest.fixture
def mailboxes():
    made = ChildClient(Mailboxes, None)
    yield made
    made.shutdown()


def test_outputs_are_returned_before_the_end_of_the_engine(mailboxes):
    """Guards against outputs that are lost with the exception of another request, in whatever order they are taken,
    and against one death that is reported once per request."""
    requests = [mailboxes.open(PromptRequest([1, 2], params=GREEDY, request_id=name)) for name in ("a", "b", "c", "d")]
    dead = EngineDeadError("scripted")
    done = RequestOutput("b", None, [1, 2], [], finished=True)

    async def put():
        for request, item in zip(requests, (dead, done, dead, InvalidRequestError("refused")), strict=True):
            request.mailbox.put(item)

    mailboxes._run(put)
    found = []
    while mailboxes.has_unfinished_requests():
        try:
            found += mailboxes.step(3)
        except (EngineDeadError, InvalidRequestError) as error:
            found.append(error)
    assert found[0] is done
    assert [str(error) for error in found[1:]] == ["scripted", "refused"]


def test_what_was_discarded_is_neither_returned_nor_raised(mailboxes):
    """Guards against a later call that is refused, or fails, because of the requests of one that has failed."""
    requests = [mailboxes.open(PromptRequest([1, 2], params=GREEDY, request_id=name)) for name in ("a", "b", "c")]
    done = RequestOutput("c", None, [1, 2], [], finished=True)

    async def put():
        for request, item in zip(requests, (InvalidRequestError("a"), InvalidRequestError("b"), done), strict=True):
            request.mailbox.put(item)

    mailboxes._run(put)
    mailboxes._run(mailboxes._next_outputs)  # as if Ctrl-C had ended the call of `step` just before it returned
    mailboxes.discard(["a", "b", "c"])
    assert not mailboxes.has_unfinished_requests()
    assert mailboxes.step() == []


def test_a_wait_for_requests_that_were_aborted_meanwhile(mailboxes):
    """Guards against a ValueError of asyncio if another thread aborts the last request before the wait has begun."""
    assert mailboxes._run(mailboxes._next_outputs) is None
    assert mailboxes.step(2) == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns of forks with threads
@pytest.mark.parametrize("call", ["generate", "shutdown", "with"])
def test_a_forked_process_is_refused(llm, call):
    """Guards against waiting for ever: the thread of the event loop does not run in the copy."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        code = 1
        try:
            match call:
                case "generate":
                    llm.generate("Once", GREEDY)
                case "shutdown":
                    llm.shutdown()
                    code = 0
                case "with":
                    with llm:
                        pass
                    code = 0
        except EngineDeadError as error:
            code = 0 if "forked" in str(error) else 1
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert llm.generate("Once", GREEDY)[0].finished


def test_a_shutdown_that_was_interrupted_can_be_repeated(monkeypatch):
    """Guards against an engine that lives on because Ctrl-C ended the first call of `shutdown`."""

    def interrupted(*args):
        raise KeyboardInterrupt

    made = ChildClient(Mailboxes, None)
    with monkeypatch.context() as patched:
        patched.setattr(made, "_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.shutdown()
    assert made._thread.is_alive()
    made.shutdown()
    assert not made._thread.is_alive()
