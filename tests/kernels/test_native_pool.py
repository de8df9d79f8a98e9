"""The thread pool: short runs by the thousand, with and without a race detector, and in a forked child."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import penstock.kernels.cpu
from penstock.kernels.cpu.library import load_library

NATIVE = Path(penstock.kernels.cpu.__file__).parent / "native"
STRESS = Path(__file__).with_name("native_pool_stress.cpp")
COMPILER = shutil.which("c++") or shutil.which("g++")
RUNS = 4_000  # in each of five pools at once

FORKED = """
import os, sys, torch
import numpy as np
from tests.kernels.packed import Native, pack

values = np.random.default_rng(0).standard_normal((640, 512)).astype(np.float32)
packed, x, native = pack(values, "f32"), torch.ones(20, 512), Native(0, threads=3)
expected = native.linear(packed, x)
child = os.fork()
if child == 0:
    same = torch.equal(native.linear(packed, x), expected)
    native.close()
    os._exit(0 if same else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def build(target: Path, *flags: str) -> bool:
    command = [str(COMPILER), "-std=c++17", "-O2", "-pthread", f"-I{NATIVE}", *flags]
    sources = [str(STRESS), str(NATIVE / "threads" / "thread_pool.cpp")]
    return subprocess.run([*command, *sources, "-o", str(target)], capture_output=True).returncode == 0


@pytest.mark.skipif(COMPILER is None or not NATIVE.exists(), reason="no C++ compiler, or no sources")
@pytest.mark.parametrize("flags", [(), ("-fsanitize=thread", "-g")], ids=["plain", "race-detector"])
def test_every_item_is_done_once_and_before_the_run_returns(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Guards against a late helper that takes an item of the next run, lost wake-ups, unordered memory and ranges that
    are not the ones asked for."""
    program = tmp_path / "stress"
    if not build(program, *flags):
        assert flags, "the thread pool does not compile"
        pytest.skip("this compiler has no race detector")
    done = subprocess.run([str(program), str(RUNS)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(load_library() is None, reason="built without a C++ compiler")
def test_a_forked_child_computes_alone() -> None:
    """Guards against a child that waits for helpers which the fork left behind."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
