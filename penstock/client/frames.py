"""The frames between a client and its engine process: typed msgpack, each preceded by its length. No pickle.

    client -> engine    Start, AddRequest, Abort, Shutdown
    engine -> client    Ready or Failed, then Outputs, Rejected, Heartbeat

Every frame of the engine carries the epoch it was started with: the client drops what an engine says whose time is
over. Outputs carry the index of their first token (EngineOutput.start_index), so that nothing is counted twice.
"""

import socket
import struct
from typing import Any

import msgspec

from penstock.errors import EngineError
from penstock.interface.messages import EngineOutput, EngineRequest, EngineStats, ModelInfo

MAX_FRAME_BYTES = 256 * 2**20  # a longer one is garbage
_LENGTH = struct.Struct("<I")


class Start(msgspec.Struct, tag=True, frozen=True):
    """First frame: who the engine is. `options` are EngineConfig.from_options' own."""

    epoch: int
    options: dict[str, Any]


class AddRequest(msgspec.Struct, tag=True, frozen=True):
    request: EngineRequest


class Abort(msgspec.Struct, tag=True, frozen=True):
    request_ids: list[str]


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Stop now. The end of the connection means the same."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    epoch: int
    info: ModelInfo
    stats: EngineStats


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot be built, and a second try would not help: a wrong option or an unreadable model."""

    epoch: int
    message: str
    param: str | None
    code: str | None
    user_error: bool


class Outputs(msgspec.Struct, tag=True, frozen=True):
    epoch: int
    outputs: list[EngineOutput]
    stats: EngineStats


class Rejected(msgspec.Struct, tag=True, frozen=True):
    """A request was not taken."""

    epoch: int
    request_id: str
    message: str
    param: str | None
    code: str | None


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """The step loop turns, with nothing to do."""

    epoch: int
    stats: EngineStats


ToEngine = Start | AddRequest | Abort | Shutdown
FromEngine = Ready | Failed | Outputs | Rejected | Heartbeat

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)

HEADER_BYTES = _LENGTH.size


def pack(frame: ToEngine | FromEngine) -> bytes:
    """The frame as it travels."""
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """Length of the body that follows. Raises EngineError where it cannot be one."""
    length = int(_LENGTH.unpack(header)[0])
    if length > MAX_FRAME_BYTES:
        raise EngineError(f"a frame of {length} bytes is announced; the connection is broken")
    return length


def unpack_to_engine(body: bytes) -> ToEngine:
    frame: ToEngine = _to_engine.decode(body)
    return frame


def unpack_from_engine(body: bytes) -> FromEngine:
    frame: FromEngine = _from_engine.decode(body)
    return frame


def receive(sock: socket.socket) -> bytes | None:
    """The next frame's body from a blocking socket, or None at the end of the connection."""
    header = _receive_exactly(sock, HEADER_BYTES)
    return None if header is None else _receive_exactly(sock, body_length(header))


def _receive_exactly(sock: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = sock.recv(min(count - len(parts), 2**20))
        except ConnectionResetError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
