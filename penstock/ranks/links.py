"""Links: how the ranks of a model exchange arrays. All ranks of a block make the same calls of `gather`, in the same
order; each passes an array and gets those of all.

On one host the arrays lie in shared memory, and a byte over a socket says that one is ready (SharedMemoryLinks):

    rank r:  writes its array to its own buffer -> a byte to each other rank of the block -> a byte from each of them
             -> reads their arrays where they lie

Each rank has two buffers for each degree and uses them alternately. Before it writes to a buffer again, the byte of the
gather in between has shown that every rank has finished reading that buffer. The memory has no name in the system, and
disappears with its processes. Ranks on several machines send their arrays over the sockets instead (SocketLinks), and
those of GPUs their tensors from device to device (device_links.py).

A socket is closed when its process ends, so the death of a rank reaches all others at their next gather. Connections to
a machine that vanishes are closed after some seconds (the launcher sets TCP's keep-alive).
"""

import io
import itertools
import math
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from penstock.config import DEGREES, HALF_GROUPS
from penstock.errors import ExecutorLostError
from penstock.kernels.tensors import UINT8, Array, Tensor, as_array
from penstock.ranks.launcher import HERE, HostLauncher, Launcher

BLOCKS = (*DEGREES, HALF_GROUPS)  # sizes of the blocks of ranks that exchange arrays
SPIN_S = 5e-4  # ranks compute equal parts and arrive at nearly the same time; sleeping and waking takes longer
TIMEOUT_S = 60  # a live rank answers within the time of one product
PAGE = 4096
NO_MEMORY = "none"


class Links(Protocol):
    """One rank's connections to the others.

    Attributes:
        is_recorded: whether a gather is a part of a recorded pass; otherwise the pass leaves it to the host (run_host).
        buffer_bytes: the most bytes of one rank's array.
    """

    is_recorded: bool
    buffer_bytes: int

    @property
    def bytes_received(self) -> int:
        """The bytes that this rank has received from other ranks so far."""

    def gather(self, x: Tensor, degree: int, shapes: Sequence[tuple[int, ...]] | None = None) -> Sequence[Tensor]:
        """Gather the `x` of each rank in this rank's block of `degree` neighbours, in the order of ranks.

        The results, arrays unless the links are a device's, must not be written to, and are valid until the next call.
        shapes: each rank's shape, if they differ from that of x.

        Raises:
            ExecutorLostError: a rank of the block ended, does not answer, or is at another place of the model.
        """

    def check(self) -> None:
        """Raise ExecutorLostError if a rank has ended while a device computed, which no gather has noticed."""


class NoLinks:
    """Stands for the links of a rank whose part is only counted, never computed."""

    is_recorded, bytes_received, buffer_bytes = False, 0, 0

    def gather(self, x: Tensor, degree: int, shapes: Sequence[tuple[int, ...]] | None = None) -> Sequence[Tensor]:
        raise AssertionError("a part that is only counted does not compute")

    def check(self) -> None:
        """Do nothing: no other rank is there that could have ended."""


class HostLinks:
    """A socket to each other rank.

    Attributes:
        bytes_received: bytes that this rank has received from other ranks so far.
        is_open: whether this rank has not left the group.
    """

    is_recorded = False
    buffer_bytes: int

    def __init__(self, rank: int, peers: dict[int, socket.socket]) -> None:
        self.rank = rank
        self._peers = peers
        self.bytes_received, self.is_open = 0, True

    def gather(self, x: Tensor, degree: int, shapes: Sequence[tuple[int, ...]] | None = None) -> list[Array]:
        raise NotImplementedError

    def check(self) -> None:
        """Do nothing: every gather has noticed it."""

    def check_all(self, seconds: float) -> None:
        """Wait so long for the end of any other rank. Raise ExecutorLostError if one has ended."""
        poll, ranks = select.poll(), {sock.fileno(): rank for rank, sock in self._peers.items()}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLRDHUP)
        for descriptor, _ in poll.poll(1000 * seconds):
            raise ExecutorLostError(f"rank {ranks[descriptor]} has ended", rank=ranks[descriptor])

    def close(self) -> None:
        """Leave the group, so that the other ranks' next gather with this one fails. A second call does nothing."""
        self.is_open = False
        for sock in self._peers.values():
            sock.close()


