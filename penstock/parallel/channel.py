"""The messages between the processes of one pipeline, over inherited sockets: typed msgpack and arrays.

    engine -> every rank     what it computes (assembly/pipeline.py), then a StepOrder for each step
    rank -> the next rank    the residual stream and the branch of a step, as they lie in memory
    rank -> engine           Ready or CannotStart; for each step a Span, and from the last stage Done or StepFailed

Each message is preceded by its length. A socket is closed when the process at its other end ends.
"""

import socket
import struct
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np

from penstock.errors import ExecutorLostError
from penstock.interface.step import SchedulerOutput, StepOutput
from penstock.kernels.tensors import Array, as_array

T = TypeVar("T")
BUFFER_BYTES = 4 * 2**20  # socket buffer of a link, so that a stage seldom waits for the next one to read
_LENGTH = struct.Struct("<Q")
_HANDED = struct.Struct("<BQII")  # kind of the contents, bytes received for the step so far, rows, columns
_NOTHING, _STREAM, _BOTH, _FAILED = range(4)


@dataclass(frozen=True, slots=True)
class StepOrder:
    """A step for every rank.

    Attributes:
        outputs: new tokens of the steps collected since the last order, by request id.
    """

    plan: SchedulerOutput
    outputs: dict[str, list[int]] = field(default_factory=dict)


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The rank has its layers. cache_bytes: the size of its key/value caches."""

    cache_bytes: int


class CannotStart(msgspec.Struct, tag=True, frozen=True):
    """The rank cannot start. param: the option at fault, if any."""

    message: str
    param: str | None = None


class StepFailed(msgspec.Struct, tag=True, frozen=True):
    message: str
    no_memory: bool


class Done(msgspec.Struct, tag=True, frozen=True):
    output: StepOutput


class Span(msgspec.Struct, tag=True, frozen=True):
    """A step on one stage, from `begin` to `end` in seconds of time.perf_counter, which a host's processes share."""

    stage: int
    step_id: int
    num_rows: int
    num_tokens: int
    begin: float
    end: float


FromRank = Ready | CannotStart | StepFailed | Done | Span
encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(StepOrder).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode


class Channel:
    """One end of a socket between two processes."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)

    def send(self, *parts: Any) -> None:
        """Send a message in parts. Raise OSError if the other process is gone."""
        views = [memoryview(part).cast("B") for part in parts]
        self.sock.sendall(_LENGTH.pack(sum(view.nbytes for view in views)))
        for view in views:
            self.sock.sendall(view)

    def receive(self) -> bytearray:
        """Wait for a message. Raise ExecutorLostError at the end of the connection."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._read(length)

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view, done = memoryview(data), 0
        while done < count:
            try:
                received = self.sock.recv_into(view[done:])
            except OSError:
                received = 0
            if not received:
                raise ExecutorLostError("a process that computes layers has ended")
            done += received
        return data

    def close(self) -> None:
        self.sock.close()


class StageFailedError(Exception):
    """An earlier stage could not compute this step."""

    def __init__(self, failure: StepFailed) -> None:
        super().__init__(failure.message)
        self.failure = failure


def send_handed(channel: Channel, handed: Any, received: int) -> None:
    """Send x and h, [T, hidden] float32 each, to the next stage. h may be None; handed is None for neither.

    received: bytes that this stage and the earlier ones have received from other ranks for the step.
    """
    if handed is None:
        channel.send(_HANDED.pack(_NOTHING, received, 0, 0))
        return
    x, h = (None if part is None else np.ascontiguousarray(as_array(part)) for part in handed)
    if x is None:
        raise ValueError("a stage sends a branch without a residual stream")
    kind = _STREAM if h is None else _BOTH
    channel.send(_HANDED.pack(kind, received, *x.shape), x, *([] if h is None else [h]))


def send_failure(channel: Channel, failure: StepFailed) -> None:
    """Tell the next stage that a step has failed."""
    channel.send(_HANDED.pack(_FAILED, 0, 0, 0), encode(failure))


def receive_handed(channel: Channel) -> tuple[tuple[Array, Array | None] | None, int]:
    """Wait for what the previous stage sends. Return it, and the bytes received for the step, including this message.

    Raises:
        StageFailedError: an earlier stage could not compute the step.
    """
    data = channel.receive()
    kind, received, rows, columns = _HANDED.unpack_from(data)
    if kind == _FAILED:
        failure = decode_from_rank(memoryview(data)[_HANDED.size :])
        raise StageFailedError(failure if isinstance(failure, StepFailed) else StepFailed("unknown", no_memory=False))
    if kind == _NOTHING:
        return None, received
    values = np.frombuffer(data, np.float32, offset=_HANDED.size).reshape(-1, rows, columns)
    return (values[0], values[1] if kind == _BOTH else None), received + values.nbytes
