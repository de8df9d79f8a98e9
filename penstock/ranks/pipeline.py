"""PipelineExecutor: the layers are divided into stages, and as many steps are in flight as there are stages. A stage is
one process, or several ranks that share its layers.

    engine --- order of step k ---> every rank of every stage
               stage 0 --- x, h ---> stage 1 --- x, h ---> ... stage P-1 --- results of step k ---> engine

All ranks of a stage compute the same x and h, and each sends them to the rank with its number in the next stage. The
ranks of a stage have links of their own (links.py). Only rank 0 of the last stage samples.

Every rank has the whole block tables and the tokens of every request, but weights, keys and values of only its own
part. Orders are sent without waiting, so while stage 1 computes step k, stage 0 computes step k + 1.

The processes (process.py) are connected by inherited sockets, over which a Channel sends typed msgpack and arrays:

    engine -> every rank     what it computes (build.Begin), then a StepOrder for each step
    rank -> the next rank    the residual stream and the branch of a step, as they lie in memory
    rank -> engine           Ready or CannotStart; for each step a Span, and from the last stage Done or StepFailed

A socket is closed when the process at its other end ends. If one rank ends, the others end too, and whoever waits for a
step gets ExecutorLostError.
"""

import pickle
import socket
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np

from penstock.errors import EngineError, ExecutorLostError
from penstock.interface.step import SchedulerOutput, StepOutput
from penstock.kernels.tensors import Array, as_array
from penstock.layers.lora import Adapter
from penstock.ranks.group import CannotStart, Ready, StepOrder, receive_ready
from penstock.ranks.launcher import HERE, PROCESS, Launcher, Process
from penstock.ranks.links import Mesh

RANK_OF_STAGE = "stage"  # the first word of a process of a pipeline
NO_END = "-1"  # stands for the connection that the first or the last stage does not have
EXIT_WAIT_S = 5.0
MAX_SPANS = 100_000  # older ones are forgotten
BUFFER_BYTES = 4 * 2**20  # socket buffer of a channel, so that a stage seldom waits for the next one to read
_LENGTH = struct.Struct("<Q")  # precedes each message
_ACTIVATIONS = struct.Struct("<BQII")  # kind of the contents, bytes received for the step so far, rows, columns
_NOTHING, _STREAM, _BOTH, _FAILED = range(4)


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


def send_activations(channel: Channel, activations: Any, received: int) -> None:
    """Send x and h, [T, hidden] float32 each, to the next stage. h may be None; activations: both, or None for neither.

    received: bytes that this stage and the earlier ones have received from other ranks for the step.
    """
    if activations is None:
        channel.send(_ACTIVATIONS.pack(_NOTHING, received, 0, 0))
        return
    x, h = (None if part is None else np.ascontiguousarray(as_array(part)) for part in activations)
    if x is None:
        raise ValueError("a stage sends a branch without a residual stream")
    kind = _STREAM if h is None else _BOTH
    channel.send(_ACTIVATIONS.pack(kind, received, *x.shape), x, *([] if h is None else [h]))


def send_failure(channel: Channel, failure: StepFailed) -> None:
    channel.send(_ACTIVATIONS.pack(_FAILED, 0, 0, 0), encode(failure))


def receive_activations(channel: Channel) -> tuple[tuple[Array, Array | None] | None, int]:
    """Wait for the previous stage. Return its x and h, and the bytes received for the step, this message included.

    Raises:
        StageFailedError: an earlier stage could not compute the step.
    """
    data = channel.receive()
    kind, received, rows, columns = _ACTIVATIONS.unpack_from(data)
    if kind == _FAILED:
        failure = decode_from_rank(memoryview(data)[_ACTIVATIONS.size :])
        raise StageFailedError(failure if isinstance(failure, StepFailed) else StepFailed("unknown", no_memory=False))
    if kind == _NOTHING:
        return None, received
    values = np.frombuffer(data, np.float32, offset=_ACTIVATIONS.size).reshape(-1, rows, columns)
    return (values[0], values[1] if kind == _BOTH else None), received + values.nbytes


def _message_of(channel: Channel) -> FromRank:
    """Receive a rank's next message. Raise ExecutorLostError if the rank has ended."""
    message: FromRank = decode_from_rank(channel.receive())
    return message