class SharedMemoryLinks(HostLinks):
    """Links to ranks on the same host."""

    def __init__(self, rank: int, peers: dict[int, socket.socket], memory: int, buffer_bytes: int) -> None:
        """Map the shared memory. memory: its descriptor. buffer_bytes: of each buffer."""
        super().__init__(rank, peers)
        self.buffer_bytes = buffer_bytes
        size = (len(peers) + 1) * len(BLOCKS) * 2 * buffer_bytes
        self._memory = np.frombuffer(mmap.mmap(memory, size), dtype=UINT8)
        self._parity = dict.fromkeys(BLOCKS, 0)  # by degree: which of the two buffers was written last
        for sock in peers.values():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", TIMEOUT_S, 0))

    def gather(self, x: Tensor, degree: int, shapes: Sequence[tuple[int, ...]] | None = None) -> list[Array]:
        x, first = as_array(x), self.rank // degree * degree
        if x.nbytes > self.buffer_bytes:
            raise ExecutorLostError(f"a rank sends {x.nbytes} bytes at once, but {self.buffer_bytes} were planned")
        parity = self._parity[degree] = self._parity[degree] ^ 1
        x = np.ascontiguousarray(x)
        self._buffer(self.rank, degree, parity)[: x.nbytes] = x.reshape(-1).view(UINT8)
        others = [rank for rank in range(first, first + degree) if rank != self.rank]
        tag = bytes([degree << 1 | parity])  # equal in all ranks that are at the same place of the model
        for rank in others:
            self._notify(rank, tag)
        for rank in others:
            self._wait_for(rank, tag)
        found = []
        for index in range(degree):
            shape = x.shape if shapes is None else shapes[index]
            size = math.prod(shape) * x.itemsize
            assert size <= self.buffer_bytes, "a part that does not fit was refused by the rank that sent it"
            if first + index != self.rank:
                self.bytes_received += size
            found.append(self._buffer(first + index, degree, parity)[:size].view(x.dtype).reshape(shape))
        return found

    def _buffer(self, rank: int, degree: int, parity: int) -> Array:
        start = ((rank * len(BLOCKS) + BLOCKS.index(degree)) * 2 + parity) * self.buffer_bytes
        return self._memory[start : start + self.buffer_bytes]

    def _notify(self, rank: int, tag: bytes) -> None:
        try:
            self._peers[rank].sendall(tag)
        except OSError as error:
            raise ExecutorLostError(f"rank {rank} has ended", rank=rank) from error

    def _wait_for(self, rank: int, tag: bytes) -> None:
        try:
            received = self._poll(rank) or self._peers[rank].recv(1)
        except BlockingIOError as error:
            raise ExecutorLostError(f"rank {rank} has not answered for {TIMEOUT_S} s", rank=rank) from error
        except OSError as error:
            raise ExecutorLostError(f"rank {rank} has ended", rank=rank) from error
        if not received:
            raise ExecutorLostError(f"rank {rank} has ended", rank=rank)
        if received != tag:
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


class SocketLinks(HostLinks):
    """Links to ranks on other machines. A rank sends its array to the others of its block and receives theirs at the
    same time, so no two ranks wait for each other to read."""

    buffer_bytes = 2**30  # nothing is kept in a buffer

    def __init__(self, rank: int, peers: dict[int, socket.socket]) -> None:
        super().__init__(rank, peers)
        self._counts = dict.fromkeys(BLOCKS, 0)  # gathers so far modulo 256, by degree
        for sock in peers.values():
            sock.setblocking(False)

    def gather(self, x: Tensor, degree: int, shapes: Sequence[tuple[int, ...]] | None = None) -> list[Array]:
        first = self.rank // degree * degree
        x = np.ascontiguousarray(as_array(x))
        found = [np.empty(x.shape if shapes is None else shapes[index], x.dtype) for index in range(degree)]
        found[self.rank - first] = x
        count = self._counts[degree] = (self._counts[degree] + 1) % 256
        tag = bytes([degree, count])  # equal in all ranks that are at the same place of the model
        data = np.concatenate([np.frombuffer(tag, UINT8), x.reshape(-1).view(UINT8)])
        buffers = {first + i: np.empty(len(tag) + item.nbytes, UINT8) for i, item in enumerate(found)}
        del buffers[self.rank]
        self._exchange(memoryview(data.data), {rank: memoryview(buffer.data) for rank, buffer in buffers.items()})
        for rank, buffer in buffers.items():
            if buffer[: len(tag)].tobytes() != tag:
                raise ExecutorLostError(
                    f"rank {rank} is at another place of the model than rank {self.rank}", rank=rank
                )
            found[rank - first].reshape(-1).view(UINT8)[:] = buffer[len(tag) :]
            self.bytes_received += len(buffer) - len(tag)
        return found

    def _exchange(self, data: memoryview, into: dict[int, memoryview]) -> None:
        """Send `data` to the ranks of `into`, and fill each rank's buffer there with what it sends."""
        poll, deadline = select.poll(), time.monotonic() + TIMEOUT_S
        unsent, ranks = dict.fromkeys(into, data), {self._peers[rank].fileno(): rank for rank in into}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN | select.POLLOUT)
        while ranks:
            events = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not events:
                slow = min(ranks.values())
                raise ExecutorLostError(f"rank {slow} has not answered for {TIMEOUT_S} s", rank=slow)
            for descriptor, event in events:
                rank = ranks[descriptor]
                sock = self._peers[rank]
                try:
                    if event & select.POLLOUT and unsent[rank]:
                        unsent[rank] = unsent[rank][sock.send(unsent[rank]) :]
                    if event & ~select.POLLOUT and into[rank]:
                        into[rank] = into[rank][_receive_into(sock, into[rank]) :]
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise ExecutorLostError(f"rank {rank} has ended", rank=rank) from error
                wanted = (select.POLLOUT if unsent[rank] else 0) | (select.POLLIN if into[rank] else 0)
                if wanted:
                    poll.modify(descriptor, wanted)
                else:
                    poll.unregister(descriptor)
                    del ranks[descriptor]


