"""A machine, engines and a workshop without processes: what they answer is written down by the test."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import Limits
from benchmarks.peers.base import Engine, LoadOptions, Peer
from benchmarks.process import OverTimeError, WorkerError

STEADY = Limits(30.0, 900.0, 1800.0)


class FakePeer(Peer):
    """A peer that exists by name only."""

    def __init__(self, name: str, precisions: tuple[str, ...] = ("bf16",)) -> None:
        self.name = self.distribution = name
        self.precisions = precisions

    def convert(self, source: Path, target: Path, precision: str) -> None:
        raise AssertionError("the workshop is a fake")

    def load(self, options: LoadOptions) -> Engine:
        raise AssertionError("the workshop is a fake")


@dataclass
class FakeMachine:
    """Gives out the limits and the use by others that were written down, then steady and none."""

    cores: int = 2
    limits_to_come: list[Limits] = field(default_factory=list)
    others_to_come: list[float] = field(default_factory=list)
    free: list[int] = field(default_factory=list)

    def limits(self) -> Limits:
        return self.limits_to_come.pop(0) if self.limits_to_come else STEADY

    def watch(self, engine_seconds: Callable[[], float]) -> Any:
        used = self.others_to_come.pop(0) if self.others_to_come else 0.0
        return type("Meter", (), {"cores": lambda self: used})()

    def wait_until_quiet(self, longest: float) -> None:
        pass

    def is_disturbed(self, cores_of_others: float) -> bool:
        return cores_of_others > 0.1

    def available_bytes(self) -> int:
        return self.free.pop(0) if self.free else 2**40


class FakeWorker:
    """Takes `seconds` for every request, or fails with it."""

    def __init__(self, name: str, seconds: float | Exception, shop: "FakeWorkshop") -> None:
        self.name, self._seconds, self._log, self._prompts = name, seconds, shop.log, shop.prompts

    def send(self, request: Mapping[str, Any]) -> None:
        pass

    def receive(self, cap: float) -> dict[str, Any]:
        if isinstance(self._seconds, WorkerError):
            raise self._seconds
        return {"ready": {"version": "1"}}

    def ask(self, request: Mapping[str, Any], cap: float) -> dict[str, Any]:
        if request.get("warm_up"):
            return {"warm": True}
        self._log.append(self.name)
        self._prompts.append(request["prompts"])
        if isinstance(self._seconds, Exception):
            raise self._seconds
        if self._seconds > cap:
            raise OverTimeError(cap)
        return {
            "seconds": self._seconds,
            "first_s": self._seconds / 2,
            "later_s": self._seconds / 2,
            "later_tokens": request["output"] - 1,
            "peak_rss_bytes": 2**20,
        }

    def seconds(self) -> float:
        return 0.0

    def stop(self) -> None:
        self._log.append(f"{self.name} ended")


class FakeWorkshop:
    """Starts fake workers.

    Attributes:
        seconds: by engine, what its workers take, or how they fail.
        log: the samples taken and the workers ended, in order.
        prompts: of the samples, in order.
        starts: how often each engine was started.
    """

    def __init__(self, seconds: dict[str, float | Exception]) -> None:
        self.config = {"vocab_size": 100}
        self.seconds, self.log, self.prompts = seconds, list[str](), list[list[list[int]]]()
        self.starts = dict.fromkeys(seconds, 0)
        self.broken: set[str] = set()

    def make_source(self) -> None:
        pass

    def source_bytes(self) -> int:
        return 100

    def install(self, peer: Peer) -> None:
        if peer.name in self.broken:
            raise WorkerError("pip install: no such version")

    def convert(self, peer: Peer, precision: str) -> None:
        pass

    def start(self, peer: Peer, precision: str, sizes: Mapping[str, int]) -> FakeWorker:
        self.starts[peer.name] += 1
        return FakeWorker(peer.name, self.seconds[peer.name], self)
