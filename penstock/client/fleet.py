"""Fleet: the engines of one client, and which of them computes which choices, also after a death.

    a new request       goes to the ready engine that can compute it soonest (Router); all of its choices go
                        to the same engine, which computes their prompt once
    an engine dies      its choices go on at once in engines with free rows; the rest wait for a row, or for the
                        engine that takes its place
    a choice that ended engines twice    stays, to be tried alone by the next engine (Recovery)

The first engine plans the memory of all engines. The others start when it is ready, with a cache of the same size, so
every request that one engine has accepted fits the others. A new engine whose bits differ from those of the running
engines is not let in. The fleet knows no text, and is not thread-safe.
"""

import asyncio
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from msgspec import structs

from penstock.client import frames
from penstock.client.admission import QueuedTokens, Router, block_hashes
from penstock.client.engine_client import EngineState, EngineStatus
from penstock.client.engine_handle import EngineHandle, EnginePlan, taking_over, total_stats
from penstock.client.open_requests import EngineListener, OpenRequest, OpenRequests
from penstock.client.prefixes import Pin
from penstock.client.records import RecordKeeper, RecordOptions
from penstock.errors import EngineDeadError, EngineError, PenstockError
from penstock.interface.messages import EngineOutput, ModelInfo
from penstock.interface.timeline import IntervalKind

LOGGER = logging.getLogger("penstock")
DEATHS_BEFORE_TRIAL = 2
OutputsLeft = Callable[[int, bool], float]  # (limit, whether choices never end early) -> expected outputs


@dataclass(eq=False, slots=True)
class Replica:
    """One engine of a fleet, with its work and its flight recorder.

    Attributes:
        index: from 0.
        name: name of its process in the log.
        queued: the work that it still has.
        last_outputs_at: when its last outputs arrived, on the clock of timelines.
        given_up: whether it will never have an engine again.
    """

    index: int
    name: str
    handle: EngineHandle
    recovery: "Recovery"
    records: RecordKeeper
    queued: QueuedTokens = field(default_factory=QueuedTokens)
    last_outputs_at: float = 0.0
    given_up: bool = False

    @property
    def is_ready(self) -> bool:
        """True if it has an engine that computes, even if only a choice that is tried alone."""
        return self.handle.state is EngineState.READY

    @property
    def free_rows(self) -> int:
        info = self.handle.model_info
        return 0 if info is None or not self.recovery.accepts else info.max_num_seqs - self.queued.rows

    def status(self) -> EngineStatus:
        handle = self.handle
        return EngineStatus(
            state=handle.state,
            pid=handle.connection.pid,
            restarts=handle.restarts,
            heartbeat_age_s=handle.liveness.age_s,
            making_progress=self.is_ready and handle.liveness.making_progress,
            stats=handle.liveness.stats,
            journal_requests=len(self.queued),
            queued_tokens=self.queued.total,
            planned_memory={} if handle.model_info is None or not handle.awake.is_set() else handle.model_info.memory,
            peak_memory_bytes=handle.connection.peak_memory_bytes(),
            standby=handle.standby_status(),
        )


@dataclass(frozen=True, slots=True)
class _Assignment:
    """The engine that computes a choice, and the content hashes of its prompt; none if there is only one engine."""

    replica: Replica
    request: OpenRequest
    hashes: list[bytes]


