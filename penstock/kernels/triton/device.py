"""Finding the GPU that an engine computes on. Imports neither torch nor Triton, whose imports take seconds.

Whoever wants a GPU asks here first: whether the driver, the device and the packages are there is known in milliseconds.
With TRITON_INTERPRET=1, Triton's interpreter stands in for the device, slowly, on arrays of the CPU: whole engines are
tested like that on machines without a GPU.
"""

import ctypes
import hashlib
import os
import re
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from penstock.errors import NotSupportedError, fail, invalid, shown

NAME = "triton"  # of the kernels
TILE = 128  # positions that attention folds at a time; a block of the cache holds whole tiles
MAX_HEAD_DIM = 256  # elements of a head that a program of attention can hold
LEAVES = 1  # pieces of K in products, where a model has one device
OLDEST = 80  # compute capability, as in sm_80
PACKAGES = ("torch", "triton")
DRIVER = "libcuda.so.1"
CAPABILITY = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


def choose(kernels: str, device: str, number: int, num_engines: int, why_not: str, num_ranks: int = 1) -> str | None:
    """Choose the device of an engine whose options are these; None: a GPU is neither asked for nor free to take.

    Args:
        number, num_engines: of the engine, and how many there are here; each has GPUs of its own.
        why_not: why the engine cannot be served on a GPU; "" if it can.
        num_ranks: its processes, each of which has a GPU: the first one what is returned, the others those after it.
            They take GPUs only if asked to, because this has not run on several GPUs yet.

    Raises:
        InvalidRequestError: a GPU is asked for and cannot be used.
    """
    asked = "kernels" if kernels == NAME else "device" if device.startswith("cuda") else ""
    if not asked and (is_interpreted() or num_ranks > 1 or (kernels, device) != ("auto", "auto")):
        return None
    here = device if ":" in device else f"cuda:{number * num_ranks}"
    if num_engines > 1 and ":" in device:
        raise fail("device", device, f"cuda: each of {num_engines} engines has GPUs of its own")
    if is_interpreted() and device in ("auto", "cpu"):
        here = "cpu"
    elif is_interpreted() or device == "cpu":
        where = "CPU, in Triton's interpreter" if is_interpreted() else "GPU"
        raise fail("device", device, f"auto: kernels = {NAME} compute on the {where}")
    missing = next(filter(None, (why_missing(of_rank(here, rank)) for rank in range(num_ranks))), "")
    missing = missing or _why_unequal(number_of(here), num_ranks)
    value = shown(kernels if asked == "kernels" else device)
    if missing and asked:
        raise invalid(asked, f"{value} cannot be used: {missing}")
    if why_not and asked:
        raise NotSupportedError(f"{asked}: {value} cannot be used: {why_not}", param=asked)
    return None if missing or why_not else here


def of_rank(device: str, rank: int) -> str:
    """Name the device of a rank, from that of rank 0."""
    return device if device == "cpu" else f"cuda:{number_of(device) + rank}"


def leaves_of(num_ranks: int) -> int:
    """Count the pieces of K in products: one where a model has one device, which saves time."""
    if num_ranks == 1:
        return LEAVES
    from penstock.kernels.ops import REDUCTION_LEAVES  # which imports numpy; the config reads this module

    return REDUCTION_LEAVES


def describe(device: str) -> str:
    """Say what a device is, for users."""
    found = architectures()
    return "Triton's interpreter" if device == "cpu" or isinstance(found, str) else f"sm_{found[number_of(device)]}"


def is_interpreted() -> bool:
    """Tell whether kernels run in Triton's interpreter, by the variable that Triton reads when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def number_of(device: str) -> int:
    """Return N of "cuda:N"; 0 for "cuda"."""
    return int(device.partition(":")[2] or 0)


def why_missing(device: str = "cuda") -> str:
    """Say what kernels on "cuda" or "cuda:N" lack here; "" if they can be used."""
    index = number_of(device)
    if not is_interpreted():
        found = architectures()
        if isinstance(found, str):
            return found
        if index >= len(found):
            return f"there is no GPU {index}: the NVIDIA driver shows {len(found)} (CUDA_VISIBLE_DEVICES can hide some)"
        if found[index] < OLDEST:
            return f"the GPU has compute capability {found[index] / 10}; {OLDEST / 10} or more is needed"
    for package in PACKAGES:
        if find_spec(package) is None:
            return f"{package} is not installed: pip install 'penstock[gpu]'"
    if not is_interpreted() and not _torch_has_cuda():
        return "the installed torch is a build without CUDA; pip install 'penstock[gpu]' in a new environment"
    return ""


def _why_unequal(first: int, count: int) -> str:
    """Say that GPUs cannot share a model because their bits differ; "" if they do not."""
    found = architectures()
    kinds = [] if is_interpreted() or isinstance(found, str) else sorted({*found[first : first + count]})
    texts = " and ".join(f"{kind / 10}" for kind in kinds)
    return f"the GPUs have compute capabilities {texts}, and only equal ones share a model" if len(kinds) > 1 else ""


@cache
def architectures() -> tuple[int, ...] | str:
    """Ask the driver for the compute capability of each GPU (90 is 9.0); or say why it cannot be asked."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return f"this machine has no NVIDIA driver ({DRIVER})"
    if (status := driver.cuInit(0)) != 0:
        return f"the NVIDIA driver finds no GPU (cuInit returns {status})"
    count, found = ctypes.c_int(), list[int]()
    if driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return "the NVIDIA driver does not count its GPUs"
    for number in range(count.value):
        device, parts = ctypes.c_int(), [ctypes.c_int(), ctypes.c_int()]
        driver.cuDeviceGet(ctypes.byref(device), number)
        for part, attribute in zip(parts, CAPABILITY, strict=True):
            driver.cuDeviceGetAttribute(ctypes.byref(part), attribute, device)
        found.append(10 * parts[0].value + parts[1].value)
    return tuple(found)


def name_of(device: str, num_ranks: int = 1) -> str:
    """Name the arithmetic of kernels on a device, for fingerprints: "triton.sm90.leaves1", for example."""
    found = architectures()
    name = "interpreted" if is_interpreted() or isinstance(found, str) else f"sm{found[number_of(device)]}"
    return f"{NAME}.{name}.leaves{leaves_of(num_ranks)}"


def fingerprint() -> str:
    """Name what decides bits besides the device: the sources of the kernels, and the compiler."""
    digest = hashlib.blake2b(metadata.version("triton").encode(), digest_size=8)
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _torch_has_cuda() -> bool:
    """Read in the files of torch whether it was built with CUDA."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    return file is not None and file.exists() and re.search(r"^cuda\b[^=]*= *'", file.read_text(), re.M) is not None
