"""Links: how the ranks of a model on one host exchange arrays, which is called a meeting. The arrays lie in shared
memory; a byte over a socket says that one is ready.

    rank r:  writes its array to its own place -> a byte to each other rank of the block -> a byte from each of them
             -> reads their arrays where they lie

Each rank has two places for each degree and uses them in turn. Before it writes to a place again, the byte of the
meeting in between has told it that every rank is done with that place. A socket is closed when its process ends, so the
death of a rank reaches all others at their next meeting. The memory has no name in the system, and disappears with its
processes. Ranks on several machines cannot share memory, so they send their arrays over the sockets (wire.py).
"""

import io
import itertools
import math
import mmap
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.errors import ExecutorLostError
from penstock.kernels.tensors import UINT8, Array
from penstock.parallel.launch import HERE, HostLauncher, Launcher
from penstock.parallel.wire import WireLinks
from penstock.spec.shares import DEGREES

SPIN_S = 5e-4  # ranks compute equal parts and arrive at nearly the same time; sleeping and waking takes longer
TIMEOUT_S = 60  # a live rank answers within the time of one product
PAGE = 4096
NO_MEMORY = "none"


class Links:
    """One rank's end, which meets the ranks of its block of neighbours.

    Attributes:
        bytes_received: bytes that this rank has received from other ranks so far.
        meetings: number of meetings so far.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket], memory: int, place_bytes: int) -> None:
        """peers: a socket to each other rank. memory: the shared memory's descriptor. place_bytes: size of a place."""
        self.rank = rank
        self._peers = peers
        self._place = place_bytes
        size = (len(peers) + 1) * len(DEGREES) * 2 * place_bytes
        self._memory = np.frombuffer(mmap.mmap(memory, size), dtype=UINT8)
        self._turns = dict.fromkeys(DEGREES, 0)
        self.bytes_received = 0
        self.meetings = 0
        for sock in peers.values():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", TIMEOUT_S, 0))

    def gather(self, x: Array, degree: int, shapes: Sequence[tuple[int, ...]] | None = None) -> list[Array]:
        """Return what each rank of this rank's block gave (layers/split.py, Ranks)."""
        first = self.rank // degree * degree
        if x.nbytes > self._place:
            raise ExecutorLostError(f"a rank sends {x.nbytes} bytes at once, but {self._place} were planned")
        turn = self._turns[degree] = self._turns[degree] ^ 1
        x = np.ascontiguousarray(x)
        self._at(self.rank, degree, turn)[: x.nbytes] = x.reshape(-1).view(UINT8)
        others = [rank for rank in range(first, first + degree) if rank != self.rank]
        word = bytes([degree << 1 | turn])
        for rank in others:
            self._say(rank, word)
        for rank in others:
            self._hear(rank, word)
        self.meetings += 1
        found = []
        for index in range(degree):
            shape = x.shape if shapes is None else shapes[index]
            size = math.prod(shape) * x.itemsize
            if first + index != self.rank:
                self.bytes_received += size
            found.append(self._at(first + index, degree, turn)[:size].view(x.dtype).reshape(shape))
        return found

    def close(self) -> None:
        """Leave the group, so that the other ranks' next meeting with this one fails. A second call does nothing."""
        for sock in self._peers.values():
            sock.close()

    def _at(self, rank: int, degree: int, turn: int) -> Array:
        start = ((rank * len(DEGREES) + DEGREES.index(degree)) * 2 + turn) * self._place
        return self._memory[start : start + self._place]

    def _say(self, rank: int, word: bytes) -> None:
        try:
            self._peers[rank].sendall(word)
        except OSError as error:
            raise ExecutorLostError(f"rank {rank} has ended", rank=rank) from error

    def _hear(self, rank: int, word: bytes) -> None:
        try:
            heard = self._poll(rank) or self._peers[rank].recv(1)
        except BlockingIOError as error:
            raise ExecutorLostError(f"rank {rank} has not answered for {TIMEOUT_S} s", rank=rank) from error
        except OSError as error:
            raise ExecutorLostError(f"rank {rank} has ended", rank=rank) from error
        if not heard:
            raise ExecutorLostError(f"rank {rank} has ended", rank=rank)
        if heard != word:
            raise ExecutorLostError(f"rank {rank} is at another place of the model than rank {self.rank}", rank=rank)

    def _poll(self, rank: int) -> bytes:
        """Poll for a byte for SPIN_S. Return b"" if it has not come, or the rank has ended."""
        ended_at = time.perf_counter() + SPIN_S
        while time.perf_counter() < ended_at:
            try:
                return self._peers[rank].recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()  # lets a rank that shares this core run
        return b""


class Meeting:
    """The sockets and memory over which the ranks of a model or stage meet, until each rank has taken its end.

    Args:
        size: number of ranks.
        place_bytes: the maximum number of bytes that one rank gives the others at once.
        first: the number of rank 0's process; the numbers of the other ranks follow.

    Raises:
        OSError: the system has no more memory or sockets.
    """

    def __init__(self, size: int, place_bytes: int, launcher: Launcher | None = None, first: int = HERE) -> None:
        launcher = launcher or HostLauncher()
        self._place_bytes = rounded_to_pages(place_bytes)
        self._ends: list[dict[int, Any]] = [{} for _ in range(size)]
        self._memory: io.FileIO | None = None
        try:
            for one, other in itertools.combinations(range(size), 2):
                self._ends[one][other], self._ends[other][one] = launcher.connect(first + one, first + other)
            if launcher.shares_memory:
                self._memory = io.FileIO(os.memfd_create("penstock-ranks"), "r+")  # a page is allocated when written to
                self._memory.truncate(size * len(DEGREES) * 2 * self._place_bytes)
        except BaseException:
            self.close()
            raise

    def join(self, rank: int) -> Links | WireLinks:
        """Return the end of a rank in this process."""
        peers, self._ends[rank] = self._ends[rank], {}
        if self._memory is None:
            return WireLinks(rank, peers)
        return Links(rank, peers, self._memory.fileno(), self._place_bytes)

    def words(self, rank: int) -> list[Any]:
        """Return the words that a rank's process is started with; there, `inherit` reads them."""
        ends = [word for peer, end in self._ends[rank].items() for word in (str(peer), end)]
        return [str(rank), self._memory or NO_MEMORY, str(self._place_bytes), *ends]

    def close(self) -> None:
        """Close this process's copies of what the ranks have inherited."""
        if self._memory is not None:
            self._memory.close()
        for end in itertools.chain.from_iterable(item.values() for item in self._ends):
            end.close()


def inherit(words: Sequence[str]) -> Links | WireLinks:
    """Return the end of this process's rank, from the words that the process was started with."""
    rank, memory, place_bytes = int(words[0]), words[1], int(words[2])
    peers = {int(peer): socket.socket(fileno=int(file)) for peer, file in zip(words[3::2], words[4::2], strict=True)}
    if memory == NO_MEMORY:
        return WireLinks(rank, peers)
    links = Links(rank, peers, int(memory), place_bytes)
    os.close(int(memory))
    return links


def rounded_to_pages(num_bytes: int) -> int:
    """Return a number of bytes, rounded up to a multiple of the page size."""
    return -(-num_bytes // PAGE) * PAGE
