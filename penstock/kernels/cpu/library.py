"""The native library: find it, if the package was installed with a compiler, and declare its functions. No torch.

The C interface is read from native/abi.h, the only place that declares it. The parser accepts only the forms that abi.h
uses and raises an error on anything else, so it cannot miss a declaration.

PENSTOCK_CPU_LEVEL=portable, avx2, avx512f, avx512, avx512fma or amx selects an instruction level up to the best one.
PENSTOCK_CPU_LIBRARY=FILE loads another build of the library, as `make sanitize` does.

A file that was cut short would end the process with SIGBUS, at the first page that is missing. So the file is checked
before it is loaded: its size against its own headers, and size and SHA-256 against what pip noted when it installed it.
"""

import base64
import ctypes
import hashlib
import os
import re
import struct
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import penstock.kernels.cpu
from penstock.errors import InvalidRequestError, shown

HEADER = Path(__file__).with_name("native") / "abi.h"
SCALARS = {"std::int32_t": c_int32, "std::int64_t": c_int64, "float": c_float, "double": c_double, "void": None}
COMMENT = re.compile(r"//.*|^[ \t]*#.*", re.MULTILINE)
STATEMENT = re.compile(
    r"""\s*(?:
      namespace\s\w+\s\{ | extern\s"C"\s\{ | \}(?!;) | struct\s\w+;
    | constexpr\sint\s(?P<constant>\w+)\s=\s(?P<value>\d+);
    | enum\s(?P<enum>\w+)\s:\s[\w:]+\s\{(?P<members>[^}]*)\};
    | struct\s(?P<struct>\w+)\s\{(?P<fields>[^}]*)\};
    | PENSTOCK_API\s(?P<result>[\w:]+\*?)\s(?P<function>\w+)\((?P<parameters>[^)]*)\);
    )\s*""",
    re.VERBOSE,
)
DECLARATION = re.compile(r"\s*(?:const\s)?(?P<type>[\w:]+\*?)\s(?P<names>[^*]+)")
NAME = re.compile(r"\s*(?P<name>\w+)(?:\[(?:penstock::)?(?P<length>\w+)\])?\s*")


class Abi:
    """The declarations of a header.

    Attributes:
        constants: integer constants and enum members by name.
        enums: the members of each enum in order.
        structs: for each struct, the `_fields_` of a ctypes.Structure; pointers are addresses.
        functions: for each function, the result type and the argument types, for ctypes.
    """

    def __init__(self, text: str) -> None:
        """Parse the text of a header.

        Raises:
            ValueError: a statement, type or name does not have a form that abi.h uses.
        """
        self.constants: dict[str, int] = {}
        self.enums: dict[str, dict[str, int]] = {}
        self.structs: dict[str, list[tuple[str, Any]]] = {}
        self.functions: dict[str, tuple[Any, list[Any]]] = {}
        text, at = COMMENT.sub("", text).strip(), 0
        while at < len(text):
            found = _match(STATEMENT.match(text, at), text[at : at + 80])
            self._add(found)
            at = found.end()

    def _add(self, found: re.Match[str]) -> None:
        if name := found["constant"]:
            self.constants[name] = int(found["value"])
        elif name := found["enum"]:
            self.enums[name] = _members(found["members"])
            self.constants |= self.enums[name]
        elif name := found["struct"]:
            lines = found["fields"].split(";")[:-1]
            self.structs[name] = [entry for line in lines for entry in self._declared(line)]
        elif name := found["function"]:
            parameters = [item for item in found["parameters"].split(",") if item.strip()]
            self.functions[name] = _type(found["result"]), [self._declared(item)[0][1] for item in parameters]

    def _declared(self, text: str) -> list[tuple[str, Any]]:
        """Parse the names and types in a declaration such as `const float* x` or `std::int64_t n, ends[8]`."""
        found = _match(DECLARATION.fullmatch(text), text)
        entries = []
        for item in found["names"].split(","):
            name, kind = _match(NAME.fullmatch(item), text), _type(found["type"])
            length = name["length"]
            entries.append((name["name"], kind if length is None else kind * self.constants[length]))
        return entries


def _match(found: re.Match[str] | None, text: str) -> re.Match[str]:
    if found is None:
        raise ValueError(f"abi.h: cannot parse {text.strip()!r}")
    return found


def _members(text: str) -> dict[str, int]:
    members: dict[str, int] = {}
    for item in filter(str.strip, text.split(",")):
        name, _, value = item.partition("=")
        members[name.strip()] = int(value) if value else len(members)
    return members


def _type(name: str) -> Any:
    if name.endswith("*"):
        return c_void_p
    if name not in SCALARS:
        raise ValueError(f"abi.h: unknown type {name!r}")
    return SCALARS[name]


