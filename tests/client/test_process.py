"""AsyncLLM and its engine process: death, abort, refusal and the parent's end. Real processes, the demo model."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from penstock import (
    AsyncLLM,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    ModelLoadError,
    PoolingParams,
    RequestFailedError,
    SamplingParams,
)
from penstock.client import engine_handle
from penstock.client.engine_client import EngineState
from penstock.client.open_requests import OpenRequest
from penstock.kernels.cpu.library import load_library
from tests.server.harness import wait_until

LONG = SamplingParams(max_tokens=900, ignore_eos=True, output_kind="delta", seed=1)
SHORT = SamplingParams(max_tokens=8, seed=1)


async def final(llm: AsyncLLM, prompt="Once upon a time", params=SHORT):
    last = None
    async for output in llm.generate(prompt, params):
        last = output
    return last


async def until(condition, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def llm(loop):
    """One engine for all tests that leave it usable."""
    made = AsyncLLM(model="demo", max_num_seqs=4)
    loop.run(made.start())
    yield made
    loop.run(made.shutdown())


def test_streams_and_choices(loop, llm):
    async def scenario():
        texts, indices = [], set()
        params = SamplingParams(n=3, max_tokens=8, seed=5, output_kind="delta")
        async for output in llm.generate("Once upon a time", params):
            indices |= {choice.index for choice in output.outputs}
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=8, seed=5, output_kind="delta")):
            texts.append(output.outputs[0].text)
        whole = await final(llm, params=SamplingParams(max_tokens=8, seed=5))
        assert indices == {0, 1, 2}
        assert "".join(texts) == whole.outputs[0].text
        assert len(texts) > 3
        assert whole.finished
        assert whole.seed == 5

    loop.run(scenario())


def test_same_seed_same_choices_which_differ(loop, llm):
    async def scenario():
        params = SamplingParams(n=3, max_tokens=12, seed=5)
        first, second = await asyncio.gather(final(llm, params=params), final(llm, params=params))
        texts = [choice.text for choice in first.outputs]
        assert texts == [choice.text for choice in second.outputs]
        assert len(set(texts)) == 3

    loop.run(scenario())


def test_leaving_the_loop_aborts_soon(loop, llm):
    """Guards against a consumer that went away being computed for to the end."""

    async def scenario():
        stream = llm.generate("Once", LONG)
        async for _ in stream:
            if llm.status().stats.num_running:
                break
        before = llm.status()
        await stream.aclose()
        await until(lambda: llm.status().stats.num_running == 0)
        after = llm.status()
        assert after.num_aborted_total == before.num_aborted_total + 1
        # Steps go on while the abort is under way: two on an idle machine, more on a busy one.
        await asyncio.sleep(0.1)
        assert llm.status().stats.num_steps_total == after.stats.num_steps_total
        assert after.stats.num_generated_tokens_total < before.stats.num_generated_tokens_total + LONG.max_tokens - 1
        assert after.journal_requests == 0
        assert after.stats.kv_blocks_free == after.stats.kv_blocks_total

    loop.run(scenario())


def test_refusals_leave_the_engine_alone(loop, llm):
    async def scenario():
        pid = llm.status().pid
        for prompt in ("", [], [10**9], "x" * 10**6, {"promt": "x"}, 5, ["a"], None):
            with pytest.raises(InvalidRequestError):
                await final(llm, prompt)
        with pytest.raises(InvalidRequestError, match="stop_token_ids"):
            await final(llm, params=SamplingParams(stop_token_ids=[10**6]))
        assert (await final(llm)).finished
        assert llm.status().pid == pid

    loop.run(scenario())


def test_duplicate_request_id_is_refused(loop, llm):
    async def scenario():
        stream = llm.generate("Once", LONG, request_id="mine")
        await anext(stream)
        with pytest.raises(InvalidRequestError, match="in use"):
            await anext(llm.generate("Once", LONG, request_id="mine"))
        assert (await anext(stream)).request_id == "mine"
        await stream.aclose()

    loop.run(scenario())


def test_an_output_that_cannot_be_made_text_ends_its_request_only(loop, llm, monkeypatch):
    """A tokenizer that raises must not silence the supervisor, and with it every other request."""

    async def scenario():
        make_output = OpenRequest.make_output

        def broken(request):
            if request.request_id == "bad":
                raise KeyError("scripted")
            return make_output(request)

        with monkeypatch.context() as patch:
            patch.setattr(OpenRequest, "make_output", broken)
            bad = asyncio.create_task(anext(llm.generate("Once", LONG, request_id="bad")))
            good = await final(llm)
            with pytest.raises(RequestFailedError, match="scripted"):
                await bad
        assert good.finished
        await until(lambda: llm.status().stats.num_running == 0)
        assert (await final(llm)).finished

    loop.run(scenario())


def test_an_id_in_use_is_free_again_only_when_its_reader_has_seen_the_end(loop, llm):
    """A second request under the id of one that has ended but was not read to its end would be lost with it."""

    async def scenario():
        first = llm.generate("Once", SamplingParams(max_tokens=3, output_kind="delta"), request_id="x")
        await anext(first)
        await until(lambda: llm.status().stats.num_running == 0)
        with pytest.raises(InvalidRequestError, match="in use"):
            await anext(llm.generate("Once", SHORT, request_id="x"))
        assert [output async for output in first][-1].finished
        assert (await anext(llm.generate("Once", SHORT, request_id="x"))).request_id == "x"

    loop.run(scenario())


def test_a_slow_reader_gets_the_newest_state_and_no_backlog(loop, llm):
    """Unread cumulative outputs, each with everything so far, would fill the memory."""

    async def scenario():
        stream = llm.generate("Once", SamplingParams(max_tokens=100, ignore_eos=True, seed=1))
        first = await anext(stream)
        await until(lambda: llm.status().stats.num_running == 0)
        rest = [output async for output in stream]
        assert len(first.outputs[0].token_ids) < 100
        assert len(rest) == 1
        assert len(rest[0].outputs[0].token_ids) == 100

    loop.run(scenario())


def test_numpy_numbers_are_numbers(loop, llm):
    async def scenario():
        params = SamplingParams(temperature=np.float64(0.5), top_p=np.float64(0.9), max_tokens=3, logit_bias={5: 1})
        assert (await final(llm, params=params)).finished

    loop.run(scenario())


def test_edges_of_starting_and_ending(monkeypatch):
    """Each of these once waited for ever, or until the process was killed, which would be too late here."""
    monkeypatch.setattr(engine_handle, "EXIT_WAIT_S", 1e6)

    async def attached_and_left():
        llm = AsyncLLM(model="demo")
        await llm.client.attach()
        await asyncio.sleep(0.1)
        await llm.shutdown()

    async def shut_down_while_a_request_waits_for_the_start():
        llm = AsyncLLM(model="demo")
        waiting = asyncio.create_task(final(llm))
        await asyncio.sleep(0.1)
        await llm.shutdown()
        (ended,) = await asyncio.gather(waiting, return_exceptions=True)
        if isinstance(ended, EngineDeadError):
            assert "shut down" in str(ended)
        else:
            assert ended.finished  # the engine had started before it was told to end

    async def used_after_the_end():
        llm = AsyncLLM(model="demo")
        await llm.shutdown()
        await llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await final(llm)

    for scenario in (attached_and_left, shut_down_while_a_request_waits_for_the_start, used_after_the_end):
        asyncio.run(scenario())


def test_a_second_event_loop_is_told_so():
    llm = AsyncLLM(model="demo")
    assert asyncio.run(final(llm)).finished
    with pytest.raises(EngineError, match="event loop"):
        asyncio.run(final(llm))
    asyncio.run(llm.shutdown())


async def test_a_death_does_not_end_a_drain():
    """Draining, and then the engine dies: the new one must not take requests."""
    async with AsyncLLM(model="demo") as llm:
        await llm.start()
        await llm.drain(0.1)
        assert llm.status().state is EngineState.DRAINING
        os.kill(llm.status().pid, signal.SIGKILL)
        await until(lambda: llm.status().restarts == 1)
        await until(lambda: llm.status().state is EngineState.DRAINING)
        with pytest.raises(EngineDeadError, match="draining"):
            await final(llm)


async def test_an_engine_that_never_gets_ready_is_given_up():
    """However long each try takes: a model that does not fit would be loaded for ever."""
    llm = AsyncLLM(model="demo")
    watcher = asyncio.create_task(llm.start())
    killed = set()
    while not watcher.done():
        pid = llm.status().pid
        if pid is not None and pid not in killed:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.01)
    with pytest.raises(EngineDeadError, match="3 times before it was ready"):
        await watcher
    assert llm.status().state is EngineState.FAILED
    assert len(killed) == 3
    await llm.shutdown()


async def test_the_current_directory_is_no_part_of_the_engine(tmp_path, monkeypatch):
    """A queue.py lying where the server is started must not run in the engine process."""
    (tmp_path / "queue.py").write_text("raise SystemExit('run from the current directory')")
    (tmp_path / "torch.py").write_text("raise SystemExit('run from the current directory')")
    monkeypatch.chdir(tmp_path)
    async with AsyncLLM(model="demo") as llm:
        assert (await final(llm)).finished
        assert llm.status().restarts == 0


PROMPTS = ("Once upon a time", "One day", "The old", "Anna")
MIXED = (  # all that an engine or a client keeps of a request beside its tokens
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "temperature": 1.3, "top_p": 0.9, "min_p": 0.02},
    {"seed": 3, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"seed": 4, "logprobs": 3, "prompt_logprobs": 1},
    {"seed": 5, "n": 3},
    {"seed": 6, "stop": ["zzz", "qqq "], "min_tokens": 40},
    {"seed": 7, "top_k": 20, "logit_bias": {5: 2.0}, "bad_words": ["the"]},
)


async def stream_all(llm, num_tokens, *, output_kind="delta"):
    """Return for each of 16 mixed streams all that its reader got, by choice."""

    async def read(prompt, fields):
        params = SamplingParams(**fields, max_tokens=num_tokens, ignore_eos=True, output_kind=output_kind)
        got = {}
        async for output in llm.generate(prompt, params):
            for choice in output.outputs:
                ids, texts, logprobs, reason = got.get(choice.index, ([], "", [], None))
                assert reason is None, "an output after the last"
                logprobs = logprobs + (choice.logprobs or [])
                got[choice.index] = (ids + choice.token_ids, texts + choice.text, logprobs, choice.finish_reason)
        return got

    pairs = [(PROMPTS[(index + turn) % 4], fields) for turn in range(2) for index, fields in enumerate(MIXED)]
    return await asyncio.gather(*(read(prompt, fields) for prompt, fields in pairs))


async def take_its_memory(llm):
    """Let an engine find no memory for a prompt that is longer than all that it has computed in a step so far."""
    resource.prlimit(llm.status().pid, resource.RLIMIT_AS, (0, resource.RLIM_INFINITY))
    await asyncio.gather(final(llm), final(llm, prompt=list(range(9, 900))))


@pytest.mark.covers("F37")
@pytest.mark.skipif(load_library() is None, reason="the reference kernels do not promise the same bits")
async def test_no_stream_notices_that_engines_die(monkeypatch):
    """Whatever ends an engine (a signal, a step without memory), or only stops it: every stream goes on with the next
    token, none lost or changed; and a vector that it was computing comes from the next one, with the same bits."""
    mean = PoolingParams(pooling_type="MEAN")
    monkeypatch.setattr(engine_handle, "MAX_DEATHS", 100)
    monkeypatch.setattr(engine_handle, "SILENCE_S", 1.0)
    async with AsyncLLM(model="demo", max_num_seqs=12) as llm:
        undisturbed = await stream_all(llm, 120)
        vector, pooled = (await llm.embed(PROMPTS[0], mean)).outputs, []
        disturbed = asyncio.create_task(stream_all(llm, 120))
        for restarts, fault in enumerate([None, signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP]):
            tokens = llm.status().stats.num_generated_tokens_total
            await until(lambda: llm.status().stats.num_generated_tokens_total > tokens + 100)  # noqa: B023
            pooled += [asyncio.create_task(llm.embed(PROMPTS[0], mean)) for _ in range(2)]
            await asyncio.sleep(0)  # they are sent
            if fault is None:
                await take_its_memory(llm)
            else:
                os.kill(llm.status().pid, fault)
            await until(lambda: llm.status().restarts == restarts + 1)  # noqa: B023
            assert llm.status().journal_requests > 0
            await until(lambda: llm.status().state is EngineState.READY)
        assert not disturbed.done()
        assert await disturbed == undisturbed
        assert [(await item).outputs for item in pooled] == [vector] * len(pooled)
        assert llm.status().journal_requests == 0


def test_a_request_waits_for_the_next_engine(loop, llm):
    async def scenario():
        whole, before = await final(llm), llm.status().restarts
        os.kill(llm.status().pid, signal.SIGKILL)
        assert (await final(llm)).outputs == whole.outputs
        assert llm.status().restarts == before + 1

    loop.run(scenario())


def test_streams_do_not_go_on_with_other_bits(loop, llm):
    """Guards against a stream whose second half comes from a model that was replaced on disk."""

    async def scenario():
        llm.client._fleet.model_info = replace(llm.model_info, system_fingerprint="penstock-2-of-other-weights")
        stream = asyncio.create_task(final(llm, params=LONG))
        await until(lambda: llm.status().journal_tokens > 0)
        os.kill(llm.status().pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="computes differently: penstock-2-of-other-weights became"):
            await stream
        assert (await final(llm)).finished

    loop.run(scenario())


HARM = SamplingParams(max_tokens=9, seed=666, ignore_eos=True)
HARMFUL = """
import os, signal
from penstock.engine.engine import Engine

