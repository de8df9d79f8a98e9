"""What arrives at either end of the engine's connection, and is no frame."""

import socket
import threading

import msgspec
import pytest

from penstock.client import frames
from penstock.client.engine_process import EngineServer, Outbox
from penstock.interface.messages import EngineRequest
from penstock.interface.sampling_params import SamplingParams
from tests.fakes_engine import make_engine

INVALID = [
    b"",
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",  # four milliards of items announced
    b"\x81\xa4type" + b"\x91" * 100_000,  # deeper than the stack
    b"\x81\xa4type\xa2\xff\xfe",  # text that is not UTF-8
    b"\x81\xa4type\xa6Pickle",
    b"\x80\x04\x95\x00.",
]


@pytest.mark.parametrize("body", INVALID)
def test_one_error_for_all_that_is_no_frame(body: bytes) -> None:
    """Guards against an error that the supervisor does not expect, after which it starts no engine any more."""
    for unpack in (frames.unpack_to_engine, frames.unpack_from_engine):
        with pytest.raises(frames.InvalidFrameError):
            unpack(body)


def test_invalid_frames_cost_nobody_else() -> None:
    """Guards against an engine that dies of a frame, does not count it, or lets somebody wait for it."""
    ours, theirs = socket.socketpair()
    server = EngineServer(make_engine(), Outbox(theirs, 3), None)
    wrong = msgspec.to_builtins(frames.AddRequest(EngineRequest("a", [1], SamplingParams(seed=1))))
    wrong["request"]["params"]["top_p"] = 7
    with ours, theirs:
        for body in [*INVALID, frames.pack(frames.Start(3, {}))[frames.HEADER_BYTES :], msgspec.msgpack.encode(wrong)]:
            server._handle(body)
        rejected = frames.unpack_from_engine(frames.receive(ours) or b"")
    assert isinstance(rejected, frames.Rejected)
    assert (rejected.epoch, rejected.request_id) == (3, "a")
    assert "top_p" in rejected.message
    assert server._stats().num_invalid_frames_total == len(INVALID) + 2
    assert not server.engine.has_work


def test_a_header_that_announces_too_much(capfd: pytest.CaptureFixture[str]) -> None:
    """Guards against waiting for, or making room for, four gigabytes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        threading.Thread(target=ours.sendall, args=(b"\xff\xff\xff\xff",)).start()
        with pytest.raises(frames.InvalidFrameError):
            frames.receive(theirs)
