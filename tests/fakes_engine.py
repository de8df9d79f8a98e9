"""Engines on the ScriptedExecutor, for tests of the engine and of everything above it."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from penstock.engine.beam_search import BeamSearch
from penstock.engine.engine import Engine
from penstock.engine.kv_cache_manager import KVCacheManager
from penstock.engine.policies import Scheduling
from penstock.engine.speculation import Speculation
from penstock.interface.messages import EngineOutput, EngineRequest, Hypothesis, ModelInfo
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import BlockStore, CacheGroup, Executor, RequestStepOutput, SchedulerOutput, StepOutput
from penstock_lab.mock import VOCAB_SIZE as VOCAB
from penstock_lab.mock import MockExecutor, likely_tokens, next_token


@dataclass
class ScriptedExecutor(MockExecutor):
    """A mock that remembers what it was given, fails when told to, and has a store of blocks.

    Attributes:
        steps: every SchedulerOutput it was given.
        fail: called with each step; may raise (a step that fails as a whole) or return request ids to fail alone.
        stored: blocks that steps have saved; a test's BlockStore decides which of them it holds.
        max_rows: the maximum number of requests that it knew at once.
    """

    steps: list[SchedulerOutput] = field(default_factory=list)
    fail: Callable[[SchedulerOutput], set[str]] = lambda step: set()
    stored: dict[tuple[int, bytes], "array[int]"] = field(default_factory=dict)  # by group and hash
    max_rows: int = 0

    def submit(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        self.steps.append(scheduler_output)
        return super().submit(scheduler_output)

    def collect(self, handle: SchedulerOutput) -> StepOutput:
        for request_id in handle.removed_request_ids:
            self.rows.pop(request_id, None)
        try:
            failed = self.fail(handle)
        except BaseException:
            assert self.submitted.popleft() is handle
            raise
        self._transfer(handle)
        output = super().collect(handle)
        self.max_rows = max(self.max_rows, len(self.rows))
        for request_id in failed & output.results.keys():
            output.results[request_id] = RequestStepOutput([], error="scripted")
        return output

    def _transfer(self, step: SchedulerOutput) -> None:
        for item in (*step.block_saves, *step.block_loads):
            size, slots = self.groups[item.group].block_size, self.slots[item.group]
            place, key = slice(item.block_id * size, (item.block_id + 1) * size), (item.group, item.block_hash)
            if item in step.block_loads:
                slots[place] = self.stored[key]
            else:
                self.stored[key] = slots[place]


def expected_search(
    prompt: list[int], params: SamplingParams, end_ids: tuple[int, ...] = (), window: int | None = None
) -> list[Hypothesis]:
    """What a beam search alone finds."""
    search = BeamSearch(params, params.max_tokens, frozenset() if params.ignore_eos else frozenset(end_ids))
    count = max(params.num_candidates(len(end_ids)), params.logprobs or 0)
    while not search.is_done:
        search.advance([likely_tokens([*prompt, *path.token_ids], count, window=window) for path in search.paths])
    return search.hypotheses


def expected_outputs(prompt: list[int], count: int, window: int | None = None) -> list[int]:
    """What a request alone generates."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, window=window))
    return tokens[len(prompt) :]


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    windows: tuple[int | None, ...] = (None,),
    sinks: int = 0,
    chunked: bool = False,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 512,
    eos_token_ids: tuple[int, ...] = (),
    enable_prefix_caching: bool = True,
    user_rows: bool = False,
    speculation: Speculation | None = None,
    depth: int = 1,
    store: Callable[[ScriptedExecutor], BlockStore] | None = None,
    wrap: Callable[[ScriptedExecutor], Executor] = lambda executor: executor,
    **scheduling: Any,
) -> Engine:
    """An engine on a ScriptedExecutor, a cache group a window. User rows: a block a request, a ring for a window."""
    groups = [
        CacheGroup(
            (i,),
            window,
            num_blocks,
            block_size,
            num_sink_tokens=0 if window is None or user_rows else sinks,
            chunked=chunked,
        )
        for i, window in enumerate(windows)
    ]
    if user_rows:
        enable_prefix_caching = False
        groups = [_row_group(group, max_model_len) for group in groups]
    executor = ScriptedExecutor(groups, depth=depth)
    made = Engine(
        wrap(executor),
        KVCacheManager(
            groups, enable_prefix_caching=enable_prefix_caching, store=None if store is None else store(executor)
        ),
        scheduling=Scheduling(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **scheduling),
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        eos_token_ids=eos_token_ids,
    )
    made.speculate(speculation)
    return made


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
