"""Read the C interface of the native library from native/abi.h, the only place that declares it. No torch.

The parser accepts only the forms that abi.h uses and raises an error on anything else, so it cannot miss a declaration.
"""

import re
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

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
        """Return the names and types in a declaration such as `const float* x` or `std::int64_t n, ends[8]`."""
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
