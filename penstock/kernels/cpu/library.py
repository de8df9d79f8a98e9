"""Finds and loads the native library, if the package was installed with a compiler. No torch.

So far it only tells what the processor can do; `penstock --version` shows it. The kernels behind `kernels.ops` use it
as they are built.
"""

import ctypes
from functools import lru_cache
from pathlib import Path

import penstock.kernels.cpu

ABI_VERSION = 1
FEATURE_BITS = {1: "avx2", 2: "avx512", 4: "vnni", 8: "bf16"}


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL | None:
    """The library, or None where none was built or it is of another version."""
    for folder in penstock.kernels.cpu.__path__:
        path = Path(folder) / "penstock_cpu.so"
        if path.exists():
            library = ctypes.CDLL(str(path))
            return library if library.penstock_abi_version() == ABI_VERSION else None
    return None


def cpu_features() -> tuple[str, ...] | None:
    """Names of the instruction sets found, or None without the library."""
    library = load_library()
    if library is None:
        return None
    bits = library.penstock_cpu_features()
    return tuple(name for bit, name in FEATURE_BITS.items() if bits & bit)
