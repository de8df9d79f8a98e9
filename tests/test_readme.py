"""The pages that users read hold what they say: commands and programs run as they stand there (the port aside), links
and paths lead somewhere, the tables are those of the tests, and a request passes the ten files."""

import argparse
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator

import pytest
import yaml

from benchmarks import picture
from penstock.cli.main import build_parser, dashed
from penstock.errors import EXTRAS
from tests import support_matrix
from tests.pages import CONSOLE, PAGES, ROOT, SERVE, commands, name_of, programs, run, serving

README = ROOT / "README.md"
TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]
WITH_COMMANDS = [page for page in PAGES if commands(page) and page.name != "request.md"]  # which has a test of its own
PROGRAMS = [pytest.param(text, id=f"{name_of(page)}-{i}") for page in PAGES for i, text in enumerate(programs(page))]
# A path with a folder, and below a folder of the repository or of the package; /models/llama is a user's own.
PATH = re.compile(r"(?<![\w/.*~$-])((?:[a-z0-9_]+/)+[A-Za-z0-9_.]+\.(?:py|md|yaml|yml|json|h|cpp|txt|svg))\b")
PLACES = [
    ROOT / place
    for place in ("", "penstock", "penstock/kernels", "penstock/kernels/cpu", "penstock/kernels/cpu/native")
]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Yield the port of the pages' server, a free one."""
    with serving() as number:
        yield number


def test_there_is_something_to_run():
    assert len(commands(README)) >= 3
    assert len(programs(README)) >= 2
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.covers("C22")
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_commands(page, port, tmp_path):
    """Guards against a command that fails, or that needs more than the commands above it on its page: they run in their
    order, in an empty folder. The fixture starts the server."""
    for command in commands(page):
        if command == SERVE:
            continue
        assert not command.endswith("&"), f"pages may start one server only: {SERVE}"
        done = run(command.replace("8000", str(port)), tmp_path)
        assert done.returncode == 0, (command, done.stderr)
        assert (done.stdout + done.stderr).strip(), command  # `convert` reports on stderr, like every progress line
        assert '"error"' not in done.stdout or "tempreature" in command  # the misspelt field is there to be refused


def test_pages_write_to_no_fixed_place():
    """Guards against two commands that meet in a folder of the machine, such as two tests of one page."""
    for page in PAGES:
        for command in commands(page):
            assert "/tmp/" not in command, f"{name_of(page)}: {command}"


def test_commands_that_are_not_run_are_accepted():
    """Guards against an option that a page names and the command no longer has, if it is too slow to run."""
    texts = [block for page in PAGES for block in CONSOLE.findall(page.read_text(encoding="utf-8"))]
    lines = [line for text in texts for line in text.replace("\\\n", " ").splitlines()]
    found = [
        shlex.split(line.removeprefix("$ penstock "), comments=True) for line in lines if line.startswith("$ penstock ")
    ]
    assert len(found) >= 45
    for words in found:
        end = next((at for at, word in enumerate(words) if word in ("&", "&&", "|", "<", ">")), len(words))
        build_parser(words[:end]).parse_args(dashed(words[:end]))


@pytest.mark.covers("C22")
@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program, port, tmp_path, capsys):
    file = tmp_path / "program.py"
    file.write_text(program.replace("8000", str(port)), encoding="utf-8")
    runpy.run_path(str(file), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_links_and_paths_lead_somewhere(page):
    """Guards against a file that was moved or renamed and is still named on a page."""
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for path in PATH.findall(re.sub(r"\]\([^)]*\)|https?://\S+", "]", text)):
        assert any((place / path).exists() for place in PLACES), path


def test_commands_in_sentences_and_tables_are_accepted():
    """Guards against a command or a flag that a page names outside of a block, and that is no longer there."""
    texts = [re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S) for page in TEXTS[:-2]]
    found = [span.split() for text in texts for span in re.findall(r"`penstock ([a-z][^`\n]*)`", text)]
    assert len(found) >= 150
    for words in found:
        parser = build_parser(words[:1])
        for word in words[:2]:  # such as `bench serve`
            kinds = [action.choices for action in parser._actions if action.nargs == argparse.PARSER]
            assert kinds or word != words[0]
            parser = kinds[0].get(word, parser) if kinds else parser
        assert parser.prog.split()[1] == words[0], words
        flags = [word.partition("=")[0] for word in dashed(words) if re.match("--?[a-z]", word)]
        assert parser._option_string_actions.keys() >= set(flags), words


def test_extras_that_are_named_exist():
    """Guards against a page or an error that tells the user to install an extra that was dropped."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = {name for page in TEXTS for name in re.findall(r"penstock\[(\w+)\]", page.read_text(encoding="utf-8"))}
    assert named
    assert named | set(EXTRAS.values()) <= extras.keys()


def test_every_page_is_on_the_site():
    """Guards against a page that nobody finds: the navigation of mkdocs.yml has each one."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r": (\w+\.md)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in PAGES if page.parent == ROOT / "docs")
    assert yaml.safe_load(text)["strict"] is True


def test_the_ten_files_are_those_that_a_request_passes(tmp_path):
    """Guards against a way through the code that nobody takes any more."""
    named = re.findall(
        r"^\| \d+ \| `(\S+)` \|", (ROOT / "docs" / "request.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(named) == 10
    block = re.search(r"^```\n(server/.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert block is not None
    assert block[1].replace("->", " ").split() == named
    (command,) = commands(ROOT / "docs" / "request.md")
    done = run(command, tmp_path, ROOT)
    assert done.returncode == 0, done.stderr
    folders = [line.split() for line in done.stdout.splitlines() if line.startswith("  ")]
    assert set(named) <= {f"{folder}{stem}.py" for folder, *stems in folders for stem in stems}


def test_the_counted_files_exist():
    """Guards against an output on the page that was made before files were renamed."""
    page = (ROOT / "docs" / "request.md").read_text(encoding="utf-8")
    folders = [
        line.split() for line in page.partition("tools/request_path.py")[2].splitlines() if line.startswith("  ")
    ]
    for folder, *stems in folders:
        for stem in stems:
            assert (ROOT / "penstock" / folder.strip("/") / f"{stem}.py").is_file(), f"{folder}{stem}"


def test_the_picture_of_speed_is_that_of_the_table():
    """Guards against a bar that is not its number: the table is changed, and the picture is drawn from it."""
    drawn = picture.draw(*picture.read_table(picture.TABLE.read_text(encoding="utf-8")))
    assert picture.PICTURE.read_text(encoding="utf-8") == drawn


@pytest.mark.covers("C15")
@pytest.mark.parametrize("matrix", support_matrix.MATRICES, ids=lambda matrix: matrix.name)
def test_tables_of_what_works_are_those_of_the_tests(matrix):
    """Guards against a cell by hand, and against a family or a format that is missing: a table has exactly the rows and
    cells that the tests define, and says of each that it passed when `make matrix` wrote it."""
    assert matrix.written() == matrix.table(matrix.defined())
