"""Which cores compute: machines described by files below a folder, as Linux describes them in /proc and /sys."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError
from penstock.kernels.cpu.host import Machine, parse_cpus, pinned_cores, show_cpus
from penstock.kernels.cpu.library import load_library
from tests.fakes import tiny_config
from tests.kernels.test_control_groups import v2, write


def machine(root: Path, cores: Sequence[str], nodes: Sequence[str] = (), online: str = "") -> Path:
    """Describe a machine: the hyper-threads of each core, the CPUs of each node, and the CPUs that are online."""
    system = root / "sys/devices/system"
    for siblings in cores:
        for cpu in parse_cpus(siblings):
            write(system / f"cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
    for index, cpus in enumerate(nodes):
        write(system / f"node/node{index}/cpulist", cpus)
    if online:
        write(system / "cpu/online", online)
    return root


def test_every_core_of_one_socket_computes(tmp_path: Path) -> None:
    found = Machine.read(machine(tmp_path, ["0", "1", "2", "3"], ["0-3"], "0-3"), mask=range(4))
    assert found.default_threads() == (4, "the cores of this process")
    assert found.affinity(4)[0] == "none"


def test_hyper_threads_are_not_cores(tmp_path: Path) -> None:
    """Guards against two threads on one core, which share its multipliers and are slower than one."""
    found = Machine.read(machine(tmp_path, ["0,4", "1,5", "2,6", "3,7"], ["0-7"], "0-7"), mask=range(8))
    assert found.default_threads() == (4, "the cores of this process, with 8 hyper-threads")
    assert found.affinity(4)[0] == "none"
    assert pinned_cores("0-7", 4, found) == ((0, 4), (1, 5), (2, 6), (3, 7))
    with pytest.raises(ValueError, match="3 cores for 3 threads"):
        pinned_cores("0,1,4,5", 3, found)


def test_fewer_threads_than_cores_choose_no_cores(tmp_path: Path) -> None:
    """Guards against two engines that both choose the first cores of a machine and leave the others idle."""
    found = Machine.read(machine(tmp_path, ["0", "1", "2", "3"], ["0-1", "2-3"], "0-3"), mask=range(4))
    assert [found.affinity(threads)[0] for threads in (1, 2, 4, 8)] == ["none", "none", "nodes", "none"]


def test_each_thread_stays_on_the_node_of_its_core(tmp_path: Path) -> None:
    found = Machine.read(machine(tmp_path, ["0,4", "1,5", "2,6", "3,7"], ["0,1,4,5", "2,3,6,7"], "0-7"), mask=range(8))
    one, other = (0, 4, 1, 5), (2, 6, 3, 7)
    assert pinned_cores("nodes", 4, found) == (one, one, other, other)


def test_threads_stay_on_one_node_where_it_has_enough_cores(tmp_path: Path) -> None:
    """Guards against threads that read half of the weights from another socket's memory without need."""
    found = Machine.read(machine(tmp_path, ["0", "1", "2", "3", "4"], ["0,2", "1,3,4"], "0-4"), mask=range(5))
    assert [core.node for core in found.cores] == [0, 0, 1, 1, 1]
    assert pinned_cores("0-4", 2, found) == ((0,), (2,))
    assert pinned_cores("0-4", 3, found) == ((1,), (3,), (4,))
    assert pinned_cores("0-4", 4, found) == ((1,), (3,), (4,), (0,))
    assert found.affinity(5) == ("nodes", "a thread for each core of 2 NUMA nodes")


def test_the_mask_and_offline_cores_are_respected(tmp_path: Path) -> None:
    """Guards against more threads than taskset, a cpuset or switched-off cores leave room for."""
    root = machine(tmp_path, ["0,4", "1,5", "2,6", "3,7"], ["0-7"], "0-2,4-6")
    assert Machine.read(root, mask=(1, 2, 3, 6)).cores == Machine.read(root, mask=(1, 2, 6)).cores
    assert Machine.read(root, mask=(1, 2, 6)).default_threads()[0] == 2
    with pytest.raises(ValueError, match="among the CPUs 1-2,6 of this process; 0,5 is not"):
        pinned_cores("0-1,5", 1, Machine.read(root, mask=(1, 2, 6)))


def test_a_machine_without_descriptions_has_one_core_per_cpu(tmp_path: Path) -> None:
    found = Machine.read(tmp_path, mask=(0, 3))
    assert (len(found.cores), found.quota, found.nodes) == (2, None, (0,))


@pytest.mark.parametrize(
    ("quota", "threads"), [("150000 100000", 2), ("140000 100000", 1), ("20000 100000", 1), ("max 100000", 4)]
)
def test_a_quota_of_version_2_limits_the_threads(tmp_path: Path, quota: str, threads: int) -> None:
    """Guards against threads that the system stops for most of every period, while the others wait for them."""
    root = v2(machine(tmp_path, ["0", "1", "2", "3"]), "/", {"cpu.max": quota})
    assert Machine.read(root, mask=range(4)).default_threads()[0] == threads


def test_cpu_lists_are_read_and_shown() -> None:
    assert parse_cpus("8,0-3,2") == (0, 1, 2, 3, 8)
    assert parse_cpus("") == ()
    assert show_cpus((8, 3, 2, 1, 0)) == "0-3,8"
    for text in ("a", "1-", "-1", "3-1", "1,,2", "0x1", "²"):
        with pytest.raises(ValueError):
            parse_cpus(text)


@pytest.mark.skipif(load_library() is None, reason="built without a C++ compiler")
def test_the_option_names_what_is_wrong() -> None:
    """Guards against an engine that silently computes elsewhere than it was told to."""
    last = max(os.sched_getaffinity(0))
    with pytest.raises(InvalidRequestError, match=r"^cpu_affinity: .*among the CPUs") as caught:
        EngineConfig.from_options(cpu_affinity=f"0-{last + 1}").resolve(tiny_config(8))
    assert caught.value.param == "cpu_affinity"
    with pytest.raises(InvalidRequestError, match="at least 2 cores for 2 threads"):
        EngineConfig.from_options(cpu_affinity=str(last), threads=2).resolve(tiny_config(8))
    with pytest.raises(InvalidRequestError, match="only the native kernels"):
        EngineConfig.from_options(cpu_affinity=str(last), kernels="reference").resolve(tiny_config(8))
    resolved = EngineConfig.from_options(cpu_affinity=str(last)).resolve(tiny_config(8))
    assert (resolved.numerics.threads, resolved.numerics.cpu_affinity) == (1, str(last))
