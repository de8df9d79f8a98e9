"""The cores, CPU time and memory of the machine that this process may use, and the placement of its threads.

    usable CPUs   online, and in the process's affinity mask, which taskset and the cpuset of a container set
    cores         hyper-threads of one core count once: they share its multipliers, its caches and its loads
    quota         the CPUs' worth of time that cgroups (v1 or v2) allow: the least of the container's and all outer ones

    none    threads run wherever the system puts them
    nodes   each thread stays on one NUMA node, whose memory holds the weights that it packed and reads
    0-3,8   one thread per physical core of the list, on any of its hyper-threads in the list

`auto` is `nodes` for an engine that computes on all cores of several nodes, else `none`. It pins no thread to a single
core: on one node that gains nothing, and a thread that cannot leave a core which another process occupies delays all
other threads (decode products beside a busy process took 1.6 times as long with pinned threads, 1.3 times with free
ones). It does not choose a subset of the cores either, because a second engine would choose the same ones.

A limit on time or memory may be set on the process's own control group or on any group around it, such as a container's
or a service's slice; the least of them counts. Everything is read from /proc and /sys below a root, so that tests can
describe other machines. The module knows no model and starts no thread.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
UNLIMITED = 2**62  # bytes; v1 writes a number above this for no limit
USABLE_SHARE = 0.85  # of the free memory


def cpu_quota(root: Path = ROOT) -> float | None:
    """Read the CPUs' worth of time that the control groups of this process allow; None for no limit."""
    limits = [limit for folder in _folders("cpu", root) if (limit := _folder_quota(folder)) is not None]
    return min(limits, default=None)


def memory_left(root: Path = ROOT) -> int:
    """Read the bytes that the control groups of this process leave; UNLIMITED without a limit."""
    return min((_folder_memory(folder) for folder in _folders("memory", root)), default=UNLIMITED)


def free_memory_bytes() -> int:
    """Count the bytes that this process can still allocate, limited by the machine and by its control groups."""
    for line in read_text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, memory_left())
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # other systems do not say what is free


def usable_memory_bytes() -> int:
    """Count the bytes that a model may take if it leaves some for other programs, and for the pages of files."""
    return int(USABLE_SHARE * free_memory_bytes())


