"""What the control groups of this process (cgroups of Linux, v1 or v2) allow: CPU time and memory.

A limit may be set on the process's own group or on any group around it, such as a container's or a service's slice. The
least of them counts. Everything is read below a root, so that tests can describe other machines.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
UNLIMITED = 2**62  # bytes; v1 writes a number above this for no limit


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the CPUs' worth of time that the control groups of this process allow, None for no limit."""
    limits = [limit for folder in _folders("cpu", root) if (limit := _folder_quota(folder)) is not None]
    return min(limits, default=None)


def memory_left(root: Path = ROOT) -> int:
    """Return the bytes that the control groups of this process leave, UNLIMITED without a limit."""
    return min((_folder_memory(folder) for folder in _folders("memory", root)), default=UNLIMITED)


def read_text(path: Path) -> str:
    """Return the text of a small file, or an empty string if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _folders(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups that may have a limit of the controller, innermost first.

    A container often sees only the tree below its own group, so the paths of /proc/self/cgroup have to be read relative
    to the mounted part of the tree. If a path does not lie below the mounted part, only the mounted root is known.
    """
    paths: dict[str, str] = {}  # by controller for v1, "" for v2
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update({name: path for name in controllers.split(",") if name in ("", controller)})
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        fields, _, tail = line.partition(" - ")
        mounted_root, mount_point = fields.split()[3:5]
        kind, *_, options = tail.split()  # the source between them may be empty
        name = {"cgroup": controller, "cgroup2": ""}.get(kind)
        if name is None or name not in paths or (kind == "cgroup" and controller not in options.split(",")):
            continue
        top, own = root / mount_point.lstrip("/"), PurePosixPath(paths[name])
        visible = own.is_relative_to(mounted_root) and ".." not in own.parts
        inside = own.relative_to(mounted_root) if visible else PurePosixPath()
        yield from (top / parent for parent in (inside, *inside.parents))


def _folder_quota(folder: Path) -> float | None:
    """Return the limit of one control group, from cpu.max (v2) or from the two files of v1."""
    quota, _, period = read_text(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")
    if not (quota.isdecimal() and period.isdecimal() and int(quota) and int(period)):
        return None  # "max", -1, or no such file
    return int(quota) / int(period)


def _folder_memory(folder: Path) -> int:
    """Return the bytes that one control group leaves, from the files of v2 or of v1."""
    for limit_file, usage_file, inactive in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = read_text(folder / limit_file), read_text(folder / usage_file)
        if limit.isdecimal() and used.isdecimal() and int(limit) < UNLIMITED:
            stat = dict(line.split() for line in read_text(folder / "memory.stat").splitlines())
            # Pages of files read earlier, such as the checkpoint, count as used but are reclaimed on demand.
            return max(0, int(limit) - int(used) + int(stat.get(inactive, 0)))
    return UNLIMITED
