"""Makes an engine: directory -> ModelConfig -> resolved EngineConfig -> model -> cache plan -> runner -> engine."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from penstock.assembly.drafts import Draft, find_draft, make_speculation
from penstock.assembly.info import describe, with_memory
from penstock.assembly.memory import CachePlan, Ledger, MemoryPlan, plan_given_cache, plan_kv_cache
from penstock.assembly.sizes import model_sizes
from penstock.assembly.streaming import as_served
from penstock.config import LIMITS, TRITON, EngineConfig
from penstock.engine.adapters import Adapters
from penstock.engine.engine import Engine
from penstock.engine.kv_cache_manager import KVCacheManager
from penstock.engine.policies import Clock, Scheduling
from penstock.errors import EngineError, InvalidRequestError, ModelLoadError, NotSupportedError, fail, invalid
from penstock.interface import entry_points
from penstock.interface.messages import AdapterInfo, ModelInfo
from penstock.interface.plugins import import_files
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import BlockStore, CacheGroup, Executor
from penstock.kernels.cpu.host import free_memory_bytes, resident_bytes
from penstock.kernels.ops import Ops
from penstock.kernels.tensors import Tensor
from penstock.kernels.triton import device as gpu
from penstock.layers.decoder import reserve_results
from penstock.layers.lora import Adapter, adapter_size
from penstock.layers.module import CausalLM, ForwardContext
from penstock.layers.weights import HeadLayout
from penstock.models.config_json import load_model_config
from penstock.models.registry import FallbackVersion, find_model
from penstock.ranks.build import (
    RankPlace,
    RankPlan,
    RanksExecutor,
    StartRanks,
    check_codes,
    check_split,
    degrees_of,
    explain_sharding,
    open_grammars,
    split_of,
    start_ranks,
)
from penstock.ranks.launcher import open_launcher
from penstock.ranks.links import NoLinks
from penstock.ranks.sharding import Share
from penstock.runner.block_store import check_offload, make_store
from penstock.runner.forward_pass import ForwardPass
from penstock.runner.model_runner import LocalExecutor, ModelRunner
from penstock.spec.model_config import ModelConfig
from penstock.tokenizer.grammars import Grammars
from penstock.weights import packed
from penstock.weights.adapters import digest_of
from penstock.weights.hub import resolve_model
from penstock.weights.instance import ModelInstance, Weights
from penstock.weights.kv_scales import read_scales
from penstock.weights.loader import ANYWHERE, Place, Stored, make_model, make_ops, make_slots, open_reader, open_stored
from penstock.weights.safetensors import verify_checksums

UNLIMITED = 2**62  # bytes


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """Everything of an engine except its executor, for simulations, which read no weights and allocate nothing.

    memory is its ledger; None if the backend's memory cannot be planned. codings names how the checkpoint codes its
    weights; it is empty if it does not.
    """

    config: EngineConfig
    model_config: ModelConfig
    groups: list[CacheGroup]
    memory: MemoryPlan | None = None
    codings: str = ""

    def make(self, executor: Executor, clock: Clock = time.monotonic, kv_cache: KVCacheManager | None = None) -> Engine:
        """Build the engine that `build_engine` would build, but with these parts and without drafts."""
        kv_cache = kv_cache or _make_cache(self.config, self.groups)
        return _make_engine(self.config, self.model_config, executor, kv_cache, clock)


def plan_engine(config: EngineConfig) -> PlannedEngine:
    """Resolve a config and plan its cache as `build_engine` does, but from config.json alone.

    Raises:
        ModelLoadError: the model does not exist, or cannot be served.
        InvalidRequestError: an option does not fit the model or the machine.
    """
    import_files(config.imports)
    model_config, weights = _find(config, None, needs_weights=False)
    config, stored = _resolve(config, model_config, weights, is_complete=False)
    ops = make_ops(config, model_config)
    config, plan, memory = _plan(config, model_config, stored, ops, ops.free_bytes())
    return PlannedEngine(config, model_config, plan.groups, memory, _names(stored))


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine that is ready to work, its resolved config, and the description of its model for clients.

    forms compiles the forms of answers; it is None for a mock engine. model, model_config and ops are the engine's own,
    for measurements. forward_pass inspects the model.
    """

    engine: Engine
    config: EngineConfig
    info: ModelInfo
    cache_bytes: int
    model: CausalLM
    model_config: ModelConfig
    ops: Ops
    forward_pass: ForwardPass
    forms: Grammars | None = None


