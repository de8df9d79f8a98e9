"""Print how the package is built: its rooms, the arrows between them, and what has grown too long or too wide.

A room is a folder or a single module directly below penstock/. An arrow is an import between two rooms, anywhere in a
file. Without circles, the arrows order the rooms into floors: a room is one floor above the highest room that it
imports. A line of code is one that is not blank and not part of a comment or docstring. `make structure` prints the
figures; tests/test_architecture.py enforces limits on them. `--package penstock_lab` measures the laboratory.
"""

import argparse
import ast
import io
import json
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "penstock"
LAB = ROOT / "penstock_lab"
NATIVE = PACKAGE / "kernels" / "cpu" / "native"
LONG_FILE = 700  # lines
LONG_FUNCTION = 70
WIDE_SIGNATURE = 8  # parameters without self and cls

NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)

Arrows = dict[tuple[str, str], set[str]]


def room_of(path: Path, package: Path = PACKAGE) -> str:
    """Return the room of a file: the folder below the package, or the module's own name."""
    relative = path.relative_to(package)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return the nodes of a file that matter here: itself, its imports, classes and functions."""
    kinds = (ast.Module, ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]


def imported_names(path: Path) -> set[str]:
    """Return the dotted names that a file imports, at its top and inside functions."""
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise SystemExit(f"{path}: relative imports are not followed; write the whole name")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def find_arrows(package: Path = PACKAGE) -> Arrows:
    """Return {(room, imported room): files of the first room that import the second}, both of one package."""
    files = sorted(package.rglob("*.py"))
    rooms = {room_of(path, package) for path in files}
    found: Arrows = defaultdict(set)
    for path in files:
        room = room_of(path, package)
        for name in imported_names(path):
            owner, _, rest = name.partition(".")
            target = rest.split(".")[0]
            if owner == package.name and target != room:
                found[room, target if target in rooms else "__init__"].add(str(path.relative_to(ROOT)))
    return {pair: files for pair, files in found.items() if pair[0] != pair[1]}


def find_file_arrows(package: Path = PACKAGE) -> set[tuple[str, str]]:
    """Return (module, imported module) of one package, by dotted names."""
    modules = {}
    for path in package.rglob("*.py"):
        modules[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    found = set()
    for module, path in modules.items():
        for name in imported_names(path):
            found.add((module, name if name in modules else name.rpartition(".")[0]))
    return {(module, target) for module, target in found if target in modules and target != module}


def find_circles(arrows: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the groups of rooms, or of modules, that import each other in a loop."""
    below = defaultdict(set)
    for room, target in arrows:
        below[room].add(target)
    reach: dict[str, set[str]] = {}
    for start in below:
        seen, stack = set[str](), [start]
        while stack:
            fresh = below.get(stack.pop(), set()) - seen
            seen |= fresh
            stack += fresh
        reach[start] = seen
    groups = {frozenset(other for other in reach[room] if room in reach.get(other, ())) for room in reach}
    return sorted(sorted(group) for group in groups if group)


