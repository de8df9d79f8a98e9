"""WireLinks: how the ranks of a model on several machines meet. Each rank sends its array to the others of its block
and receives theirs at the same time, so no two ranks wait for each other to read.

The death of a rank closes its connections, so it reaches all others at their next meeting. The connections to a machine
that vanishes are closed after some seconds (door.tune).
"""

import select
import socket
import time
from collections.abc import Sequence

import numpy as np

from penstock.errors import ExecutorLostError
from penstock.kernels.tensors import UINT8, Array
from penstock.spec.shares import DEGREES

TIMEOUT_S = 60  # as on one machine (links.py)


class WireLinks:
    """One rank's end, which meets the ranks of its block of neighbours.

    Attributes:
        bytes_received: bytes that this rank has received from other ranks so far.
        meetings: number of meetings so far.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket]) -> None:
        """peers: a connection to each other rank."""
        self.rank = rank
        self._peers = peers
        self._turns = dict.fromkeys(DEGREES, 0)
        self.bytes_received = 0
        self.meetings = 0
        for sock in peers.values():
            sock.setblocking(False)

    def gather(self, x: Array, degree: int, shapes: Sequence[tuple[int, ...]] | None = None) -> list[Array]:
        """Return what each rank of this rank's block gave (layers/split.py, Ranks)."""
        first = self.rank // degree * degree
        x = np.ascontiguousarray(x)
        found = [np.empty(x.shape if shapes is None else shapes[index], x.dtype) for index in range(degree)]
        found[self.rank - first] = x
        turn = self._turns[degree] = (self._turns[degree] + 1) % 256
        word = bytes([degree, turn])  # tells which meeting a rank is at
        data = np.concatenate([np.frombuffer(word, UINT8), x.reshape(-1).view(UINT8)])
        heard = {first + i: np.empty(len(word) + item.nbytes, UINT8) for i, item in enumerate(found)}
        del heard[self.rank]
        self._exchange(memoryview(data.data), {rank: memoryview(buffer.data) for rank, buffer in heard.items()})
        for rank, buffer in heard.items():
            if buffer[: len(word)].tobytes() != word:
                raise ExecutorLostError(
                    f"rank {rank} is at another place of the model than rank {self.rank}", rank=rank
                )
            found[rank - first].reshape(-1).view(UINT8)[:] = buffer[len(word) :]
            self.bytes_received += len(buffer) - len(word)
        self.meetings += 1
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
                        into[rank] = into[rank][_received(sock, into[rank]) :]
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

    def close(self) -> None:
        """Leave the group, so that the other ranks' next meeting with this one fails. A second call does nothing."""
        for sock in self._peers.values():
            sock.close()


def _received(sock: socket.socket, buffer: memoryview) -> int:
    """Receive into a buffer. Return the number of bytes. Raise OSError at the end of the connection."""
    count = sock.recv_into(buffer)
    if not count:
        raise ConnectionResetError
    return count