class Fleet:
    """Keeps the engines running, and gives them the choices of OpenRequests. The constructor starts the first engine;
    `attach` watches it.

    Args:
        start: the first frame of an engine.
        outputs_left: estimates the outputs of a choice.
        standby: whether each engine has a second process that is kept ready.
        engine_plan: starts the engines, and says how many there are.

    Attributes:
        router: chooses among replicas, by their index.
        model_info: description of the model; None until an engine was ready.
        failure: why there will be no engine any more; None as long as there may be one.
        settled: set once all engines that the plan requires have been ready, or there is a failure.
    """

    def __init__(
        self,
        start: frames.Start,
        requests: OpenRequests,
        listener: EngineListener,
        outputs_left: OutputsLeft,
        record: RecordOptions,
        *,
        standby: bool = False,
        engine_plan: EnginePlan,
    ) -> None:
        self.model_info: ModelInfo | None = None
        self.failure: PenstockError | None = None
        self.settled = asyncio.Event()
        self._use_cache_of(1, 1)
        self._listener = weakref.ref(listener)  # weak, so that dropping the client ends its engines
        self._requests = requests
        self._outputs_left = outputs_left
        self._engine_plan = engine_plan
        self._start = start
        self._record = record
        self._standby = standby
        self._deaths: dict[str, Deaths] = {}  # of choices, in whatever engine
        self._assigned: dict[str, _Assignment] = {}  # by engine request id
        self._watches: list[asyncio.Task[None]] = []
        self._replicas: list[Replica] = []
        self._add_replica(start)

    def __len__(self) -> int:
        """Count the engines that there are going to be."""
        return self._engine_plan.num_engines

    def _add_replica(self, start: frames.Start) -> Replica:
        index, records = len(self._replicas), RecordKeeper(self._record)
        name = "the engine process" if len(self) == 1 else f"engine process {index}"
        handle = EngineHandle(
            structs.replace(start, ring=records.descriptor, number=index),
            partial(self._received, index),
            standby=self._standby,
            name=name,
            launch=self._engine_plan.start,
            adapters=self._requests.adapters,
        )
        recovery = Recovery(self._requests, handle.send, self._deaths)
        self._replicas.append(Replica(index, name, handle, recovery, records))
        return self._replicas[-1]

    # --- from start to end -----------------------------------------------------------------------------------------

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
        self._watches.append(asyncio.get_running_loop().create_task(self._keep_running(replica), name="engine handle"))

    async def _keep_running(self, replica: Replica) -> None:
        """Serve one process after another until the engine is given up."""
        handle = replica.handle
        try:
            while (cause := await handle.wait_for_death(lambda: replica.recovery.recovered)) is not None:
                if handle.awake.is_set():
                    replica.records.engine_died(cause)
                await handle.replace(explained=self._engine_lost(replica))
        except Exception as error:
            LOGGER.exception("the supervision of %s failed", replica.name)
            handle.give_up(EngineDeadError(f"the supervision of the engine failed: {error!r}"))
        finally:
            handle.hang_up()
        self._give_up(replica)

    async def sleep(self) -> None:
        """End the engines, which must have nothing to do. On return, their memory is free."""
        self.settled.clear()
        await asyncio.gather(*(replica.handle.sleep() for replica in self._replicas))

    def wake_up(self) -> None:
        """Start the engines again, each with a cache of the same size as before."""
        for replica in self._replicas:
            replica.handle.wake_up()

    def stop(self) -> None:
        """End all engines and start no others. A second call does nothing."""
        self._fail(EngineDeadError("the engine was shut down"), EngineDeadError("the engine was shut down"))

    def end(self) -> None:
        """End the engines at once, and wait until they have ended; for use without an event loop."""
        self.stop()
        for replica in self._replicas:
            replica.handle.end()

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
            await replica.handle.wait()
            await asyncio.to_thread(replica.records.close)

    def _fail(self, failure: PenstockError, shown: EngineDeadError) -> None:
        """End all engines: there will be none any more."""
        listener = self._listener()
        if self.failure is None:
            self.failure = failure
            if listener is not None:
                listener.engine_failed(shown)
        for replica in self._replicas:
            replica.handle.give_up(failure)
        self.settled.set()

    # --- what is known of the engines ------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        if self.failure is not None:
            return EngineState.FAILED
        if not self.settled.is_set():
            is_asleep = self._replicas[0].handle.state is EngineState.SLEEPING
            return EngineState.SLEEPING if is_asleep else EngineState.STARTING
        return EngineState.READY if any(replica.is_ready for replica in self._replicas) else EngineState.RECOVERING

    @property
    def restarts(self) -> int:
        return sum(replica.handle.restarts for replica in self._replicas)

    def status(self) -> EngineStatus:
        """Sum the status of all engines, and list the status of each."""
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

    def records(self, index: int) -> RecordKeeper:
        """Find the RecordKeeper of an engine. Raise EngineDeadError if the engine has not been started yet."""
        if index >= len(self._replicas):
            raise EngineDeadError(f"engine {index} has not been started yet")
        return self._replicas[index].records

    def handles(self, *, ready: bool) -> list[EngineHandle]:
        """List the engines, or those that are ready."""
        return [replica.handle for replica in self._replicas if replica.is_ready or not ready]

    def _num_rows(self) -> int:
        infos = [replica.handle.model_info for replica in self._replicas if replica.is_ready]
        return sum(info.max_num_seqs for info in infos if info is not None)

    # --- pinned prefixes -------------------------------------------------------------------------------------------

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

    # --- what happens to an engine ---------------------------------------------------------------------------------

    def _received(self, index: int, frame: frames.FromEngine) -> None:
        """Handle a frame of the engine's current process. Outputs are passed on without choices that have moved to
        another engine meanwhile."""
        listener, replica, adapters = self._listener(), self._replicas[index], self._requests.adapters
        if listener is None:  # the client was dropped, and its engines are about to end
            return
        match frame:
            case frames.Outputs():
                replica.last_outputs_at = time.monotonic()
                places = (self._assigned.get(output.request_id) for output in frame.outputs)
                pairs = zip(frame.outputs, places, strict=True)
                outputs = [output for output, place in pairs if place is None or place.replica is replica]
                listener.received(index, outputs, frame.stats)
                self._note_computed(replica, outputs)
            case frames.Rejected(_, adapter_id) if not self.settled.is_set() and adapters.get(adapter_id) is not None:
                self.model_info = None  # it was never served
                self._fail(frame.as_error(), EngineDeadError("an adapter could not be loaded"))
            case frames.Rejected():
                listener.rejected(frame.request_id, frame.as_error())
            case frames.AdapterLoaded():
                adapters.loaded(frame.info)
                self._settle()
            case frames.Ready():
                self._engine_ready(replica, frame, listener)
            case frames.Leaving():
                LOGGER.info("%s takes no new requests", replica.name)
                replica.recovery.leaving = True
                self._move_waiting()
            case frames.Failed():
                self._give_up(replica)

    def _engine_ready(self, replica: Replica, ready: frames.Ready, listener: EngineListener) -> None:
        """Let a new engine in, unless its bits differ from the running engines'. The first starts the others."""
        if self.failure is not None:
            return  # its frame was on the way when all engines were stopped
        known, info = self.model_info, ready.info
        if known is not None and known.system_fingerprint != info.system_fingerprint:
            change = f"{known.system_fingerprint} became {info.system_fingerprint}"
            if any(other.is_ready for other in self._replicas if other is not replica):
                message = f"it computes differently from the others ({change}): its files or its processor differ"
                replica.handle.give_up(EngineDeadError(message))
                self._give_up(replica)
                return
            listener.engine_failed(EngineDeadError(f"the new engine computes differently: {change}"))
            self.model_info = info
        self.model_info = self.model_info or info  # that of the first engine says why its options were chosen
        replica.recovery.engine_ready()
        listener.engine_ready(replica.index, self._num_rows(), info)
        if known is None:
            self._use_cache_of(info.block_size, ready.stats.kv_blocks_total)
            for _ in range(1, len(self)):
                self._watch(self._add_replica(taking_over(self._start, ready)))
        self._settle()
        self._move_waiting()

    def _settle(self) -> None:
        """Take requests if enough engines have been ready, and have the adapters that there are from the start."""
        num_ready_once = sum(other.handle.model_info is not None for other in self._replicas)
        if self._requests.adapters.are_loaded and num_ready_once >= (self._engine_plan.num_initial or len(self)):
            self.settled.set()

    def _engine_lost(self, replica: Replica) -> bool:
        """Let other engines go on with the work of an engine that died. Return whether a request is to blame."""
        to_blame = replica.recovery.engine_lost(replica.last_outputs_at)
        request = None if to_blame is None else self._requests.owner(to_blame)
        self.router.forget(replica.index)
        listener = self._listener()
        if listener is not None:
            listener.engine_lost(replica.index, self._num_rows(), request)
        self._move_waiting()
        return request is not None

    def _give_up(self, replica: Replica) -> None:
        """Go on without an engine that has failed, if all have been ready once and at least one is left."""
        error = replica.handle.failure
        assert error is not None, "an engine that may come back keeps its requests"
        if self.failure is not None or replica.given_up:
            return
        replica.given_up = True
        shown = error
        if not isinstance(shown, EngineDeadError):  # its text may name files, which readers of streams should not see
            if replica.handle.model_info is not None:  # at the first start, the waiting caller reports the error
                LOGGER.error("no engine can be started again: %s", error)
            shown = EngineDeadError("no engine can be started again; the server's log says why")
        if not self.settled.is_set() or all(other.given_up for other in self._replicas):
            self._fail(error, shown)
            return
        LOGGER.error("%s is given up, and the others go on: %s", replica.name, shown)
        self._engine_lost(replica)

    def _note_computed(self, replica: Replica, outputs: Sequence[EngineOutput]) -> None:
        """Note what an engine has computed, after the outputs have been handed to their readers."""
        accepted = replica.recovery.accepts
        for output in outputs:
            replica.queued.computed(output.request_id, len(output.new_token_ids))
        ended = [output.request_id for output in outputs if output.finish_reason is not None]
        left = [self._unassign(request_id) for request_id in ended]
        replica.recovery.received([o.request_id for o in outputs if o.new_token_ids or o.finish_reason is not None])
        if any(left) or replica.recovery.accepts != accepted:
            self._move_waiting()

    # --- which engine computes what --------------------------------------------------------------------------------

    def _use_cache_of(self, block_size: int, num_blocks: int) -> None:
        """Set the size of the engines' caches, reported by the first ready engine, before any request arrives."""
        self._block_size = block_size
        self.router: Router[int] = Router(block_size, num_blocks)

    def submit(self, request: OpenRequest) -> None:
        """Let one engine compute all running choices of a request."""
        ids = self._requests.running_of(request)
        able = [replica for replica in self._replicas if replica.recovery.accepts]
        able = able or [replica for replica in self._replicas if not replica.given_up and not replica.recovery.leaving]
        able = able or [replica for replica in self._replicas if not replica.given_up]
        if ids and able:
            self._assign(request, ids, able)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Tell the engines that these choices are not wanted any more, or not now."""
        gone: dict[Replica, list[str]] = {}
        for request_id in request_ids:
            place = self._unassign(request_id)
            if place is not None:
                gone.setdefault(place.replica, []).append(request_id)
        for replica, ids in gone.items():
            replica.recovery.abort(ids)
        if gone:
            self._move_waiting()

    def _move_waiting(self) -> None:
        """Move choices that wait for an engine that is not ready to engines with free rows. Choices of an engine that
        was given up go to any other engine, with or without free rows. An engine that leaves and has no choices is
        ended; another one takes its place when it can."""
        for replica in self._replicas:
            if replica.recovery.leaving and not len(replica.queued):
                replica.handle.connection.hang_up()
            if replica.recovery.accepts or not len(replica.queued):
                continue
            wanted = replica.recovery.waiting(with_trials=replica.given_up)
            for request in self._requests:
                ids = [key for key in self._requests.running_of(request) if key in wanted]
                able = [other for other in self._replicas if other is not replica and other.recovery.accepts]
                if not replica.given_up:
                    rows = len(ids) * _rows(request)
                    able = [other for other in able if other.free_rows >= rows]
                if ids and able:
                    for request_id in ids:
                        self._unassign(request_id)
                    replica.recovery.abort(ids)  # they were never sent to its engine, so this ends no trial
                    self._assign(request, ids, able)

    def _assign(self, request: OpenRequest, ids: Sequence[str], able: Sequence[Replica]) -> None:
        """Let one of these engines compute running choices of a request."""
        prompt, params = request.prompt_token_ids, request.params
        hashes = self._hashes(prompt, request)
        target = self._replicas[
            self.router.choose(hashes, len(prompt), {replica.index: replica.queued.total for replica in able})
        ]
        cached = self.router.cached_tokens(target.index, hashes, len(prompt))
        self.router.note(target.index, hashes)
        for place, request_id in enumerate(ids):
            assert request_id not in self._assigned, "a choice is in one engine at a time"
            at_most = (params.max_tokens or 0) - self._requests.num_tokens_of(request_id)
            prompt_left = 0 if place else len(prompt) - cached  # the others find it in the cache
            rows = _rows(request)
            target.queued.add(request_id, prompt_left, rows * self._outputs_left(at_most, params.ignore_eos), rows)
            self._assigned[request_id] = _Assignment(target, request, hashes)
        assert not target.given_up, "no engine would ever compute these choices"
        target.recovery.submit(ids)

    def _unassign(self, request_id: str) -> _Assignment | None:
        """Forget where a choice is computed, but remember that the engine has its tokens in the cache."""
        place = self._assigned.pop(request_id, None)
        if place is not None:
            place.replica.queued.remove(request_id)
            if len(self) > 1 and place.replica.recovery.accepts:
                of_it = (one for one in place.request.choices if one.request.request_id == request_id)
                tokens = place.request.prompt_token_ids + next((one.token_ids for one in of_it), [])
                self.router.note(place.replica.index, self._hashes(tokens, place.request, place.hashes))
        return place

    def _hashes(self, token_ids: list[int], request: OpenRequest, known: Sequence[bytes] = ()) -> list[bytes]:
        """Hash the full blocks of a prompt; none if there is only one engine, and so nothing to compare."""
        if len(self) == 1:
            return []
        salt, root = request.engine_requests[0].cache_salt, self._requests.adapters.root_hash(request.adapter)
        return block_hashes(token_ids, salt, self._block_size, known, root=root)


def _rows(request: OpenRequest) -> int:
    """Count the rows that a choice takes; the beams of a search are one choice."""
    params = request.params
    return params.n if params.use_beam_search else 1


# --- what one engine is given, and its successor after a death --------------------------------------------------------


@dataclass(slots=True)
class Deaths:
    """The number of deaths of engines with a choice in them since it received its last token."""

    num_tokens: int  # received at the last death
    count: int


class Recovery:
    """Sends choices of OpenRequests to one engine after another.

    A new engine gets every running choice, with the tokens received so far as outputs, and continues with the next
    token. Because it computes the same tokens, no reader can tell afterwards that the old one died.

    A choice may itself be what ends the engine (it overflows a buffer, or exhausts the memory). A choice that was in
    the engine at two deaths, and received nothing in between, is therefore tried alone: the engine gets nothing else
    until the choice has its next token. If the engine dies again, that choice fails, and the others go on. The record
    of deaths is shared, so a choice that ends one engine, moves to another and ends that too has two deaths.

    Pinned prefixes are given to a new engine first, because whether a request fits beside them is decided when it
    arrives. They are computed last, because no request should wait for a prefix that it does not use.

    Args:
        send: sends to the current engine; frames for a dead engine are dropped.
        deaths: by engine request id, shared by the engines of a client.

    Attributes:
        leaving: whether the current engine is to be shut down when it has nothing to compute.
    """

    def __init__(
        self, requests: OpenRequests, send: Callable[[frames.ToEngine], None], deaths: dict[str, Deaths]
    ) -> None:
        self.leaving = False
        self._requests = requests
        self._send = send
        self._ready = False
        self._assigned: dict[str, None] = {}  # choices for this engine or its successor, oldest first
        self._sent: set[str] = set()  # engine request ids in the current engine
        self._deaths = deaths
        self._pins_to_compute: list[Pin] = []  # by the current engine, after all trials
        self._computing: dict[str, Pin] = {}  # pins that the current engine computes again
        self._trials: deque[str] = deque()  # choices to try alone; the first one is in the engine

    @property
    def accepts(self) -> bool:
        """True if new choices reach the engine at once: it is ready, stays, and tries none alone."""
        return self._ready and not self.leaving and not self._trials

    def submit(self, request_ids: Iterable[str]) -> None:
        """Send new choices to the engine; while it starts, or tries a choice alone, they wait."""
        request_ids = list(request_ids)
        self._assigned.update(dict.fromkeys(request_ids))
        if self.accepts:
            self._send_missing(request_ids)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Tell the engine that these choices are not wanted any more, or not from this engine."""
        request_ids = list(request_ids)
        for request_id in request_ids:
            self._assigned.pop(request_id, None)
        self._withdraw(request_ids)

    def _withdraw(self, request_ids: Iterable[str]) -> None:
        known = [request_id for request_id in request_ids if request_id in self._sent]
        if known:
            self._send(frames.Abort(known))
            self._sent.difference_update(known)
            self._end_trial(known)

    def waiting(self, *, with_trials: bool) -> set[str]:
        """List the choices that another engine may take over: those that this engine does not have, without those that
        are to be tried alone, unless it never comes back."""
        return {key for key in self._assigned if key not in self._sent and (with_trials or not self._to_try(key))}

    def _to_try(self, request_id: str) -> bool:
        noted = self._deaths.get(request_id)
        return noted is not None and noted.count >= DEATHS_BEFORE_TRIAL

    def pin(self, pin: Pin) -> None:
        """Tell the engine about a new pin, before the request that computes it is submitted."""
        if self._ready:
            self._send(frames.Pin(pin.name, pin.request))

    def compute(self, pin: Pin) -> None:
        """Let the engine compute a pin that another engine has computed."""
        if self._ready:  # otherwise it computes it once it is ready
            self._pins_to_compute.append(pin)
            if not self._trials:
                self._compute_pins()

    def unpin(self, pin: Pin) -> None:
        """Tell the engine that a pin is not wanted any more."""
        if pin in self._pins_to_compute:
            self._pins_to_compute.remove(pin)
        if self._ready:
            self._send(frames.Unpin(pin.name))

    @property
    def recovered(self) -> bool:
        """True once every choice that a death interrupted after its first token has received another token."""
        running = self._requests.running()
        begun = {key: deaths.num_tokens for key, deaths in self._deaths.items() if deaths.num_tokens and key in running}
        return self._ready and all(self._requests.num_tokens_of(key) > count for key, count in begun.items())

    def engine_ready(self) -> None:
        """Give a new engine all running choices, or the first choice that has to be tried alone."""
        assert not self._ready, "an engine is new only after the death of the one before"
        assert not self._sent, "what was sent to a dead engine is lost"
        self._ready = True
        for pin in self._requests.prefixes:
            self._send(frames.Pin(pin.name, pin.request))
        self._pins_to_compute = [
            pin for pin in self._requests.prefixes if pin.is_computed and pin.num_deaths < DEATHS_BEFORE_TRIAL
        ]
        self._trials = deque(key for key in self._deaths if key in self._assigned and self._to_try(key))
        self._continue()

    def engine_lost(self, last_heard: float = 0.0) -> str | None:
        """Note the death of an engine that was last heard at `last_heard`. Return the choice that it was computing
        alone, which is to blame."""
        to_blame = self._trials[0] if self._ready and self._trials else None
        self._requests.interrupted(self._sent, IntervalKind.RECOVERY, last_heard)
        running = self._requests.running()
        for request_id in [key for key in self._deaths if key not in running]:
            del self._deaths[request_id]
        for request_id in [key for key in self._assigned if key in self._sent and key in running]:
            noted, num_tokens = self._deaths.get(request_id), self._requests.num_tokens_of(request_id)
            again = noted is not None and noted.num_tokens == num_tokens
            self._deaths[request_id] = Deaths(num_tokens, noted.count + 1 if noted is not None and again else 1)
        for pin in self._computing.values():
            pin.num_deaths += 1
        self._computing.clear()
        self._pins_to_compute.clear()
        self._ready = self.leaving = False
        self._sent.clear()
        self._trials.clear()
        return to_blame

    def received(self, request_ids: Sequence[str]) -> None:
        """Note that the engine has sent tokens, or the end, of these choices."""
        assert self._ready or not request_ids, "an output of a dead engine would count as its successor's"
        if self._trials and self._trials[0] in request_ids:
            self._withdraw([self._trials[0]])  # the next one must be alone; this one comes back after the last trial
        ended = set(request_ids).difference(self._requests.running())
        self._sent.difference_update(ended)
        for request_id in ended:
            self._assigned.pop(request_id, None)
        for request_id in self._computing.keys() & set(request_ids):
            self._computing.pop(request_id).num_deaths = 0

    def _end_trial(self, request_ids: Iterable[str]) -> None:
        """Go on to the next trial if the present one is among these choices."""
        if self._trials and self._trials[0] in request_ids:
            self._deaths.pop(self._trials.popleft(), None)
            self._continue()

    def _continue(self) -> None:
        """Send the next choice to try alone or, if there is none, every choice that the engine does not have."""
        running = self._requests.running()
        while self._trials and self._trials[0] not in running:
            self._deaths.pop(self._trials.popleft(), None)
        self._send_missing([self._trials[0]] if self._trials else [key for key in self._assigned if key in running])
        if not self._trials:
            self._compute_pins()

    def _compute_pins(self) -> None:
        for pin in self._pins_to_compute:
            self._computing[pin.request.request_id] = pin
            self._send(frames.AddRequest(pin.request))
        self._pins_to_compute.clear()

    def _send_missing(self, request_ids: Iterable[str]) -> None:
        assert self._ready, "a frame for a dead engine would be dropped"
        for request_id in request_ids:
            if request_id not in self._sent:
                assert request_id in self._assigned, "another engine computes this choice"
                assert not self._trials or (request_id == self._trials[0] and not self._sent), "it is tried alone"
                self._sent.add(request_id)
                self._send(frames.AddRequest(self._requests.resumed(request_id)))
