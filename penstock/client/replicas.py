"""Replicas: the engines of one client, and their processes from start to end.

The first engine plans the memory of all engines. The others start when it is ready, with a cache of the same size, so
every request that one engine has accepted fits the others. A new engine whose bits differ from those of the running
engines is not let in. The dispatcher decides which engine computes what (client/dispatcher.py). Not thread-safe.
"""

import asyncio
import logging
import time
import weakref
from dataclasses import replace
from typing import Protocol

from msgspec import structs

from penstock.client import frames
from penstock.client.child import Launcher
from penstock.client.dispatcher import Dispatcher, OutputsLeft
from penstock.client.engine_client import EngineState, EngineStatus
from penstock.client.liveness import total_stats
from penstock.client.open_requests import OpenRequest, OpenRequests
from penstock.client.prefixes import Pin
from penstock.client.records import RecordKeeper, RecordOptions
from penstock.client.recovery import Deaths
from penstock.client.replica import Replica
from penstock.client.supervisor import taking_over
from penstock.errors import EngineDeadError, EngineError, PenstockError
from penstock.interface.messages import ModelInfo

LOGGER = logging.getLogger("penstock")
MAX_REPLICAS = 64


class ReplicasListener(Protocol):
    """What the replicas report to the owner of the requests."""

    def engine_ready(self, index: int, num_rows: int, info: ModelInfo) -> None:
        """Handle a new engine. num_rows: rows of all engines that are ready."""

    def engine_lost(self, index: int, num_rows: int, to_blame: OpenRequest | None) -> None:
        """Handle a death. to_blame: the request that the engine was computing alone."""

    def engine_failed(self, error: EngineDeadError) -> None:
        """End all open requests: there will be no engine any more, or only one with other bits."""

    def received(self, index: int, frame: frames.Outputs | frames.Rejected) -> None:
        """Handle an engine's outputs, or the rejection of a request."""


class _DroppedListener:
    """Stands in for a client that was garbage-collected, and ignores every event."""

    def engine_ready(self, index: int, num_rows: int, info: ModelInfo) -> None:
        """Do nothing."""

    def engine_lost(self, index: int, num_rows: int, to_blame: OpenRequest | None) -> None:
        """Do nothing."""

    def engine_failed(self, error: EngineDeadError) -> None:
        """Do nothing."""

    def received(self, index: int, frame: frames.Outputs | frames.Rejected) -> None:
        """Do nothing."""


