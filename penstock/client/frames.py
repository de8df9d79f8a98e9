"""Frames between a client and its engine process: typed msgpack without pickle, each preceded by its length.

    client -> engine    Start, then AddRequest, Abort, Pin, Unpin, LoadAdapter and UnloadAdapter
    engine -> client    Ready or Failed, then Outputs, Rejected, AdapterLoaded, Heartbeat and, from another machine,
                        Leaving

Frames from an engine carry the epoch that it was started with, so that frames from a replaced engine are dropped.
Outputs carry the index of their first token (EngineOutput.start_index), so that no token counts twice.
"""

import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from penstock.errors import EngineError, InvalidRequestError, ModelLoadError
from penstock.interface.messages import AdapterInfo, EngineOutput, EngineRequest, EngineStats, ModelInfo

T = TypeVar("T")
MAX_FRAME_BYTES = 256 * 2**20  # a longer frame is invalid
MAX_POOLED_IN_FRAME = MAX_FRAME_BYTES // 2  # bytes; one request has at most half of this
_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size


class InvalidFrameError(EngineError):
    """Received bytes are not a valid frame."""


class Start(msgspec.Struct, tag=True, frozen=True):
    """The first frame. `options` are for EngineConfig.from_options.

    takes_over: whether the options are those of another engine, whose memory will be free by then, or which has planned
        for this one too.
    ring: descriptor of the flight recorder's memory, which the process inherits.
    num_engines: engines that share the machine.
    number: of this engine among them, from 0.
    """

    epoch: int
    options: dict[str, Any]
    takes_over: bool = False
    ring: int | None = None
    num_engines: int = 1
    number: int = 0


class AddRequest(msgspec.Struct, tag=True, frozen=True):
    request: EngineRequest


class Abort(msgspec.Struct, tag=True, frozen=True):
    request_ids: list[str]


class Pin(msgspec.Struct, tag=True, frozen=True):
    """Keep the prompt of this request in the cache once the request has computed it. Rejected has its id if the pin is
    refused."""

    name: str
    request: EngineRequest


class Unpin(msgspec.Struct, tag=True, frozen=True):
    name: str


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Load an adapter, for requests that have its id. Rejected has the id if it cannot be loaded, or its files have
    another hash by now."""

    id: str
    path: str
    sha256: str


class UnloadAdapter(msgspec.Struct, tag=True, frozen=True):
    id: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    epoch: int
    info: ModelInfo
    stats: EngineStats
    cache_bytes: int = 0


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot be built: a wrong option (user_error) or an unreadable model. A retry would not help."""

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
    """The engine did not accept a request or the pin that it computes, or could not load the adapter with this id."""

    epoch: int
    request_id: str
    message: str
    param: str | None
    code: str | None

    def as_error(self) -> InvalidRequestError:
        return InvalidRequestError(self.message, param=self.param, code=self.code)


class AdapterLoaded(msgspec.Struct, tag=True, frozen=True):
    """The engine has loaded an adapter; the name in its description is the id."""

    epoch: int
    info: AdapterInfo


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """The engine is alive: idle, about to compute its first step after idling, or in a long step.

    Attributes:
        working_s: seconds that the step under way, or the build of the engine, has taken so far.
    """

    epoch: int
    stats: EngineStats
    working_s: float = 0.0


class Leaving(msgspec.Struct, tag=True, frozen=True):
    """The engine is to be shut down once it has no requests."""

    epoch: int


ToEngine = Start | AddRequest | Abort | Pin | Unpin | LoadAdapter | UnloadAdapter
FromEngine = Ready | Failed | Outputs | Rejected | AdapterLoaded | Heartbeat | Leaving


def in_parts(outputs: list[EngineOutput]) -> Iterator[list[EngineOutput]]:
    """Yield the outputs of a step in one or more parts, each small enough in pooled vectors for a frame."""
    part: list[EngineOutput] = []
    size = 0
    for output in outputs:
        its_size = 0 if output.pooled is None else len(output.pooled)
        if size + its_size > MAX_POOLED_IN_FRAME and part:
            yield part
            part, size = [], 0
        part.append(output)
        size += its_size
    yield part


_encode = msgspec.msgpack.Encoder().encode
_decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
_decode_from_engine: Callable[[bytes], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode


def unpack_to_engine(body: bytes) -> ToEngine:
    """Decode a frame that a client sent. Raise InvalidFrameError if it is invalid."""
    return _unpack(_decode_to_engine, body)


def unpack_from_engine(body: bytes) -> FromEngine:
    """Decode a frame that an engine sent. Raise InvalidFrameError if it is invalid."""
    return _unpack(_decode_from_engine, body)


def _unpack(decode: Callable[[bytes], T], body: bytes) -> T:
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidFrameError(f"{len(body)} bytes are not a frame: {error}") from None


def request_id_in(body: bytes) -> str | None:
    """Find the request id of an AddRequest that cannot be decoded; None if that cannot be read either."""
    try:
        found = msgspec.msgpack.decode(body)["request"]["request_id"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, LookupError):
        return None
    return found if isinstance(found, str) else None


def pack(frame: ToEngine | FromEngine) -> bytes:
    """Encode a frame with its header."""
    return with_header(_encode(frame))


def with_header(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """Read the length of the body that follows. Raise InvalidFrameError if it exceeds MAX_FRAME_BYTES."""
    length = int(_LENGTH.unpack(header)[0])
    if length > MAX_FRAME_BYTES:
        raise InvalidFrameError(f"a header announces {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return length


def receive(sock: socket.socket) -> bytes | None:
    """Read the body of the next frame from a blocking socket; None at the end of the connection."""
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
