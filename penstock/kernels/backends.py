"""The backends by name. kernels/ops.py is their interface."""

from collections.abc import Sequence

import torch

from penstock.errors import NotSupportedError
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.ops import Ops
from penstock.kernels.reference import ReferenceOps


def load_ops(
    name: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    threads: int = 1,
    cores: Sequence[Sequence[int]] = (),
) -> Ops:
    """Make the backend of that name for models of type `dtype`.

    Args:
        threads: of the native kernels.
        cores: the CPUs of each of these threads (kernels/cpu/cores.py), nothing to leave them free.

    Raises:
        NotSupportedError: the backend is not built yet.
        InvalidRequestError: `name` is "cpu", and the native kernels are not installed.
    """
    if name == "reference":
        return ReferenceOps(dtype, device)
    if name == "cpu":
        ops = CpuOps(dtype, threads=threads)
        if cores:
            ops.pin(cores)
        return ops
    raise NotSupportedError(f"kernels: {name!r} is planned but not built yet", param="kernels")
