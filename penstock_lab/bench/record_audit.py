"""Audit: checks that recorded steps may be computed, and that blocks were assigned correctly. Needs no model or text.

A record that could make a kernel read or write beyond its memory is refused. A possible mistake of the scheduler is a
finding: a block that is written while another request holds it, or a cached block that holds another prefix.
"""

from dataclasses import dataclass, field

from penstock.client.records import Computed, EngineDescription
from penstock.engine.block_pool import NO_PARENT, hash_block
from penstock.interface.step import NO_BLOCK, CacheGroup, NewRequest, ScheduledRequest, SchedulerOutput
from penstock_lab.bench.record_history import EngineStart, OpenRequest, RecordedStep, malformed

MAX_FINDINGS = 20
MAX_CONTEXT = 2**24
BLOCK_UNIT = 16

Block = tuple[int, int]  # cache group, block id


@dataclass(slots=True)
class Row:
    """One request as the executor knows it.

    Attributes:
        hashes: content hashes of its leading full blocks, as far as they were needed.
        num_noted: number of leading hashes that are recorded as the content of their blocks.
        released: per cache group, the number of leading table entries that the window has passed.
    """

    request: NewRequest
    token_ids: list[int]
    tables: list[list[int]]
    released: list[int]
    hashes: list[bytes] = field(default_factory=list)
    num_noted: int = 0


