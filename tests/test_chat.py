"""A conversation in the terminal: its commands, messages of several lines, its lines, and other servers."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import terminal
from penstock.cli.answers import Piece, Pieces
from penstock.cli.conversation import show
from tests.pages import serving
from tests.test_cli import called, penstock

QUESTION, ANSWER = "What is 3 + 4?", "3 + 4 = 7."


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wrapped(text: str, columns: int, monkeypatch: pytest.MonkeyPatch, step: int = 1) -> list[str]:
    """Write a text in pieces of `step` characters, and return the lines on a terminal of that width."""
    out = Terminal()
    monkeypatch.setattr(terminal.shutil, "get_terminal_size", lambda: os.terminal_size((columns, 24)))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        writer = terminal.WordWrap()
        for start in range(0, len(text), step):
            writer.write(text[start : start + step])
        writer.finish()
    return out.getvalue().split("\n")[:-1]


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_lines_end_between_words(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against words cut at the edge, a lost character, and code or long words that are rearranged."""
    text = (
        "The quick brown fox jumps over the lazy dog.\n\n```\nx = some_function(with_many, arguments)\n```\nEnd of it."
    )
    lines = wrapped(text, 16, monkeypatch, step)
    assert lines[:4] == ["The quick brown ", "fox jumps over ", "the lazy dog.", ""]
    assert lines[4:] == ["```", "x = some_function(with_many, arguments)", "```", "End of it."]
    assert "".join(lines).replace(" ", "") == re.sub(r"\s", "", text)
    assert wrapped("a " + "b" * 40 + " c", 16, monkeypatch, step) == ["a ", "b" * 40 + " c"]
    assert wrapped("日本語の文章です", 6, monkeypatch, step) == ["日本語", "の文章", "です"]
    assert wrapped("exactly sixteen. Next", 16, monkeypatch, step) == ["exactly sixteen.", "Next"]


def test_commands_of_a_conversation(tmp_path: Path) -> None:
    """Guards against settings that do nothing or break the conversation, and a saved one that cannot be continued."""
    file = tmp_path / "saved.json"
    lines = [
        '"""What is', '3 + 4?"""', "What is \\", "3 + 4?", f"/save {file}", "/set", "/set max-tokens 2", QUESTION,
        "/set max_tokens default", "/set nope 3", "/set top_p 7", "/set stop a b", "/set ignore_eos", "/set",
        f"/load {file}", "/load /nowhere", f"/load {__file__}", "/retry", "/bye", QUESTION,
    ]  # fmt: skip
    done = penstock("chat", "--temperature", "0", stdin="\n".join(lines))
    assert done.returncode == 0, done.stderr
    saved = json.loads(file.read_text())
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"] * 2
    assert [saved["messages"][at]["content"] for at in (0, 2)] == ["What is\n3 + 4?"] * 2
    first, second, short, *last = done.stdout.splitlines()
    assert first == second == ANSWER
    assert ANSWER.startswith(short)
    assert len(short) < len(ANSWER)
    assert len(last) > 1  # the answer to /retry goes on to the end of the context: "ignore_eos" was set
    for text in (
        "temperature 0.0", "ended by max_tokens", "nope: there is no such sampling parameter", "stop: b is too much",
        "top_p: 7.0 is not allowed", "ignore_eos True", "4 messages from", "/nowhere: No such file", "tokens/s",
    ):  # fmt: skip
        assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_the_start_is_quiet_and_the_choices_are_there_when_asked_for() -> None:
    """Guards against a screen of technical lines before the first word."""
    quiet = penstock("chat", stdin="")
    assert len(quiet.stderr.splitlines()) <= 2
    assert "  threads = " in penstock("chat", "--verbose", stdin="").stderr


def test_a_conversation_with_a_server() -> None:
    """Guards against options that a server never gets, and a full context that ends the conversation."""
    lines = [QUESTION, "/retry", "/set max_tokens 2", QUESTION, *["What is 2 + 3? " * 12] * 14, "x" * 9000, QUESTION]
    with serving() as port:
        url = f"http://127.0.0.1:{port}"
        done = penstock("chat", "--url", url, "--temperature", "0", "--max-tokens", "20", stdin="\n".join(lines))
        assert done.returncode == 0, done.stderr
        first, again, short, *others = done.stdout.splitlines()
        assert first == again == ANSWER
        assert ANSWER.startswith(short)
        assert len(others) == 14 + 1
        for text in (f"penstock: demo, {url}/v1", "tokens/s", "are left out", "not sent:"):
            assert text in done.stderr
        wrong = penstock("chat", "nothing", "--url", f"{url}/v1/", stdin=QUESTION)
        assert wrong.returncode == 1
        assert "nothing" in wrong.stderr.splitlines()[-1]
    gone = penstock("chat", "--url", url, stdin=QUESTION)
    assert gone.returncode == 1
    assert "cannot be reached" in gone.stderr


def test_thoughts_are_shown_and_not_sent_back(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against reasoning in the history, where a template does not expect it, and one that runs into the
    answer."""
    thoughts = [Piece("Hm, "), Piece("well.")]

    def pieces() -> Pieces:
        yield from (Piece(piece.text, is_thought=True) for piece in thoughts)
        yield Piece("")
        yield Piece("Seven.", 9)

    assert show(pieces()) == "Seven."
    assert capsys.readouterr().out == "Hm, well.\n\nSeven.\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chat", "--url", "ftp://x"], "url: 'ftp://x' must begin with http://"),
        (["chat", "--url", "http://x", "--threads", "2"], "--threads: not with --url"),
        (["chat", "--n", "2"], "--n: a conversation has one answer"),
        (["run", "--n", "2", "demo", "x"], "--n: a conversation has one answer"),
        (["run", "demo", "x", "y"], "unrecognized arguments: y"),
        (["run", "demo", "x", "--quantization", "int5"], "--quantization: 'int5' is not allowed"),
        (["run", "demo", "x", "--max-model-len", "4096"], "--max-model-len: 4096 is not allowed"),
        (["run", "demo", "x", "--memory", "1MiB"], "--memory: 1.0 MiB is too little"),
        (["pull", "demo", "demo"], "unrecognized arguments: demo"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], message: str) -> None:
    done = called(*words)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]


def test_run_answers_a_prompt_wherever_it_stands() -> None:
    """Guards against a prompt after an option, which argparse does not take, and standard input that is not read."""
    before, after = ("demo", QUESTION, "--temperature", "0"), ("demo", "--temperature", "0", QUESTION)
    for words, stdin in ((before, "ignored"), (after, None), (("--temperature", "0"), QUESTION + "\n")):
        done = penstock("run", *words, stdin=stdin)
        assert done.returncode == 0, done.stderr
        assert done.stdout == ANSWER + "\n"


def test_a_base_model_continues_the_text(tmp_path: Path) -> None:
    """Guards against an error for a model without a chat template."""
    from penstock.weights.hub import MODEL_DIR

    for file in MODEL_DIR.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    words = [sys.executable, "-m", "penstock", "run", str(tmp_path), "Once upon a", "--max-tokens", "4"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "it continues the text" in done.stderr
