"""The memory of an engine, before anything is allocated: its bytes by purpose, and the size of its cache. No torch.

    runtime       the interpreter and its libraries: memory of the process before it loads, and its later growth
    weights       packed, or mapped from a file
    adapters      max_loras slots for LoRA adapters of max_lora_rank (layers/lora.py)
    positions     rotary tables of max_model_len positions
    cache         all blocks: layers of a group x block_size x cache_token_bytes (kernels/attention/items.py) each
    results       the buffers of the layers' results, for max_num_batched_tokens tokens
    operands      copies by the native kernels: a product's operands, a step's new keys and values, a core's scratch
    logits        logits and log-probabilities of all rows that are sampled or scored at once
    requests      token ids of max_num_seqs requests
    drafts        a draft model with its cache, or the index for prompt lookup
    offload       blocks kept in memory beyond the cache (kv_offload_memory_bytes)

On a GPU, of which each rank has its own, there are instead of runtime, operands and requests:

    scratch       values between the kernels of one operation
    exchange      what a rank gathers from all others at once
    reserve       recorded programs, and what the allocator of torch loses by rounding

Without an explicit size, the cache gets what max_num_seqs sequences of max_model_len need, but at most MAX_SHARE of the
free memory or, with the option `memory`, what the other entries leave. A cache that cannot hold one sequence of
max_model_len is refused. `penstock prove --only memory` fills a real engine to its limits and compares its peak with
the ledger.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.config import TRITON, EngineConfig
from penstock.engine.kv_cache_manager import peak_blocks, table_length
from penstock.errors import InvalidRequestError, fail, invalid
from penstock.interface.step import CacheGroup
from penstock.kernels.attention.items import ELEMENT_BYTES, GRANULE, AttentionShape, cache_token_bytes
from penstock.kernels.attention.plan import Planner
from penstock.kernels.scheme import Scheme
from penstock.kernels.tensors import FIXED_ROWS, LOGITS_ROWS
from penstock.kernels.triton.sizes import ALIGNED_ROWS, GATE_BYTES, SPAN, STATES_BYTES
from penstock.spec.model_config import ModelConfig
from penstock.weights.loader import rotary_bytes

MAX_SHARE = 0.4  # largest share of the free memory, unless kv_cache_memory_bytes is given
RUNTIME_GROWTH = 3 * 2**20  # recorded programs, threads' stacks, Python's own objects; measured
TOKEN_OBJECT_BYTES = 64  # bytes of a token in the lists of the scheduler and of the runner's rows; measured
PASS_BYTES = 16 * 2**20  # operands that a native product lays out at once (ProductKernel::pass_bytes)
LOGIT_BYTES = 10  # a logit, its log-probability, and the memory for comparing and ranking them; measured
ROUND_LENGTH = 64  # a max_model_len that is chosen to fit is a multiple of this
GPU_RESERVE = 2**29  # recorded programs, and what the allocator of torch loses by rounding; not measured yet
SCRATCH_MARGIN = 2**20  # of aligned pieces
FLOAT_BYTES = 4
SMALL = 2**19  # smaller entries are not shown


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The cache groups with their numbers of blocks, the bytes of all groups, and the reason for this size."""

    groups: list[CacheGroup]
    num_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class _GroupNeed:
    group: CacheGroup  # without blocks
    block_bytes: int
    minimum: int  # blocks for one sequence of max_model_len
    wanted: int  # blocks for max_num_seqs such sequences


