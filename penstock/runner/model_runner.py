"""ModelRunner: computes steps on one device, from a SchedulerOutput to a StepOutput. LocalExecutor: runs it for the
engine. RecordedModel: a model whose pass over few tokens is recorded once and then run without its Python.

    begin     scheduler_output -> InputBatch.update, pack -> model(input_ids, ctx) -> hidden [T, hidden]
                -> logits at the M sampled positions -> Sampler
                -> logits at the P prompt positions, a slice at a time -> their scores
    finish    -> ids, log-probabilities, vectors

`begin` reads no result of the device. `finish` waits for it, and does what the host has to do with the results. So a
device can compute between the halves while the host does something else.

If the logits of a row are not finite, or allow no token, only that row's request fails; the others continue. The runner
decides nothing about scheduling or blocks, and handles no text.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from penstock.config import EngineConfig
from penstock.errors import EngineError, ExecutorLostError, one_line
from penstock.interface.step import (
    NO_ADAPTER,
    BlockCopy,
    CacheGroup,
    RequestStepOutput,
    SchedulerOutput,
    StepOutput,
    TokenLogprobs,
)
from penstock.kernels.metadata import AttentionMetadata, CacheSpec, Heads, KVCache, KVScales
from penstock.kernels.ops import Ops, Program, RecordingOps
from penstock.kernels.tensors import FLOAT32, LOGITS_ROWS, Array, Tensor, as_array, contiguous, dtype_of, is_torch
from penstock.layers.lora import Adapter
from penstock.layers.module import CausalLM, ForwardContext
from penstock.layers.weights import adapted_products
from penstock.runner.block_store import TieredBlockStore
from penstock.runner.input_batch import InputBatch, PackedStep, Positions, PromptPiece
from penstock.runner.pooler import Head, Pooler
from penstock.runner.sampler import NOT_FINITE, Draws, Sampled, Sampler, token_logprobs
from penstock.runner.structured import Forms, StructuredRows
from penstock.spec.model_config import ModelConfig

HIDDEN_NOT_FINITE = "the model's hidden states are not finite (NaN or infinity)"
WINDOW = 2048  # columns of a checksum; an even number, because two float32 are added as one 64-bit word


@dataclass(slots=True, eq=False)
class Pending:
    """A step that was begun and not finished.

    Attributes:
        step: None for a step without tokens.
        hidden: the hidden states [T, hidden], if a pooling request needs them.
        draws: None if nothing is sampled here.
        scores: the prompt positions to score, and the scores of each slice of them.
    """

    plan: SchedulerOutput
    step: PackedStep | None = None
    hidden: Tensor | None = None
    draws: Draws | None = None
    scores: list[tuple[PromptPiece, list[Callable[[], list[Array]]]]] = field(default_factory=list)


class ModelRunner:
    """Computes steps one after the other, with a model and its KV caches.

    Attributes:
        model: the model, recorded where the backend can.
        ops, groups: the backend and the cache groups.
        vocab_size: the number of tokens, without the LM head's padding.
        computing: returns the context in which the model must be called.
        batch: the state of its requests.
        kv_caches: one per decoder layer.
        cache_bytes: the bytes of all its KV caches.
    """

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        groups: Sequence[CacheGroup],
        config: EngineConfig,
        model_config: ModelConfig,
        kv_scales: Sequence[KVScales] | None = None,
        forms: Forms | None = None,
        own_layers: range | None = None,
    ) -> None:
        """Allocate the caches of a loaded model.

        Args:
            own_layers: the decoder layers that the model computes here; None: all.
            kv_scales: per-channel scales of an int8 cache, one per layer.
            forms: compiles forms of answers; without it, requests with a form fail.

        Sets the number of torch's threads, which is a setting of the process: if a process has two engines, the later
        one decides for both. Native kernels have their own threads, and torch's would only compete for the cores.

        Raises:
            EngineError: the config is not resolved, or the groups or scales do not fit the layers.
        """
        max_model_len, threads = config.scheduler.max_model_len, config.numerics.threads
        if max_model_len is None or threads is None:
            raise EngineError("the runner needs a resolved config")
        self.computing = _prepare_torch(ops, 1 if config.numerics.kernels == "cpu" else threads)
        self.ops = ops
        self._recording = ops if isinstance(ops, RecordingOps) else None
        self._prepared = 0, 0  # of what is counted as prepared: what earlier steps have reported
        self.model = model
        self._adapted = adapted_products(model)
        self._slots = next((product.spec.slots for product in self._adapted.values()), None)
        if self.may_record(config, model_config):
            self.model = RecordedModel(model, cast(RecordingOps, ops))
        self.vocab_size = model_config.vocab_size
        self.groups = tuple(groups)
        self._heads = [_heads(model_config.at(group.layers[0])) for group in groups]
        self._layer_group = layer_groups(groups, model_config.num_hidden_layers)
        self._own_layers = own_layers or range(model_config.num_hidden_layers)
        self.kv_caches = allocate_kv_caches(ops, groups, config, model_config, kv_scales, self._own_layers)
        self.cache_bytes = sum(self.kv_caches[layer].num_bytes for layer in self._own_layers)
        owned = {index: set(group.layers) & set(self._own_layers) for index, group in enumerate(groups)}
        self._first_layers = {index: min(found) for index, found in owned.items() if found}
        labels = len(model_config.labels), model_config.label_activation
        head = Head(model.compute_logits, *labels, lambda rows: ops.round(ops.tensor(rows.astype(FLOAT32))))
        self._pooler = Pooler(head)
        self._packed: PackedStep | None = None  # the last step
        self._unplanned: dict[int, AttentionMetadata] = {}  # metadata of the last step, by cache group
        has_types = model_config.num_token_types > 0
        limits = config.scheduler.max_num_seqs, max_model_len
        self.batch = InputBatch(groups, *limits, model_config.eos_token_ids, has_token_types=has_types)
        self._structured = StructuredRows(forms, self.batch)
        self._sampler = Sampler(ops, self.batch, self._structured)
        self.store: TieredBlockStore | None = None  # for blocks beyond the cache

    def may_record(self, config: EngineConfig, model_config: ModelConfig) -> bool:
        """Tell whether passes are recorded as programs: the backend can, and all passes over the same number of tokens
        make the same calls on the same memory."""
        return isinstance(self.ops, RecordingOps)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Put a LoRA adapter into a slot, for the steps from now on."""
        for name, product in self._adapted.items():
            product.load(slot, adapter.get(name))

    def execute(self, scheduler_output: SchedulerOutput) -> StepOutput:
        """Compute a step, both halves of it. Raise as they do."""
        return self.finish(self.begin(scheduler_output))

    def begin(self, scheduler_output: SchedulerOutput) -> Pending:
        """Begin a step. The step before must be finished. A step without tokens only removes requests.

        Raises:
            EngineError: scheduler and runner disagree. After any exception, no token was appended, and later steps
                work once the requests of this step have been removed.
        """
        self.batch.update(scheduler_output)
        self._note_special_requests(scheduler_output)
        self._transfer_blocks(scheduler_output)
        self._copy_blocks(scheduler_output.block_copies)
        pending = Pending(scheduler_output)
        if scheduler_output.scheduled:
            with self.computing():
                self._begin(pending)
        return pending

    def finish(self, pending: Pending) -> StepOutput:
        """Wait for a step that was begun, and return its results. Raise as `begin` does."""
        plan = pending.plan
        if pending.step is None:
            return StepOutput(plan.step_id, {})
        results = [RequestStepOutput([]) for _ in plan.scheduled]
        with self.computing():
            self._finish(pending, pending.step, results)
        pairs = zip(plan.scheduled, results, strict=True)
        finished = {item.request_id: result if result.error is None else _failed(result) for item, result in pairs}
        return StepOutput(plan.step_id, finished, 0, *self._newly_prepared())

    def _newly_prepared(self) -> tuple[int, int]:
        """Count the kernels compiled and the programs recorded since the last call."""
        compiled, recorded = self._prepared
        recorded_now = self.model.num_recorded if isinstance(self.model, RecordedModel) else 0
        self._prepared = 0 if self._recording is None else self._recording.num_compiled, recorded_now
        return self._prepared[0] - compiled, self._prepared[1] - recorded

    def _note_special_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Follow the few requests that have a form or are pooled. A step without any calls neither part."""
        if self._structured.by_row:
            self._structured.remove(scheduler_output.removed_request_ids)
        if self._pooler.requests:
            self._pooler.remove(scheduler_output.removed_request_ids)
        for request in scheduler_output.new_requests:
            if request.params.structured_outputs is not None:
                self._structured.add(request)
            if request.params.pooling is not None:
                self._pooler.add(request)

    @property
    def block_bytes(self) -> list[int]:
        """The bytes of a block in all layers of each cache group."""
        return [sum(self._layer_bytes(index)) for index in range(len(self.groups))]

    def _layer_bytes(self, group: int) -> list[int]:
        """Count the bytes of a block in each layer of its group."""
        layers, num_blocks = self.groups[group].layers, self.groups[group].num_blocks
        return [self.kv_caches[layer].num_bytes // num_blocks for layer in layers]

    def _transfer_blocks(self, plan: SchedulerOutput) -> None:
        """Save blocks to the store, and load blocks that the store has fetched."""
        if self.store is None:
            return
        for item in plan.block_saves:
            caches = (self.kv_caches[layer] for layer in self.groups[item.group].layers)
            content = b"".join(self.ops.read_block(cache, item.block_id) for cache in caches)
            self.store.save(item.group, item.block_hash, content)
        for item in plan.block_loads:
            rest = memoryview(self.store.load(item.group, item.block_hash))
            for layer, size in zip(self.groups[item.group].layers, self._layer_bytes(item.group), strict=True):
                self.ops.write_block(self.kv_caches[layer], item.block_id, rest[:size])
                rest = rest[size:]
        self.store.end_step()

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            for layer in self.groups[copy.group].layers:
                if layer in self._own_layers:
                    self.ops.copy_block(self.kv_caches[layer], copy.source, copy.target)

    def _begin(self, pending: Pending) -> None:
        step = pending.step = self.batch.pack(pending.plan.scheduled)
        if self._structured.by_row:
            self._structured.begin(step)
        num_tokens, num_sampled = len(step.input_ids), len(step.layout.sampled)
        rows = self.model.program_rows(num_tokens) if isinstance(self.model, RecordedModel) else 0
        wide = step.padded(rows) if rows > num_tokens else step
        input_ids, ctx = self.ops.tensor(wide.input_ids), self.context(wide)
        # If every token is sampled, no prompt log-probabilities are needed, only logits.
        if rows and isinstance(self.model, RecordedModel) and num_sampled == num_tokens:
            self._draw(self.model.logits(input_ids, ctx)[:num_tokens], pending, step)
            return
        hidden = self.model(input_ids, ctx)
        if self._pooler.requests:
            pending.hidden = hidden
        if step.prompt_pieces or num_sampled < num_tokens:  # else every token is sampled, in order
            hidden = hidden[self.ops.tensor(step.logits_indices)]
        start = num_sampled
        for piece in step.prompt_pieces:
            end = start + len(piece.targets)
            self._score(hidden[start:end], piece, pending)
            start = end
        if num_sampled:
            self._draw(self.model.compute_logits(hidden[:num_sampled]), pending, step)

    def _score(self, hidden: Tensor, piece: PromptPiece, pending: Pending) -> None:
        """Begin to score the prompt positions of hidden [n, hidden], a bounded slice at a time."""
        slices: list[Callable[[], list[Array]]] = []
        pending.scores.append((piece, slices))
        for start in range(0, len(piece.targets), LOGITS_ROWS):
            end = start + LOGITS_ROWS
            logits = self.without_padding(self.model.compute_logits(hidden[start:end]))
            scores = self.ops.token_scores(logits, self.ops.tensor(piece.targets[start:end]), piece.num_top)
            slices.append(self.ops.fetch([scores.ids, scores.logprobs, scores.ranks]))

    def _draw(self, logits: Tensor, pending: Pending, step: PackedStep) -> None:
        """Begin to sample a token from each row of logits [M, V']."""
        positions = Positions(step.layout.sampled_rows, step.layout.offsets)
        pending.draws = self._sampler.begin(self.without_padding(logits), positions)

    def _finish(self, pending: Pending, step: PackedStep, results: list[RequestStepOutput]) -> None:
        if pending.hidden is not None:
            starts, scheduled = step.layout.query_start_loc, pending.plan.scheduled
            for b, pooled in self._pooler.pool(pending.hidden, starts, scheduled).items():
                results[b].pooled = pooled
                results[b].error = HIDDEN_NOT_FINITE if pooled is None else None
        for piece, slices in pending.scores:
            results[piece.sequence].prompt_logprobs = entries = list(_entries(slices, piece.num_top))
            if len(entries) < len(piece.targets):
                results[piece.sequence].error = NOT_FINITE
        if pending.draws is not None:
            self._take_draws(pending.draws, pending.plan, step, results)

    def context(self, step: PackedStep) -> ForwardContext:
        """Prepare what the model needs to know of a step, which may be the last step, changed in place."""
        if step is not self._packed:  # else the step was advanced in place, and the metadata still holds
            self._packed = step
            self._unplanned = {index: self._attention(step, index) for index in self._first_layers}
        if self._slots is not None:
            slots = np.full(len(step.input_ids), NO_ADAPTER, np.int32)  # those of padding have none
            slots[: len(step.layout.token_rows)] = self.batch.adapters[step.layout.token_rows]
            self._slots.choose(slots)
        planned = {
            index: self.ops.plan(meta, self._heads[index], self.kv_caches[self._first_layers[index]])
            for index, meta in self._unplanned.items()
        }
        unused = next(iter(planned.values()))  # a placeholder for groups whose layers are all on other stages
        attention = tuple(planned.get(index, unused) for index in range(len(self.groups)))
        types = None if step.token_types is None else self.ops.tensor(step.token_types)
        return ForwardContext(self.ops.tensor(step.positions), self.kv_caches, attention, self._layer_group, types)

    def _attention(self, step: PackedStep, index: int) -> AttentionMetadata:
        """Make the metadata of a cache group, without a plan."""
        group = self.groups[index]
        return AttentionMetadata(
            query_start_loc=step.layout.query_start_loc,
            seq_lens=step.seq_lens,
            block_table=step.block_tables[index],
            slot_mapping=step.slot_mappings[index],
            block_size=group.block_size,
            sliding_window=group.sliding_window,
            num_sink_tokens=group.num_sink_tokens,
            chunked=group.chunked,
            bidirectional=group.bidirectional,
        )

    def _take_draws(
        self, draws: Draws, plan: SchedulerOutput, step: PackedStep, results: list[RequestStepOutput]
    ) -> None:
        """Give each sequence its valid tokens."""
        sequences, positions = step.layout.sampled.tolist(), draws.positions
        if plan.checksum_logits:
            for b, checksum in zip(sequences, logits_checksums(draws.logits, plan.step_id), strict=True):
                results[b].checksum = ((results[b].checksum or 0) + checksum) % 2**64
        failed = None
        if step.prompt_pieces:  # nothing else can have failed yet
            failed = np.array([results[b].error is not None for b in sequences], dtype=np.bool_)
        sampled, errors = self._sampler.finish(draws, failed)
        for index, state in sampled.sampler_state.items():  # a request that has one has no drafts
            self.batch.sampling.sampler_state[positions.rows[index]] = results[sequences[index]].sampler_state = state
        chosen_ids = sampled.token_ids
        if errors or step.layout.has_drafts or failed is not None:
            chosen = np.array(_accept(sampled, errors, step, results), dtype=np.int64)
            positions, chosen_ids = positions.at(chosen), chosen_ids[chosen]
        else:  # as in most steps
            for b, token_id, entry in zip(sequences, chosen_ids.tolist(), sampled.logprobs, strict=True):
                results[b].new_token_ids = [token_id]
                results[b].logprobs = None if entry is None else [entry]
        self.batch.append(positions.rows, chosen_ids, positions.offsets)
        if self._structured.by_row:
            self._append_forced(step, results)

    def _append_forced(self, step: PackedStep, results: list[RequestStepOutput]) -> None:
        """Append the tokens that a sequence's form dictates, unless the sequence had wrong drafts.

        They are outputs as if sampled. The next step computes them together.
        """
        forced: dict[int, list[int]] = {}
        counts = np.bincount(step.layout.sampled, minlength=len(results)).tolist()
        for row, result, count in zip(step.layout.rows.tolist(), results, counts, strict=True):
            if result.error is None and 0 < count == len(result.new_token_ids):
                forced[row] = self._structured.forced(row)
                result.new_token_ids += forced[row]
        self.batch.extend(forced)

    def without_padding(self, logits: Tensor) -> Tensor:
        """Remove the LM head's padding, logits [M, V'] -> [M, V], so that it enters no sum over the vocabulary."""
        if logits.shape[1] == self.vocab_size:
            return logits
        return contiguous(logits[:, : self.vocab_size])


def _entries(slices: Iterable[Callable[[], list[Array]]], num_top: int) -> Iterator[TokenLogprobs]:
    """Yield one entry per prompt position, up to the first slice whose logits are not finite."""
    for fetch in slices:
        scores = fetch()
        if not np.equal(scores[1], scores[1]).all():  # NaN, which equals nothing
            return
        yield from token_logprobs(scores, [num_top] * len(scores[0]))


class LocalExecutor:
    """A `step.Executor` with one ModelRunner in this process. The handle of a step is its SchedulerOutput.

    A step runs when it is collected, in the thread that collects it: its kernels use every core, and Python running
    beside them would only take one away (docs/perf_log.md, "What was tried and did not help").
    """

    depth = 1

    def __init__(self, runner: ModelRunner) -> None:
        self._runner: ModelRunner | None = runner
        self._submitted: deque[SchedulerOutput] = deque()
        self.cache_bytes = runner.cache_bytes

    def use_store(self, make: Callable[[list[int]], TieredBlockStore]) -> TieredBlockStore:
        """Keep blocks beyond the cache in the store that `make` returns; `make` gets the bytes of a block per group."""
        if self._runner is None:
            raise EngineError("the executor was shut down")
        store = self._runner.store = make(self._runner.block_bytes)
        return store

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Put a LoRA adapter into a slot, for the steps that are computed from now on."""
        if self._runner is None:
            raise EngineError("the executor was shut down")
        self._runner.load_adapter(slot, adapter)

    def submit(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Queue a step; it starts in `collect`."""
        self._submitted.append(scheduler_output)
        return scheduler_output

    def collect(self, handle: SchedulerOutput) -> StepOutput:
        """Run the step and return its results. Steps are collected once each, in the order submitted.

        Raises:
            EngineError: another step must be collected first (nothing was run), or the executor was shut down.
            ExecutorLostError: the device is lost; another process may go on.
            Exception: whatever the step raised as a whole. Later steps still work; the requests of this step must be
                removed in the next one.
        """
        if not self._submitted or self._submitted[0] is not handle:
            raise EngineError("steps are collected once each, in the order in which they were submitted")
        self._submitted.popleft()
        if self._runner is None:
            raise EngineError("the executor was shut down")
        try:
            return self._runner.finish(self._runner.begin(handle))
        except RuntimeError as error:
            if self._runner.ops.is_lost():
                raise ExecutorLostError(f"the device computes nothing any more: {one_line(error)}") from error
            raise

    def shutdown(self) -> None:
        """Free the model and the caches. A second call does nothing."""
        self._submitted.clear()
        if self._runner is not None and self._runner.store is not None:
            self._runner.store.close()
        self._runner = None


def _accept(
    sampled: Sampled, errors: Mapping[int, str], step: PackedStep, results: list[RequestStepOutput]
) -> list[int]:
    """Give each sequence its tokens up to and including the first that differs from the draft at its place; return
    their indices.

    Later tokens and errors are dropped, because they were computed after a wrong draft. An error after accepted drafts
    is dropped, too: it occurs again in the next step.
    """
    token_ids, accepted, is_open = sampled.token_ids.tolist(), [], [result.error is None for result in results]
    for index, (b, draft) in enumerate(zip(step.layout.sampled.tolist(), step.drafts.tolist(), strict=True)):
        if not is_open[b]:
            continue
        result = results[b]
        if index in errors:
            result.error = None if result.new_token_ids else errors[index]
            is_open[b] = False
            continue
        accepted.append(index)
        result.new_token_ids.append(token_ids[index])
        if (entry := sampled.logprobs[index]) is not None:
            result.logprobs = [*(result.logprobs or ()), entry]
        is_open[b] = token_ids[index] == draft
    return accepted


def logits_checksums(logits: Tensor, step_id: int) -> list[int]:
    """Sum, for each row of logits [M, V] float32, the words in this step's window, modulo 2**64. The sum shows the
    flight recorder's replay a changed bit even in a step that chose the same tokens.

    A checksum covers a window of the vocabulary, because all of it would cost as much as sampling does: 4 MiB a step
    with 32 requests and 32,000 tokens. A bit that changes before the LM head changes nearly every logit. The window
    moves with the step, so that a change in the LM head alone is seen within vocab_size / WINDOW steps.
    """
    vocab_size = logits.shape[1]
    width = min(WINDOW, vocab_size // 2 * 2)
    if width == 0:
        return [int(row.view(np.uint32)[0]) for row in as_array(logits)]
    start = min(step_id % -(-vocab_size // width) * width, vocab_size - width)
    words = as_array(logits[:, start : start + width]).view(np.uint64)
    return list(np.add.reduce(words, axis=1, dtype=np.uint64).tolist())


def _failed(result: RequestStepOutput) -> RequestStepOutput:
    """Strip the result of a failed request to its error and checksum."""
    return RequestStepOutput([], error=result.error, checksum=result.checksum)


def _prepare_torch(ops: Ops, threads: int) -> Callable[[], AbstractContextManager[object]]:
    """Set the number of torch's threads, if this process has torch. Return the context in which a step computes."""
    if sys.modules.get("torch") is None:
        return nullcontext
    import torch

    torch.set_num_threads(threads)
    return torch.inference_mode if is_torch(ops.dtype) else nullcontext


def _heads(layer: ModelConfig) -> Heads:
    """Describe the heads of a layer, with the numbers of this layer."""
    return Heads(layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim)


def layer_groups(groups: Sequence[CacheGroup], num_layers: int) -> tuple[int, ...]:
    """Find the index of each decoder layer's cache group.

    Raises:
        EngineError: a layer is in no group or in two.
    """
    group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
    if sorted(layer for group in groups for layer in group.layers) != list(range(num_layers)):
        raise EngineError(f"cache groups must hold each of the {num_layers} layers exactly once")
    return tuple(group_of[layer] for layer in range(num_layers))


def allocate_kv_caches(
    ops: Ops,
    groups: Sequence[CacheGroup],
    config: EngineConfig,
    model_config: ModelConfig,
    scales: Sequence[KVScales] | None = None,
    own_layers: range | None = None,
) -> tuple[KVCache, ...]:
    """Allocate one cache per decoder layer, in layer order.

    scales: per-channel scales of an int8 cache, one per layer.
    own_layers: the layers that are computed here, at least one; None: all. In the place of every other layer stands the
        cache of one of these; it is not used there.

    Raises:
        EngineError: the groups do not hold every layer exactly once, or there are not as many scales as layers.
    """
    layers = layer_groups(groups, model_config.num_hidden_layers)
    if scales is not None and len(scales) != len(layers):
        raise EngineError(f"KV scales of {len(scales)} layers for {len(layers)} layers")
    caches = {
        layer: ops.new_kv_cache(
            CacheSpec(
                groups[index].num_blocks,
                groups[index].block_size,
                model_config.at(layer).num_key_value_heads,
                model_config.at(layer).head_dim,
                dtype_of(config.cache.kv_cache_dtype, ops.dtype),
                slices=config.kv_cache_slices,
                scales=None if scales is None else scales[layer],
            )
        )
        for layer, index in enumerate(layers)
        if own_layers is None or layer in own_layers
    }
    return tuple(caches.get(layer, next(iter(caches.values()))) for layer in range(len(layers)))


@dataclass(slots=True, eq=False)
class _Recorded:
    """A program and the inputs that it reads, [tokens] int64 each; token_types: as in ForwardContext."""

    input_ids: Tensor
    positions: Tensor
    token_types: Tensor | None
    kv_caches: Sequence[KVCache]
    program: Program


class RecordedModel:
    """A CausalLM that gives its model's results. Its forward pass over few tokens is recorded as a program, as other
    engines do with CUDA graphs. Steps of fewer tokens than a program has are padded, if the backend says so
    (RecordingOps.program_rows). It stops recording if a pass does more than call operations.

    Attributes:
        num_recorded: the number of programs that were recorded so far.
    """

    def __init__(self, model: CausalLM, ops: RecordingOps) -> None:
        self.num_recorded = 0
        self._model = model
        self._ops = ops
        self._recorded: dict[tuple[int, bool], _Recorded] = {}
        self._recordable = True
        self._with_torch = bool(getattr(model, "repeats_torch", False))
        self._once: set[tuple[int, bool]] = set()  # passes of torch's that came once

    def program_rows(self, tokens: int) -> int:
        """Find the rows of the program that computes a step of so many tokens; 0: none does."""
        return self._ops.program_rows(tokens) if self._recordable else 0

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Compute hidden states as CausalLM does. The next call overwrites them."""
        return self._run(input_ids, ctx, head=False)

    def logits(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Compute the logits of every token, [T, V] float32, as decode steps need. The next call overwrites them."""
        return self._run(input_ids, ctx, head=True)

    def decode(self, tokens: Array, ctx: ForwardContext, vocab_size: int) -> bool:
        """Compute several greedy decode steps with one token of each sequence, as `Program.decode` does.

        Returns:
            False if there is no program that can; then nothing was computed.
        """
        recorded = self._recorded.get((len(tokens), True))
        if recorded is None or recorded.kv_caches is not ctx.kv_caches:
            return False
        recorded.positions[:] = ctx.positions
        if not recorded.program.decode(ctx.attention, recorded.input_ids, recorded.positions, tokens, vocab_size):
            return False
        ctx.positions[:] = recorded.positions
        return True

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)

    def _run(self, input_ids: Tensor, ctx: ForwardContext, *, head: bool) -> Tensor:
        tokens = input_ids.shape[0]
        if self.program_rows(tokens) != tokens:
            return self._forward(input_ids, ctx, head)
        recorded = self._recorded.get((tokens, head))
        if recorded is None or recorded.kv_caches is not ctx.kv_caches:
            if self._with_torch and (tokens, head) not in self._once:  # to watch torch takes as long as several passes
                self._once.add((tokens, head))
                return self._forward(input_ids, ctx, head)
            return self._record(input_ids, ctx, head)
        recorded.input_ids[:] = input_ids
        recorded.positions[:] = ctx.positions
        if recorded.token_types is not None:
            recorded.token_types[:] = ctx.token_types
        return recorded.program.run(ctx.attention)

    def _forward(self, input_ids: Tensor, ctx: ForwardContext, head: bool) -> Tensor:
        hidden = self._model(input_ids, ctx)
        return self._model.compute_logits(hidden) if head else hidden

    def _record(self, input_ids: Tensor, ctx: ForwardContext, head: bool) -> Tensor:
        """Compute the first step with this number of tokens, and keep its program."""
        types = None if ctx.token_types is None else self._copy(ctx.token_types)
        input_ids, ctx = self._copy(input_ids), replace(ctx, positions=self._copy(ctx.positions), token_types=types)
        result, program = self._ops.record(
            lambda attention: self._forward(input_ids, replace(ctx, attention=tuple(attention)), head),
            ctx.attention,
            torch_too=self._with_torch,
        )
        if program is None:
            self._recordable = False
        else:
            self.num_recorded += 1
            self._recorded[input_ids.shape[0], head] = _Recorded(
                input_ids, ctx.positions, types, ctx.kv_caches, program
            )
        return result

    def _copy(self, tensor: Tensor) -> Tensor:
        return self._ops.tensor(as_array(tensor).copy())