def build_engine(
    config: EngineConfig,
    instance: object | None = None,
    *,
    takes_over: bool = False,
    num_engines: int = 1,
    number: int = 0,
    groups: list[CacheGroup] | None = None,
    start: StartRanks = start_ranks,
) -> BuiltEngine:
    """Load the model and make its engine.

    Args:
        instance: a model object of Transformers, served instead of the model that config.model names. Its weights are
            copied and not read again.
        takes_over: config.cache.kv_cache_memory_bytes was planned by another engine, whose memory will be free by then
            or who planned for this engine, too; so it is not refused for lack of free memory.
        num_engines: how many engines share the cores and the free memory of the machine.
        number: of this engine among them; each has GPUs of its own, if any.
        groups: the cache groups with their blocks; None plans them.
        start: starts the ranks of a model that several processes share.

    Raises:
        ModelLoadError: the model directory or the object cannot be served.
        InvalidRequestError: an option does not fit the model or the machine.
    """
    import_files(config.imports)
    model_config, weights = _find(config, instance)
    config, stored = _resolve(config, model_config, weights, num_engines, number)
    check_offload(config)
    if config.numerics.load_format == "mock":
        return _build_mock(config, model_config, weights, groups)
    launcher = open_launcher(config)
    try:
        ops = make_ops(config, model_config)
        alone = config.numerics.kernels == TRITON  # each engine has a GPU of its own
        measure = ops.free_bytes if alone else free_memory_bytes  # other machines find the latter by its name
        free = UNLIMITED if takes_over else launcher.free_memory_bytes(measure) // (1 if alone else num_engines)
        return _build(
            config,
            model_config,
            weights,
            stored,
            ops,
            free,
            groups,
            lambda plan, ops, forms: start(plan, ops, forms, launcher),
        )
    except BaseException:
        launcher.close()
        raise


def _build(
    config: EngineConfig,
    model_config: ModelConfig,
    weights: Weights,
    stored: Stored,
    ops: Ops,
    free: int,
    groups: list[CacheGroup] | None,
    start: Callable[[RankPlan, Ops, Grammars], RanksExecutor],
) -> BuiltEngine:
    """Load the model of a resolved config and make its engine, within `free` bytes of memory."""
    kv_scales = read_scales(config, model_config)
    draft = find_draft(config, model_config, weights)
    free -= draft.num_bytes + (config.cache.kv_offload_memory_bytes or 0)
    config, plan, memory = _plan(config, model_config, stored, ops, free, draft.num_bytes, groups)
    forms = open_grammars(weights, model_config.vocab_size, model_config.eos_token_ids)
    model: CausalLM
    executor: LocalExecutor | RanksExecutor
    has_stages = config.parallel.pipeline_parallel_size > 1
    if has_stages or config.parallel.num_ranks > 1:
        degrees, entries = degrees_of(config, model_config), {} if memory is None else memory.entries
        rank_plan = RankPlan(config, model_config, weights, tuple(plan.groups), degrees)
        on_gpus = entries.get("scratch", 0), entries.get("exchange", 0)
        executor = start(replace(rank_plan, scratch_bytes=on_gpus[0], exchange_bytes=on_gpus[1]), ops, forms)
        option = "pipeline_parallel_size" if has_stages else "tensor_parallel_size"
        model = _NoModel(option, "no process has the whole model; use 1 to look into it")
    else:
        model = make_model(config, model_config, stored, ops, Place(ops.free_bytes))
        if memory is not None and config.numerics.kernels == TRITON:
            cast(Any, ops).scratch.reserve(memory.entries["scratch"])  # so that no step allocates any
            reserve_results(model, config.scheduler.max_num_batched_tokens or 0, config.scheduler.max_num_seqs)
        executor = LocalExecutor(ModelRunner(model, ops, plan.groups, config, model_config, kv_scales, forms))
    cache_bytes = executor.cache_bytes
    if config.parallel.num_ranks == 1 and cache_bytes != plan.num_bytes:
        raise EngineError(f"the cache takes {cache_bytes} bytes, but {plan.num_bytes} were planned")
    info, store = with_memory(describe(config, model_config, plan, weights), memory), None
    if config.cache.offload_option is not None and isinstance(executor, LocalExecutor):  # others are refused earlier
        store = executor.use_store(partial(make_store, config, info.system_fingerprint, plan.groups))
        info = replace(info, block_directory=store.directory)
    adapters = _make_adapters(config, model_config, stored, executor.load_adapter)
    engine = _make_engine(config, model_config, executor, _make_cache(config, plan.groups, store), adapters=adapters)
    _add_modules(engine, config)
    engine.speculate(make_speculation(config, draft))
    forward_pass = ForwardPass(model, ops, config, model_config, kv_scales)
    return BuiltEngine(engine, config, info, cache_bytes, model, model_config, ops, forward_pass, forms)


