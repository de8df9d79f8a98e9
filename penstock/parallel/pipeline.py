"""PipelineExecutor: the layers are divided into stages, and as many steps are in flight as there are stages. A stage is
one process, or several ranks that share its layers.

    engine --- order of step k ---> every rank of every stage
               stage 0 --- x, h ---> stage 1 --- x, h ---> ... stage P-1 --- results of step k ---> engine

All ranks of a stage compute the same x and h, and each sends them to the rank with its number in the next stage. The
ranks of a stage meet over their own links (links.py). Only rank 0 of the last stage samples.

Every rank has the whole block tables and the tokens of every request, but weights, keys and values of only its own
part. Orders are sent without waiting, so while stage 1 computes step k, stage 0 computes step k + 1.

If one rank ends, the others end too, and whoever waits for a step gets ExecutorLostError.
"""

import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from typing import Any

from penstock.errors import EngineError, ExecutorLostError, InvalidRequestError, ModelLoadError
from penstock.interface.step import SchedulerOutput, StepOutput
from penstock.parallel.channel import (
    CannotStart,
    Channel,
    Done,
    FromRank,
    Ready,
    Span,
    StepFailed,
    StepOrder,
    decode_from_rank,
    encode,
)
from penstock.parallel.launch import HERE, Launcher, Process
from penstock.parallel.links import Meeting

RANK_MODULE = "penstock.assembly.rank"
NO_END = "-1"  # stands for the link that the first or the last stage does not have
EXIT_WAIT_S = 5.0
MAX_SPANS = 100_000  # older ones are forgotten


class PipelineExecutor:
    """A `step.Executor` over the processes of one pipeline.

    Attributes:
        depth: number of steps in flight, which is the number of stages.
        ready: the Ready message of each rank, stage by stage.
        spans: the latest steps on each stage, with their times.
    """

    def __init__(self, begins: Sequence[Sequence[bytes]], place_bytes: int, launcher: Launcher) -> None:
        """Start the ranks, and wait until all have their layers.

        Args:
            begins: the first message to each rank of each stage.
            place_bytes: the maximum number of bytes that a rank gives the other ranks of its stage at once.
            launcher: starts the ranks, and is closed at the end.

        Raises:
            ModelLoadError, InvalidRequestError: a rank cannot load its part.
            ExecutorLostError: a rank cannot be started, or ended before it was ready.
        """
        self.depth = len(begins)
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._outputs: dict[str, list[int]] = {}
        self._results: SimpleQueue[FromRank | None] = SimpleQueue()
        self._launcher = launcher
        self._processes: list[Process] = []
        self._channels: list[Channel] = []
        self._is_dead = False
        try:
            self._start(len(begins), len(begins[0]), place_bytes)
            for channel, begin in zip(self._channels, (begin for stage in begins for begin in stage), strict=True):
                channel.send(begin)
            self.ready = self._wait_ready()
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
        """The bytes of all ranks' caches."""
        return sum(item.cache_bytes for item in self.ready)

    def _start(self, num_stages: int, size: int, place_bytes: int) -> None:
        """Start `size` ranks for each stage."""
        none: list[Any] = [NO_END] * size
        befores = none  # each rank's end of the link from the previous stage
        with ExitStack() as inherited:  # the ranks have copies of what is closed here
            for stage in range(num_stages):
                first, afters, next_befores = 1 + stage * size, [*none], [*none]
                for rank in range(size if stage < num_stages - 1 else 0):
                    afters[rank], next_befores[rank] = self._launcher.connect(first + rank, first + size + rank)
                    inherited.callback(afters[rank].close)
                    inherited.callback(next_befores[rank].close)
                meeting = Meeting(size, place_bytes, self._launcher, first) if size > 1 else None
                if meeting is not None:
                    inherited.callback(meeting.close)
                for rank in range(size):
                    met = [] if meeting is None else meeting.words(rank)
                    self._start_rank(first + rank, [befores[rank], afters[rank], *met])
                befores = next_befores

    def _start_rank(self, number: int, words: list[Any]) -> None:
        ours, theirs = self._launcher.connect(HERE, number)
        self._channels.append(Channel(ours))
        try:
            process = self._launcher.start(number, RANK_MODULE, [theirs, *words])
            self._processes += [] if process is None else [process]
        finally:
            theirs.close()

    def _wait_ready(self) -> list[Ready]:
        """Wait for all ranks. If one cannot load its part, the others of its stage end without a message."""
        ready: list[Ready] = []
        lost: ExecutorLostError | None = None
        for channel in self._channels:
            try:
                message = decode_from_rank(channel.receive())
            except ExecutorLostError as error:
                lost = error
                continue
            if isinstance(message, CannotStart) and message.param is not None:
                raise InvalidRequestError(message.message, param=message.param)
            if not isinstance(message, Ready):
                raise ModelLoadError(message.message if isinstance(message, CannotStart) else "a rank is not ready")
            ready.append(message)
        if lost is not None:
            raise lost
        return ready

    def _read(self, channel: Channel) -> None:
        """Read a rank's messages until it ends, then wake whoever waits for a step."""
        with suppress(ExecutorLostError):
            while True:
                message = decode_from_rank(channel.receive())
                if isinstance(message, Span):
                    self.spans.append(message)
                else:
                    self._results.put(message)
        self._is_dead = True
        self._results.put(None)

    def submit(self, scheduler_output: SchedulerOutput) -> int:
        """Send a step to every rank. Raise ExecutorLostError if one is gone."""
        data = encode(StepOrder(scheduler_output, self._outputs))
        self._outputs = {}
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
        self._outputs.update((name, result.new_token_ids) for name, result in message.output.results.items())
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
