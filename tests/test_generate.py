"""`penstock generate`: its prompts, how texts share the terminal, and errors that need no model."""

import io
import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from penstock import InvalidRequestError, read_prompts
from penstock.cli.generate import Concurrent, InOrder, Printer, Reprint
from penstock.cli.main import dashed, main
from penstock.cli.terminal import saying
from penstock.client import prompts
from penstock.interface.outputs import CompletionOutput, FinishReason, RequestOutput
from penstock.kernels.cpu.library import load_library
from penstock.server.options import ServerOptions
from penstock.server.serve import log_to_stderr

GOLDEN = Path(__file__).parent / "golden"
PROMPTS = ["One morning", "Once upon a time there was", "Tom"]
FALCON = ["--mode", "concurrent", "--print_option", "reprint", "--print_interval", "1"]


@pytest.fixture(autouse=True)
def the_signals() -> Iterator[None]:
    """A command sets what Ctrl-C does; the tests' own process keeps it."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def generate(*words: str) -> int:
    return main(["generate", "demo", "--temperature", "0", "--max-tokens", "24", "--threads", "1", *words])


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_a_file_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a device or a pipe that fills the memory."""
    monkeypatch.setattr(prompts, "MAX_BYTES", 1 << 20)
    assert generate("--prompts", "/dev/zero") == 2
    advice = "it has more than 1 MiB; divide it, or use `penstock run-batch`"
    assert capsys.readouterr().err == f"penstock: --prompts: cannot read '/dev/zero': {advice}\n"
    feed(monkeypatch, bytes(1 + (1 << 20)))
    assert generate() == 2
    assert capsys.readouterr().err == f"penstock: cannot read standard input: {advice}\n"


@pytest.mark.covers("F39")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lines.jsonl", '"a b"\n\n{"prompt": "c\\u2028d"}\r\n{"prompt_token_ids": [1, 2]}\n'),
        ("falcon.json", '[\n "a b", {"prompt": "c\\u2028d"},\n {"prompt_token_ids": [1, 2]}]'),
        ("marked.json", '\ufeff["a b", {"prompt": "c\\u2028d"}, {"prompt_token_ids": [1, 2]}]'),
    ],
)
def test_a_file_of_prompts_in_json(name: str, text: str, tmp_path: Path) -> None:
    """Guards against a form of file that Falcon's document or vLLM's users have and that is refused."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_prompts(tmp_path / name) == ["a b", {"prompt": "c\u2028d"}, {"prompt_token_ids": [1, 2]}]


def test_a_file_of_plain_lines(tmp_path: Path) -> None:
    """Guards against plain text that has to be written as JSON, and against lines that lose their spaces."""
    (tmp_path / "some.txt").write_bytes("Once upon\r\n\n  two spaces \nlast é".encode())
    assert read_prompts(str(tmp_path / "some.txt")) == ["Once upon", "  two spaces ", "last é"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'"fine"\n{broken', r"standard input, line 2 is not JSON.*anything else as a prompt per line"),
        (b"[INST] hello", r"is not JSON.*what begins with \[, \{ or"),
        (b'["a", 5]', "item 2 must be a string or an object"),
        (b'["a", ""]', "item 2 is an empty string"),
        (b'{"prompt": "a", "max_tokens": 5}', "line 1 must be a string or an object"),
        (b'"a"\n{"prompt": 3}', "line 2 needs either prompt"),
        (b'{"prompt_token_ids": []}', "line 1 needs either"),
        (b'{"prompt": "a", "prompt_token_ids": [1]}', "line 1 needs either"),
        (b'"a"\n' + b"[" * 100_000, "line 2 is not JSON"),
        (b"caf\xe9", "^cannot read standard input: "),
    ],
)
def test_what_is_no_prompt_is_named(text: bytes, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an error that does not say which line it is about and what is read."""
    feed(monkeypatch, text)
    with pytest.raises(InvalidRequestError, match=message):
        read_prompts("-")


def test_standard_input_is_a_prompt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against `echo "Once upon a time" | penstock generate demo` being an error, and against the line's end
    becoming a part of the prompt."""
    feed(monkeypatch, b"Once upon\na time\n")
    assert generate("--json") == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "Once upon\na time"
    feed(monkeypatch, b" \n")
    assert generate() == 2
    assert (
        "give a prompt with -p TEXT, --prompts FILE (which must hold one) or standard input" in capsys.readouterr().err
    )


# --- the terminal ----------------------------------------------------------------------------------------------------


def deltas() -> Iterator[tuple[int, RequestOutput]]:
    """Two prompts of two choices each, a word a token, in lockstep; the last choice fails."""
    words = {(0, 0): " red\n fox", (0, 1): " dog", (1, 0): " sun shine", (1, 1): " rain bow"}
    for step in range(2):
        for index in range(2):
            items = []
            for choice in range(2):
                parts = words[index, choice].split(" ")[1:]
                if step < len(parts):
                    last = step == len(parts) - 1
                    failed = (index, choice) == (1, 1)
                    reason = (FinishReason.ERROR if failed else FinishReason.STOP) if last else None
                    items.append(CompletionOutput(choice, " " + parts[step], [7], finish_reason=reason))
            done = step == 1
            error = "no memory" if done and index == 1 else None
            yield index, RequestOutput(str(index), None, [1], items, done, error=error)


def printed(printer: Printer) -> None:
    with closing(printer):
        for index, output in deltas():
            printer.show(index, output)


def test_all_choices_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a line without its label, a word cut in two, a blank line, and a lost failure."""
    printed(Concurrent(["A", "The"], 1, 2))
    assert capsys.readouterr().out.splitlines() == [
        "[1.0] A red", "[1.1] A dog", "[2.0] The", "[2.1] The",
        "[1.0] fox", "[2.0] sun shine", "[2.1] rain bow", "[2.1] (failed: no memory)",
    ]  # fmt: skip
    printed(Concurrent(["A", "The"], 100, 2))
    assert capsys.readouterr().out.splitlines() == [
        "[1.1] A dog", "[1.0] A red", "[1.0] fox", "[2.0] The sun shine", "[2.1] The rain bow",
        "[2.1] (failed: no memory)",
    ]  # fmt: skip


