"""The limits of control groups, described by files below a folder as Linux describes them in /proc and /sys."""

from pathlib import Path

import pytest

from penstock.kernels.cpu.host import UNLIMITED, cpu_quota, memory_left

DOCKER = "/docker/abc"
V1_MOUNTS = (
    "33 31 0:30 {top} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "34 31 0:31 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
)
NAMELESS = "29 23 0:27 / /mnt rw,relatime - tmpfs  rw\n"  # a mount without a source
V2_MOUNTS = NAMELESS + "30 23 0:28 {top} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
GIB = 2**30


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def v1(root: Path) -> Path:
    """Describe mounts of version 1 for a process in DOCKER, and return the folder of the controllers."""
    write(root / "proc/self/cgroup", f"5:memory:{DOCKER}\n4:cpu,cpuacct:{DOCKER}\n3:cpuset:{DOCKER}\n0::/")
    write(root / "proc/self/mountinfo", V1_MOUNTS.format(top="/") + V2_MOUNTS.format(top="/"))
    return root / "sys/fs/cgroup"


def v2(root: Path, path: str, files: dict[str, str], top: str = "/") -> Path:
    """Describe control groups of version 2: the texts of files below the mount."""
    write(root / "proc/self/cgroup", f"0::{path}")
    write(root / "proc/self/mountinfo", V2_MOUNTS.format(top=top))
    for file, text in files.items():
        write(root / "sys/fs/cgroup" / file, text)
    return root


def test_the_least_quota_around_a_group_counts(tmp_path: Path) -> None:
    """Guards against reading only the innermost group: the limit of a service is often set on its slice."""
    quotas = {"a": "300000 100000", "a/b": "max 100000", "a/b/c": "800000 100000", "other": "1000 100000"}
    assert cpu_quota(v2(tmp_path, "/a/b/c", {f"{folder}/cpu.max": text for folder, text in quotas.items()})) == 3.0


def test_a_container_that_sees_its_own_part_of_the_tree(tmp_path: Path) -> None:
    """Guards against looking for the host's path below a mount that begins at the container's group."""
    quotas = {"cpu.max": "200000 100000", "job/cpu.max": "max 100000"}
    assert cpu_quota(v2(tmp_path, DOCKER + "/job", quotas, top=DOCKER)) == 2.0


def test_a_group_outside_the_mounted_part_has_no_known_path(tmp_path: Path) -> None:
    assert cpu_quota(v2(tmp_path, "/../elsewhere", {"cpu.max": "250000 100000"})) == 2.5


@pytest.mark.parametrize(("quota", "expected"), [("350000", 3.5), ("-1", None)])
def test_a_quota_of_version_1(tmp_path: Path, quota: str, expected: float | None) -> None:
    folder = v1(tmp_path) / "cpu,cpuacct"
    for place, text in ((folder, "-1"), (folder / DOCKER.lstrip("/"), quota)):
        write(place / "cpu.cfs_quota_us", text)
        write(place / "cpu.cfs_period_us", "100000")
    assert cpu_quota(tmp_path) == expected


def test_the_least_memory_around_a_group_counts(tmp_path: Path) -> None:
    """Guards against a cache as large as the machine in a service whose slice has a MemoryMax: it would be killed."""
    files = {
        "memory.stat": "inactive_file 5",  # the root has no limit
        "system.slice/memory.max": str(8 * GIB),
        "system.slice/memory.current": str(3 * GIB),
        "system.slice/memory.stat": f"anon 1\ninactive_file {GIB}",
        "system.slice/penstock.service/memory.max": "max",
        "system.slice/penstock.service/memory.current": str(GIB),
    }
    assert memory_left(v2(tmp_path, "/system.slice/penstock.service", files)) == 6 * GIB


@pytest.mark.parametrize(
    ("limit", "expected"), [(4 * GIB, 2 * GIB), (GIB, 0), (2**63 - 4096, UNLIMITED)], ids=["limit", "used up", "none"]
)
def test_memory_of_version_1(tmp_path: Path, limit: int, expected: int) -> None:
    """Guards against a container of version 1 whose cache is sized by the host's memory."""
    folder = v1(tmp_path) / "memory" / DOCKER.lstrip("/")
    write(folder / "memory.limit_in_bytes", str(limit))
    write(folder / "memory.usage_in_bytes", str(2 * GIB + 7))
    write(folder / "memory.stat", "inactive_file 1\ntotal_inactive_file 7")
    assert memory_left(tmp_path) == expected


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert (cpu_quota(tmp_path), memory_left(tmp_path)) == (None, UNLIMITED)