class Replicas:
    """Keeps the engines running. The constructor starts the first one; `attach` watches it.

    Args:
        start: the first frame of an engine.
        outputs_left: estimates the outputs of a choice.
        standby: whether each engine has a second process that is kept ready.
        launcher: starts the engines, and says how many there are.

    Attributes:
        dispatcher: gives the choices of requests to the engines.
        model_info: description of the model; None until an engine was ready.
        failure: why there will be no engine any more; None as long as there may be one.
        settled: set once all engines that the launcher requires have been ready, or there is a failure.
    """

    def __init__(
        self,
        start: frames.Start,
        requests: OpenRequests,
        listener: ReplicasListener,
        outputs_left: OutputsLeft,
        record: RecordOptions,
        *,
        standby: bool = False,
        launcher: Launcher,
    ) -> None:
        self._launcher = launcher
        self.requests = requests
        self._deaths: dict[str, Deaths] = {}
        self.model_info: ModelInfo | None = None
        self.failure: PenstockError | None = None
        self.settled = asyncio.Event()
        self._listener = weakref.ref(listener)  # weak, so that dropping the client ends its engines
        self._start = start
        self._record = record
        self._standby = standby
        self._watches: list[asyncio.Task[None]] = []
        self._replicas = [self._make(0, start)]
        self.dispatcher = Dispatcher(requests, self._replicas, outputs_left, several=len(self) > 1)

    def __len__(self) -> int:
        return self._launcher.num_engines

    def _make(self, index: int, start: frames.Start) -> Replica:
        shared = self.requests, self._deaths, self._record
        return Replica(index, self, start, *shared, standby=self._standby, launcher=self._launcher)

    # --- the processes ---------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Watch the engines from the running event loop.

        Raises:
            EngineError: they were shut down, or belong to another event loop.
        """
        if self._watches and self._watches[0].get_loop() is not asyncio.get_running_loop():
            raise EngineError("this engine belongs to the event loop that used it first; make a new one for each loop")
        if not self._watches:
            if self.failure is not None:
                raise self.failure
            self._watch(self._replicas[0])

    def _watch(self, replica: Replica) -> None:
        loop = asyncio.get_running_loop()
        self._watches.append(loop.create_task(replica.supervisor.run(), name="engine supervisor"))

    def stop(self) -> None:
        """End all engines and start no others. A second call does nothing."""
        self._fail(EngineDeadError("the engine was shut down"), EngineDeadError("the engine was shut down"))

    def end(self) -> None:
        """End the engines at once, and wait until they have ended; for use without an event loop."""
        self.stop()
        for replica in self._replicas:
            replica.supervisor.end()

    def abandon(self) -> None:
        """End the engines of a listener that exists no more; from any thread."""
        loop = self._watches[0].get_loop() if self._watches else None
        if loop is not None and loop.is_running():
            loop.call_soon_threadsafe(self.stop)
        else:  # a loop that does not run would not close the connections
            self.end()

    async def wait(self) -> None:
        """Wait for the processes to end, after `stop`, and for the records in progress."""
        if self._watches and self._watches[0].get_loop() is asyncio.get_running_loop():
            await asyncio.wait(self._watches)
        for replica in self._replicas:
            await replica.supervisor.wait()
            await asyncio.to_thread(replica.records.close)

    def records(self, index: int) -> RecordKeeper:
        """Return the RecordKeeper of an engine. Raise EngineDeadError if the engine has not been started yet."""
        if index >= len(self._replicas):
            raise EngineDeadError(f"engine {index} has not been started yet")
        return self._replicas[index].records

    @property
    def state(self) -> EngineState:
        if self.failure is not None:
            return EngineState.FAILED
        if not self.settled.is_set():
            return EngineState.STARTING
        return EngineState.READY if any(replica.is_ready for replica in self._replicas) else EngineState.RECOVERING

    @property
    def restarts(self) -> int:
        return sum(replica.supervisor.restarts for replica in self._replicas)

    def status(self) -> EngineStatus:
        """Return the summed status of all engines, and the status of each."""
        found = tuple(replica.status() for replica in self._replicas)
        if len(found) == 1:
            return replace(found[0], state=self.state, replicas=found)
        ages = [one.heartbeat_age_s for one in found if one.heartbeat_age_s is not None]
        peaks = [one.peak_memory_bytes for one in found if one.peak_memory_bytes is not None]
        memory = {name for one in found for name in one.planned_memory}
        return EngineStatus(
            state=self.state,
            pid=next((one.pid for one in found if one.pid is not None), None),
            restarts=self.restarts,
            heartbeat_age_s=min(ages, default=None),
            making_progress=self.failure is None and any(one.making_progress for one in found),
            stats=total_stats([one.stats for one in found]),
            queued_tokens=sum(one.queued_tokens for one in found),
            planned_memory={name: sum(one.planned_memory.get(name, 0) for one in found) for name in sorted(memory)},
            peak_memory_bytes=sum(peaks) if peaks else None,
            replicas=found,
        )

    def pin(self, pin: Pin) -> None:
        """Tell every engine about a new pin, before the request that computes it is submitted."""
        for replica in self._replicas:
            replica.recovery.pin(pin)

    def compute_everywhere(self, pin: Pin) -> None:
        """Let every engine compute a pin that one of them has computed."""
        if len(self._replicas) > 1:
            for replica in self._replicas:
                replica.recovery.compute(pin)

    def unpin(self, pin: Pin) -> None:
        """Tell every engine that a pin is not wanted any more."""
        for replica in self._replicas:
            replica.recovery.unpin(pin)

    # --- what the replicas call ------------------------------------------------------------------------------------

    def engine_ready(self, replica: Replica, info: ModelInfo) -> None:
        """Let a new engine in, unless its bits differ from the running engines'. The first starts the others."""
        if self.failure is not None:
            return  # its frame was on the way when all engines were stopped
        known = self.model_info
        if known is not None and known.system_fingerprint != info.system_fingerprint:
            change = f"{known.system_fingerprint} became {info.system_fingerprint}"
            if any(other.is_ready for other in self._replicas if other is not replica):
                message = f"it computes differently from the others ({change}): its files or its processor differ"
                replica.supervisor.give_up(EngineDeadError(message))
                return
            self._current_listener().engine_failed(EngineDeadError(f"the new engine computes differently: {change}"))
            self.model_info = info
        self.model_info = self.model_info or info  # that of the first engine says why its options were chosen
        replica.recovery.engine_ready()
        self._current_listener().engine_ready(replica.index, self._num_rows(), info)
        if known is None:
            self.dispatcher.use(info.block_size, replica.supervisor.liveness.stats.kv_blocks_total)
            for index in range(1, len(self)):
                start = taking_over(self._start, info.max_model_len, replica.supervisor.cache_bytes)
                self._replicas.append(self._make(index, start))
                self._watch(self._replicas[-1])
        num_ready_once = sum(other.supervisor.model_info is not None for other in self._replicas)
        if num_ready_once >= (self._launcher.num_initial or len(self)):
            self.settled.set()
        self.dispatcher.move()

    def engine_lost(self, replica: Replica) -> bool:
        """Let other engines go on with the work of an engine that died. Return whether a request is to blame."""
        replica.records.engine_died(replica.supervisor.last_death)
        return self._do_without(replica)

    def _do_without(self, replica: Replica) -> bool:
        to_blame = replica.recovery.engine_lost(replica.last_outputs_at)
        request = None if to_blame is None else self.requests.owner(to_blame)
        self.dispatcher.forget(replica)
        self._current_listener().engine_lost(replica.index, self._num_rows(), request)
        self.dispatcher.move()
        return request is not None

    def leaving(self, replica: Replica) -> None:
        """Give nothing more to an engine that is to be shut down."""
        LOGGER.info("%s takes no new requests", replica.name)
        self.dispatcher.move()

    def engine_failed(self, replica: Replica, error: EngineDeadError) -> None:
        """Go on with the other engines, if all have been ready once and at least one is left."""
        if self.failure is not None:
            return
        if replica.supervisor.failure is not None and (
            not self.settled.is_set() or all(other.supervisor.failure is not None for other in self._replicas)
        ):
            self._fail(replica.supervisor.failure, error)
            return
        LOGGER.error("%s is given up, and the others go on: %s", replica.name, error)
        self._do_without(replica)

    def received(self, replica: Replica, frame: frames.Outputs | frames.Rejected) -> None:
        """Pass on the outputs and rejections of an engine, without choices that have moved to another engine."""
        if isinstance(frame, frames.Rejected):
            self._current_listener().received(replica.index, frame)
            return
        replica.last_outputs_at = time.monotonic()
        outputs = self.dispatcher.its_own(replica, frame.outputs)
        self._current_listener().received(replica.index, structs.replace(frame, outputs=outputs))
        self.dispatcher.received(replica, outputs)

    def _current_listener(self) -> ReplicasListener:
        return self._listener() or _DroppedListener()

    def _num_rows(self) -> int:
        infos = [replica.supervisor.model_info for replica in self._replicas if replica.is_ready]
        return sum(info.max_num_seqs for info in infos if info is not None)

    def _fail(self, failure: PenstockError, shown: EngineDeadError) -> None:
        """End all engines: there will be none any more."""
        if self.failure is None:
            self.failure = failure
            self._current_listener().engine_failed(shown)
        for replica in self._replicas:
            replica.supervisor.stop()
        self.settled.set()
