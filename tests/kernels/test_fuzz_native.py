"""tools/fuzz_native.py: no entry point that it calls reads or writes beside its operands, and it would notice."""

import signal
import subprocess
import sys

import pytest

from penstock.kernels.cpu.library import load_library
from tools import fuzz_native
from tools.structure import ROOT

pytestmark = pytest.mark.skipif(load_library() is None, reason="no native library")
OVERRUN = """
from tools.fuzz_native import Fuzz
from penstock.kernels.cpu.library import load_library
fuzz = Fuzz(load_library(), 0, seed=0)
fuzz.call("add", fuzz.floats(64), fuzz.floats(64), 65)
"""


def test_nothing_is_touched_beside_the_operands(capsys) -> None:
    """Guards against a vector loop that reads a whole vector at the end of a row."""
    fuzz_native.main(15)
    assert "portable: 12 entry points" in capsys.readouterr().out


def test_an_overrun_is_noticed() -> None:
    """Guards against guard pages that guard nothing."""
    assert subprocess.run([sys.executable, "-c", OVERRUN], cwd=ROOT).returncode == -signal.SIGSEGV


def test_a_write_before_an_operand_is_noticed() -> None:
    """Guards against a comparison that compares nothing."""
    memory = fuzz_native.Guarded(8)
    memory._map[0] = 0
    with pytest.raises(AssertionError, match="wrote before"):
        memory.check("add")
