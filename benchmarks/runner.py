"""Take the samples: in every workload the engines take turns, and stay loaded but frozen between their turns."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.environments import Workshop
from benchmarks.machine import Machine
from benchmarks.peers import OURS
from benchmarks.peers.base import GGUF_PRECISIONS, Peer
from benchmarks.process import OverTimeError, Worker, WorkerError
from benchmarks.store import Store
from benchmarks.workloads import COLD_START, LONG_PROMPTS, Workload

PRECISIONS = ("bf16", "int8", "int4", *GGUF_PRECISIONS)
LOAD_CAP = 900.0  # seconds for loading and the first run, in which some engines compile
COLD_CAP = 180.0  # seconds for a cold start
LEAST_CAP = 30.0  # seconds that any sample may take
REPEATS = 1  # repetitions of a sample that other processes disturbed
MOST_WAITING = 20.0  # seconds to wait before a sample for other processes to become quiet
MEMORY_FACTOR = 3.0  # memory that must be free before an engine is loaded, in sizes of the checkpoint
SHORTEST_CONTEXT = 128  # enough for the first run, whose sizes the worker sets
DISTURBED, MOVED = "*", "~"


@dataclass(frozen=True)
class Plan:
    """The workloads of a run, how often they are measured and for how long.

    Attributes:
        rounds: largest number of samples of each engine in each workload.
        minutes: time after which no new sample is begun; 0: no limit.
        precisions: the types of weights, in the order in which they are measured.
        patience: a peer's sample is ended when it takes this many times as long as Penstock's.
    """

    workloads: Sequence[Workload]
    threads: int
    rounds: int = 3
    minutes: float = 0.0
    patience: float = 3.0
    precisions: Sequence[str] = PRECISIONS

    def sizes(self) -> dict[str, int]:
        """Return the sizes for which every engine is loaded."""
        return {
            "threads": self.threads,
            "max_length": max(SHORTEST_CONTEXT, *(work.length for work in self.workloads)),
            "max_streams": max(work.streams for work in self.workloads),
            "cache_tokens": max(work.cache_tokens for work in self.workloads),
        }


class Runner:
    """Runs a plan. `report` is called with (text, samples done, samples in total) as the run progresses."""

    def __init__(
        self,
        plan: Plan,
        peers: Sequence[Peer],
        workshop: Workshop,
        store: Store,
        machine: Machine,
        report: Callable[[str, int, int], None],
    ) -> None:
        self._plan, self._workshop, self._store, self._machine = plan, workshop, store, machine
        self._peers = sorted(peers, key=lambda peer: peer.name != OURS)  # ours first, because its time sets the caps
        self._report = report
        self._workers: dict[str, Worker] = {}  # for the present precision, in the order of their last use
        self._failed: dict[tuple[str, str], str] = {}  # (engine, precision) -> reason
        self._done, self._total = 0, 0

    def run(self) -> None:
        """Install, convert and measure. A failure becomes a sample with an error."""
        self._prepare()
        cells = self._cells()
        self._total = sum(len(self._having(precision)) for precision, _ in cells) * self._plan.rounds
        deadline = time.monotonic() + 60 * self._plan.minutes if self._plan.minutes else float("inf")
        try:
            for index, (precision, work) in enumerate(cells):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                if index and cells[index - 1][0] != precision:
                    self._stop_all()
                self._run_cell(precision, work, time.monotonic() + left / (len(cells) - index))
        finally:
            self._stop_all()

    def _cells(self) -> list[tuple[str, Workload]]:
        """Return (type of weights, workload) in the order of the run. Long prompts take longest and come last."""
        works = self._plan.workloads
        passes = ([w for w in works if w.name != LONG_PROMPTS], [w for w in works if w.name == LONG_PROMPTS])
        return [(precision, work) for some in passes for precision in self._plan.precisions for work in some]

    def _having(self, precision: str) -> list[Peer]:
        return [peer for peer in self._peers if precision in peer.precisions]

    def _prepare(self) -> None:
        self._report("writing the checkpoint", 0, 1)
        self._workshop.make_source()
        for peer in self._peers:
            for precision in (name for name in self._plan.precisions if name in peer.precisions):
                try:
                    self._report(f"installing {peer.name}", 0, 1)
                    self._workshop.install(peer)
                    self._report(f"converting for {peer.name}, {precision}", 0, 1)
                    self._workshop.convert(peer, precision)
                except (WorkerError, OverTimeError, OSError) as error:
                    self._failed[peer.name, precision] = str(error)

    def _run_cell(self, precision: str, work: Workload, deadline: float) -> None:
        """Take the samples of one workload with one type of weights. After the first round, stop at `deadline`."""
        for turn in range(self._plan.rounds):
            for peer in self._having(precision):
                self._report(f"{work.name} {precision}, round {turn + 1}: {peer.name}", self._done, self._total)
                self._done += 1
                taken = self._store.of(peer.name, precision, work)
                ended = any("cap" in sample for sample in taken) or (turn > 0 and "error" in taken[-1])
                measured = sum("error" not in sample for sample in taken)
                if measured <= turn and not ended and not (turn > 0 and time.monotonic() > deadline):
                    self._store.add_sample(self._sample(peer, precision, work, turn))

    def _sample(self, peer: Peer, precision: str, work: Workload, turn: int) -> dict[str, Any]:
        """Return one sample, repeated if other processes disturbed it."""
        sample = {
            "engine": peer.name,
            "precision": precision,
            "workload": work.name,
            "size": work.size,
            "round": turn,
            "marks": "",
        }
        cap = self._cap(peer, precision, work)
        try:
            for attempt in range(1 + REPEATS):
                prompts = work.prompts(self._workshop.config["vocab_size"], turn, attempt)
                measured = self._measure(peer, precision, work, prompts, cap)
                if DISTURBED not in measured["marks"]:
                    break
            return sample | measured
        except OverTimeError as error:
            self._workers.pop(peer.name, None)
            return sample | {"cap": error.seconds}
        except WorkerError as error:
            self._workers.pop(peer.name, None)
            return sample | {"error": str(error)}

    def _cap(self, peer: Peer, precision: str, work: Workload) -> float:
        ours: list[float] = [one["seconds"] for one in self._store.of(OURS, precision, work) if "seconds" in one]
        if work.name == COLD_START:
            return COLD_CAP
        if peer.name == OURS or not ours:
            return LOAD_CAP
        return max(LEAST_CAP, self._plan.patience * statistics.median(ours))

    def _measure(
        self, peer: Peer, precision: str, work: Workload, prompts: list[list[int]], cap: float
    ) -> dict[str, Any]:
        request = {"prompts": prompts, "output": work.output, "shared": work.shared}
        cold = work.name == COLD_START
        if cold:
            self._make_room()
        worker = None if cold else self._loaded(peer, precision)
        self._machine.wait_until_quiet(MOST_WAITING)
        before = self._machine.limits()
        begun = time.monotonic()
        if worker is None:
            worker = self._start(peer, precision)
        earlier = 0.0 if cold else worker.seconds()
        meter = self._machine.watch(lambda: worker.seconds() - earlier)
        if cold:
            worker.send(request)
            worker.receive(cap)  # the model is loaded
            answer = worker.receive(cap) | {"seconds": time.monotonic() - begun}
        else:
            answer = worker.ask(request, cap)
        others = meter.cores()
        after = self._machine.limits()
        if cold:
            worker.stop()
        marks = (DISTURBED if self._machine.is_disturbed(others) else "") + (MOVED if before.moved(after) else "")
        return answer | {"marks": marks, "others": round(others, 3), "limits": [asdict(before), asdict(after)]}

    def _loaded(self, peer: Peer, precision: str) -> Worker:
        """Return the peer's worker, loaded and warm, and mark it as the most recently used."""
        worker = self._workers.pop(peer.name, None)
        if worker is None:
            self._make_room()
            worker = self._start(peer, precision)
            try:
                self._store.add_facts(peer.name, precision, worker.receive(LOAD_CAP)["ready"])
                worker.ask({"warm_up": True}, LOAD_CAP)
            except (WorkerError, OverTimeError) as error:
                self._failed[peer.name, precision] = str(error)  # so that it is not loaded again for every workload
                raise WorkerError(str(error)) from error
        self._workers[peer.name] = worker
        return worker

    def _start(self, peer: Peer, precision: str) -> Worker:
        if reason := self._failed.get((peer.name, precision)):
            raise WorkerError(reason)
        return self._workshop.start(peer, precision, self._plan.sizes())

    def _make_room(self) -> None:
        """End the least recently used workers until one more fits into memory."""
        while self._workers and self._machine.available_bytes() < MEMORY_FACTOR * self._workshop.source_bytes():
            self._workers.pop(next(iter(self._workers))).stop()

    def _stop_all(self) -> None:
        while self._workers:
            self._workers.popitem()[1].stop()