def find_floors(arrows: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Return the floor of each room; a room that imports no other is on floor 1. The arrows must have no circle."""
    arrows = list(arrows)
    floors = dict.fromkeys({room for pair in arrows for room in pair}, 1)
    for _ in floors:
        for room, target in arrows:
            floors[room] = max(floors[room], floors[target] + 1)
    return floors


def modules_used_by(folder: Path) -> set[str]:
    """Return the modules of penstock/ that the files below a folder import; "penstock" stands for its public names."""
    files = (path.relative_to(ROOT).with_suffix("") for path in PACKAGE.rglob("*.py"))
    modules = {".".join(file.parts).removesuffix(".__init__") for file in files}
    used = set()
    for name in (name for path in folder.rglob("*.py") for name in imported_names(path)):
        if name.partition(".")[0] == PACKAGE.name:
            used.add(name if name in modules else name.rpartition(".")[0])
    return used


def lines_of_code(path: Path) -> int:
    """Return the number of lines that are not blank and not part of a comment or docstring."""
    docstrings: set[int] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type not in NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def python_functions(package: Path) -> Iterator[tuple[str, int, int]]:
    """Yield (place, lines, parameters) of each Python function."""
    for path in sorted(package.rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                parameters = [item.arg for item in given if item.arg not in ("self", "cls")]
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", lines, len(parameters)


def native_functions() -> Iterator[tuple[str, int]]:
    """Yield (place, lines) of each C++ function: a block whose first and last lines begin in the first column."""
    for path in native_files():
        start, name = 0, ""
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            opens = line.endswith("{") and re.match(r"(?!namespace|struct|class|enum|extern|union)[A-Za-z]", line)
            if not start and opens:
                start, name = number, line.partition("(")[0]
            elif start and line.startswith("}"):
                yield f"{path.relative_to(ROOT)}:{start} {name}", number - start + 1
                start = 0


def native_files() -> list[Path]:
    return sorted(path for path in NATIVE.rglob("*") if path.suffix in (".cpp", ".h"))


def count_lines(paths: Iterable[Path]) -> dict[str, int]:
    return {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}


def largest(figures: Iterable[tuple[str, int]], above: int) -> dict[str, int]:
    return {place: number for place, number in sorted(figures, key=lambda item: -item[1]) if number > above}


def measure(package: Path = PACKAGE) -> dict[str, Any]:
    """Return every figure as plain values."""
    arrows, functions = find_arrows(package), list(python_functions(package))
    circles = find_circles(arrows)
    files = sorted(package.rglob("*.py"))
    native = native_files() if package == PACKAGE else []
    rooms = Counter[str]()
    for path in files:
        rooms[room_of(path, package)] += lines_of_code(path)
    lengths = [(place, lines) for place, lines, _ in functions]
    in_circles = [pair for pair in arrows if any(set(pair) <= set(circle) for circle in circles)]
    long_native = native_functions() if native else ()
    return {
        "rooms": len(rooms),
        "arrows": len(arrows),
        "arrows up": len(in_circles),
        "circles": circles,
        "circles of files": find_circles(find_file_arrows(package)),
        "Python files": len(files),
        "lines of code": sum(rooms.values()),
        "lines of Python": sum(count_lines(files).values()),
        "lines of C++": sum(count_lines(native).values()),
        "longest Python function": max(lines for _, lines in lengths),
        "most parameters": max(parameters for *_, parameters in functions),
        f"functions over {LONG_FUNCTION} lines": largest([*lengths, *long_native], LONG_FUNCTION),
        f"signatures over {WIDE_SIGNATURE} parameters": largest(
            [(place, parameters) for place, _, parameters in functions], WIDE_SIGNATURE
        ),
        f"files over {LONG_FILE} lines": largest(count_lines([*files, *native]).items(), LONG_FILE),
        "floors": {} if circles else by_floor(arrows, rooms),
    }


def by_floor(arrows: Arrows, lines: Counter[str]) -> dict[str, list[str]]:
    """Return {floor: its rooms with their lines of code}, from the top floor down."""
    floors = find_floors(arrows)
    return {
        str(floor): [f"{room} {lines[room]}" for room in sorted(floors) if floors[room] == floor]
        for floor in sorted(set(floors.values()), reverse=True)
    }


def print_files(package: Path) -> None:
    """Print every file that says what it is, by room, with its lines of code and the first line of its docstring."""
    room = ""
    for path in sorted(package.rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if docstring is None:
            continue
        if room != room_of(path, package):
            room = room_of(path, package)
            print(f"{room}")
        print(f"  {path.relative_to(package)!s:34} {lines_of_code(path):4}  {docstring.splitlines()[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--arrows", action="store_true", help="print every arrow with the files that draw it")
    parser.add_argument("--package", default=PACKAGE.name, choices=(PACKAGE.name, LAB.name), help="what is measured")
    parser.add_argument("--files", action="store_true", help="list every file with the first line of its docstring")
    options = parser.parse_args()
    package = ROOT / options.package
    if options.files:
        return print_files(package)
    figures = measure(package)
    if options.arrows:
        figures["arrows"] = {f"{a} -> {b}": sorted(files) for (a, b), files in sorted(find_arrows(package).items())}
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        if not isinstance(value, dict):
            print(f"{name}: {value or 0}")
            continue
        print(f"{name}:{'' if value else ' none'}")
        for place, number in value.items():
            print(f"  {', '.join(number) if isinstance(number, list) else number}  {place}")


if __name__ == "__main__":
    main()
