"""MockExecutor: an Executor without a model, for `--load-format mock` and for proofs of what is above an executor.

It checks memory like a real one: token ids, and adapters, stand for keys and values, are written to the slots that the
block tables name, and every step reads a request's whole context back through its table. So a block that is shared,
freed or reused wrongly makes a step fail. The next token is a fixed function of the (visible) context.
"""

import hashlib
from array import array
from collections import deque
from dataclasses import dataclass, field
from random import Random
from zlib import crc32

from penstock import EngineError, SamplingParams
from penstock.interface.step import (
    BlockCopy,
    CacheGroup,
    NewRequest,
    RequestStepOutput,
    ScheduledRequest,
    SchedulerOutput,
    StepOutput,
    TokenLogprobs,
)

VOCAB_SIZE = 997
HIDDEN_SIZE = 8  # length of a pooled vector
STALE = -7  # what a slot holds before anybody writes it


def next_token(
    context: list[int],
    vocab_size: int = VOCAB_SIZE,
    *,
    window: int | None = None,
    params: SamplingParams | None = None,
    choice: int = 0,
    adapter: str = "",
) -> int:
    """Compute the token that follows a context; with params None it is greedy.

    It is a hash of the tokens in the window, the length of the context, the digest of the LoRA adapter if it has one
    and, if it is sampled, the seed and the choice.
    """
    seen = context if window is None else context[-window:]
    noise: tuple[object, ...] = () if params is None or params.greedy else (params.seed, choice)
    noise += (adapter,) if adapter else ()
    digest = hashlib.blake2b(repr((len(context), seen, *noise)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % vocab_size


def likely_tokens(
    context: list[int], count: int, vocab_size: int = VOCAB_SIZE, window: int | None = None
) -> TokenLogprobs:
    """Make candidates for a beam: tokens that depend on what the window sees, often with equal probabilities.

    The first token is arbitrary. The most likely ones follow, the lower id first on a tie.
    """
    random = Random(next_token(context, vocab_size, window=window))
    size = min(40, vocab_size)
    scores = {token: -random.randint(1, 64) / 8 for token in random.sample(range(size), max(size - 16, size // 2))}
    ids = sorted(scores, key=lambda token: (-scores[token], token))[:count]
    return TokenLogprobs([ids[0], *ids], [scores[token] for token in (ids[0], *ids)], 1)


@dataclass
class _Row:
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    choice: int
    adapter: str
    tables: list[list[int]]
    first_computed: int | None = None  # position of the first token computed


@dataclass
class MockExecutor:
    """Carries out steps on a cache of token ids.

    Attributes:
        depth: steps in flight that it allows. They are computed when they are collected.
        rows: the requests that it knows, by id.
    """

    groups: list[CacheGroup]
    vocab_size: int = VOCAB_SIZE
    num_end_tokens: int = 8  # most end tokens of a model; a search needs more candidates for each
    depth: int = 1
    rows: dict[str, _Row] = field(default_factory=dict)
    submitted: deque[SchedulerOutput] = field(default_factory=deque)
    adapters: dict[int, str] = field(default_factory=dict)  # digests by slot, for the steps from now on
    adapters_of: dict[int, dict[int, str]] = field(default_factory=dict)  # and for those submitted before, by step_id

    def __post_init__(self) -> None:
        self.slots = [array("i", [STALE]) * (group.num_blocks * group.block_size) for group in self.groups]

    def load_adapter(self, slot: int, digest: str) -> None:
        self.adapters[slot] = digest

    def submit(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        self.submitted.append(scheduler_output)
        self.adapters_of[scheduler_output.step_id] = dict(self.adapters)
        return scheduler_output

    def collect(self, handle: SchedulerOutput) -> StepOutput:
        """Compute the step.

        Raises:
            EngineError: the scheduler named a block that does not hold what it should.
        """
        _demand(self.submitted.popleft() is handle, f"step {handle.step_id} is not the oldest")
        for request_id in handle.removed_request_ids:
            self.rows.pop(request_id, None)
        for copy in handle.block_copies:
            self._copy(copy)
        adapters = self.adapters_of.pop(handle.step_id)
        for new in handle.new_requests:
            self._learn(new, adapters.get(new.adapter, ""))
        return StepOutput(handle.step_id, {item.request_id: self._run(item) for item in handle.scheduled})

    def shutdown(self) -> None:
        self.rows.clear()
        self.submitted.clear()

    def _copy(self, copy: BlockCopy) -> None:
        size, slots = self.groups[copy.group].block_size, self.slots[copy.group]
        source, target = copy.source * size, copy.target * size
        slots[target : target + size] = slots[source : source + size]

    def _learn(self, new: NewRequest, adapter: str) -> None:
        _demand(new.request_id not in self.rows, f"{new.request_id} is introduced twice")
        tables = [list(table) for table in new.block_tables]
        ids, count = list(new.token_ids), new.num_prompt_tokens
        self.rows[new.request_id] = _Row(ids, count, new.params, new.choice, adapter, tables)

    def _run(self, item: ScheduledRequest) -> RequestStepOutput:
        row = self.rows[item.request_id]
        if row.params.structured_outputs is not None:
            return RequestStepOutput([], error="structured_outputs: no model, so the form cannot be followed")
        start, stop = item.num_computed_tokens, item.num_computed_tokens + item.num_new_tokens
        _demand(item.num_new_tokens > 0, f"{item.request_id} is scheduled for no token")
        windows: list[int] = []
        for index, group in enumerate(self.groups):
            table = row.tables[index]
            table.extend(item.new_block_ids[index])
            group.release(table, item.num_released_blocks[index])
            self._check_context(index, group, row, start)
            self._write(index, group, row, [*row.token_ids, *item.draft_token_ids], start, stop)
            windows.append(group.sliding_window or 10**9)
        row.first_computed = start if row.first_computed is None else row.first_computed
        if row.params.pooling is not None:
            return self._pool(item, row, stop, min(windows))
        return self._sample(item, row, start, stop, min(windows))

    def _slot(self, group: CacheGroup, table: list[int], position: int) -> int:
        _demand(not group.ring or len(table) == 1, "a ring is one block")
        block_id = table[0] if group.ring else table[position // group.block_size]
        _demand(block_id >= 0, f"position {position} has no block")
        return block_id * group.block_size + position % group.block_size

    def _check_context(self, index: int, group: CacheGroup, row: _Row, start: int) -> None:
        """Check that every cached position that the first new token sees holds what was written for it."""
        first = group.first_seen(start)
        for position in (*range(min(group.num_sink_tokens, first)), *range(first, start)):
            found = self.slots[index][self._slot(group, row.tables[index], position)]
            _demand(found == _value(row.token_ids[position], row.adapter), f"position {position}: {found} in the cache")

    def _write(self, index: int, group: CacheGroup, row: _Row, token_ids: list[int], start: int, stop: int) -> None:
        for position in range(start, stop):
            self.slots[index][self._slot(group, row.tables[index], position)] = _value(token_ids[position], row.adapter)

    def _sample(self, item: ScheduledRequest, row: _Row, start: int, stop: int, window: int) -> RequestStepOutput:
        prompt_logprobs = None
        if row.params.prompt_logprobs is not None:
            targets = row.token_ids[start + 1 : min(stop + 1, row.num_prompt_tokens)]
            prompt_logprobs = [self._logprobs(token, row.params.prompt_logprobs) for token in targets]
        if item.num_samples == 0:
            return RequestStepOutput([], prompt_logprobs=prompt_logprobs)
        drafts, found = item.draft_token_ids, list[int]()
        _demand(item.num_samples == 1 + len(drafts), f"{item.num_samples} samples with {len(drafts)} drafts")
        _demand(stop == len(row.token_ids) + len(drafts), f"{item.request_id} is sampled before it has caught up")
        if row.params.use_beam_search:
            return self._score(row, window)
        for draft in [*drafts, None]:
            token = next_token(
                row.token_ids, self.vocab_size, window=window, params=row.params, choice=row.choice, adapter=row.adapter
            )
            row.token_ids.append(token)
            found.append(token)
            if token != draft:
                break
        asked = row.params.logprobs
        return RequestStepOutput(
            found, None if asked is None else [self._logprobs(token, asked) for token in found], prompt_logprobs
        )

    def _pool(self, item: ScheduledRequest, row: _Row, stop: int, window: int) -> RequestStepOutput:
        """Compute numbers that depend on every prompt token that the window sees at the end of the prompt."""
        _demand(item.num_samples == 0, f"{item.request_id} is pooled, and sampled")
        pooling = row.params.pooling
        if stop < len(row.token_ids) or pooling is None:
            return RequestStepOutput([])
        _demand(not pooling.needs_whole_prompt or row.first_computed == 0, f"{item.request_id} skips what it pools")
        ends = range(len(row.token_ids)) if pooling.pooling_type == "ALL" else range(1)
        vectors = ([next_token([*row.token_ids, end, i], window=window) / VOCAB_SIZE for i in range(HIDDEN_SIZE)]
                   for end in ends)  # fmt: skip
        return RequestStepOutput([], pooled=array("f", [number for vector in vectors for number in vector]).tobytes())

    def _score(self, row: _Row, window: int) -> RequestStepOutput:
        """Make candidates for a beam. Its search chooses the token, which comes with a new request."""
        count = max(row.params.num_candidates(self.num_end_tokens), row.params.logprobs or 0)
        scored = likely_tokens(row.token_ids, count, self.vocab_size, window)
        row.token_ids.append(scored.token_ids[0])
        return RequestStepOutput(scored.token_ids[:1], [scored])

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        others = [(token + 1 + i) % self.vocab_size for i in range(count)]
        return TokenLogprobs([token, *others], [-1.5, *(-0.5 * (i + 1) for i in range(count))], count + 1)


def _value(token_id: int, adapter: str) -> int:
    """Stand for the keys and values of a token, which depend on the adapter."""
    return crc32(f"{token_id} {adapter}".encode()) >> 1 if adapter else token_id


def _demand(condition: bool, otherwise: str) -> None:
    if not condition:
        raise EngineError(otherwise)