def plan_kv_cache(
    config: EngineConfig,
    model: ModelConfig,
    free_bytes: int,
    share: float | None = MAX_SHARE,
    source: str = "the rest of the memory given",
) -> CachePlan:
    """Divide the free memory into the blocks of every cache group of a resolved config.

    Args:
        free_bytes: memory for the cache and everything allocated after it.
        share: the cache's share of free_bytes, unless kv_cache_memory_bytes is given; None: the cache may take all of
            free_bytes.
        source: says where these bytes come from, if the cache may take all of them.

    Raises:
        InvalidRequestError: kv_cache_memory_bytes, or the share of the free memory, cannot hold one sequence of
            max_model_len, or exceeds the free memory.
    """
    needs = [_need(config, model, layers, window) for layers, window in model.cache_groups()]
    wanted = sum(need.wanted * need.block_bytes for need in needs)
    minimum = sum(need.minimum * need.block_bytes for need in needs)
    given = config.cache.kv_cache_memory_bytes
    if given is not None and given > free_bytes:
        raise fail("kv_cache_memory_bytes", given, f"at most the free memory, {free_bytes} bytes")
    limit = given if given is not None else int(free_bytes * (share or 1.0))
    if limit < minimum:
        raise invalid(
            "kv_cache_memory_bytes",
            f"{mib(limit)} cannot hold one sequence of max_model_len = "
            f"{config.scheduler.max_model_len}, which needs {mib(minimum)}; increase it or reduce max_model_len",
        )
    counts = _share_out(needs, limit - minimum, fill=given is not None)
    groups = [replace(need.group, num_blocks=count) for need, count in zip(needs, counts, strict=True)]
    num_bytes = sum(need.block_bytes * count for need, count in zip(needs, counts, strict=True))
    source = source if share is None else f"{share:.0%} of the free memory"
    return CachePlan(groups, num_bytes, _reason(config, num_bytes, wanted, source))


def smallest_cache_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Count the bytes of a cache for one sequence of max_model_len."""
    needs = [_need(config, model, layers, window) for layers, window in model.cache_groups()]
    return sum(need.minimum * need.block_bytes for need in needs)


def plan_given_cache(config: EngineConfig, model: ModelConfig, free_bytes: int, groups: list[CacheGroup]) -> CachePlan:
    """Plan a cache with given groups and numbers of blocks.

    Raises:
        InvalidRequestError: the groups are not those of this model, or exceed the free memory.
    """
    needs = [_need(config, model, layers, window) for layers, window in model.cache_groups()]
    shapes = [replace(group, num_blocks=0) for group in groups]
    if shapes != [need.group for need in needs]:
        raise InvalidRequestError("the cache groups are not those of this model", param="model")
    num_bytes = sum(need.block_bytes * group.num_blocks for need, group in zip(needs, groups, strict=True))
    if num_bytes > free_bytes:
        raise InvalidRequestError(f"the cache takes {mib(num_bytes)}, but only {mib(free_bytes)} are free")
    return CachePlan(groups, num_bytes, f"{mib(num_bytes)}: as given")


def _need(config: EngineConfig, model: ModelConfig, layers: tuple[int, ...], window: int | None) -> _GroupNeed:
    """Compute the fewest and most blocks of the cache group of these layers, and the size of a block.

    If one block holds the longest request, each request has one block, and a shorter window without sink tokens
    makes it a ring.
    """
    scheduler, block_size = config.scheduler, config.cache.block_size
    length, chunk = scheduler.max_model_len, scheduler.max_num_batched_tokens
    if block_size is None or length is None or chunk is None:
        raise invalid("block_size", "the config is not resolved")
    sinks = 0 if window is None else model.num_sink_tokens
    rules = {"chunked": model.chunked_windows, "bidirectional": model.bidirectional}
    group = CacheGroup(layers, window, 0, block_size, num_sink_tokens=sinks, **rules)
    ring_size = -(-(window or block_size) // GRANULE) * GRANULE
    has_rings = config.numerics.kernels != TRITON  # whose steps read what they have overwritten
    if length <= block_size and ring_size < block_size and not sinks and has_rings:
        group = replace(group, block_size=ring_size, ring=True)
    minimum = peak_blocks(group, length, chunk)
    # With a window, all sequences together hold at most one step's new tokens more than they hold between steps.
    new = 0 if window is None else -(-chunk // group.block_size)
    most = scheduler.max_num_seqs * table_length(group, length)
    wanted = max(minimum, min(most, scheduler.max_num_seqs * peak_blocks(group, length, 1) + new))
    token_bytes = cached_token_bytes(config, model.at(layers[0]))
    return _GroupNeed(group, len(layers) * group.block_size * token_bytes, minimum, wanted)


def cached_token_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Count the bytes of a token in the cache of one layer, with the numbers of this layer and a resolved config."""
    return cache_token_bytes(
        model.num_key_value_heads,
        model.head_dim,
        config.cache.kv_cache_dtype,
        padded=config.numerics.kernels == "cpu",
        token_scales=config.cache.kv_cache_scales is None,
    )


