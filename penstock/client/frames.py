"""Frames between a client and its engine process: typed msgpack, each preceded by its length. No pickle.

    client -> engine    Start, then AddRequest and Abort
    engine -> client    Ready or Failed, then Outputs, Rejected and Heartbeat

Frames of the engine carry the epoch that it was started with, so that those of an engine that was replaced are
dropped. Outputs carry the index of their first token (EngineOutput.start_index), so that no token counts twice.
"""

import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.errors import EngineError, InvalidRequestError, ModelLoadError
from penstock.interface.messages import EngineOutput, EngineRequest, EngineStats, ModelInfo

MAX_FRAME_BYTES = 256 * 2**20  # a longer one is invalid
_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size


class Start(msgspec.Struct, tag=True, frozen=True):
    """The first frame. `options` are for EngineConfig.from_options.

    takes_over: they are what another engine had, whose memory will be free by then.
    """

    epoch: int
    options: dict[str, Any]
    takes_over: bool = False


class AddRequest(msgspec.Struct, tag=True, frozen=True):
    request: EngineRequest


class Abort(msgspec.Struct, tag=True, frozen=True):
    request_ids: list[str]


class Ready(msgspec.Struct, tag=True, frozen=True):
    epoch: int
    info: ModelInfo
    stats: EngineStats
    cache_bytes: int = 0


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot be built: a wrong option (user_error) or an unreadable model. Trying again would not help."""

    epoch: int
    message: str
    param: str | None
    code: str | None
    user_error: bool

    def as_error(self) -> InvalidRequestError | ModelLoadError:
        wrong_option = InvalidRequestError(self.message, param=self.param, code=self.code)
        return wrong_option if self.user_error else ModelLoadError(self.message)


class Outputs(msgspec.Struct, tag=True, frozen=True):
    epoch: int
    outputs: list[EngineOutput]
    stats: EngineStats


class Rejected(msgspec.Struct, tag=True, frozen=True):
    """The engine did not accept a request."""

    epoch: int
    request_id: str
    message: str
    param: str | None
    code: str | None

    def as_error(self) -> InvalidRequestError:
        return InvalidRequestError(self.message, param=self.param, code=self.code)


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """The engine is alive: idle, or about to compute its first step after it was idle."""

    epoch: int
    stats: EngineStats


ToEngine = Start | AddRequest | Abort
FromEngine = Ready | Failed | Outputs | Rejected | Heartbeat

_encode = msgspec.msgpack.Encoder().encode
# From the body of a frame; they raise msgspec.DecodeError.
unpack_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
unpack_from_engine: Callable[[bytes], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode


def pack(frame: ToEngine | FromEngine) -> bytes:
    """Return the frame with its header."""
    body = _encode(frame)
    return _LENGTH.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """Return the length of the body that follows. Raises EngineError if it is above MAX_FRAME_BYTES."""
    length = int(_LENGTH.unpack(header)[0])
    if length > MAX_FRAME_BYTES:
        raise EngineError(f"the header announces a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return length


def receive(sock: socket.socket) -> bytes | None:
    """Return the body of the next frame from a blocking socket; None at the end of the connection."""
    header = _receive_exactly(sock, HEADER_BYTES)
    return None if header is None else _receive_exactly(sock, body_length(header))


def _receive_exactly(sock: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        try:
            part = sock.recv(min(count - len(received), 2**20))
        except ConnectionResetError:
            return None
        if not part:
            return None
        received += part
    return bytes(received)
