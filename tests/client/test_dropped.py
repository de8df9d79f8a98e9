"""Engines in other processes whose clients were dropped: they end, and Python warns, as of files left open."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time

import pytest

from penstock import LLM, AsyncLLM, SamplingParams
from penstock.ranks.children import children
from tests.server.harness import WAIT_S

ENDLESS = SamplingParams(max_tokens=900, ignore_eos=True)


def ends(pid):
    """Return whether a process ends, whether or not somebody has waited for it."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def is_reaped(pid):
    """Return whether a child of this process ends and is waited for, so that no zombie stays."""
    deadline = time.monotonic() + WAIT_S
    while pid in children() and time.monotonic() < deadline:
        time.sleep(0.01)
    return pid not in children()


def test_an_llm_that_is_dropped_ends_its_process_and_its_thread():
    """Guards against an engine process, and the thread of its client, that stay until the program ends."""
    before = threading.enumerate()
    llm = LLM(model="demo", engine_in_process=False)
    llm.engine.add_request(None, "Once", ENDLESS)
    llm.engine.step()
    pid = llm.engine.status().pid
    threads = [item for item in threading.enumerate() if item.name == "engine client" and item not in before]
    with pytest.warns(ResourceWarning, match="without shutdown"):  # noqa: PT031 (both lines drop it)
        llm = None
        gc.collect()
    assert is_reaped(pid)
    (thread,) = threads
    thread.join(WAIT_S)
    assert not thread.is_alive()


async def test_an_async_llm_that_is_dropped_ends_its_process():
    """Guards against tasks of the event loop that keep a client, and its process, which nobody can reach any more."""
    llm = AsyncLLM(model="demo")
    await llm.start()
    stream = llm.generate("Once", ENDLESS)
    await anext(stream)
    pid = llm.status().pid
    await stream.aclose()
    with pytest.warns(ResourceWarning, match="without shutdown"):  # noqa: PT031 (both lines drop it)
        llm = None
        gc.collect()
    assert await asyncio.to_thread(is_reaped, pid)


AFTER_ITS_LOOP = """
import asyncio, sys
from penstock import AsyncLLM

async def start():
    llm = AsyncLLM(model="demo", standby=True)
    await llm.start()
    while (standby := llm.status().standby.pid) is None:
        await asyncio.sleep(0.01)
    return llm, (llm.status().pid, standby)

loop = asyncio.new_event_loop()
llm, pids = loop.run_until_complete(start())
if sys.argv[1] == "closed":
    loop.close()
del llm
print(*pids, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["stopped", "closed"])
def test_an_async_llm_that_is_dropped_after_its_loop_ends_its_processes(state):
    """Guards against processes that wait for an event loop that runs no more to close their connections."""
    script = [sys.executable, "-c", AFTER_ITS_LOOP, state]
    with subprocess.Popen(script, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True) as program:
        pids = program.stdout.readline().split()
        assert len(pids) == 2
        assert all(ends(pid) for pid in pids)
        assert program.poll() is None


def test_an_async_llm_that_was_never_used_ends_its_process():
    """Guards against a process that waits for a client that has no event loop."""
    llm = AsyncLLM(model="demo")
    pid = llm.status().pid
    with pytest.warns(ResourceWarning, match="without shutdown"):  # noqa: PT031 (both lines drop it)
        llm = None
        gc.collect()
    assert is_reaped(pid)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns of forks with threads
async def test_a_copy_in_a_forked_process_ends_nothing():
    """Guards against a child of a user's program that ends its parent's engine or tokenizer by dropping its copy."""
    llm = AsyncLLM(model="demo")
    await llm.start()
    before = set(children())
    pid = os.fork()
    if pid == 0:
        llm = None
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    outputs = [output async for output in llm.generate("Once", SamplingParams(max_tokens=4))]
    assert outputs[-1].finished
    assert set(children()) == before
    await llm.shutdown()


def test_what_is_shut_down_warns_of_nothing(recwarn):
    """Guards against a warning for every program that ends its engines properly."""
    with LLM(model="demo", engine_in_process=False) as llm:
        pid = llm.engine.status().pid
    del llm
    gc.collect()
    assert is_reaped(pid)
    assert [item for item in recwarn if "without shutdown" in str(item.message)] == []
