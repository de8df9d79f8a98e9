"""PipelineExecutor: layers in groups, each in a process of its own, and as many steps in flight as there are groups.

    engine --- order of step k ---> rank 0, rank 1, ... rank P-1
               rank 0 --- x, h ---> rank 1 --- x, h ---> ... rank P-1 --- results of step k ---> engine

Every rank has the whole block tables and the tokens of every request; each has keys and values, and weights, of its own
layers only. Orders are sent without waiting, so while rank 1 computes step k, rank 0 computes step k + 1.

A rank that ends, ends its engine: whoever waits for a step gets ExecutorLostError, and the other ranks end with it.
"""

import socket
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue

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
from penstock.parallel.spawn import spawn

RANK_MODULE = "penstock.assembly.rank"
EXIT_WAIT_S = 5.0
MAX_SPANS = 100_000  # the oldest are forgotten
STDERR = 2  # output of a rank joins our messages; stdout belongs to the user


class PipelineExecutor:
    """A `step.Executor` over the processes of one pipeline.

    Attributes:
        depth: as many steps as there are stages.
        ready: what each rank has loaded.
        spans: what the ranks did last, step by step.
    """

    def __init__(self, begins: Sequence[bytes]) -> None:
        """Start a rank with each of these messages, and wait until all have their layers.

        Raises:
            ModelLoadError, InvalidRequestError: a rank cannot load its part.
            ExecutorLostError: a rank ended before that.
        """
        self.depth = len(begins)
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._outputs: dict[str, list[int]] = {}
        self._results: SimpleQueue[FromRank | None] = SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._is_dead = False
        try:
            self._spawn(len(begins))
            for channel, begin in zip(self._channels, begins, strict=True):
                channel.send(begin)
            self.ready = [self._wait_ready(channel) for channel in self._channels]
        except BaseException:
            self.shutdown()
            raise
        self._readers = [threading.Thread(target=self._read, args=(item,), daemon=True) for item in self._channels]
        for reader in self._readers:
            reader.start()

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of all ranks' caches."""
        return sum(item.cache_bytes for item in self.ready)

    def _spawn(self, count: int) -> None:
        links = [socket.socketpair() for _ in range(count - 1)]
        befores, afters = [None, *(link[1] for link in links)], [*(link[0] for link in links), None]
        for before, after in zip(befores, afters, strict=True):
            ours, theirs = socket.socketpair()
            self._channels.append(Channel(ours))
            inherited = [end.fileno() for end in (theirs, before, after) if end is not None]
            words = [str(-1 if end is None else end.fileno()) for end in (theirs, before, after)]
            self._processes.append(spawn(RANK_MODULE, words, inherited=inherited, stdout=STDERR))
            theirs.close()
        for end in (end for link in links for end in link):
            end.close()

    def _wait_ready(self, channel: Channel) -> Ready:
        message = decode_from_rank(channel.receive())
        if isinstance(message, Ready):
            return message
        if isinstance(message, CannotStart) and message.param is not None:
            raise InvalidRequestError(message.message, param=message.param)
        raise ModelLoadError(message.message if isinstance(message, CannotStart) else "a rank is not ready")

    def _read(self, channel: Channel) -> None:
        """Read what a rank says until it ends; then nobody has to wait for it."""
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
            raise ExecutorLostError(f"the last rank answered with something else than step {handle}")
        self._outputs.update((name, result.new_token_ids) for name, result in message.output.results.items())
        return message.output

    def shutdown(self) -> None:
        """End the ranks. A second call does nothing."""
        for channel in self._channels:
            with suppress(OSError):
                channel.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
            channel.close()
        for process in self._processes:
            try:
                process.wait(EXIT_WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes, self._channels = [], []
