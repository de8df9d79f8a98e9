"""What is tested of which architecture, the table of docs/models.md: `make matrix` runs the tests and writes it.

A test that is marked `matrix(column)` proves that column of its `case`. A cell says "yes" if every such test of every
tiny model of the architecture has passed, "no" if one has not, and NOTHING if there is no such test, for instance
because no layer has a window.
"""

import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path

import pytest

from tests.families.case import Case, all_cases

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
TESTS = ROOT / "tests" / "families"
COLUMNS = ["float32", "bfloat16", "int8", "int4", "int8 cache", "window", "drafts", "2 ranks"]
NOTHING = "–"
BETWEEN = re.compile(r"(<!-- support matrix: [^\n]*-->\n)(.*?)(<!-- end -->)", re.DOTALL)

Cells = dict[str, dict[str, bool]]  # by architecture and column


class Results:
    """A pytest plugin that notes which column of which architecture each test proves, and whether it passed."""

    def __init__(self) -> None:
        self.cells: Cells = {}
        self._proves: dict[str, list[tuple[str, str]]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        for item in items:
            columns = [mark.args[0] for mark in item.iter_markers("matrix")]
            self._proves[item.nodeid] = [(item.callspec.params["case"].architecture, column) for column in columns]
            for architecture, column in self._proves[item.nodeid]:
                self.cells.setdefault(architecture, {})[column] = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:  # a test that is skipped has proved nothing
            for architecture, column in self._proves[report.nodeid]:
                self.cells[architecture][column] = False


def defined() -> Cells:
    """Return the cells that the tests have, as if all had passed: read from their marks, without pytest."""
    cells: Cells = {}
    for name in sorted(file.stem for file in TESTS.glob("test_*.py")):
        module = importlib.import_module(f"tests.families.{name}")
        for function in (value for name, value in vars(module).items() if name.startswith("test_")):
            marks = [*getattr(module, "pytestmark", []), *getattr(function, "pytestmark", [])]
            choices = {mark.args[0]: mark.args[1] for mark in marks if mark.name == "parametrize"}
            marks += [mark for values in choices.values() for value in values for mark in getattr(value, "marks", ())]
            for case, mark in product(choices.get("case", all_cases()), marks):
                if mark.name == "matrix":
                    cells.setdefault(case.architecture, {})[mark.args[0]] = True
    return cells


def table(cells: Mapping[str, Mapping[str, bool]], cases: Iterable[Case]) -> str:
    """Return the table in Markdown, one line per architecture."""
    models: dict[str, list[str]] = {}
    for case in cases:
        models.setdefault(case.architecture, []).append(case.name)
    lines = [["Architecture", *COLUMNS, "tiny models"], ["---"] * (len(COLUMNS) + 2)]
    for architecture, names in models.items():
        found = cells.get(architecture, {})
        words = [{True: "yes", False: "no", None: NOTHING}[found.get(column)] for column in COLUMNS]
        lines.append([f"`{architecture}`", *words, str(len(names))])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def written() -> str:
    """Return the table as it stands in docs/models.md."""
    found = BETWEEN.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None, "docs/models.md has no place for the support matrix"
    return found[2]


def main() -> int:
    """Run the tests and write the table. Return exit code 1 if a cell says "no"."""
    results = Results()
    imported_before = "ignore::pytest.PytestAssertRewriteWarning"  # by the cases
    code = pytest.main(["-m", "matrix", "-W", imported_before, str(TESTS)], [results])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return code  # nothing was proved, and nothing refuted
    text = PAGE.read_text(encoding="utf-8")
    new = table(results.cells, all_cases())
    PAGE.write_text(BETWEEN.sub(lambda match: match[1] + new + match[3], text), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
