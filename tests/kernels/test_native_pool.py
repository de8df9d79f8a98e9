"""The thread pool: short runs by the thousand, with and without a race detector, in a forked child, with more threads
than cores, and pinned."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import penstock.kernels.cpu
from penstock.kernels.cpu.library import load_library
from tests.kernels.packed import Native, levels, pack

NATIVE = Path(penstock.kernels.cpu.__file__).parent / "native"
STRESS = Path(__file__).with_name("native_pool_stress.cpp")
COMPILER = shutil.which("c++") or shutil.which("g++")
RUNS = {"plain": 4_000, "race-detector": 1_000}  # in each of five pools at once; a detector needs no luck

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


PINNED = """
import os, sys, torch
import numpy as np
from penstock.kernels.backends import load_ops

first, last = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
def masks():
    return {int(task): os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")}
before = masks()
ops = load_ops("cpu", torch.bfloat16, threads=3, cores=[(first,), (last,), (first, last)])
own = os.getpid()
helpers = [mask for task, mask in sorted(masks().items()) if task not in before]
assert helpers == [{last}, {first, last}], helpers
assert os.sched_getaffinity(own) == {first, last}
"""


def build(target: Path, *flags: str) -> bool:
    command = [str(COMPILER), "-std=c++17", "-O2", "-pthread", f"-I{NATIVE}", *flags]
    sources = [str(STRESS), str(NATIVE / "threads" / "thread_pool.cpp")]
    return subprocess.run([*command, *sources, "-o", str(target)], capture_output=True).returncode == 0


@pytest.mark.skipif(COMPILER is None or not NATIVE.exists(), reason="no C++ compiler, or no sources")
@pytest.mark.parametrize("kind", RUNS)
def test_every_item_is_done_once_and_before_the_run_returns(tmp_path: Path, kind: str) -> None:
    """Guards against a late helper that takes an item of the next run, lost wake-ups, unordered memory and ranges that
    are not the ones asked for."""
    program = tmp_path / "stress"
    if not build(program, *(["-fsanitize=thread", "-g"] if kind == "race-detector" else [])):
        assert kind == "race-detector", "the thread pool does not compile"
        pytest.skip("this compiler has no race detector")
    done = subprocess.run([str(program), str(RUNS[kind])], capture_output=True, text=True)
    if "unexpected memory mapping" in done.stderr:  # of a kernel that scatters them farther than the detector knows
        pytest.skip("this machine's addresses are beyond what the compiler's race detector knows")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(load_library() is None, reason="built without a C++ compiler")
def test_a_forked_child_computes_alone() -> None:
    """Guards against a child that waits for helpers which the fork left behind."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(load_library() is None, reason="built without a C++ compiler")
def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    """Guards against a sum that is cut by threads, and against scratch memory or ranges that are too few for them: up
    to 64 threads, more than this machine has cores and than the work has items."""
    values = np.random.default_rng(0).standard_normal((650, 512)).astype(np.float32)
    packed = pack(values, "bf16", leaf_ends=(200, 512))
    few, many = torch.randn(1, 512), torch.randn(37, 512)
    alone = Native(levels()[-1])
    for threads in (2, 3, 8, 64):
        native = Native(levels()[-1], threads)
        for x in (few.bfloat16(), many.bfloat16()):
            assert torch.equal(native.linear(packed, x), alone.linear(packed, x)), threads
        native.close()
    alone.close()


@pytest.mark.skipif(load_library() is None or not hasattr(os, "sched_setaffinity"), reason="no library or no affinity")
def test_helpers_run_where_they_are_pinned() -> None:
    """Guards against helpers that all inherit the caller's CPUs, and a caller that is left with one core."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PINNED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
