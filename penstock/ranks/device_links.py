"""DeviceLinks: ranks on GPUs exchange tensors where they lie. NCCL moves them, and adds nothing: `Ops.add_parts` adds
the shares of a sum as one device adds its leaves. In Triton's interpreter, gloo moves them.

A gather is a part of a recorded pass: a CUDA graph contains NCCL's copies. Every rank has the same plan, so all of them
launch the same graphs in the same order. What is on the host (the magnitudes of weights while they load, experts that
several ranks share) takes the links of the host.

A kernel that waits for a rank that has ended would wait for ever. So a thread watches the host's connections, and ends
NCCL's kernels when one is closed; `check`, after each step, then finds it closed, and the step is lost.
"""

import os
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from math import prod
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.utils._python_dispatch import _disable_current_modes

from penstock.errors import ExecutorLostError
from penstock.kernels.tensors import Tensor
from penstock.kernels.triton.launch import FixedScratch
from penstock.ranks.links import TIMEOUT_S, HostLinks

WATCH_S = 0.5  # between two looks whether this rank has left


class DeviceLinks:
    """Links of a rank whose tensors are on a device.

    Attributes:
        bytes_received: bytes that came over the links of the host; what NCCL moves is not counted.
    """

    is_recorded = True

    def __init__(self, host: HostLinks, size: int, device: torch.device, buffer_bytes: int) -> None:
        """Join the other ranks, which all do so. buffer_bytes: the most that a gather brings together."""
        self.rank, self.buffer_bytes = host.rank, buffer_bytes
        self._host, self._device = host, device
        file = os.memfd_create("penstock-store")  # rank 0's is used; it has no name in the system
        weakref.finalize(self, os.close, file)
        process, number = host.gather(np.array([os.getpid(), file]), size)[0].tolist()
        self._store = c10d.FileStore(f"/proc/{process}/fd/{number}", size)
        self._blocks: dict[int, Any] = {}
        self._memory = FixedScratch(device)
        self._memory.reserve(buffer_bytes)
        if device.type == "cuda":
            threading.Thread(target=self._watch, daemon=True).start()

    @property
    def bytes_received(self) -> int:
        return self._host.bytes_received

    def gather(self, x: Tensor, degree: int, shapes: Sequence[tuple[int, ...]] | None = None) -> Sequence[Tensor]:
        """Gather as Links.gather does: tensors on the device, one after the other in one buffer, or arrays."""
        if isinstance(x, np.ndarray):
            return self._host.gather(x, degree, shapes)
        sizes = [tuple(x.shape)] * degree if shapes is None else shapes
        longest = max(map(prod, sizes)) * x.itemsize
        whole = self._memory.begin().empty((degree, longest), torch.uint8, self._device)
        own = whole[self.rank % degree]
        own[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
        try:  # gloo's thread would take the dispatch mode in which a pass is watched for torch's functions
            with _disable_current_modes():
                self._block(degree)._allgather_base(whole.view(-1), own).wait()
        except RuntimeError as error:
            self._host.check_all(WATCH_S)  # which says who has ended
            raise ExecutorLostError(f"a rank has ended, or does not answer: {error}") from error
        if shapes is None:
            return cast(Sequence[Tensor], whole.view(x.dtype).view(degree, *x.shape))
        return [row[: prod(size) * x.itemsize].view(x.dtype).view(size) for row, size in zip(whole, sizes, strict=True)]

    def _block(self, degree: int) -> Any:
        """Find the group of this rank's block of neighbours; the first pass of a form, which is not recorded, makes
        it."""
        if degree not in self._blocks:
            store = c10d.PrefixStore(f"{degree} {self.rank // degree}", self._store)
            if self._device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=TIMEOUT_S)
                self._blocks[degree] = dist.ProcessGroupNCCL(store, self.rank % degree, degree, options)
            else:
                timeout = timedelta(seconds=TIMEOUT_S)
                self._blocks[degree] = dist.ProcessGroupGloo(store, self.rank % degree, degree, timeout)
        return self._blocks[degree]

    def check(self) -> None:
        self._host.check_all(0.0)

    def _watch(self) -> None:
        """End the kernels that wait for a rank that has ended."""
        try:
            while self._host.is_open:
                self._host.check_all(WATCH_S)
        except (ExecutorLostError, OSError, ValueError):  # or this rank has just left
            for block in list(self._blocks.values()):
                block.abort()
