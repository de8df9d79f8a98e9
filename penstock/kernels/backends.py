"""Which backends there are: the one place that knows them all. `ops` is what they have in common."""

import torch

from penstock.errors import NotSupportedError
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.ops import Ops
from penstock.kernels.reference import ReferenceOps


def load_ops(name: str, dtype: torch.dtype, device: torch.device | str = "cpu", *, threads: int = 1) -> Ops:
    """The backend of that name, for models of that type, on that device; native kernels get so many threads.

    Raises:
        NotSupportedError: the backend is not built yet.
        InvalidRequestError: the native kernels are asked for and not installed.
    """
    if name == "reference":
        return ReferenceOps(dtype, device)
    if name == "cpu":
        return CpuOps(dtype, threads=threads)
    raise NotSupportedError(f"kernels: {name!r} is planned but not built yet", param="kernels")
