"""Engines in other processes whose clients were dropped: they end, and Python warns, as of files left open."""

import asyncio
import gc
import subprocess
import sys
import threading
import time

import pytest

from penstock import LLM, AsyncLLM, SamplingParams

ENDLESS = SamplingParams(max_tokens=900, ignore_eos=True)


def ends(pid):
    """Return whether a process ends, whether or not somebody has waited for it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def test_an_llm_that_is_dropped_ends_its_process_and_its_thread():
    """Guards against an engine process, and the thread of its client, that stay until the program ends."""
    before = threading.enumerate()
    llm = LLM(model="demo", engine_in_process=False)
    llm.engine.add_request(None, "Once", ENDLESS)
    llm.engine.step()
    pid = llm.engine.status().pid
    threads = [item for item in threading.enumerate() if item.name == "engine client" and item not in before]
    with pytest.warns(ResourceWarning, match="without shutdown"):
        llm = None
    assert ends(pid)
    (thread,) = threads
    thread.join(60)
    assert not thread.is_alive()


def test_an_async_llm_that_is_dropped_ends_its_process():
    """Guards against tasks of the event loop that keep a client, and its process, which nobody can reach any more."""

    async def scenario():
        llm = AsyncLLM(model="demo")
        await llm.start()
        stream = llm.generate("Once", ENDLESS)
        await anext(stream)
        pid = llm.status().pid
        await stream.aclose()
        with pytest.warns(ResourceWarning, match="without shutdown"):
            llm = None
        assert await asyncio.to_thread(ends, pid)

    asyncio.run(scenario())


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
    with pytest.warns(ResourceWarning, match="without shutdown"):
        llm = None
    assert ends(pid)


def test_what_is_shut_down_warns_of_nothing(recwarn):
    """Guards against a warning for every program that ends its engines properly."""
    with LLM(model="demo", engine_in_process=False) as llm:
        pid = llm.engine.status().pid
    del llm
    gc.collect()
    assert ends(pid)
    assert [item for item in recwarn if "without shutdown" in str(item.message)] == []
