"""tools/install.py: what `make demo` says, and what it does about an old Python or a broken .venv."""

import sys
import tempfile
from pathlib import Path

import pytest

from tools import install, kept_object, wheel

PATIENT = """
import pathlib, sys, time
for line, said in zip(sys.argv[1::2], sys.argv[2::2]):
    print(line, flush=True)
    for _ in range(1000):  # until it was spoken of
        if not pathlib.Path(said).exists():
            time.sleep(0.1)
"""


def test_an_old_python_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a SyntaxError or an error of pip as the first words of Penstock."""
    monkeypatch.setattr(install.sys, "version_info", (3, 10, 4))
    monkeypatch.setattr(install, "works", lambda python, code: False)
    with pytest.raises(SystemExit) as stopped:
        install.use_new_python()
    assert stopped.value.code == 2
    said = capsys.readouterr().out
    assert "needs Python 3.11 or newer" in said
    assert "make demo PYTHON=" in said


def test_a_newer_python_of_the_machine_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a refusal where python3 is old and python3.12 is beside it."""
    called: list[list[str]] = []
    monkeypatch.setattr(install.sys, "version_info", (3, 10, 4))
    monkeypatch.setattr(install, "works", lambda python, code: python == "python3.12")
    monkeypatch.setattr(install.os, "execvp", lambda name, words: called.append(words))
    monkeypatch.setattr(install, "stop", lambda text: None)  # reached here only, because nothing was executed
    install.use_new_python()
    assert called == [["python3.12", *sys.argv]]


def test_a_broken_venv_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a second try that fails like the first."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/nowhere/python3.10")
    monkeypatch.setattr(install, "VENV", str(tmp_path / ".venv"))
    monkeypatch.setattr(install, "PYTHON", str(python))
    made: list[list[str]] = []
    monkeypatch.setattr(install, "run", lambda command, doing, log: made.append(command))
    install.make_venv()
    assert not python.is_symlink()
    assert made == [[sys.executable, "-m", "venv", str(tmp_path / ".venv")]]
    assert "it is made anew" in capsys.readouterr().out
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    install.make_venv()
    assert len(made) == 1  # one that works is kept


def test_a_silent_command_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against minutes without a line, and against lines that say what was done long ago."""
    lines = {"Collecting numpy": "looking for numpy", "[3/33] Building x": "compiling: 3 of 33 files"}
    words = [word for line, said in lines.items() for word in (line, str(tmp_path / said))]
    monkeypatch.setattr(install, "SILENCE_S", 0.01)
    monkeypatch.setattr(install, "say", lambda text: (tmp_path / text.partition(": ")[2]).touch())
    with tempfile.TemporaryFile("w+") as log:
        assert install.run([sys.executable, "-c", PATIENT, *words], "starting", log) == 0
    assert all((tmp_path / said).exists() for said in lines.values())


def test_an_extra_is_all_of_its_packages() -> None:
    """Guards against an extra that installs itself from an index, and compiles the package once more."""
    packages = install.requirements_of("test")
    assert not [line for line in packages if line.startswith("penstock")]
    assert {"torch", "transformers", "matplotlib", "pytest"} <= {line.partition(">")[0] for line in packages}


@pytest.mark.covers("F34")
def test_one_compilation_for_all_checkouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against minutes of compiling what was compiled before, against a library of other sources, and against a
    damaged one that is installed again and again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert install.library_settings("a", "this")[0].endswith("PENSTOCK_THIS_MACHINE=ON")
    assert install.library_settings("a", "all")[0].endswith("PENSTOCK_THIS_MACHINE=OFF")
    (tmp_path / "built.so").write_text("x")
    install.keep_library(str(tmp_path / "built.so"), install.kept_library("a", "this"))
    assert install.library_settings("a", "this")[0].endswith("PENSTOCK_LIBRARY=" + install.kept_library("a", "this"))
    assert install.library_settings("a", "all")[0].endswith("PENSTOCK_THIS_MACHINE=OFF")  # it has too few levels
    assert install.library_settings("b", "this")[0].endswith("PENSTOCK_THIS_MACHINE=ON")
    install.keep_library(str(tmp_path / "built.so"), install.kept_library("a", "all"))
    assert install.library_settings("a", "this")[0].endswith("PENSTOCK_LIBRARY=" + install.kept_library("a", "all"))
    assert "damaged" not in capsys.readouterr().out
    Path(install.kept_library("a", "all")).write_text("y")
    assert install.library_settings("a", "this")[0].endswith("PENSTOCK_LIBRARY=" + install.kept_library("a", "this"))
    assert f"{install.kept_library('a', 'all')} is damaged" in capsys.readouterr().out
    Path(install.kept_library("a", "this") + install.HASH).unlink()
    assert install.library_settings("a", "this")[0].endswith("PENSTOCK_THIS_MACHINE=ON")


@pytest.mark.covers("F34")
def test_what_was_compiled_before_is_copied(tmp_path: Path) -> None:
    """Guards against minutes for a change of one kernel, against an object of other text, headers or flags, or a
    damaged one, and against a header that CMake does not know of afterwards."""
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    compiler.write_text(
        f'#!/bin/sh\ncase " $* " in *" -E "*|*" --version "*) ;; *) echo >>{calls} ;; esac\nexec c++ "$@"'
    )
    compiler.chmod(0o755)
    header = tmp_path / "h.h"

    def compile(place: str, number: int, *flags: str) -> tuple[bytes, int]:
        """The object, and how often the compiler has compiled."""
        (tmp_path / place).mkdir(exist_ok=True)
        source, target = tmp_path / place / "a.cpp", tmp_path / place / "a.o"
        source.write_text('#include "h.h"\nextern "C" int a() { return NUMBER; }\n')
        header.write_text(f"#define NUMBER {number}\n")
        depends = ["-MD", "-MT", str(target), "-MF", f"{target}.d"]
        words = [*flags, f"-I{tmp_path}", *depends, "-o", str(target), "-c", str(source)]
        assert kept_object.main(str(tmp_path / "kept"), str(compiler), *words) == 0
        assert str(header) in Path(f"{target}.d").read_text()
        return target.read_bytes(), len(calls.read_text())

    first, _ = compile("one", 1, "-O2")
    assert compile("another", 1, "-O2") == (first, 1)
    other, count = compile("one", 2, "-O2")
    assert (other != first, count) == (True, 2)
    assert compile("one", 2, "-O1", "-DUNUSED")[1] == 3
    assert compile("one", 1, "-O2", "-DUNUSED") == (first, 3)
    for kept in (tmp_path / "kept").iterdir():
        kept.write_bytes(kept.read_bytes()[:-9])
    assert compile("one", 1, "-O2") == (first, 4)
    assert compile("one", 1, "-O2") == (first, 4)
    assert kept_object.main(str(tmp_path / "kept"), str(compiler), "-c", str(tmp_path / "none.cpp"), "-o", "x.o") != 0


def test_a_wheel_above_its_limits_fails() -> None:
    """Guards against an installation that grows unseen: `make wheel`, which .ci/run runs, holds these limits."""
    assert (wheel.MOST_INSTALLED_MB, wheel.MOST_PACKAGES) == (200, 40)
    assert "40.0" in wheel.limit("packages", 40, wheel.MOST_PACKAGES)
    with pytest.raises(SystemExit, match="packages: 41"):
        wheel.limit("packages", 41, wheel.MOST_PACKAGES)