ABI = Abi(HEADER.read_text(encoding="utf-8"))
ABI_VERSION = int(hashlib.sha256(HEADER.read_bytes()).hexdigest()[:7], 16)  # as CMakeLists.txt writes it
LEVELS = tuple(name.removeprefix("LEVEL_").lower() for name in ABI.enums["Level"])
LEVEL_VARIABLE = "PENSTOCK_CPU_LEVEL"
LIBRARY_VARIABLE = "PENSTOCK_CPU_LIBRARY"
SAME_BITS = {"avx512f": "avx2", "avx512fma": "avx512"}  # faster levels that compute exactly the bits of another level
MAX_LEAVES = ABI.constants["MAX_LEAVES"]
MAX_ARGUMENTS = ABI.constants["MAX_CALL_ARGUMENTS"]
RECORDABLE = tuple("penstock_" + name.removeprefix("RECORD_").lower() for name in ABI.enums["Recordable"])
NOT_QUANTISABLE, OUT_OF_RANGE = ABI.constants["STATUS_NOT_QUANTISABLE"], ABI.constants["STATUS_OUT_OF_RANGE"]
NOT_BUILT = (
    "the native library is not installed, because there was no C++ compiler; install one, and install the package again"
)


class PenstockWeight(ctypes.Structure):
    _fields_ = ABI.structs["PenstockWeight"]


class PenstockLora(ctypes.Structure):
    _fields_ = ABI.structs["PenstockLora"]


class PenstockBits(ctypes.Structure):
    _fields_ = ABI.structs["PenstockBits"]


class PenstockBlockForm(ctypes.Structure):
    _fields_ = ABI.structs["PenstockBlockForm"]


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
    """Load the library once; None if it is missing or cannot be used, and `why_missing` gives the reason."""
    return _find_library()[0]


def why_missing() -> str:
    """Say why the native library is missing or cannot be used; "" if it is there."""
    return _find_library()[1]


@lru_cache(maxsize=1)
def _find_library() -> tuple[ctypes.CDLL | None, str]:
    """Load the library and declare its functions, or give None and the reason."""
    files = (Path(folder) / "penstock_cpu.so" for folder in penstock.kernels.cpu.__path__)
    given = os.environ.get(LIBRARY_VARIABLE)
    path = Path(given) if given else next((file for file in files if file.exists()), None)
    if path is None:
        return None, NOT_BUILT
    try:
        if damage := _damage_of(path):
            return None, f"the native library is damaged ({damage}); install the package again"
        library = ctypes.CDLL(str(path))
        if library.penstock_abi_version() != ABI_VERSION:
            again = "install the package again (in a checkout: make installed)"
            return None, f"the native library {path} was built from another {HEADER}; {again}"
        for name, (result, arguments) in ABI.functions.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:  # truncated, or built for another machine
        text = " ".join(str(error).split())
        return None, f"the native library cannot be used ({text}); install the package again"
    return library, ""


def _damage_of(path: Path) -> str:
    """Say what is wrong with the file of a library, or with its being another than the installed one; "" if nothing."""
    content = path.read_bytes()
    needed = max((offset + size for offset, size in _segments(content)), default=0)
    if len(content) < needed:
        return f"{path} has {len(content)} of {needed} bytes"
    for record in path.parents[min(3, len(path.parents) - 1)].glob("penstock-*.dist-info/RECORD"):
        name = f"{path.relative_to(record.parents[1])},sha256="
        for line in record.read_text(encoding="utf-8").splitlines():
            if line.startswith(name):
                expected, _, size = line.removeprefix(name).partition(",")
                if size != str(len(content)):
                    return f"{path} has {len(content)} bytes, and {size} were installed"
                if base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=") != expected:
                    return f"{path} is not the file that was installed: its SHA-256 differs"
    return ""


def _segments(content: bytes) -> list[tuple[int, int]]:
    """List the offset and size in the file of everything that the loader would map; [] if it is no 64-bit ELF file."""
    if len(content) < 64 or content[:5] != b"\x7fELF\x02":
        return []
    (first,), (size, count) = struct.unpack_from("<Q", content, 32), struct.unpack_from("<HH", content, 54)
    starts = [start for start in range(first, first + size * count, size) if start + 40 <= len(content)]
    found = [struct.unpack_from("<QQQQ", content, start + 8) for start in starts]  # offset, two addresses, size
    return [(offset, length) for offset, _, _, length in found] + [(first, size * count)]


def best_level() -> str | None:
    """Ask the library for the highest instruction level of this processor; None without the library."""
    library = load_library()
    return None if library is None else LEVELS[library.penstock_best_level()]


def level_of_bits() -> str | None:
    """Name the level of the bits of `chosen_level()`: levels that compute the same bits share one name.

    Raises:
        InvalidRequestError: as in `chosen_level`.
    """
    level = chosen_level()
    return None if level is None else SAME_BITS.get(level, level)


def chosen_level() -> str | None:
    """Choose the level at which kernels run: the best level, or the one that PENSTOCK_CPU_LEVEL selects.

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
