"""The backends by name. kernels/ops.py is their interface.

To add one: write a class of Ops in a folder beside cpu/, return it from load_ops, and let NumericsConfig (config.py)
accept its name, which is in KERNELS there, and choose it for "auto". If its arrays are numpy's, say so in
weights/loader.dtype_for; otherwise they are torch's.
"""

from collections.abc import Sequence

from penstock.errors import invalid
from penstock.kernels.ops import Ops
from penstock.kernels.tensors import Dtype
from penstock.kernels.triton.device import is_interpreted, leaves_of, why_missing


def load_ops(
    name: str,
    dtype: Dtype,
    device: object = None,
    *,
    threads: int = 1,
    cores: Sequence[Sequence[int]] = (),
    num_ranks: int = 1,
) -> Ops:
    """Make the backend with this name for models of type `dtype`.

    Args:
        dtype: a np.dtype or a torch.dtype; results are of the same kind. The reference backend computes with torch.
        device: None: the CPU, or the first GPU for kernels that need one.
        threads: number of threads of the native kernels.
        cores: the CPUs of each of these threads (kernels/cpu/host.py); empty: threads are not bound to CPUs.
        num_ranks: processes that share each layer.

    Raises:
        InvalidRequestError: the backend cannot be used here.
    """
    if name == "reference":
        from penstock.kernels.reference import ReferenceOps

        return ReferenceOps(dtype, device or "cpu")
    if name == "cpu":
        from penstock.kernels.cpu.ops import CpuOps

        ops = CpuOps(dtype, threads=threads)
        if cores:
            ops.pin(cores)
        return ops
    if name == "triton":
        device = device or ("cpu" if is_interpreted() else "cuda")
        if why := why_missing(str(device)):
            raise invalid("kernels", f"{name!r} cannot be used: {why}")
        from penstock.kernels.triton.ops import TritonOps

        return TritonOps(dtype, device, leaves=leaves_of(num_ranks))
    raise invalid("kernels", f"there are no kernels {name!r}")
