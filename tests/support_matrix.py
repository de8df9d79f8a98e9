"""What is tested of which architecture and file, the tables of docs/: `make matrix` runs the tests and writes them.

A test that is marked `matrix(column)` proves that column of the row to which its case belongs; `matrix(column, row)`
names the row. A cell says "yes" if every such test of every case has passed, "no" if one has not, and NOTHING if there
is no such test, for instance because no layer has a window.
"""

import importlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.families.case import all_cases
from tests.test_encoders import FAMILIES as ENCODERS
from tests.weights.files import FILES

ROOT = Path(__file__).parent.parent
NOTHING = "–"
MUTATIONS = 1000  # damaged files of each format
TIMEOUT_S = 1800  # of a test, with so many files, on a busy machine

Cells = dict[str, dict[str, bool]]  # by row and column


@dataclass(frozen=True)
class Matrix:
    """One of the tables.

    Attributes:
        name: in the comments around it.
        page: that contains it.
        tests: files, or folders of them.
        head: title of its first column.
        columns: titles of the others.
        parameter: of the tests, which is a case.
        row: of a case.
        cases: all of them; the last column counts them. Without cases, marks name the rows.
        rows: in their order, if there are no cases.
    """

    name: str
    page: Path
    tests: tuple[str, ...]
    head: str
    columns: tuple[str, ...]
    parameter: str = ""
    row: Callable[[Any], str] = str
    cases: Callable[[], list[Any]] = list
    rows: tuple[str, ...] = ()

    @property
    def place(self) -> re.Pattern[str]:
        return re.compile(rf"(<!-- {self.name}: [^\n]*-->\n)(.*?)(<!-- end -->)", re.DOTALL)

    def files(self) -> list[Path]:
        places = [ROOT / "tests" / name for name in self.tests]
        return [file for place in places for file in (sorted(place.glob("test_*.py")) if place.is_dir() else [place])]

    def row_of(self, mark: pytest.Mark, case: Any) -> str:
        """Return the row of which a test with this mark proves something."""
        return mark.args[1] if len(mark.args) > 1 else self.row(case)

    def defined(self) -> Cells:
        """Return the cells that the tests have, as if all had passed: read from their marks, without pytest."""
        cells: Cells = {}
        for file in self.files():
            module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
            for marks in _marks_of_tests(module, list(getattr(module, "pytestmark", []))):
                choices = {mark.args[0]: mark.args[1] for mark in marks if mark.name == "parametrize"}
                marks += [
                    mark for values in choices.values() for value in values for mark in getattr(value, "marks", ())
                ]
                cases = choices.get(self.parameter, self.cases()) or [None]
                for case, mark in product(cases, marks):
                    if mark.name == "matrix":
                        cells.setdefault(self.row_of(mark, case), {})[mark.args[0]] = True
        return cells

    def table(self, cells: Mapping[str, Mapping[str, bool]]) -> str:
        """Return the table in Markdown, one line per row."""
        counts = Counter(map(self.row, self.cases()))
        lines = [[self.head, *self.columns, *(["tiny models"] if counts else [])]]
        lines.append(["---"] * len(lines[0]))
        for row in self.rows or counts:
            found = cells.get(row, {})
            words = [{True: "yes", False: "no", None: NOTHING}[found.get(column)] for column in self.columns]
            lines.append([row, *words, *([str(counts[row])] if counts else [])])
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def written(self) -> str:
        """Return the table as it stands in its page."""
        found = self.place.search(self.page.read_text(encoding="utf-8"))
        assert found is not None, f"{self.page} has no place for the {self.name}"
        return found[2]

    def write(self, cells: Mapping[str, Mapping[str, bool]]) -> None:
        text, new = self.page.read_text(encoding="utf-8"), self.table(cells)
        self.page.write_text(self.place.sub(lambda match: match[1] + new + match[3], text), encoding="utf-8")


def _marks_of_tests(place: object, marks: list[pytest.Mark]) -> Iterator[list[pytest.Mark]]:
    """Yield the marks of every test of a module or class, with those of the classes around it."""
    for name, value in vars(place).items():
        own = [*marks, *getattr(value, "pytestmark", [])]
        if name.startswith("test_"):
            yield own
        elif name.startswith("Test") and isinstance(value, type):
            yield from _marks_of_tests(value, own)


MATRICES = (
    Matrix(
        "support matrix",
        ROOT / "docs" / "models.md",
        ("families",),
        "Architecture",
        (
            *("KV cache", "paged attention", "kernels"),
            *("float32", "bfloat16", "int8", "int4", "int8 cache", "window", "drafts", "2 ranks"),
        ),
        "case",
        lambda case: f"`{case.architecture}`",
        all_cases,
    ),
    Matrix(
        "formats of weights",
        ROOT / "docs" / "files.md",
        ("weights/test_files.py",),
        "Format",
        ("values", "logits", "same bits", "2 ranks", "convert", "plan", "damaged"),
        "file",
        lambda file: file.row,
        lambda: FILES,
    ),
    Matrix(
        "formats of tokenizers",
        ROOT / "docs" / "files.md",
        ("tokenizer", "test_hostile_files.py"),
        "File",
        ("ids", "texts", "BOS and EOS", "chat template", "damaged"),
        rows=(
            *("`tokenizer.json`", "`tokenizer.model`", "`tekken.json`"),
            *("GGUF, byte-level BPE", "GGUF, SentencePiece", "GGUF, WordPiece"),
        ),
    ),
    Matrix(
        "encoders",
        ROOT / "docs" / "embeddings.md",
        ("test_encoders.py",),
        "Encoder",
        (
            *("states", "classes", "classes of tokens", "pairs", "same bits"),
            *("bfloat16", "int8", "2 ranks", "GGUF"),
        ),
        "family",
        rows=(*ENCODERS, "JinaBert"),
    ),
)


class Results:
    """A pytest plugin that notes which cell of which table each test proves, and whether it passed."""

    def __init__(self) -> None:
        self.cells: dict[str, Cells] = {matrix.name: {} for matrix in MATRICES}
        self._proves: dict[str, list[tuple[str, str, str]]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        for matrix, item in product(MATRICES, items):
            if item.path in matrix.files():
                case = item.callspec.params.get(matrix.parameter) if hasattr(item, "callspec") else None
                for mark in item.iter_markers("matrix"):
                    row, column = matrix.row_of(mark, case), mark.args[0]
                    self._proves.setdefault(item.nodeid, []).append((matrix.name, row, column))
                    self.cells[matrix.name].setdefault(row, {})[column] = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:  # a test that is skipped has proved nothing
            for name, row, column in self._proves[report.nodeid]:
                self.cells[name][row][column] = False


def main() -> int:
    """Run the tests and write the tables. Return exit code 1 if a cell says "no"."""
    results = Results()
    imported_before = "ignore::pytest.PytestAssertRewriteWarning"  # by the cases
    files = [str(file) for matrix in MATRICES for file in matrix.files()]
    limits = [f"--mutations={MUTATIONS}", f"--timeout={TIMEOUT_S}"]
    code = pytest.main(["-m", "matrix", "-W", imported_before, *limits, *files], [results])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return code  # nothing was proved, and nothing refuted
    for matrix in MATRICES:
        matrix.write(results.cells[matrix.name])
    return code


if __name__ == "__main__":
    sys.exit(main())
