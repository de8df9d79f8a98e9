"""ScriptedExecutor: an Executor without a model, for tests of the engine and of everything above it.

It is honest about memory: keys and values are stood for by token ids, written to the slots that the block tables
name, and every step reads a request's whole context back through its table. A block shared, freed or reused wrongly
therefore shows as a wrong token. The next token is a fixed function of the (visible) context.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from penstock.engine.engine import Engine
from penstock.engine.policies import Scheduling
from penstock.interface.messages import EngineOutput, EngineRequest, ModelInfo
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import (
    CacheGroup,
    NewRequest,
    RequestStepOutput,
    ScheduledRequest,
    SchedulerOutput,
    StepOutput,
    TokenLogprobs,
)

VOCAB = 997
STALE = -7  # what a slot holds before anybody writes it


def next_token(context: list[int], window: int | None = None) -> int:
    """The token that follows a context: a hash of what the window can see, and of how long the context is."""
    seen = context if window is None else context[-window:]
    digest = hashlib.blake2b(repr((len(context), seen)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % VOCAB


def expected_outputs(prompt: list[int], count: int, window: int | None = None) -> list[int]:
    """What a request alone generates."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, window))
    return tokens[len(prompt) :]


@dataclass
class _Row:
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    tables: list[list[int]]


@dataclass
class ScriptedExecutor:
    """Carries steps out on a cache of token ids.

    Attributes:
        steps: every SchedulerOutput it was given.
        fail: called with each step; may raise (a step that fails as a whole) or return request ids to fail alone.
    """

    groups: list[CacheGroup]
    steps: list[SchedulerOutput] = field(default_factory=list)
    fail: Callable[[SchedulerOutput], set[str]] = lambda step: set()
    rows: dict[str, _Row] = field(default_factory=dict)
    max_rows: int = 0

    def __post_init__(self) -> None:
        self.slots = [[STALE] * (group.num_blocks * group.block_size) for group in self.groups]

    def submit(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        self.steps.append(scheduler_output)
        for request_id in scheduler_output.removed_request_ids:
            self.rows.pop(request_id, None)
        return scheduler_output

    def collect(self, handle: SchedulerOutput) -> StepOutput:
        failed = self.fail(handle)
        for new in handle.new_requests:
            self._learn(new)
        self.max_rows = max(self.max_rows, len(self.rows))
        reads = {item.request_id: self._run(item) for item in handle.scheduled}  # all read before any sampling
        error = RequestStepOutput([], error="scripted")
        return StepOutput(handle.step_id, {key: error if key in failed else value for key, value in reads.items()})

    def shutdown(self) -> None:
        self.rows.clear()

    def _learn(self, new: NewRequest) -> None:
        assert new.request_id not in self.rows, "introduced twice"
        tables = [list(table) for table in new.block_tables]
        self.rows[new.request_id] = _Row(list(new.token_ids), new.num_prompt_tokens, new.params, tables)

    def _run(self, item: ScheduledRequest) -> RequestStepOutput:
        row = self.rows[item.request_id]
        start, stop = item.num_computed_tokens, item.num_computed_tokens + item.num_new_tokens
        assert item.num_new_tokens > 0
        windows: list[int] = []
        for index, group in enumerate(self.groups):
            table = row.tables[index]
            table.extend(item.new_block_ids[index])
            table[: item.num_released_blocks[index]] = [-1] * item.num_released_blocks[index]
            self._check_context(index, group, row, start)
            self._write(index, group, row, start, stop)
            windows.append(group.sliding_window or 10**9)
        return self._sample(item, row, start, stop, min(windows))

    def _slot(self, group: CacheGroup, table: list[int], position: int) -> int:
        assert not group.ring or len(table) == 1, "a ring is one block"
        block_id = table[0] if group.ring else table[position // group.block_size]
        assert block_id >= 0, f"position {position} has no block"
        return block_id * group.block_size + position % group.block_size

    def _check_context(self, index: int, group: CacheGroup, row: _Row, start: int) -> None:
        """Every cached position that the first new token can see must hold what was written for it."""
        first = 0 if group.sliding_window is None else max(0, start - group.sliding_window + 1)
        for position in range(first, start):
            found = self.slots[index][self._slot(group, row.tables[index], position)]
            assert found == row.token_ids[position], f"position {position}: {found} in the cache"

    def _write(self, index: int, group: CacheGroup, row: _Row, start: int, stop: int) -> None:
        for position in range(start, stop):
            self.slots[index][self._slot(group, row.tables[index], position)] = row.token_ids[position]

    def _sample(self, item: ScheduledRequest, row: _Row, start: int, stop: int, window: int) -> RequestStepOutput:
        prompt_logprobs = None
        if row.params.prompt_logprobs is not None:
            targets = row.token_ids[start + 1 : min(stop + 1, row.num_prompt_tokens)]
            prompt_logprobs = [TokenLogprobs([token], [-1.0], 1) for token in targets]
        if item.num_samples == 0:
            return RequestStepOutput([], prompt_logprobs=prompt_logprobs)
        token = next_token(row.token_ids, window)
        row.token_ids.append(token)
        logprobs = [TokenLogprobs([token], [-0.5], 1)] if row.params.logprobs is not None else None
        return RequestStepOutput([token], logprobs, prompt_logprobs)


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    windows: tuple[int | None, ...] = (None,),
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 512,
    eos_token_ids: tuple[int, ...] = (),
    enable_prefix_caching: bool = True,
    user_rows: bool = False,
    **scheduling: Any,
) -> Engine:
    """An engine on a ScriptedExecutor, a cache group a window. User rows: a block a request, a ring for a window."""
    groups = [CacheGroup((i,), window, num_blocks, block_size) for i, window in enumerate(windows)]
    if user_rows:
        enable_prefix_caching = False
        groups = [_row_group(group, max_model_len) for group in groups]
    return Engine(
        ScriptedExecutor(groups),
        groups,
        scheduling=Scheduling(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **scheduling),
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        eos_token_ids=eos_token_ids,
        enable_prefix_caching=enable_prefix_caching,
    )


def _row_group(group: CacheGroup, max_model_len: int) -> CacheGroup:
    size = -(-(group.sliding_window or max_model_len) // 16) * 16
    return replace(group, block_size=size, ring=group.sliding_window is not None)


def request(request_id: str, prompt: list[int], max_tokens: int = 8, **options: Any) -> EngineRequest:
    """A greedy request; options that are fields of EngineRequest go there, the rest to SamplingParams."""
    names = {item.name for item in fields(EngineRequest)} & options.keys()
    own: dict[str, Any] = {name: options.pop(name) for name in names}
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0, **options)
    return EngineRequest(request_id, prompt, params, **own)


def run(engine: Engine, max_steps: int = 10_000) -> dict[str, list[EngineOutput]]:
    """Step until there is nothing to do; the outputs of each request in order."""
    outputs: dict[str, list[EngineOutput]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    raise AssertionError(f"not done after {max_steps} steps")


def token_ids(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def model_info(max_model_len: int, vocab_size: int) -> ModelInfo:
    """What a client needs to know of a model, for tests without one."""
    return ModelInfo("fake", max_model_len, vocab_size, (), "float32", "fp-fake")
