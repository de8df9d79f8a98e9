"""Find the native library, if the package was installed with a compiler, and declare its functions. No torch.

PENSTOCK_CPU_LEVEL=portable, avx2, avx512f, avx512, avx512fma or amx selects an instruction level up to the best one.
PENSTOCK_CPU_LIBRARY=FILE loads another build of the library, as `make sanitize` does.
"""

import ctypes
import os
from functools import lru_cache
from pathlib import Path

import penstock.kernels.cpu
from penstock.errors import InvalidRequestError, shown
from penstock.kernels.cpu.abi import ABI

ABI_VERSION = ABI.constants["ABI_VERSION"]
LEVELS = tuple(name.removeprefix("LEVEL_").lower() for name in ABI.enums["Level"])
LEVEL_VARIABLE = "PENSTOCK_CPU_LEVEL"
LIBRARY_VARIABLE = "PENSTOCK_CPU_LIBRARY"
SAME_BITS = {"avx512f": "avx2", "avx512fma": "avx512"}  # faster levels that compute exactly the bits of another level
MAX_LEAVES = ABI.constants["MAX_LEAVES"]
MAX_ARGUMENTS = ABI.constants["MAX_CALL_ARGUMENTS"]
RECORDABLE = tuple("penstock_" + name.removeprefix("RECORD_").lower() for name in ABI.enums["Recordable"])
NOT_QUANTISABLE, OUT_OF_RANGE = ABI.constants["STATUS_NOT_QUANTISABLE"], ABI.constants["STATUS_OUT_OF_RANGE"]
NOT_BUILT = "the native library is not installed, because there was no C++ compiler"


class PenstockWeight(ctypes.Structure):
    _fields_ = ABI.structs["PenstockWeight"]


class PenstockSampling(ctypes.Structure):
    _fields_ = ABI.structs["PenstockSampling"]


class PenstockCache(ctypes.Structure):
    _fields_ = ABI.structs["PenstockCache"]


class PenstockAttention(ctypes.Structure):
    _fields_ = ABI.structs["PenstockAttention"]


class PenstockAttentionStep(ctypes.Structure):
    _fields_ = ABI.structs["PenstockAttentionStep"]


class PenstockCall(ctypes.Structure):
    _fields_ = ABI.structs["PenstockCall"]


class PenstockSpan(ctypes.Structure):
    _fields_ = ABI.structs["PenstockSpan"]


def check_status(status: int) -> None:
    """Raise the error that a Status of the native library stands for.

    Raises:
        ValueError: a weight cannot be quantised, or an id, position or slot is outside its table.
        MemoryError: memory could not be allocated.
    """
    if status == NOT_QUANTISABLE:
        raise ValueError("weights that are not finite or have a magnitude of 2^100 or more cannot be quantised")
    if status == OUT_OF_RANGE:
        raise ValueError("an id, position or slot is outside of its table")
    if status:
        raise MemoryError("not enough memory for a native operation")


def load_library() -> ctypes.CDLL | None:
    """Return the library, or None if it is missing or cannot be used; `why_missing` gives the reason."""
    return _find_library()[0]


def why_missing() -> str:
    """Return why the native library is missing or cannot be used; "" if it is there."""
    return _find_library()[1]


@lru_cache(maxsize=1)
def _find_library() -> tuple[ctypes.CDLL | None, str]:
    """Return the library with its functions declared, or None and the reason."""
    files = (Path(folder) / "penstock_cpu.so" for folder in penstock.kernels.cpu.__path__)
    given = os.environ.get(LIBRARY_VARIABLE)
    path = Path(given) if given else next((file for file in files if file.exists()), None)
    if path is None:
        return None, NOT_BUILT
    try:
        library = ctypes.CDLL(str(path))
        version = library.penstock_abi_version()
        if version != ABI_VERSION:
            reason = f"the native library is version {version}, but {ABI_VERSION} is needed; install the package again"
            return None, reason
        for name, (result, arguments) in ABI.functions.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:  # truncated, or built for another machine
        text = " ".join(str(error).split())
        return None, f"the native library cannot be used ({text}); install the package again"
    return library, ""


def best_level() -> str | None:
    """Return the highest instruction level of the library on this processor, or None without the library."""
    library = load_library()
    return None if library is None else LEVELS[library.penstock_best_level()]


def level_of_bits() -> str | None:
    """Return the level that names the bits of `chosen_level()`: levels that compute the same bits share one name.

    Raises:
        InvalidRequestError: as in `chosen_level`.
    """
    level = chosen_level()
    return None if level is None else SAME_BITS.get(level, level)


def chosen_level() -> str | None:
    """Return the level at which kernels run: the best level, or the one that PENSTOCK_CPU_LEVEL selects.

    Raises:
        InvalidRequestError: the variable does not name a level of this machine.
    """
    best = best_level()
    forced = os.environ.get(LEVEL_VARIABLE, "")
    if best is None or not forced:
        return best
    allowed = LEVELS[: LEVELS.index(best) + 1]
    if forced not in allowed:
        raise InvalidRequestError(
            f"{LEVEL_VARIABLE}: {shown(forced)} is not allowed; this machine has {', '.join(allowed)}"
        )
    return forced
