"""What a call restored from the journal says of its turn, and a reader that leaves it."""

import asyncio
import time
from dataclasses import replace

import pytest

from penstock.interface.messages import ModelInfo
from penstock.interface.sampling_params import SamplingParams
from penstock.server.kept_calls import Begun, KeptCall, decode_record, encode_record
from penstock.server.resumption import _restored_log

INFO = ModelInfo("m", 100, 100, (), "float32", "f")


def begun(**turn: object) -> Begun:
    made = Begun(
        id="a", kind="chat", owner="", created=int(time.time()) - 10, body=b"{}", model="m", fingerprint="f",
        params=SamplingParams(), prompts=[], grace_s=None, keep_s=0.0, **turn,
    )  # type: ignore[arg-type]  # fmt: skip
    found = decode_record(encode_record(made))
    assert isinstance(found, Begun)
    return found


@pytest.mark.parametrize("ticks", range(6))
def test_a_reader_that_leaves_as_something_comes_has_left(ticks: int) -> None:
    """Guards against a cancellation that is lost when it meets an event: the call went on for nobody."""

    async def scenario() -> bool:
        call = KeptCall(begun())
        reader = asyncio.create_task(read(call))
        await turns(5)
        call.add((0, b"data: 1\n\n"))
        await turns(ticks)
        reader.cancel()
        await turns(5)
        return reader.cancelled()

    async def read(call: KeptCall) -> None:
        async for _ in call.read([], keep_alive_s=60.0):
            pass

    async def turns(count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    assert asyncio.run(scenario())


@pytest.mark.parametrize(("policy", "priority"), [("priority", -3), ("fcfs", 0)])
def test_a_restored_call_keeps_its_turn(policy: str, priority: int) -> None:
    """Guards against a call that is urgent, or due, and is neither after a restart; and against one that fails because
    the new server's policy knows no priorities."""
    info = replace(INFO, scheduling_policy=policy)
    log = _restored_log(begun(key="ann", priority=-3, timeout_s=100.0), info)
    assert (log.key, log.priority) == ("ann", priority)
    assert log.timeout_s is not None
    assert 80 < log.timeout_s <= 91
    late = _restored_log(begun(timeout_s=2.0), info)
    assert late.timeout_s is not None
    assert 0 < late.timeout_s < 1
    assert _restored_log(begun(), info).timeout_s is None
