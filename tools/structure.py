"""Print how the package is built: rooms, arrows between them, and what has grown too long or too wide.

A room is a folder or a loose module directly below ``penstock/``; an arrow is an import between two rooms, wherever in
the file it stands. Floors follow from the arrows: a room stands one above the highest room that it imports. Run it with
``make structure``; ``tests/test_architecture.py`` holds the same figures against their limits.
"""

import argparse
import ast
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "penstock"


def room_of(path: Path) -> str:
    """Return the room of a file: the folder below penstock/, or the module's own name."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_names(path: Path) -> set[str]:
    """Return the dotted names below penstock that a file imports, inside functions as well as at its top."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("penstock.") for name in names if name.startswith("penstock.")}


def arrows(files: Iterable[Path], rooms: set[str]) -> dict[tuple[str, str], set[str]]:
    """Return {(room, imported room): files of the first that import the second}."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path in files:
        room = room_of(path)
        for name in imported_names(path):
            target = name.split(".")[0]
            if target not in rooms:
                target = "__init__"  # a public name, fetched through the package itself
            if target != room:
                found[room, target].add(str(path.relative_to(PACKAGE)))
    return dict(found)


def circles(pairs: Iterable[tuple[str, str]]) -> list[set[str]]:
    """Return the groups of rooms that import each other in a loop (strongly connected components of two or more)."""
    below = defaultdict(set)
    for room, target in pairs:
        below[room].add(target)

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        stack = [start]
        while stack:
            for target in below[stack.pop()] - seen:
                seen.add(target)
                stack.append(target)
        return seen

    reach = {room: reachable(room) for room in list(below)}
    groups = {
        frozenset({room} | {o for o in reach[room] if room in reach.get(o, ())})
        for room in reach
        if room in reach[room]
    }
    return [set(group) for group in groups]


def floors(rooms: set[str], pairs: set[tuple[str, str]]) -> dict[str, int]:
    """Return the floor of each room; rooms of one circle share what they can."""
    level = dict.fromkeys(rooms, 1)
    for _ in rooms:
        for room, target in pairs:
            level[room] = min(max(level[room], level[target] + 1), len(rooms))
    return level


def functions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield (place, lines, parameters without self) of each function of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = node.args
            names = [a.arg for a in [*given.posonlyargs, *given.args, *given.kwonlyargs]]
            count = len([name for name in names if name not in ("self", "cls")])
            place = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
            yield place, (node.end_lineno or node.lineno) - node.lineno + 1, count


def measure() -> dict[str, object]:
    """Return every figure as plain values, ready for JSON."""
    files = sorted(PACKAGE.rglob("*.py"))
    rooms = {room_of(path) for path in files}
    drawn = arrows(files, rooms)
    found = [entry for path in files for entry in functions(path)]
    lines = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    native = [p for p in (PACKAGE / "kernels").rglob("*") if p.suffix in (".cpp", ".h")]
    lines_native = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in native}
    level = floors(rooms, set(drawn))
    return {
        "rooms": len(rooms),
        "arrows": len(drawn),
        "circles": [sorted(circle) for circle in circles(drawn)],
        "floors": {room: level[room] for room in sorted(rooms, key=lambda r: (-level[r], r))},
        "drawn": {f"{a} -> {b}": len(names) for (a, b), names in sorted(drawn.items())},
        "lines_python": sum(lines.values()),
        "lines_native": sum(lines_native.values()),
        "lines_by_room": dict(
            Counter({room: sum(n for p, n in lines.items() if room_of(ROOT / p) == room) for room in rooms})
        ),
        "files_over_300": {p: n for p, n in sorted({**lines, **lines_native}.items(), key=lambda x: -x[1]) if n > 300},
        "functions_over_50": {p: n for p, n, _ in sorted(found, key=lambda x: -x[1]) if n > 50},
        "signatures_over_8": {p: n for p, _, n in sorted(found, key=lambda x: -x[2]) if n > 8},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    figures = measure()
    if parser.parse_args().json:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        if isinstance(value, dict):
            print(f"{name}: {len(value)}")
            for key, number in value.items():
                print(f"  {number:6} {key}")
        else:
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