class _NoModel:
    """Stands for the model of an engine whose process has no model, or only a part of it."""

    def __init__(self, option: str, why: str) -> None:
        self._error = f"{option}: {why}", option

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        raise NotSupportedError(self._error[0], param=self._error[1])

    def compute_logits(self, hidden: Tensor) -> Tensor:
        raise NotSupportedError(self._error[0], param=self._error[1])


def _build_mock(
    config: EngineConfig, model_config: ModelConfig, weights: Weights, groups: list[CacheGroup] | None
) -> BuiltEngine:
    """Make an engine that is complete except for its model. Each token is a hash of the tokens before it."""
    reason = {"load_format": "mock: no model is loaded, and the tokens mean nothing"}
    config = replace(config, reasons=config.reasons | reason)
    if groups is None:
        plan = plan_kv_cache(config, model_config, UNLIMITED)
    else:
        plan = plan_given_cache(config, model_config, UNLIMITED, groups)
    plan = replace(plan, reason="none: its cache holds token ids")
    depth = config.parallel.pipeline_parallel_size
    make_executor = entry_points.load("executors", "mock", "load_format")
    executor = make_executor(plan.groups, model_config.vocab_size, depth=depth)
    adapters = _make_adapters(config, model_config, Stored(), executor.load_adapter)
    engine = _make_engine(config, model_config, executor, _make_cache(config, plan.groups), adapters=adapters)
    _add_modules(engine, config)
    if config.speculation.drafts is not None and config.speculation.drafts.model is not None:
        raise fail(
            "speculative_config",
            config.speculation.drafts.model,
            '{"method": "ngram"}: load_format = mock has no model',
        )
    engine.speculate(make_speculation(config, Draft()))
    model, ops = _NoModel("load_format", "mock has no model"), make_ops(config, model_config)
    info, forward_pass = describe(config, model_config, plan, weights), ForwardPass(model, ops, config, model_config)
    return BuiltEngine(engine, config, info, plan.num_bytes, model, model_config, ops, forward_pass)


def _make_cache(config: EngineConfig, groups: list[CacheGroup], store: BlockStore | None = None) -> KVCacheManager:
    return KVCacheManager(groups, enable_prefix_caching=config.cache.enable_prefix_caching, store=store)


def _make_engine(
    config: EngineConfig,
    model_config: ModelConfig,
    executor: Executor,
    kv_cache: KVCacheManager,
    clock: Clock = time.monotonic,
    adapters: Adapters | None = None,
) -> Engine:
    scheduler = config.scheduler
    if scheduler.max_model_len is None or scheduler.max_num_batched_tokens is None:
        raise EngineError("the engine needs a resolved config")
    return Engine(
        executor,
        kv_cache,
        scheduling=Scheduling(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            policy=scheduler.scheduling_policy,
            max_stall_s=None if scheduler.max_stall_ms is None else scheduler.max_stall_ms / 1000,
            prefill_ratio=scheduler.prefill_ratio,
            whole_prompts=model_config.bidirectional,
            clock=clock,
        ),
        max_model_len=scheduler.max_model_len,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        adapters=adapters,
    )