def all_token_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Count the bytes of a token in the caches of all layers."""
    groups = [(len(layers), model.at(layers[0])) for layers, _ in model.cache_groups()]
    return sum(count * cached_token_bytes(config, layer) for count, layer in groups)


def _share_out(needs: list[_GroupNeed], rest: int, *, fill: bool) -> list[int]:
    """Divide blocks among the groups: to each its minimum, plus a part of the remaining bytes in proportion to the
    further blocks that it wants. `fill` uses all bytes, even more than are wanted."""
    parts = [need.wanted - need.minimum for need in needs]
    if not any(parts):
        parts = [need.minimum if fill else 0 for need in needs]
    total = sum(part * need.block_bytes for part, need in zip(parts, needs, strict=True))
    scale = rest / total if total else 0.0
    scale = scale if fill else min(scale, 1.0)
    return [need.minimum + int(part * scale) for part, need in zip(parts, needs, strict=True)]


def _reason(config: EngineConfig, num_bytes: int, wanted: int, source: str) -> str:
    scheduler = config.scheduler
    full = f"{scheduler.max_num_seqs} sequences of {scheduler.max_model_len} tokens"
    if config.cache.kv_cache_memory_bytes is not None:
        return f"{mib(num_bytes)}: as given; {full} would need {mib(wanted)}"
    if num_bytes < wanted:
        return f"{mib(num_bytes)}: {source}; {full} would need {mib(wanted)}"
    return f"{mib(num_bytes)}: what {full} need"


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


@dataclass(frozen=True, slots=True)
class Products:
    """The bytes of the weights that products read, and their operations per row, by type."""

    num_bytes: dict[str, int] = field(default_factory=Counter)
    operations: dict[str, int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The memory of a model, or of a rank's part of it, without its cache, as assembly/sizes.py counts it.

    Attributes:
        weights: bytes of all parameters in the form in which they are kept.
        adapters: bytes of the slots of LoRA adapters.
        row_bytes: bytes of one token's results in a step, without logits.
        vocab_columns: columns of a row of logits.
        deepest: elements of the longest row that a product reads.
        fixed_rows: rows for which results have memory that stays, apart from that of larger steps.
        kinds: the bytes of `weights` by type, with scales, biases and padding listed separately.
        products: the products of "layers", "head" and "experts".
    """

    weights: int
    row_bytes: int
    vocab_columns: int
    deepest: int
    fixed_rows: int = FIXED_ROWS
    kinds: Mapping[str, int] = field(default_factory=dict)
    products: Mapping[str, Products] = field(default_factory=dict)
    adapters: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The ledger of an engine: bytes by purpose, the cache included."""

    entries: dict[str, int]
    cache: CachePlan

    @property
    def total(self) -> int:
        """The bytes of all entries."""
        return sum(self.entries.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {mib(size)}" for name, size in self.entries.items() if size >= SMALL)
        return f"{mib(self.total)}: {parts}"


@dataclass(frozen=True, slots=True)
class Ledger:
    """Plans the memory of one model on one machine, for any config.

    Args:
        sizes: returns the sizes of the model under a quantization.
        runtime_bytes: memory of the process before it loads the model.
        free_bytes: memory that the process can still allocate.
        draft_bytes: memory that speculation takes.
        is_coded: whether the checkpoint's weights are quantised already, so that no quantization can be chosen.
    """

    model: ModelConfig
    sizes: Callable[[Scheme | None], ModelSizes]
    runtime_bytes: int
    free_bytes: int
    draft_bytes: int = 0
    is_coded: bool = False

    def plan(self, config: EngineConfig) -> MemoryPlan:
        """Make the ledger of a resolved config.

        Raises:
            InvalidRequestError: the memory left for the cache cannot hold one sequence of max_model_len.
        """
        entries = self.entries(config)
        if config.numerics.kernels == TRITON:
            limit = min(config.cache.memory or self.free_bytes, self.free_bytes)
            room = max(0, limit - sum(entries.values()))
            cache = plan_kv_cache(config, self.model, room, share=None, source="the rest of the GPU's memory")
        elif config.cache.memory is None:
            cache = plan_kv_cache(config, self.model, self.free_bytes)
        else:
            room = min(config.cache.memory - sum(entries.values()), self.free_bytes)
            cache = plan_kv_cache(config, self.model, room, share=None)
        return MemoryPlan(entries | {"cache": cache.num_bytes}, cache)

    def fit(self, config: EngineConfig) -> tuple[EngineConfig, MemoryPlan]:
        """Complete a config so that it fits the memory, and make its ledger.

        If `memory` is given and max_model_len was left open, the longest one that fits is chosen.

        Raises:
            InvalidRequestError: the config does not fit; with `memory`, the message names the smallest change that
                would make it fit.
        """
        try:
            return config, self.plan(config)
        except InvalidRequestError:
            if config.cache.memory is None:
                raise
        if "max_model_len" in config.reasons and (shorter := self._shorter(config)) is not None:
            length = shorter.scheduler.max_model_len
            reason = f"{length}: what memory = {mib(config.cache.memory)} has room for, of the model's "
            reasons = {**config.reasons, "max_model_len": f"{reason}{config.scheduler.max_model_len}"}
            return replace(shorter, reasons=reasons), self.plan(shorter)
        raise self._refusal(config)

    def entries(self, config: EngineConfig) -> dict[str, int]:
        """Count the bytes of everything except the cache, by entry, for the largest step that the config allows."""
        scheduler, sizes, model = config.scheduler, self.sizes(config.numerics.scheme), self.model
        length, tokens, seqs = (
            scheduler.max_model_len or 0,
            scheduler.max_num_batched_tokens or 0,
            scheduler.max_num_seqs,
        )
        fixed, drafts = sizes.fixed_rows, {"drafts": self.draft_bytes} if self.draft_bytes else {}
        kept = {
            "weights": sizes.weights,
            **({"adapters": sizes.adapters} if sizes.adapters else {}),
            "positions": rotary_bytes(model, length),
            "results": sizes.row_bytes * (fixed + (tokens if tokens > fixed else 0)),
        }
        if config.numerics.kernels == TRITON:
            rows = max(seqs, LOGITS_ROWS)
            logits = FLOAT_BYTES * sizes.vocab_columns * (fixed + (rows if rows > fixed else 0))
            scratch = self._scratch(config, tokens, rows, sizes)
            found = kept | {"logits": logits, "scratch": scratch, "reserve": GPU_RESERVE} | drafts
            if (ranks := config.parallel.num_ranks) > 1:
                width = max(model.hidden_size, config.lora.max_lora_rank)
                found["exchange"] = FLOAT_BYTES * ranks * max(tokens * width, rows * sizes.vocab_columns)
            return found
        return {
            "runtime": self.runtime_bytes + RUNTIME_GROWTH,
            **kept,
            "operands": self._operands(config, tokens, sizes.deepest) + self._workspace(config, tokens, seqs, length),
            "logits": LOGIT_BYTES * max(seqs, LOGITS_ROWS) * sizes.vocab_columns,
            "requests": seqs * length * TOKEN_OBJECT_BYTES,
            **drafts,
            **({"offload": config.cache.kv_offload_memory_bytes} if config.cache.kv_offload_memory_bytes else {}),
        }

    def bytes_beside_cache(self, config: EngineConfig) -> int:
        """Count the bytes that a model takes in a process that already runs, without its cache."""
        entries = self.entries(config)
        return sum(size for name, size in entries.items() if name not in ("runtime", "reserve"))

    def needed_bytes(self, config: EngineConfig) -> int:
        """Count the fewest bytes that an engine takes: with a cache for one sequence of max_model_len."""
        return sum(self.entries(config).values()) + smallest_cache_bytes(config, self.model)

    def smallest_change(self, config: EngineConfig) -> str | None:
        """Find the change that makes a config fit at the least cost to the user; None if none is enough."""
        return next((text for text, changed in self._changes(config) if self._fits(changed)), None)

    def _operands(self, config: EngineConfig, tokens: int, deepest: int) -> int:
        """Count the bytes of the operands that products copy. All experts copy theirs at once.

        They are int8 slices for quantised weights, which some levels widen to words beside int8 weights; otherwise
        values that some levels widen to float32.
        """
        model, scheme = self.model, config.numerics.scheme
        element = ELEMENT_BYTES["float32"]
        if scheme is not None and scheme.slices:
            element = scheme.slices * (2 if scheme.weight_bits == 8 else 1)
        if self.is_coded:
            element = max(element, 2 * config.numerics.activation_slices)
        pairs = tokens * model.num_experts_per_tok
        return max(min(tokens * deepest * element, PASS_BYTES), pairs * max(model.hidden_size, _inner(model)) * element)

    def _scratch(self, config: EngineConfig, tokens: int, rows: int, sizes: ModelSizes) -> int:
        """Count the most bytes that one operation on a GPU keeps between its kernels."""
        model, inner, slices = self.model, _inner(self.model), 0
        if config.numerics.scheme is not None:
            slices = config.numerics.scheme.slices
        deepest = max(sizes.deepest, model.hidden_size)
        operand = tokens * (slices * deepest + FLOAT_BYTES)
        gate = FLOAT_BYTES * 2 * max(model.intermediate_size, deepest)
        gates = min(tokens * gate, max(GATE_BYTES, ALIGNED_ROWS * gate))  # of int4 weights
        pairs = tokens * model.num_experts_per_tok
        experts = pairs * (FLOAT_BYTES * (3 * inner + 2 * model.hidden_size)) + FLOAT_BYTES * tokens * model.num_experts
        spans = -(-(config.scheduler.max_model_len or 0) // SPAN) + 1
        heads = [model.at(layers[0]) for layers, _ in model.cache_groups()]
        item = max(2 * 64 * FLOAT_BYTES * spans * head.num_key_value_heads * (head.head_dim + 2) for head in heads)
        queries = max(tokens * head.num_attention_heads * (3 * head.head_dim + 8) for head in heads)
        chosen = 3 * FLOAT_BYTES * rows * sizes.vocab_columns
        return SCRATCH_MARGIN + max(operand + gates, operand + experts, max(STATES_BYTES, item) + queries, chosen)

    def _workspace(self, config: EngineConfig, tokens: int, seqs: int, length: int) -> int:
        """Count the bytes that operations use in turn: experts, and attention with each core's scratch memory.

        Attention needs most for one long prompt, or when all rows decode.
        """
        model = self.model
        inner = _inner(model) * ELEMENT_BYTES[config.numerics.dtype]
        most = tokens * model.num_experts_per_tok * (inner + model.hidden_size * 4)
        for shape in {_attention_shape(config, model.at(layers[0])) for layers, _ in model.cache_groups()}:
            for counts, lengths in (([min(tokens, length)], [length]), ([1] * seqs, [length] * seqs)):
                most = max(most, _attention_bytes(config, shape, counts, lengths))
        return most

    def _shorter(self, config: EngineConfig) -> EngineConfig | None:
        """Search for the longest max_model_len that fits, a multiple of ROUND_LENGTH; None if there is none."""
        low, high = 0, (config.scheduler.max_model_len or 0) // ROUND_LENGTH
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if self._fits(_with(config, max_model_len=middle * ROUND_LENGTH)) else (low, middle - 1)
            )
        return _with(config, max_model_len=low * ROUND_LENGTH) if low else None

    def _fits(self, config: EngineConfig) -> bool:
        try:
            self.plan(config)
        except InvalidRequestError:
            return False
        return True

    def _refusal(self, config: EngineConfig) -> InvalidRequestError:
        """Make the error for a config that does not fit `memory`; it names the smallest change that would help."""
        entries, needed = self.entries(config), self.needed_bytes(config)
        parts = ", ".join(f"{name} {mib(size)}" for name, size in entries.items() if size >= SMALL)
        cache = mib(needed - sum(entries.values()))
        message = (
            f"memory: {mib(config.cache.memory or 0)} is too little: one sequence of max_model_len = "
            f"{config.scheduler.max_model_len} needs {mib(needed)} ({parts}, cache {cache})"
        )
        change = self.smallest_change(config)
        advice = f"; {change} fits, or memory = {mib(needed)}" if change else f"; it takes memory = {mib(needed)}"
        return InvalidRequestError(message + advice, param="memory")

    def _changes(self, config: EngineConfig) -> Iterator[tuple[str, EngineConfig]]:
        """Yield changes that need less memory, in order of increasing cost to the user."""
        tokens = config.scheduler.max_num_batched_tokens or 0
        for fewer in (size for size in (1024, 512, 256, 128) if size < tokens):
            yield f"max_num_batched_tokens = {fewer}", _with(config, max_num_batched_tokens=fewer)
        if config.cache.kv_cache_dtype != "int8":
            cache = replace(config.cache, kv_cache_dtype="int8")
            yield "kv_cache_dtype = int8", replace(config, cache=cache)
        if (shorter := self._shorter(config)) is not None:
            yield f"max_model_len = {shorter.scheduler.max_model_len}", shorter
        if config.numerics.quantization is None and not self.is_coded:
            for name in ("int8", "int4"):
                group_size = None if (scheme := Scheme.parse(name, None)) is None else scheme.group_size
                numerics = replace(config.numerics, quantization=name, quantization_group_size=group_size)
                yield f"quantization = {name}", replace(config, numerics=numerics)


def _attention_shape(config: EngineConfig, model: ModelConfig) -> AttentionShape:
    """Describe the attention of one layer, with the numbers of this layer."""
    return AttentionShape(
        model.num_attention_heads,
        model.num_key_value_heads,
        model.head_dim,
        config.cache.kv_cache_dtype,
        config.kv_cache_slices,
        config.cache.kv_cache_scales is None,
        config.numerics.dtype,
    )


def _attention_bytes(config: EngineConfig, shape: AttentionShape, counts: list[int], lengths: list[int]) -> int:
    """Count the bytes that attention needs in a step: `counts` new tokens of sequences that then have `lengths`."""
    block_size, cores = config.cache.block_size or 1, config.numerics.threads or 1
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    table = np.arange(len(lengths), dtype=np.int32)[:, None] + np.zeros((1, -(-max(lengths) // block_size)), np.int32)
    plan = Planner(shape, block_size, num_cores=cores).plan(starts, np.array(lengths, np.int32), table)
    return plan.workspace_bytes + cores * plan.scratch_bytes


def _inner(model: ModelConfig) -> int:
    """Find the width of an expert; 0 for a model without experts."""
    return (model.moe_intermediate_size or model.intermediate_size) if model.num_experts else 0


def _with(config: EngineConfig, **changes: Any) -> EngineConfig:
    return replace(config, scheduler=replace(config.scheduler, **changes))