class PipelineExecutor:
    """A `step.Executor` over the processes of one pipeline.

    Attributes:
        depth: number of steps in flight, which is the number of stages.
        ready: the Ready message of each rank, stage by stage.
        spans: the latest steps on each stage, with their times.
    """

    def __init__(self, begins: Sequence[Sequence[bytes]], buffer_bytes: int, launcher: Launcher) -> None:
        """Start the ranks, and wait until all have their layers.

        Args:
            begins: the first message to each rank of each stage.
            buffer_bytes: the most bytes that a rank passes to the other ranks of its stage at once.
            launcher: starts the ranks, and is closed at the end.

        Raises:
            ModelLoadError, InvalidRequestError: a rank cannot load its part.
            ExecutorLostError: a rank cannot be started, or ended before it was ready.
        """
        self.depth = len(begins)
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._sampled: dict[str, list[int]] = {}
        self._adapters: list[tuple[int, bytes]] = []  # that the ranks get with the next step
        self._results: SimpleQueue[FromRank | None] = SimpleQueue()
        self._launcher = launcher
        self._processes: list[Process] = []
        self._channels: list[Channel] = []
        self._is_dead = False
        try:
            self._start(len(begins), len(begins[0]), buffer_bytes)
            for channel, begin in zip(self._channels, (begin for stage in begins for begin in stage), strict=True):
                channel.send(begin)
            self.ready = receive_ready([partial(_message_of, channel) for channel in self._channels])
        except OSError as error:  # no more processes, memory or sockets; or a rank has ended already
            self.shutdown()
            reason = f"the processes of {len(begins)} pipeline stages cannot be started: {error}"
            raise ExecutorLostError(reason) from error
        except BaseException:
            self.shutdown()
            raise
        self._readers = [threading.Thread(target=self._read, args=(item,), daemon=True) for item in self._channels]
        for reader in self._readers:
            reader.start()

    @property
    def cache_bytes(self) -> int:
        return sum(item.cache_bytes for item in self.ready)

    def _start(self, num_stages: int, size: int, buffer_bytes: int) -> None:
        """Start `size` ranks for each stage."""
        none: list[Any] = [NO_END] * size
        befores = none  # each rank's end of the channel from the previous stage
        with ExitStack() as inherited:  # the ranks have copies of what is closed here
            for stage in range(num_stages):
                first, afters, next_befores = 1 + stage * size, [*none], [*none]
                for rank in range(size if stage < num_stages - 1 else 0):
                    afters[rank], next_befores[rank] = self._launcher.connect(first + rank, first + size + rank)
                    inherited.callback(afters[rank].close)
                    inherited.callback(next_befores[rank].close)
                mesh = Mesh(size, buffer_bytes, self._launcher, first) if size > 1 else None
                if mesh is not None:
                    inherited.callback(mesh.close)
                for rank in range(size):
                    linked = [] if mesh is None else mesh.words(rank)
                    self._start_rank(first + rank, [befores[rank], afters[rank], *linked])
                befores = next_befores

    def _start_rank(self, number: int, words: list[Any]) -> None:
        ours, theirs = self._launcher.connect(HERE, number)
        self._channels.append(Channel(ours))
        try:
            process = self._launcher.start(number, PROCESS, [RANK_OF_STAGE, theirs, *words])
            self._processes += [] if process is None else [process]
        finally:
            theirs.close()

    def _read(self, channel: Channel) -> None:
        """Read a rank's messages until it ends, then wake the thread that waits for a step."""
        with suppress(ExecutorLostError):
            while True:
                message = _message_of(channel)
                if isinstance(message, Span):
                    self.spans.append(message)
                else:
                    self._results.put(message)
        self._is_dead = True
        self._results.put(None)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Put a LoRA adapter into a slot, for the steps from now on. Each rank takes its own part."""
        self._adapters.append((slot, pickle.dumps(adapter, pickle.HIGHEST_PROTOCOL)))

    def submit(self, scheduler_output: SchedulerOutput) -> int:
        """Send a step to every rank. Raise ExecutorLostError if one is gone."""
        data = encode(StepOrder(scheduler_output, self._sampled, self._adapters))
        self._sampled, self._adapters = {}, []
        try:
            for channel in self._channels:
                channel.send(data)
        except OSError:
            self._is_dead = True
        if self._is_dead:
            raise ExecutorLostError("a process that computes layers has ended")
        return scheduler_output.step_id

    def collect(self, handle: int) -> StepOutput:
        """Wait for the oldest step.

        Raises:
            ExecutorLostError: a rank has ended.
            MemoryError, EngineError: a rank could not compute this step.
        """
        message = self._results.get()
        if message is None:
            self._results.put(None)
            raise ExecutorLostError("a process that computes layers has ended")
        if isinstance(message, StepFailed):
            raise MemoryError(message.message) if message.no_memory else EngineError(message.message)
        if not isinstance(message, Done) or message.output.step_id != handle:
            raise ExecutorLostError(f"the last rank did not answer with step {handle}")
        self._sampled.update((name, result.new_token_ids) for name, result in message.output.results.items())
        return message.output

    def shutdown(self) -> None:
        """End the ranks. A second call does nothing."""
        for channel in self._channels:
            with suppress(OSError):
                channel.sock.shutdown(socket.SHUT_RDWR)  # wakes the reading thread
            channel.close()
        deadline = time.monotonic() + EXIT_WAIT_S  # shared by all processes
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(EXIT_WAIT_S)
        self._launcher.close()
        self._processes, self._channels = [], []