def _make_adapters(
    config: EngineConfig, model_config: ModelConfig, stored: Stored, load: Callable[[int, Any], None]
) -> Adapters | None:
    """Make the table of an engine's LoRA adapters; None if it has none. load: puts one into a slot of the executor."""
    if not config.lora.enable_lora:
        return None
    reader = open_reader(model_config, stored.source)

    def read(name: str, path: str) -> tuple[AdapterInfo, Adapter]:
        try:
            digest = digest_of(Path(path))
            adapter = reader.read(Path(path), config.lora.max_lora_rank)
        except ModelLoadError as error:
            raise invalid("lora_path", str(error)) from error
        rank = max(part.b.shape[1] for part in adapter.values())
        return AdapterInfo(name, path, rank, tuple(adapter), digest, adapter_size(adapter)), adapter

    return Adapters(config.lora.max_loras, read, load)


def _add_modules(engine: Engine, config: EngineConfig) -> None:
    """Load the LoRA adapters that the config names."""
    for name, path in config.lora.modules.items():
        engine.add_adapter(name, path)


def _plan(
    config: EngineConfig,
    model_config: ModelConfig,
    stored: Stored,
    ops: Ops,
    free_bytes: int,
    draft_bytes: int = 0,
    groups: list[CacheGroup] | None = None,
) -> tuple[EngineConfig, CachePlan, MemoryPlan | None]:
    """Plan the config, the cache and the ledger of an engine whose model is not loaded yet.

    There is no ledger for given groups, nor for a backend whose memory cannot be planned.

    Raises:
        InvalidRequestError: the engine does not fit the option `memory`, or the option needs a ledger.
    """
    if groups is not None:
        return config, plan_given_cache(config, model_config, free_bytes, groups), None
    if not ops.is_planned:
        if config.cache.memory is not None:
            raise fail("memory", config.cache.memory, "null: torch computes here, whose memory cannot be planned")
        return config, plan_kv_cache(config, model_config, free_bytes), None
    layout = HeadLayout(config.parallel.lm_head_pieces, config.parallel.pad_vocab_multiple)
    slices, is_coded = config.numerics.activation_slices, bool(stored.codings)
    part, place = model_config, ANYWHERE
    if config.numerics.kernels == TRITON and config.parallel.num_ranks > 1:  # each on a GPU; the last part is largest
        share = Share(config.parallel.num_ranks - 1, degrees_of(config, model_config))
        part, place = share.config(model_config), RankPlace(split=split_of(model_config, share, NoLinks()))
    options: Any = {"slices": slices, "lora": make_slots(config, ops)}
    sizes = cache(lambda scheme: model_sizes(model_config, ops, layout, stored, place, scheme=scheme, **options))
    config, memory = Ledger(part, sizes, resident_bytes(), free_bytes, draft_bytes, is_coded).fit(config)
    return config, memory.cache, memory


def _find(config: EngineConfig, instance: object | None, *, needs_weights: bool = True) -> tuple[ModelConfig, Weights]:
    """Find the model's config and the place of its weights, without reading them."""
    weights: Weights
    if instance is None:
        weights = resolve_model(config.model, weights=needs_weights)
        model_config = load_model_config(weights, config.numerics.hf_overrides, config.numerics.rope_scaling)
    else:
        for name in ("hf_overrides", "rope_scaling"):
            if getattr(config.numerics, name) is not None:
                raise fail(name, getattr(config.numerics, name), "null: a model object has no config.json")
        found = ModelInstance.of(instance)
        model_config, weights = found.config, found.weights
    try:  # requests without parameters get these
        SamplingParams(**model_config.default_sampling).check_vocabulary(model_config.vocab_size)
    except InvalidRequestError as error:
        raise ModelLoadError(f"generation_config.json: {error}") from error
    return as_served(model_config, config.numerics), weights