add_request, step, harmful = Engine.add_request, Engine.step, set()

def add(engine, request):
    if request.params.seed == 666:
        harmful.add(request.request_id)
    return add_request(engine, request)

def die_at_the_ninth_token(engine):
    outputs = step(engine)
    if any(output.request_id in harmful and output.start_index == 8 for output in outputs):
        os.kill(os.getpid(), signal.SIGSEGV)
    return outputs

Engine.add_request, Engine.step = add, die_at_the_ninth_token
"""


@pytest.mark.skipif(load_library() is None, reason="the reference kernels do not promise the same bits")
async def test_a_request_that_kills_engines_fails_alone(tmp_path):
    """Guards against one request that ends the service for all: after two deaths it is tried alone."""
    plugin = tmp_path / "harmful.py"
    plugin.write_text(HARMFUL)
    async with AsyncLLM(model="demo", imports=[str(plugin)]) as llm:
        long = SamplingParams(max_tokens=300, ignore_eos=True, seed=1)
        whole = await final(llm, params=long)
        streams = [asyncio.create_task(final(llm, params=long)) for _ in range(3)]
        with pytest.raises(RequestFailedError, match="died each of the 3 times that it computed this request"):
            await final(llm, params=HARM)
        for stream in streams:
            assert (await stream).outputs == whole.outputs
        assert llm.status().restarts == 3


def test_health_follows_the_engine_not_the_wish(loop, llm, monkeypatch):
    """A stopped engine is not healthy, idle as it is, and a new request does not change that; the next engine is."""
    monkeypatch.setattr(engine_handle, "SILENCE_S", 1.0)

    async def scenario():
        whole, before = await final(llm), llm.status().restarts
        os.kill(llm.status().pid, signal.SIGSTOP)
        waiting = asyncio.create_task(final(llm))
        await until(lambda: not llm.status().making_progress)
        await until(lambda: llm.status().making_progress)
        assert llm.status().restarts == before + 1
        assert (await waiting).outputs == whole.outputs

    loop.run(scenario())


async def test_shutdown_ends_open_requests_and_the_child():
    llm = AsyncLLM(model="demo")
    await llm.start()
    stream = asyncio.create_task(final(llm, params=LONG))
    await until(lambda: llm.status().stats.num_running == 1)
    pid = llm.status().pid
    await llm.shutdown()
    with pytest.raises(EngineDeadError):
        await stream
    assert not alive(pid)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": "/nowhere/at/all"}, ModelLoadError),
        ({"max_num_seqs": 0}, InvalidRequestError),
        ({"max_sequences": 4}, InvalidRequestError),
        ({"max_model_len": 2048}, InvalidRequestError),  # only the engine process knows the model's context
        ({"kv_cache_memory_bytes": 1000}, InvalidRequestError),
    ],
)
def test_what_cannot_start_says_why(options, error):
    async def scenario():
        llm = AsyncLLM(**options)
        try:
            await llm.start()
        finally:
            await llm.shutdown()

    with pytest.raises(error):
        asyncio.run(scenario())


STUCK = "import threading\nthreading.Event().wait()\n"


async def test_an_engine_that_stands_still_while_it_starts_is_given_up(tmp_path, monkeypatch):
    """Guards against heartbeats that a deadlock in the loading of a model would not stop: a server waited for ever."""
    monkeypatch.setattr(engine_handle, "START_SILENCE_S", 1.0)  # two heartbeats
    monkeypatch.setattr(engine_handle, "LIVENESS_CHECK_S", 0.1)
    plugin = tmp_path / "stuck.py"
    plugin.write_text(STUCK)
    llm = AsyncLLM(model="demo", imports=[str(plugin)])
    try:
        with pytest.raises(EngineDeadError, match="died 3 times before it was ready"):
            await llm.start()
    finally:
        await llm.shutdown()


async def test_an_engine_that_is_stopped_before_its_first_word_is_replaced(monkeypatch):
    """Guards against a process that nobody watches until it has been heard from once."""
    monkeypatch.setattr(engine_handle, "SILENCE_S", 0.5)
    llm = AsyncLLM(model="demo")
    os.kill(llm.status().pid, signal.SIGSTOP)
    try:
        await llm.client.attach()
        await until(lambda: llm.status().restarts > 0)
        monkeypatch.setattr(engine_handle, "SILENCE_S", 60.0)
        await llm.start()
    finally:
        await llm.shutdown()


async def test_an_engine_outlives_the_thread_that_made_its_client():
    """Guards against an engine that the kernel ends with a user's thread, instead of with the user's process."""
    made = []
    thread = threading.Thread(target=lambda: made.append(AsyncLLM(model="demo")))
    thread.start()
    thread.join()
    async with made[0] as llm:
        assert (await final(llm)).finished
        assert llm.status().restarts == 0


PARENT = """
import asyncio, sys
from penstock import AsyncLLM, SamplingParams
async def main():
    async with AsyncLLM(model="demo") as llm:
        await llm.start()
        params = SamplingParams(max_tokens=1000, ignore_eos=True, output_kind="delta")
        async for output in llm.generate("Once", params):
            if len(output.outputs[0].token_ids):
                print(llm.status().pid, "torch" in sys.modules, flush=True)
asyncio.run(main())
"""


@pytest.mark.covers("F37")
def test_the_childs_life_ends_with_its_parents_and_torch_stays_in_the_child():
    """An engine that outlives a killed parent would hold the memory for ever."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    try:
        pid, has_torch = parent.stdout.readline().split()
        assert has_torch == "False"
        assert alive(int(pid))
        parent.kill()
        parent.wait()
        wait_until(lambda: not alive(int(pid)))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def test_a_signal_to_the_whole_group_leaves_the_engine_to_its_client(loop, llm):
    """systemd and Ctrl-C signal the group; the engine must live until the client has drained."""

    async def scenario():
        stream = llm.generate("Once", LONG)
        await anext(stream)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(llm.status().pid, number)
        for _ in range(5):
            await anext(stream)
        await stream.aclose()

    loop.run(scenario())