def resident_bytes(*, peak: bool = False) -> int:
    """Read the physical memory of this process in bytes, including mapped files, or its peak."""
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def read_text(path: Path) -> str:
    """Read a small file; an empty string if it cannot be read."""
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
    """Read the limit of one control group, from cpu.max (v2) or from the two files of v1."""
    quota, _, period = read_text(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")
    if not (quota.isdecimal() and period.isdecimal() and int(quota) and int(period)):
        return None  # "max", -1, or no such file
    return int(quota) / int(period)


def _folder_memory(folder: Path) -> int:
    """Read the bytes that one control group leaves, from the files of v2 or of v1."""
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


AUTO, NONE, NODES = "auto", "none", "nodes"
AFFINITIES = (AUTO, NONE, NODES)
MAX_CPU = 2**16 - 1


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core: its usable hyper-threads, and its NUMA node."""

    cpus: tuple[int, ...]
    node: int


@dataclass(frozen=True, slots=True)
class Machine:
    """The cores and the CPU time that this process may use.

    Attributes:
        cores: sorted by node, then by first CPU.
        quota: CPUs' worth of time, None for no limit.
    """

    cores: tuple[Core, ...]
    quota: float | None = None

    @classmethod
    def read(cls, root: Path = ROOT, mask: Iterable[int] | None = None) -> "Machine":
        """Read the machine below `root`. mask: the usable CPUs; None: those of the calling thread."""
        cpus = set(_own_mask() if mask is None else mask)
        folder = root / "sys/devices/system"
        online = read_text(folder / "cpu/online")
        cpus = (cpus & set(parse_cpus(online)) if online else cpus) or cpus
        node_of = {
            cpu: int(place.name.removeprefix("node"))
            for place in (folder / "node").glob("node[0-9]*")
            for cpu in parse_cpus(read_text(place / "cpulist"))
        }
        siblings: dict[str, list[int]] = {}
        for cpu in sorted(cpus):
            siblings.setdefault(_siblings(folder / f"cpu/cpu{cpu}/topology") or str(cpu), []).append(cpu)
        cores = [Core(tuple(found), node_of.get(found[0], 0)) for found in siblings.values()]
        return cls(tuple(sorted(cores, key=lambda core: (core.node, core.cpus))), cpu_quota(root))

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted({core.node for core in self.cores}))

    def only(self, cpus: Iterable[int]) -> "Machine":
        wanted = set(cpus)
        kept = ((tuple(cpu for cpu in core.cpus if cpu in wanted), core.node) for core in self.cores)
        return Machine(tuple(Core(found, node) for found, node in kept if found), self.quota)

    def default_threads(self) -> tuple[int, str]:
        """Choose the number of threads for these cores, and say why.

        A quota is rounded to the nearest number, at least one. If it were rounded down, 1.5 CPUs would leave a third of
        the quota unused; if it were rounded up, 2.1 CPUs would make three threads that stand still a third of the time.
        """
        count, quota = len(self.cores), self.quota
        if quota is not None and (allowed := max(1, int(quota + 0.5))) < count:
            return allowed, f"the CPU quota of {quota:g}, rounded"
        num_cpus = len(self.cpus)
        return count, "the cores of this process" + (f", with {num_cpus} hyper-threads" if num_cpus > count else "")

    def cores_for(self, threads: int) -> tuple[Core, ...]:
        """Choose one core per thread: from the first node that has enough, else from the largest nodes together."""
        by_node = [[core for core in self.cores if core.node == node] for node in self.nodes]
        for cores in by_node:
            if len(cores) >= threads:
                return tuple(cores[:threads])
        return tuple(core for cores in sorted(by_node, key=len, reverse=True) for core in cores)[:threads]

    def affinity(self, threads: int) -> tuple[str, str]:
        """Choose what `auto` means for `threads` threads, and say why."""
        if len(self.nodes) > 1 and threads == len(self.cores):
            return NODES, f"a thread for each core of {len(self.nodes)} NUMA nodes"
        return NONE, "threads are free to leave a core that another process takes"


def pinned_cores(affinity: str, threads: int, machine: Machine | None = None) -> tuple[tuple[int, ...], ...]:
    """Choose the CPUs of each of `threads` threads, the calling thread first; an empty tuple for "none".

    affinity: none, nodes or a list.

    Raises:
        ValueError: a CPU of the list is not usable, or there are more threads than cores.
    """
    if affinity == NONE:
        return ()
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("none: this system cannot pin threads")
    machine = machine or Machine.read()
    wanted = machine.cpus if affinity == NODES else parse_cpus(affinity)
    if unknown := set(wanted) - set(machine.cpus):
        raise ValueError(f"among the CPUs {show_cpus(machine.cpus)} of this process; {show_cpus(unknown)} is not")
    cores = machine.only(wanted).cores_for(threads)
    if len(cores) < threads:
        raise ValueError(
            f"at least {threads} cores for {threads} threads, and the hyper-threads of a core count as one"
        )
    if affinity == NODES:
        by_node = {
            node: tuple(cpu for core in machine.cores if core.node == node for cpu in core.cpus)
            for node in machine.nodes
        }
        return tuple(by_node[core.node] for core in cores)
    return tuple(core.cpus for core in cores)


def parse_cpus(text: str) -> tuple[int, ...]:
    """Parse a list of CPUs like 0-3,8 into ascending order, without duplicates.

    Raises:
        ValueError: the text is not such a list.
    """
    cpus: set[int] = set()
    for part in text.split(",") if text else ():
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise ValueError(f"{part!r} is neither a CPU nor a range of CPUs")
        start, stop = int(first), int(last or first)
        if not start <= stop <= MAX_CPU:
            raise ValueError(f"{part!r} is not an ascending range of CPUs up to {MAX_CPU}")
        cpus.update(range(start, stop + 1))
    return tuple(sorted(cpus))


def show_cpus(cpus: Iterable[int]) -> str:
    """Format CPUs as a list like 0-3,8."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def _siblings(folder: Path) -> str:
    """Read the list of hyper-threads of a CPU's core. Only newer systems have the first file."""
    return read_text(folder / "core_cpus_list") or read_text(folder / "thread_siblings_list")


def _own_mask() -> Sequence[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)