def test_printed_anew_on_a_terminal() -> None:
    """Guards against a screen that is taller than the terminal, one print per choice instead of per step, and a text
    that is not whole at the end."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=20, height=5, color_system=None)
    printed(Reprint(["A long prompt of many words", "The"], 1, 2, console))
    before, _, end = file.getvalue().rpartition("\x1b[1A\x1b[2K")
    assert before.count("words red") == 2  # after the first step, and when the screen ends
    assert before.count("\n") == 2 * 3 + 1  # only the last line of each choice has room
    assert "A long" not in before
    assert end.endswith("[1.0] A long prompt of many words red\n fox\n\n[1.1] A long prompt of many words dog\n\n"
                        "[2.0] The sun shine\n\n[2.1] The rain bow\n(failed: no memory)\n")  # fmt: skip


def test_print_interval_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against an interval that holds back the end of a text."""
    printer = InOrder(["A", "B"], 2)
    shown = []
    for index, text, done in [(0, "1", False), (1, "2", False), (0, "3", False), (0, "4", True), (1, "5", True)]:
        item = CompletionOutput(0, text, [7], finish_reason=FinishReason.STOP if done else None)
        printer.show(index, RequestOutput("r", None, [1], [item], done))
        shown.append(capsys.readouterr().out)
    assert shown == ["", "", "A13", "4\n", "\nB25\n"]


@pytest.mark.covers("F39", "F40")
@pytest.mark.skipif(load_library() is None, reason="no native library was built")
@pytest.mark.parametrize("mode", ["--concurrent", "--reprint", "--output-at-end"])
def test_golden_files(mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a mode that changes a token or a line, in the spelling of Falcon's document too, and against a log
    level or a profile that reaches standard output."""
    file = tmp_path / "multi_prompt.json"
    file.write_text(json.dumps(PROMPTS))
    words = FALCON if mode == "--reprint" else [mode] if mode else []
    assert generate("--prompts_file", str(file), *words, "--profile", "--log_level", "ERROR") == 0
    found = capsys.readouterr()
    assert found.out == (GOLDEN / f"generate{mode.replace('--', '_')}.txt").read_text()
    assert "lm_head" in found.err
    assert "tokens/s" not in found.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--json", "--concurrent"], "--concurrent: nothing is printed before the end with --json"),
        (["--output-at-end", "--print-interval", "2"], "--print-interval: nothing is printed before the end"),
        (["--json", "--output-at-end"], "--output-at-end: --json prints at the end already"),
        (["--print-interval", "0"], "--print-interval: 0 is not allowed"),
        (["--print-interval", "2", "--n", "2"], "--print-interval: several choices are printed when complete"),
        (["--profile", "--kernels", "reference"], "--profile: only native kernels"),
    ],
)
def test_no_option_is_ignored(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against display options that have no effect together."""
    assert generate("-p", "x", *words) == 2
    assert message in capsys.readouterr().err


def test_flags_may_have_underscores() -> None:
    """Guards against a value that is changed with the name of its flag."""
    given = ["generate", "a_b", "--max_tokens=4_0", "-p", "x_y", "--", "--c_d"]
    assert dashed(given) == ["generate", "a_b", "--max-tokens=4_0", "-p", "x_y", "--", "--c_d"]


def test_what_takes_long_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a cold start that is silent for seconds, and against a line where nothing takes long."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    said = threading.Event()
    monkeypatch.setattr("penstock.cli.terminal.note", lambda text: said.set())
    with saying("loading", 3600.0):
        pass
    assert not said.is_set()
    with saying("loading", 0.0):
        assert said.wait(10)


@pytest.mark.parametrize("words", [["/nonexistent", "-p", "x"], ["-p", ""], ["--prompts", "/nowhere"]])
def test_errors_that_need_no_model_import_none(words: list[str]) -> None:
    """Guards against an error about a name that takes seconds, because the whole engine is imported first."""
    script = (
        "import sys\nfrom penstock.cli.main import main\n"
        "assert main(['generate', *sys.argv[1:]]) == 2\n"
        "heavy = {'numpy', 'torch', 'tokenizers', 'jinja2', 'msgspec', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.covers("F40")
def test_log_level_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a log level that is accepted and has no effect, and against one that does not exist."""
    logger = logging.getLogger("penstock")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logger.level)
    log_to_stderr(ServerOptions(log_level="error").log_level)
    assert not logging.getLogger("penstock.access").isEnabledFor(logging.WARNING)
    with pytest.raises(InvalidRequestError, match="log_level: 'debug' is not allowed"):
        ServerOptions(log_level="debug")
