"""Recorder: the flight recorder. It writes what one engine does into a Ring, whose memory outlives the engine.

It keeps the executor's state of every request, so that a segment can begin at any moment. The client reads the ring
after a death, and makes a bundle of it (records.py). A failure of the recorder switches it off; it affects no request.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ParamSpec, cast
from zlib import crc32

from penstock.client import records
from penstock.client.records import FRAME_BYTES, Ring
from penstock.engine.adapters import Adapters
from penstock.engine.engine import Engine
from penstock.engine.observer import EngineObserver
from penstock.interface.messages import EngineRequest, ModelInfo
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import (
    NewRequest,
    RequestStepOutput,
    SamplerState,
    SchedulerOutput,
    StepOutput,
    TokenLogprobs,
    num_rejected_drafts,
)

if TYPE_CHECKING:
    from penstock.config import EngineConfig

P = ParamSpec("P")
LOGGER = logging.getLogger("penstock")
MAX_ERROR = 2000  # characters of an error that are recorded
RESULT_BYTES = 32  # bytes reserved for the result of each request in a planned step
DRAFT_BYTES = 5  # bytes reserved for each token that a step may give beyond one per request
RETRY_STEPS = 256  # steps between two attempts while the open requests do not fit into a segment
# Options that change no bit of an answer. They depend on the machine; drafts are in the record of each step.
NOT_RECORDED = {
    "memory",
    "kv_cache_memory_bytes",
    "threads",
    "cpu_affinity",
    "sharding_config",
    "speculative_config",
    "lora_modules",
}


@dataclass(slots=True)
class _Known:
    """A request as the executor knows it: as it was introduced, and how it has changed since."""

    number: int
    new: NewRequest
    token_ids: list[int]
    tables: list[list[int]]
    released: list[int]
    sampler_state: SamplerState | None
    adapter: records.UsedAdapter | None
    num_computed_tokens: int = 0

    def introduced(self) -> records.Introduced:
        new, ids = self.new, records.pack_ids(self.token_ids)
        now = self.tables, self.num_computed_tokens, self.sampler_state, self.adapter
        # As msgpack, the same as the parameters without their defaults, which would take more than most prompts.
        params = cast(SamplingParams, new.params.changed())
        return records.Introduced(self.number, new.request_id, ids, new.num_prompt_tokens, params, new.choice, *now)


class Recorder(EngineObserver):
    """Records one engine. It leaves a gap if the ring is too small for the open requests.

    If several steps are in flight, each is recorded when it is the oldest. So every plan is directly followed by its
    results, and the steps can be computed again one after the other.

    Args:
        ring: only this recorder writes to it.
        adapters: those of the engine; None if it takes none.
    """

    def __init__(
        self, ring: Ring, engine: records.EngineDescription, epoch: int = 0, adapters: Adapters | None = None
    ) -> None:
        self.wants_checksums = True
        self._ring, self._engine, self._epoch = ring, engine, epoch
        self._adapters = adapters
        self._used: dict[int, records.UsedAdapter] = {}  # slot -> the adapter of the requests that use it
        self._known: dict[str, _Known] = {}
        self._in_flight: deque[tuple[SchedulerOutput, list[records.UsedAdapter | None]]] = deque()
        self._notes: list[records.Record] = []  # of what happened since the oldest of these was recorded
        self._num_introduced = 0
        self._continued = False  # whether the ring holds everything since this engine's start or its last gap
        self._steps_to_skip = 0
        self._is_off = False

    # --- what the engine does --------------------------------------------------------------------------------------

    def arrived(self, request: EngineRequest) -> None:
        if request.adapter is not None and self._adapters is not None:
            found = self._adapters.find(request.adapter)
            self._used[found.slot] = records.UsedAdapter(found.slot, found.info.path, found.info.sha256)
        num_prompt, num_outputs = len(request.prompt_token_ids), len(request.output_token_ids)
        self._note(records.Arrived(time.time(), request.request_id, num_prompt, num_outputs))

    def aborted(self, request_id: str) -> None:
        self._note(records.Aborted(time.time(), request_id))

    def engine_failed(self, error: str) -> None:
        """Record the exception that ends the engine process."""
        self._guarded(self._write, records.EngineFailed(time.time(), error[-MAX_ERROR:]))

    def submitting(self, plan: SchedulerOutput) -> None:
        adapters = [self._used.get(new.adapter) for new in plan.new_requests]  # later, a slot may have another one
        if not self._in_flight:
            self._guarded(self._write_plan, plan, adapters)
        self._in_flight.append((plan, adapters))

    def collected(self, plan: SchedulerOutput, output: StepOutput, seconds: float) -> None:
        self._guarded(self._write_output, plan, output, seconds)
        self._record_next(plan)

    def failed(self, plan: SchedulerOutput, error: Exception) -> None:
        if not self._in_flight or self._in_flight[0][0] is not plan:  # another observer raised before or after this one
            return
        reason = f"{type(error).__name__}: {error}"[:MAX_ERROR]
        self._guarded(self._write_result, records.StepFailed(plan.step_id, reason))
        self._record_next(plan)

    def _record_next(self, ended: SchedulerOutput) -> None:
        oldest, _ = self._in_flight.popleft()
        assert oldest is ended, "steps end in the order in which they were submitted"
        self._write_notes()
        if self._in_flight:
            self._guarded(self._write_plan, *self._in_flight[0])

    def _note(self, record: records.Record) -> None:
        """Record what happens between steps. Nothing comes between a plan and its results, which one segment holds."""
        self._notes.append(record)
        if not self._in_flight:
            self._write_notes()

    def _write_notes(self) -> None:
        notes, self._notes = self._notes, []
        for record in notes:
            self._guarded(self._write, record)

    def _guarded(self, write: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        if self._is_off:
            return
        try:
            write(*args, **kwargs)
        except Exception:
            LOGGER.exception("the flight recorder failed and is off from now on; no request is affected")
            self._is_off, self.wants_checksums = True, False

    # --- steps -----------------------------------------------------------------------------------------------------

    def _write_plan(self, plan: SchedulerOutput, adapters: list[records.UsedAdapter | None]) -> None:
        known = self._known
        introduced = list(map(self._introduce, plan.new_requests, adapters))
        added = {item.new.request_id: item for item in introduced}
        rows = [added.get(item.request_id) or known[item.request_id] for item in plan.scheduled]
        tables = {}
        for index, (row, item) in enumerate(zip(rows, plan.scheduled, strict=True)):
            if any(item.new_block_ids) or item.num_released_blocks != row.released:
                tables[index] = (item.new_block_ids, item.num_released_blocks)
        record = records.Planned(
            plan.step_id,
            time.time(),
            [row.introduced() for row in introduced],
            [known[request_id].number for request_id in plan.removed_request_ids if request_id in known],
            [row.number for row in rows],
            [item.num_computed_tokens for item in plan.scheduled],
            [item.num_new_tokens for item in plan.scheduled],
            [item.num_samples for item in plan.scheduled],
            tables,
            {index: list(item.draft_token_ids) for index, item in enumerate(plan.scheduled) if item.draft_token_ids},
            [(copy.group, copy.source, copy.target) for copy in plan.block_copies],
        )
        self._write(record, reserve=RESULT_BYTES * (len(rows) + 8) + DRAFT_BYTES * plan.num_tokens)
        for request_id in plan.removed_request_ids:
            known.pop(request_id, None)
        known.update(added)
        for index, (new_block_ids, released) in tables.items():
            self._update_tables(rows[index], new_block_ids, released)

    def _update_tables(self, row: _Known, new_block_ids: list[list[int]], released: list[int]) -> None:
        for group, table, new, count in zip(self._engine.groups, row.tables, new_block_ids, released, strict=True):
            table.extend(new)
            group.release(table, count)
        row.released = released

    def _introduce(self, new: NewRequest, adapter: records.UsedAdapter | None) -> _Known:
        self._num_introduced += 1
        tables = [list(table) for table in new.block_tables]
        ids, released = list(new.token_ids), [0] * len(tables)
        return _Known(self._num_introduced, new, ids, tables, released, new.sampler_state, adapter)

    def _write_output(self, plan: SchedulerOutput, output: StepOutput, duration_s: float) -> None:
        results = [output.results[item.request_id] for item in plan.scheduled]
        errors = {}
        for index, (item, result) in enumerate(zip(plan.scheduled, results, strict=True)):
            row = self._known[item.request_id]
            num_rejected = num_rejected_drafts(item, result)
            row.num_computed_tokens = item.num_computed_tokens + item.num_new_tokens - num_rejected
            row.token_ids += result.new_token_ids
            row.sampler_state = row.sampler_state if result.sampler_state is None else result.sampler_state
            if result.error is not None:
                errors[index] = result.error[:MAX_ERROR]
        record = records.Computed(
            plan.step_id,
            int(1e6 * duration_s),
            [item.new_token_ids for item in results],
            [item.checksum for item in results],
            score_checksums(results),
            errors,
        )
        self._write_result(record)

    # --- the ring --------------------------------------------------------------------------------------------------

    def _write(self, record: records.Record, reserve: int = 0) -> None:
        """Append a record, in a new segment if needed. `reserve` bytes must stay free for the record after it."""
        if self._steps_to_skip:
            self._steps_to_skip -= isinstance(record, records.Planned)
            return
        data = records.encode(record)
        if not (self._continued and self._ring.room >= len(data) + reserve):
            self._start_segment(len(data) + reserve)
        if self._steps_to_skip == 0:
            self._continued = self._ring.append(data)

    def _start_segment(self, reserve: int) -> None:
        """Begin a segment with all open requests. If they and `reserve` bytes do not fit, leave a gap."""
        requests = [row.introduced() for row in self._known.values()]
        begun = records.encode(records.Begun(time.time(), self._epoch, self._continued, self._engine, requests))
        if len(begun) + reserve + FRAME_BYTES > self._ring.longest_record:
            self._continued, self._steps_to_skip = False, RETRY_STEPS
        else:
            self._ring.start_segment()
            self._ring.append(begun)
            assert self._ring.room >= reserve, "the record for which this segment begins fits into it"

    def _write_result(self, record: records.Record) -> None:
        """Append the results of a step to the segment of its plan. If they do not fit, leave a gap."""
        if self._continued:
            self._continued = self._ring.append(records.encode(record))


def score_checksums(results: list[RequestStepOutput]) -> dict[int, int]:
    """Compute the checksum of the log-probabilities or the pooled vector of each result that has one, by index."""
    found = {}
    for index, result in enumerate(results):
        if result.logprobs or result.prompt_logprobs:
            found[index] = _scores_checksum([*(result.logprobs or ()), *(result.prompt_logprobs or ())])
        if result.pooled is not None:
            found[index] = crc32(result.pooled)
    return found


def _scores_checksum(entries: list[TokenLogprobs]) -> int:
    values = ((entry.token_ids, [value.hex() for value in entry.logprobs], entry.rank) for entry in entries)
    return crc32(repr(list(values)).encode())


def describe(engine: Engine, config: "EngineConfig", info: ModelInfo) -> records.EngineDescription:
    """Describe the engine of a resolved config so that a replay can build it again."""
    from penstock.config import PARTS  # here, so that an engine process listens before it loads the config

    options: dict[str, Any] = {"model": config.model, "imports": config.imports}
    for part, part_class in PARTS.items():
        names = (item.name for item in fields(part_class) if item.name not in NOT_RECORDED)
        chosen = {name: getattr(getattr(config, part), name) for name in names}
        options |= {name: value for name, value in chosen.items() if value is not None}
    return records.EngineDescription(
        system_fingerprint=info.system_fingerprint,
        options=options,
        groups=engine.kv_cache.groups,
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.scheduler.max_num_seqs,
        max_num_batched_tokens=engine.scheduler.max_num_batched_tokens,
    )