def _resolve(
    config: EngineConfig,
    model: ModelConfig,
    weights: Weights,
    num_engines: int = 1,
    number: int = 0,
    *,
    is_complete: bool = True,
) -> tuple[EngineConfig, Stored]:
    """Choose every option that was left open, by the files of the weights, the model and the machine.

    is_complete: as in open_stored.
    """
    numerics, reasons = config.numerics, dict[str, str]()
    if numerics.verify_files and not isinstance(weights, Path):
        raise fail("verify_files", True, "false: a model object has no files")
    if isinstance(weights, Path):
        numerics, reasons = packed.fit(numerics, weights)
        if numerics.verify_files and numerics.load_format == "auto":
            reasons["verify_files"] = f"on: {verify_checksums(weights)}"
    why_not = why_no_gpu(config, model, weights)
    config, why_texts = _for_texts(replace(config, numerics=numerics), model)
    reasons |= why_texts
    config = config.resolve(model, num_engines, number=number, why_no_gpu=why_not)
    check_split(config, model, weights)
    reasons |= explain_sharding(config, model)
    if model.model_impl == "auto" and isinstance(find_model(model.architecture), FallbackVersion):
        reasons["model_impl"] = f"transformers: its own modules compute {model.architecture}, which has no family here"
    merged = config.lora.merge_lora
    stored = open_stored(weights, model, numerics.load_format, is_complete=is_complete, merge_lora=merged)
    numerics, why = config.numerics.with_codings(stored.codings)
    if config.numerics.kernels == TRITON and stored.codings:
        reasons["weights"] = f"{config.numerics.dtype}: {_names(stored)} values are decoded as they are read"
        stored = stored.decoded()
    check_codes(config, model, stored)
    return replace(config, numerics=numerics, reasons=config.reasons | reasons | why), stored


def _for_texts(config: EngineConfig, model: ModelConfig) -> tuple[EngineConfig, dict[str, str]]:
    """Choose what follows from texts of a limited length, and from an encoder: a text is computed in one step, because
    its tokens see those after them. Give the reason of each choice.

    Raises:
        InvalidRequestError: an option is for texts that are continued, or leaves a step too little room.
    """
    scheduler, reasons = config.scheduler, dict[str, str]()
    if scheduler.max_model_len is None and model.max_seq_length is not None:
        scheduler = replace(scheduler, max_model_len=min(model.max_seq_length, model.longest_context))
        reasons["max_model_len"] = f"{scheduler.max_model_len}: max_seq_length of sentence_bert_config.json"
    if model.bidirectional:
        option = config.cache.offload_option or (config.speculation.drafts and "speculative_config")
        if option:
            raise invalid(option, "an encoder continues no text, and its texts share no prefix")
        length, room = scheduler.max_model_len or model.context, scheduler.max_num_batched_tokens
        if room is not None and room < length:
            raise fail("max_num_batched_tokens", room, f"at least max_model_len = {length}: a text is one step")
        scheduler = replace(scheduler, max_num_batched_tokens=room or max(LIMITS[1], length))
        config = replace(config, cache=replace(config.cache, enable_prefix_caching=False))
        reasons["enable_prefix_caching"] = "off: an encoder's tokens depend on the text after them"
    return replace(config, scheduler=scheduler), reasons


def _names(stored: Stored) -> str:
    """Name the codings of a checkpoint's weights; "" if it has none."""
    return ", ".join(dict.fromkeys(coding.name for coding in stored.codings))


def why_no_gpu(config: EngineConfig, model: ModelConfig, weights: Weights) -> str:
    """Say why a model cannot be served on a GPU with these options; "" if it can."""
    widest = max(model.at(layers[0]).head_dim for layers, _ in model.cache_groups())
    if widest > gpu.MAX_HEAD_DIM:
        return f"the heads of the model have {widest} elements; there, they may have {gpu.MAX_HEAD_DIM}"
    if find_model(model.architecture, model.model_impl).needs_torch:
        return "the model is computed in torch by a class that is not one of the built-in families"
    if config.parallel.pipeline_parallel_size > 1:
        return "the stages of a pipeline compute on the CPU only: use device = cpu, or tensor_parallel_size on GPUs"
    if config.parallel.is_on_ray:
        return (
            "processes on a Ray cluster compute on the CPU only: use device = cpu, or this machine's GPUs without Ray"
        )
    if model.bidirectional:
        return "its tokens see the text after them, and the kernels for GPUs attend to what is before"
    if config.numerics.load_format == "mock":
        return "there is no model to compute (load_format = mock)"
    if isinstance(weights, Path) and config.numerics.load_format == "auto" and packed.find_packed(weights) is not None:
        return "the directory holds weights that are packed for the CPU; use the checkpoint they were made from"
    return ""