class Audit:
    """Follows the steps of a bundle.

    Attributes:
        findings: the first MAX_FINDINGS mistakes found.
        num_blocks: per cache group, 1 + the largest block id so far.
    """

    def __init__(self, *, has_text: bool) -> None:
        self.findings: list[str] = []
        self.num_blocks: list[int] = []
        self._has_text = has_text
        self._engine: EngineDescription | None = None
        self._rows: dict[str, Row] = {}
        self._users: dict[Block, set[str]] = {}
        self._content: dict[Block, bytes] = {}  # full block -> hash of the prefix that ends with it

    def start(self, start: EngineStart) -> None:
        """Process the start of an engine with its open requests."""
        _check_engine(start.engine)
        self._engine = start.engine
        self.num_blocks = self.num_blocks or [0] * len(start.engine.groups)
        if len(self.num_blocks) != len(start.engine.groups):
            raise malformed("its engines have different cache groups")
        for state in (self._rows, self._users, self._content):
            state.clear()
        for item in start.requests:
            self._introduce(item.request)
        for item in start.requests:
            self._check_open(item)

    def step(self, step: RecordedStep) -> None:
        """Process a step with its results."""
        plan = step.plan
        for request_id in plan.removed_request_ids:
            self._remove(request_id)
        for request in plan.new_requests:
            self._introduce(request)
        self._check_limits(plan)
        self._check_copies(plan)
        for item in plan.scheduled:
            self._update_tables(item)
        for item in plan.scheduled:
            self._check_cache(item, plan)
        if step.results is not None:
            self._commit(plan, step.results)

    # --- requests --------------------------------------------------------------------------------------------------

    def _introduce(self, request: NewRequest) -> None:
        engine = self._current()
        if request.request_id in self._rows:
            raise malformed(f"request {request.request_id!r} is introduced twice")
        ids = request.token_ids
        if not 0 < request.num_prompt_tokens <= len(ids) <= engine.max_model_len:
            raise malformed(f"request {request.request_id!r} has {len(ids)} tokens")
        self._check_ids(ids)
        if not 0 <= request.choice < 2**31 or (request.params.seed is None and not request.params.greedy):
            raise malformed(f"request {request.request_id!r} has no seed, or the choice {request.choice}")
        row = Row(request, list(ids), [[] for _ in engine.groups], [0] * len(engine.groups))
        self._rows[request.request_id] = row
        for index, table in enumerate(request.block_tables):
            self._extend(row, index, table)

    def _remove(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        for index, table in enumerate(row.tables if row is not None else ()):
            for block_id in table:
                self._users.get((index, block_id), set()).discard(request_id)

    def _check_open(self, item: OpenRequest) -> None:
        """Check a request in the middle of its computation, and record the content of its blocks."""
        row = self._rows[item.request.request_id]
        if not 0 <= item.num_computed_tokens < len(row.token_ids) + 1:
            raise malformed(f"request {item.request.request_id!r} has {item.num_computed_tokens} computed tokens")
        self._check_blocks(row, item.num_computed_tokens, item.num_computed_tokens)
        self._note_content(row, item.num_computed_tokens)

    def _commit(self, plan: SchedulerOutput, results: Computed) -> None:
        for index, item in enumerate(plan.scheduled):
            row, ids = self._rows[item.request_id], results.token_ids[index]
            self._check_ids(ids)
            may_be_forced = row.request.params.structured_outputs is not None or not self._has_text
            if len(ids) > 1 + len(item.draft_token_ids) and not (may_be_forced and item.num_samples):
                raise malformed(f"step {plan.step_id} gave request {item.request_id!r} more tokens than it sampled")
            if index not in results.errors:
                rejected = max(0, len(item.draft_token_ids) + 1 - len(ids)) if item.draft_token_ids else 0
                row.token_ids += ids
                self._note_content(row, item.num_computed_tokens + item.num_new_tokens - rejected)

    # --- limits ----------------------------------------------------------------------------------------------------

    def _check_ids(self, ids: list[int]) -> None:
        limit = self._current().vocab_size if self._has_text else 2**32
        if ids and not (min(ids) >= 0 and max(ids) < limit):
            raise malformed(f"a token id is not in the vocabulary of {limit}")

    def _check_limits(self, plan: SchedulerOutput) -> None:
        engine = self._current()
        names = [item.request_id for item in plan.scheduled]
        if len(set(names)) < len(names) or not set(names) <= self._rows.keys():
            raise malformed(f"step {plan.step_id} schedules a request twice, or one that is unknown")
        if len(self._rows) > engine.max_num_seqs or plan.num_tokens > engine.max_num_batched_tokens:
            raise malformed(f"step {plan.step_id} has {len(self._rows)} requests and {plan.num_tokens} tokens")
        for item in plan.scheduled:
            self._check_ids(list(item.draft_token_ids))
            num_drafts = len(item.draft_token_ids)
            end = item.num_computed_tokens + item.num_new_tokens
            length = len(self._rows[item.request_id].token_ids) + num_drafts
            caught_up = (
                item.num_samples == (1 + num_drafts if end == length else 0) or item.num_samples == num_drafts == 0
            )
            if length > engine.max_model_len or item.num_new_tokens <= num_drafts:
                raise malformed(f"step {plan.step_id} has {num_drafts} drafts of request {item.request_id!r}")
            if item.num_computed_tokens < 0 or item.num_new_tokens < 1 or end > length or not caught_up:
                raise malformed(f"step {plan.step_id} computes request {item.request_id!r} beyond its last token")

    def _check_copies(self, plan: SchedulerOutput) -> None:
        groups = self._current().groups
        for copy in plan.block_copies:
            blocks = range(groups[copy.group].num_blocks) if 0 <= copy.group < len(groups) else ()
            if copy.source not in blocks or copy.target not in blocks:
                raise malformed(f"step {plan.step_id} copies block {copy.source} of cache group {copy.group}")
            self.num_blocks[copy.group] = max(self.num_blocks[copy.group], copy.source + 1, copy.target + 1)
            self._content.pop((copy.group, copy.target), None)

    # --- blocks ----------------------------------------------------------------------------------------------------

    def _extend(self, row: Row, index: int, block_ids: list[int]) -> None:
        """Append blocks to a table. Only blocks before the window may be -1, and only when the table is new."""
        engine, table = self._current(), row.tables[index]
        group = engine.groups[index]
        if not table:
            row.released[index] = max((i + 1 for i, item in enumerate(block_ids) if item == NO_BLOCK), default=0)
        longest = 1 if group.ring else -(-engine.max_model_len // group.block_size)
        if len(table) + len(block_ids) > longest:
            raise malformed(f"request {row.request.request_id!r} has more blocks than fit its longest length")
        for entry, block_id in enumerate(block_ids, start=len(table)):
            if block_id == NO_BLOCK and group.hidden_blocks(0).start <= entry < row.released[index]:
                continue
            if not 0 <= block_id < group.num_blocks:
                raise malformed(f"block {block_id} is not among the {group.num_blocks} of cache group {index}")
            self._users.setdefault((index, block_id), set()).add(row.request.request_id)
            self.num_blocks[index] = max(self.num_blocks[index], block_id + 1)
        table.extend(block_ids)

    def _update_tables(self, item: ScheduledRequest) -> None:
        row, groups = self._rows[item.request_id], self._current().groups
        for index, table in enumerate(row.tables):
            self._extend(row, index, item.new_block_ids[index])
            released = min(item.num_released_blocks[index], len(table))
            for entry in range(max(row.released[index], groups[index].hidden_blocks(0).start), released):
                self._users.get((index, table[entry]), set()).discard(item.request_id)
                table[entry] = NO_BLOCK
            row.released[index] = max(row.released[index], released)

    def _check_cache(self, item: ScheduledRequest, plan: SchedulerOutput) -> None:
        """Check the blocks that the step reads and writes for one request."""
        row, start = self._rows[item.request_id], item.num_computed_tokens
        end = start + item.num_new_tokens
        self._check_blocks(row, start, end)
        self._check_prefix(row, start, plan)
        for index, group in enumerate(self._current().groups):
            first, last = (0, 0) if group.ring else (start // group.block_size, (end - 1) // group.block_size)
            for block_id in row.tables[index][first : last + 1]:
                others = self._users[index, block_id] - {item.request_id}
                if others:
                    who = f"request {item.request_id} writes block {block_id} of cache group {index}"
                    self._find(f"step {plan.step_id}: {who}, which {', '.join(sorted(others))} holds too")
                self._content.pop((index, block_id), None)

    def _check_blocks(self, row: Row, start: int, end: int) -> None:
        """Refuse a request that lacks a block for a position to which tokens start .. end - 1 attend."""
        for index, group in enumerate(self._current().groups):
            first, stop = needed_blocks(group, start, end)
            if len(row.tables[index]) < stop or row.released[index] > first:
                raise malformed(f"request {row.request.request_id!r} lacks a block of cache group {index}")

    def _check_prefix(self, row: Row, start: int, plan: SchedulerOutput) -> None:
        """Check that the full blocks before the step hold the request's prefix, as far as their content is known."""
        num_checked = len(row.hashes)  # blocks checked in earlier steps; below, the first group adds hashes
        for index, group in enumerate(self._current().groups):
            if group.ring:
                continue
            hidden = group.hidden_blocks(start)
            for entry in range(num_checked, start // group.block_size):
                if entry in hidden:
                    continue
                found = self._content.get((index, row.tables[index][entry]))
                if found is not None and found != _hashes(row, entry + 1, group.block_size)[entry]:
                    block = f"block {row.tables[index][entry]} of cache group {index}"
                    self._find(f"step {plan.step_id}: {block} holds another prefix than {row.request.request_id} has")

    def _note_content(self, row: Row, num_computed: int) -> None:
        """Record the content of the blocks that the computed tokens have filled."""
        for index, group in enumerate(self._current().groups):
            if group.ring:
                continue
            hashes = _hashes(row, num_computed // group.block_size, group.block_size)
            for entry in range(row.num_noted, len(hashes)):
                if row.tables[index][entry] != NO_BLOCK:
                    self._content[index, row.tables[index][entry]] = hashes[entry]
        row.num_noted = len(row.hashes)

    def _find(self, what: str) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(what)

    def _current(self) -> EngineDescription:
        if self._engine is None:
            raise malformed("a step comes before any engine")
        return self._engine


def needed_blocks(group: CacheGroup, start: int, end: int) -> tuple[int, int]:
    """Find the range (first, stop) of block table entries that computing tokens start .. end - 1 touches, besides those
    of sink tokens."""
    if group.ring:
        return 0, min(1, end)
    return group.hidden_blocks(start).stop, -(-end // group.block_size)


def _hashes(row: Row, count: int, block_size: int) -> list[bytes]:
    """Hash the content of the row's first `count` blocks. All groups except rings have the same block size."""
    for index in range(len(row.hashes), count):
        parent = row.hashes[-1] if row.hashes else NO_PARENT
        row.hashes.append(hash_block(parent, row.token_ids[index * block_size : (index + 1) * block_size]))
    return row.hashes if len(row.hashes) == count else row.hashes[:count]


def _check_engine(engine: EngineDescription) -> None:
    limits = (engine.vocab_size, engine.max_model_len, engine.max_num_seqs, engine.max_num_batched_tokens)
    if not engine.groups or not all(0 < value <= MAX_CONTEXT for value in limits):
        raise malformed("its engine has no cache, or sizes out of range")
    sizes = {group.block_size for group in engine.groups if not group.ring}
    for group in engine.groups:
        window = group.sliding_window
        if not 0 < group.block_size <= MAX_CONTEXT + BLOCK_UNIT or group.block_size % BLOCK_UNIT:
            raise malformed(f"a block of {group.block_size} tokens")
        if (window is not None and window < 1) or (group.ring and not window) or len(sizes) > 1:
            raise malformed("its cache groups contradict each other")
