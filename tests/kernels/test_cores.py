"""Which cores compute: machines described by files below a folder, as Linux describes them in /proc and /sys."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError
from penstock.kernels.cpu.cores import Machine, cpu_quota, parse_cpus, pinned_cores, show_cpus
from penstock.kernels.cpu.library import load_library
from tests.fakes import tiny_config

DOCKER = "/docker/abc"
V1_MOUNTS = "33 31 0:30 {top} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
V2_MOUNTS = "30 23 0:28 {top} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


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


def v2(root: Path, path: str, quotas: dict[str, str], top: str = "/") -> Path:
    """Describe control groups of version 2: cpu.max by folder below the mount."""
    write(root / "proc/self/cgroup", f"0::{path}")
    write(root / "proc/self/mountinfo", V2_MOUNTS.format(top=top))
    for folder, text in quotas.items():
        write(root / "sys/fs/cgroup" / folder / "cpu.max", text)
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
    root = v2(machine(tmp_path, ["0", "1", "2", "3"]), "/", {"": quota})
    assert Machine.read(root, mask=range(4)).default_threads()[0] == threads


def test_the_least_quota_around_a_group_counts(tmp_path: Path) -> None:
    """Guards against reading only the innermost group: the limit of a service is often set on its slice."""
    quotas = {"a": "300000 100000", "a/b": "max 100000", "a/b/c": "800000 100000", "other": "1000 100000"}
    assert cpu_quota(v2(tmp_path, "/a/b/c", quotas)) == 3.0


def test_a_container_that_sees_its_own_part_of_the_tree(tmp_path: Path) -> None:
    """Guards against looking for the host's path below a mount that begins at the container's group."""
    root = v2(tmp_path, DOCKER + "/job", {"": "200000 100000", "job": "max 100000"}, top=DOCKER)
    assert cpu_quota(root) == 2.0


def test_a_group_outside_the_mounted_part_has_no_known_path(tmp_path: Path) -> None:
    assert cpu_quota(v2(tmp_path, "/../elsewhere", {"": "250000 100000"})) == 2.5


@pytest.mark.parametrize(("quota", "expected"), [("350000", 3.5), ("-1", None)])
def test_a_quota_of_version_1(tmp_path: Path, quota: str, expected: float | None) -> None:
    write(tmp_path / "proc/self/cgroup", f"4:cpu,cpuacct:{DOCKER}\n3:cpuset:{DOCKER}\n0::/")
    write(tmp_path / "proc/self/mountinfo", V1_MOUNTS.format(top="/") + V2_MOUNTS.format(top="/"))
    folder = tmp_path / "sys/fs/cgroup/cpu,cpuacct"
    write(folder / "cpu.cfs_quota_us", "-1")
    write(folder / "cpu.cfs_period_us", "100000")
    write(folder / DOCKER.lstrip("/") / "cpu.cfs_quota_us", quota)
    write(folder / DOCKER.lstrip("/") / "cpu.cfs_period_us", "100000")
    assert cpu_quota(tmp_path) == expected


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