def _receive_into(sock: socket.socket, buffer: memoryview) -> int:
    """Receive into a buffer. Return the number of bytes. Raise OSError at the end of the connection."""
    count = sock.recv_into(buffer)
    if not count:
        raise ConnectionResetError
    return count


class Mesh:
    """A connection between every two ranks of a model or stage, and their shared memory, until each rank has its links.

    Args:
        size: number of ranks.
        buffer_bytes: the maximum number of bytes that one rank passes to `gather`.
        first: the number of rank 0's process; the numbers of the other ranks follow.

    Raises:
        OSError: the system has no more memory or sockets.
    """

    def __init__(self, size: int, buffer_bytes: int, launcher: Launcher | None = None, first: int = HERE) -> None:
        launcher = launcher or HostLauncher()
        self.buffer_bytes = rounded_to_pages(buffer_bytes)
        self._ends: list[dict[int, Any]] = [{} for _ in range(size)]
        self._memory: io.FileIO | None = None
        try:
            for one, other in itertools.combinations(range(size), 2):
                self._ends[one][other], self._ends[other][one] = launcher.connect(first + one, first + other)
            if launcher.shares_memory:
                self._memory = io.FileIO(os.memfd_create("penstock-ranks"), "r+")  # a page is allocated when written to
                self._memory.truncate(size * len(BLOCKS) * 2 * self.buffer_bytes)
        except BaseException:
            self.close()
            raise

    def links(self, rank: int) -> SharedMemoryLinks | SocketLinks:
        """Make the links of a rank that runs in this process."""
        peers, self._ends[rank] = self._ends[rank], {}
        assert len(peers) == len(self._ends) - 1, "the links of a rank are made once, before the mesh is closed"
        if self._memory is None:
            return SocketLinks(rank, peers)
        return SharedMemoryLinks(rank, peers, self._memory.fileno(), self.buffer_bytes)

    def words(self, rank: int) -> list[Any]:
        """List the words that a rank's process is started with; there, `inherit_links` reads them."""
        ends = [word for peer, end in self._ends[rank].items() for word in (str(peer), end)]
        return [str(rank), self._memory or NO_MEMORY, str(self.buffer_bytes), *ends]

    def close(self) -> None:
        """Close this process's copies of what the ranks have inherited."""
        if self._memory is not None:
            self._memory.close()
        for end in itertools.chain.from_iterable(item.values() for item in self._ends):
            end.close()


def inherit_links(words: Sequence[str]) -> SharedMemoryLinks | SocketLinks:
    """Make the links of this process's rank, from the words that the process was started with (Mesh.words)."""
    rank, memory, buffer_bytes = int(words[0]), words[1], int(words[2])
    peers = {int(peer): socket.socket(fileno=int(file)) for peer, file in zip(words[3::2], words[4::2], strict=True)}
    if memory == NO_MEMORY:
        return SocketLinks(rank, peers)
    links = SharedMemoryLinks(rank, peers, int(memory), buffer_bytes)
    os.close(int(memory))
    return links


def rounded_to_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
