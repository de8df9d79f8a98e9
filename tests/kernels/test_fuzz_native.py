"""tools/fuzz_native: no entry point computes something wrong or touches what is not its own, and it would notice."""

import ctypes
import signal
import subprocess
import sys

import numpy as np
import pytest

from penstock.kernels.cpu.library import ABI, load_library
from tools.fuzz_native.__main__ import TARGETS, main, run
from tools.fuzz_native.target import Fuzz, Guarded
from tools.structure import ROOT

pytestmark = pytest.mark.skipif(load_library() is None, reason="no native library")
OVERRUN = """
from tools.fuzz_native.target import Fuzz
from penstock.kernels.cpu.library import load_library
fuzz = Fuzz(load_library(), 0, seed=0)
fuzz.call("add", fuzz.normal(64), fuzz.normal(64), 65)
"""
COMPARED = (
    "round", "linear", "activate", "lora_shrink", "lora_expand", "attend", "cache_load", "log_softmax", "sample",
    "packed_embedding", "route", "decode",
)  # fmt: skip


class Distorted:
    """The library with an entry point that returns OK and does nothing."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._library, self._name = library, f"penstock_{name}"

    def __getattr__(self, name: str) -> object:
        return (lambda *_: 0) if name == self._name else getattr(self._library, name)


def test_every_entry_point_has_a_target() -> None:
    """Guards against a function of abi.h that nobody calls with strange arguments."""
    assert {f"penstock_{name}" for name in TARGETS} == set(ABI.functions)


def test_results_are_right_and_nothing_is_touched_beside_the_operands(capsys) -> None:
    """Guards against a loop that reads a whole vector at the end of a row, and what else a target compares."""
    main(3)
    assert f"portable: {len(TARGETS)} entry points" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMPARED)
def test_a_wrong_result_is_noticed(name: str) -> None:
    """Guards against a target that compares nothing: a function that does nothing has to fail."""
    failed = 0
    for seed in range(12):
        try:
            run(Fuzz(Distorted(load_library(), name), 0, seed), name)
        except AssertionError as error:
            failed += f"target {name}, level portable, seed {seed}" in error.__notes__
    assert failed


def test_an_overrun_is_noticed() -> None:
    """Guards against guard pages that guard nothing."""
    assert subprocess.run([sys.executable, "-c", OVERRUN], cwd=ROOT).returncode == -signal.SIGSEGV


def test_a_write_before_an_operand_is_noticed() -> None:
    """Guards against a comparison that compares nothing."""
    memory = Guarded(8)
    memory._map[0] = 0
    with pytest.raises(AssertionError, match="wrote before"):
        memory.check("add")


def test_a_wrong_status_is_noticed() -> None:
    """Guards against refusals that are not asked for."""
    fuzz = Fuzz(load_library(), 0, seed=0)
    ids, table = fuzz.array(np.array([5])), fuzz.normal(2, 3)
    with pytest.raises(AssertionError, match="status -3 where 0"):
        fuzz.call("embedding", ids, table, 0, 2, 1, 3, 1.0, fuzz.out((1, 3)))
    fuzz.close()
