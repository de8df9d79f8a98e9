"""Replica: one of a client's engines, with its processes, their work, and its flight recorder."""

from typing import Protocol

from msgspec import structs

from penstock.client import frames
from penstock.client.child import Launcher
from penstock.client.engine_client import EngineState, EngineStatus
from penstock.client.open_requests import OpenRequests
from penstock.client.records import RecordKeeper, RecordOptions
from penstock.client.recovery import Deaths, Recovery
from penstock.client.router import QueuedTokens
from penstock.client.supervisor import EngineSupervisor
from penstock.errors import EngineDeadError
from penstock.interface.messages import ModelInfo


class Owner(Protocol):
    """What a replica reports to its owner, which divides the requests: everything that its supervisor reports."""

    def engine_ready(self, replica: "Replica", info: ModelInfo) -> None:
        """Handle a new engine; what was sent to the previous one is lost."""

    def engine_lost(self, replica: "Replica") -> bool:
        """Handle a death before a new engine. Return whether a request is to blame, and has been ended."""

    def engine_failed(self, replica: "Replica", error: EngineDeadError) -> None:
        """Handle the end of this replica."""

    def leaving(self, replica: "Replica") -> None:
        """Handle an engine that takes no new requests."""

    def received(self, replica: "Replica", frame: frames.Outputs | frames.Rejected) -> None:
        """Handle the engine's outputs, or the rejection of a request."""


class Replica:
    """One engine, and its successors when it dies. Implements EngineListener.

    Args:
        owner: receives what the supervisor reports.
        start: the first frame of its processes.
        deaths: what is known about choices that ended engines.
        launcher: starts the engines of this client.

    Attributes:
        index: from 0.
        name: name of its process in the log.
        queued: the work that it still has.
        last_outputs_at: when its last outputs arrived, on the clock of timelines.
    """

    def __init__(
        self,
        index: int,
        owner: Owner,
        start: frames.Start,
        requests: OpenRequests,
        deaths: dict[str, Deaths],
        record: RecordOptions,
        *,
        standby: bool = False,
        launcher: Launcher,
    ) -> None:
        self.index = index
        self.queued = QueuedTokens()
        self.records = RecordKeeper(record)
        self.recovery = Recovery(requests, self._send, deaths)
        self.last_outputs_at = 0.0
        self._owner = owner
        self.name = "the engine process" if launcher.num_engines == 1 else f"engine process {index}"
        start = structs.replace(start, ring=self.records.descriptor)
        self.supervisor = EngineSupervisor(start, self, standby=standby, name=self.name, launch=launcher.start)

    def _send(self, frame: frames.ToEngine) -> None:
        self.supervisor.child.send(frame)

    @property
    def is_ready(self) -> bool:
        """Return whether it has an engine that computes, even if only a choice that is tried alone."""
        return self.supervisor.state is EngineState.READY

    @property
    def given_up(self) -> bool:
        """Return whether it will never have an engine again."""
        return self.supervisor.failure is not None

    @property
    def free_rows(self) -> int:
        info = self.supervisor.model_info
        return 0 if info is None or not self.recovery.accepts else info.max_num_seqs - self.queued.rows

    def let_go(self) -> None:
        """End the engine; another one takes its place when it can."""
        self.supervisor.child.hang_up()

    def status(self) -> EngineStatus:
        """Return a snapshot of this engine alone."""
        engine = self.supervisor
        return EngineStatus(
            state=engine.state,
            pid=engine.child.pid,
            restarts=engine.restarts,
            heartbeat_age_s=engine.liveness.age_s,
            making_progress=engine.state is EngineState.READY and engine.liveness.making_progress,
            stats=engine.liveness.stats,
            journal_requests=len(self.queued),
            queued_tokens=self.queued.total,
            planned_memory={} if engine.model_info is None else engine.model_info.memory,
            peak_memory_bytes=engine.child.peak_memory_bytes(),
            standby=engine.standby_status(),
        )

    # --- what the supervisor calls ---------------------------------------------------------------------------------

    def engine_ready(self, info: ModelInfo) -> None:
        self._owner.engine_ready(self, info)

    def engine_lost(self) -> bool:
        return self._owner.engine_lost(self)

    def engine_failed(self, error: EngineDeadError) -> None:
        self._owner.engine_failed(self, error)

    def leaving(self) -> None:
        self.recovery.leaving = True
        self._owner.leaving(self)

    def received(self, frame: frames.Outputs | frames.Rejected) -> None:
        self._owner.received(self, frame)

    def recovered(self) -> bool:
        return self.recovery.recovered
