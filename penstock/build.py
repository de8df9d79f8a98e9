"""Composition root: from an EngineConfig to an engine with its executor. The only file that imports every part.

directory -> ModelConfig -> resolved EngineConfig -> backend -> model with weights -> cache plan -> runner -> engine
"""

import hashlib
import inspect
import json
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

# Before torch is loaded, if it is: threads that wait by spinning keep the core from the one that they wait for as soon
# as another process wants one (measured on 2 cores with one busy neighbour: 5 tokens/s spinning, 100 sleeping).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from penstock import validation as check
from penstock.config import BLOCK_SIZE_UNIT, CacheConfig, EngineConfig, NumericsConfig, SchedulerConfig
from penstock.engine.engine import Engine
from penstock.engine.ngram import NgramProposer
from penstock.engine.policies import Scheduling
from penstock.engine.scripted import ScriptedExecutor
from penstock.engine.speculation import Speculation
from penstock.errors import EngineError, InvalidRequestError, ModelLoadError, NotSupportedError
from penstock.interface.messages import ModelInfo
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import CacheGroup, Executor
from penstock.kernels.backends import load_ops
from penstock.kernels.cpu.cores import pinned_cores
from penstock.kernels.cpu.library import level_of_bits
from penstock.kernels.metadata import KVScales
from penstock.kernels.ops import NUMERICS_VERSION, Ops
from penstock.kernels.tensors import Tensor, is_torch
from penstock.layers.context import CausalLM, ForwardContext
from penstock.layers.lm_head import HeadLayout
from penstock.layers.rotary import rotary_fingerprint
from penstock.models.certificate import find_basis, read_certificate
from penstock.models.config_json import load_model_config
from penstock.models.registry import ModelVersion, find_model
from penstock.planner.ledger import Ledger, MemoryPlan
from penstock.planner.memory import (
    CachePlan,
    cached_token_bytes,
    free_memory_bytes,
    mib,
    plan_given_cache,
    plan_kv_cache,
    resident_bytes,
)
from penstock.plugins.user_files import files_fingerprint, import_files
from penstock.runner.draft_model import DraftModelProposer
from penstock.runner.forward_pass import ForwardPass
from penstock.runner.model_runner import LocalExecutor, ModelRunner
from penstock.spec.model_config import ModelConfig
from penstock.spec.sharding_map import ShardingMap
from penstock.validation import fail
from penstock.weights import packed
from penstock.weights.checksums import verify
from penstock.weights.hub import resolve_model
from penstock.weights.instance import InstanceWeights, ModelInstance
from penstock.weights.kv_scales import kv_scales_fingerprint, read_kv_scales
from penstock.weights.loader import dtype_for, load_model
from penstock.weights.safetensors import fingerprint
from penstock.weights.sizes import model_sizes
from penstock.weights.sources import read_parameters

Weights = Path | InstanceWeights
UNLIMITED = 2**62  # bytes
MAX_DRAFTED = 16  # requests that a draft model follows: beyond, a step has rows enough to be busy without drafts
INDEX_BYTES = 64  # per token, of the index that prompts are looked up in; measured on texts of few equal tokens


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine ready to work, its resolved config, and the description of its model for clients.

    model, model_config and ops are the engine's own, for measurements; forward_pass looks into the model.
    """

    engine: Engine
    config: EngineConfig
    info: ModelInfo
    cache_bytes: int
    model: CausalLM
    model_config: ModelConfig
    ops: Ops
    forward_pass: ForwardPass


def build_engine(
    config: EngineConfig,
    instance: object | None = None,
    *,
    takes_over: bool = False,
    groups: list[CacheGroup] | None = None,
) -> BuiltEngine:
    """Load the model and make its engine.

    Args:
        instance: a model object of Transformers, served instead of the model that config.model names. Its weights are
            copied and not read again.
        takes_over: config.cache.kv_cache_memory_bytes is what an engine had whose end frees it, so it is not refused.
        groups: of the cache, with their blocks; None plans them.

    Raises:
        ModelLoadError: the model directory, or the object, cannot be served.
        InvalidRequestError: an option does not fit the model or the machine.
    """
    import_files(config.imports)
    model_config, weights = _find(config, instance)
    config = _resolve(config, model_config, weights)
    if config.numerics.load_format == "mock":
        return _build_mock(config, model_config, weights, groups)
    kv_scales = _read_kv_scales(config, model_config)
    ops = _load_ops(config, model_config)
    free = UNLIMITED if takes_over else free_memory_bytes()
    draft = _find_draft(config, model_config, weights)
    free -= draft.num_bytes
    config, memory = (
        _plan_memory(config, model_config, ops, free, draft.num_bytes) if groups is None else (config, None)
    )
    numerics = config.numerics
    model = load_model(
        weights,
        model_config,
        ops,
        numerics.load_format,
        scheme=numerics.scheme,
        max_model_len=config.scheduler.max_model_len,
        head=HeadLayout(config.parallel.lm_head_pieces, config.parallel.pad_vocab_multiple),
        free_memory=free_memory_bytes,
    )
    plan = memory.cache if memory is not None else _plan_cache(config, model_config, free, groups)
    runner = ModelRunner(model, ops, plan.groups, config, model_config, kv_scales)
    if runner.cache_bytes != plan.num_bytes:
        raise EngineError(f"the cache takes {runner.cache_bytes} bytes where {plan.num_bytes} were planned")
    engine = _make_engine(config, model_config, LocalExecutor(runner), plan.groups)
    engine.speculate(_make_speculation(config, draft))
    info = _with_memory(_model_info(config, model_config, plan, weights), memory)
    forward_pass = ForwardPass(model, ops, config, model_config, kv_scales)
    return BuiltEngine(engine, config, info, runner.cache_bytes, model, model_config, ops, forward_pass)


class _NoModel:
    """The model of an engine that has none."""

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        raise NotSupportedError("load_format: mock has no model", param="load_format")

    def compute_logits(self, hidden: Tensor) -> Tensor:
        raise NotSupportedError("load_format: mock has no model", param="load_format")


def _build_mock(
    config: EngineConfig, model_config: ModelConfig, weights: Weights, groups: list[CacheGroup] | None
) -> BuiltEngine:
    """Make an engine that is whole but for its model: its tokens are a hash of those before them."""
    reason = {"load_format": "mock: no model is loaded, and the tokens mean nothing"}
    config = replace(config, reasons=config.reasons | reason)
    plan = replace(_plan_cache(config, model_config, UNLIMITED, groups), reason="none: its cache holds token ids")
    executor = ScriptedExecutor(plan.groups, model_config.vocab_size, keeps_steps=False)
    engine = _make_engine(config, model_config, executor, plan.groups)
    if config.speculation.drafts is not None and config.speculation.drafts.model is not None:
        raise fail("speculative_config", config.speculation.drafts.model, 'with the method "ngram": mock has no model')
    engine.speculate(_make_speculation(config, _Draft()))
    model, ops = _NoModel(), _load_ops(config, model_config)
    return BuiltEngine(
        engine=engine,
        config=config,
        info=_model_info(config, model_config, plan, weights),
        cache_bytes=plan.num_bytes,
        model=model,
        model_config=model_config,
        ops=ops,
        forward_pass=ForwardPass(model, ops, config, model_config),
    )


def _make_engine(
    config: EngineConfig, model_config: ModelConfig, executor: Executor, groups: list[CacheGroup]
) -> Engine:
    scheduler = config.scheduler
    if scheduler.max_model_len is None or scheduler.max_num_batched_tokens is None:
        raise EngineError("the engine needs a resolved config")
    return Engine(
        executor,
        groups,
        scheduling=Scheduling(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            policy=scheduler.scheduling_policy,
            max_stall_s=None if scheduler.max_stall_ms is None else scheduler.max_stall_ms / 1000,
        ),
        max_model_len=scheduler.max_model_len,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        enable_prefix_caching=config.cache.enable_prefix_caching,
    )


@dataclass(frozen=True, slots=True)
class _Draft:
    """What makes drafts, before anything is allocated.

    Attributes:
        num_bytes: what it will take.
        config, model_config, weights, groups: of a draft model.
    """

    num_bytes: int = 0
    config: EngineConfig | None = None
    model_config: ModelConfig | None = None
    weights: Path | None = None
    groups: tuple[CacheGroup, ...] = ()


def _find_draft(config: EngineConfig, target: ModelConfig, target_weights: Weights) -> _Draft:
    """Return what the speculative config needs.

    Raises:
        InvalidRequestError: the draft model has another vocabulary.
        ModelLoadError: it cannot be served.
    """
    wanted, scheduler = config.speculation.drafts, config.scheduler
    if wanted is None or wanted.model is None:
        entries = 0 if wanted is None else scheduler.max_num_seqs * (scheduler.max_model_len or 0)
        return _Draft(entries * INDEX_BYTES)
    weights = resolve_model(wanted.model)
    model = load_model_config(weights)
    if model.vocab_size != target.vocab_size or not _same_tokens(weights, target_weights):
        message = f"{wanted.model} has {model.vocab_size} tokens, and {config.model} others or {target.vocab_size}"
        param = "speculative_config"
        raise InvalidRequestError(f"{param}.model: {message}; both need one vocabulary", param=param)
    own = _draft_config(config, wanted.model, model)
    rows, length = own.scheduler.max_num_seqs, own.cache.block_size or 0
    groups = tuple(CacheGroup(layers, window, rows, length) for layers, window in model.cache_groups())
    num_bytes = rows * length * model.num_hidden_layers * cached_token_bytes(own, model)
    ops = _load_ops(own, model)
    if not is_torch(ops.dtype):
        ledger = Ledger(model, lambda scheme: model_sizes(model, ops, scheme, HeadLayout(1, 1)), 0, 0)
        num_bytes += ledger.bytes_beside_cache(own)
    return _Draft(num_bytes, own, model, weights, groups)


def _same_tokens(draft: Path, target: Weights) -> bool:
    """Return whether two models have one vocabulary, as far as their tokenizer.json tell."""
    if not isinstance(target, Path):
        return True
    files = [path / "tokenizer.json" for path in (draft, target)]
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return True
    try:
        one, other = (json.loads(file.read_bytes())["model"]["vocab"] for file in files)
    except (ValueError, LookupError, TypeError):
        return True  # what the tokenizer makes of such a file, it says itself
    return bool(one == other)


def _draft_config(config: EngineConfig, name: str, model: ModelConfig) -> EngineConfig:
    """Return the resolved config of a draft model: a block for each of MAX_DRAFTED requests, and its own weights."""
    length = min(config.scheduler.max_model_len or model.context, model.context)
    block_size = -(-length // BLOCK_SIZE_UNIT) * BLOCK_SIZE_UNIT
    numerics = config.numerics
    found = EngineConfig(
        model=name,
        cache=CacheConfig(block_size=block_size, enable_prefix_caching=False),
        scheduler=SchedulerConfig(
            max_model_len=length,
            max_num_seqs=min(config.scheduler.max_num_seqs, MAX_DRAFTED),
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        ),
        numerics=NumericsConfig(
            dtype="auto", kernels=numerics.kernels, load_format=numerics.load_format, cpu_affinity="none"
        ),
    ).resolve(model)
    threads = min(found.numerics.threads or 1, numerics.threads or 1)
    return replace(found, numerics=replace(found.numerics, threads=threads))


def _make_speculation(config: EngineConfig, draft: _Draft) -> Speculation | None:
    """Load the draft model, if there is one. Return what asks for drafts."""
    wanted = config.speculation.drafts
    if wanted is None:
        return None
    if draft.config is None or draft.model_config is None or draft.weights is None:
        lookup = NgramProposer(wanted.prompt_lookup_max or 1, wanted.prompt_lookup_min or 1)
        return Speculation(lookup, wanted.num_speculative_tokens)
    own, scheduler = draft.config, draft.config.scheduler
    ops = _load_ops(own, draft.model_config)
    model = load_model(
        draft.weights,
        draft.model_config,
        ops,
        own.numerics.load_format,
        scheme=own.numerics.scheme,
        max_model_len=scheduler.max_model_len,
        head=HeadLayout(1, 1),
        free_memory=free_memory_bytes,
    )
    runner = ModelRunner(model, ops, draft.groups, own, draft.model_config)
    proposer = DraftModelProposer(runner, scheduler.max_num_seqs, scheduler.max_num_batched_tokens or 1)
    return Speculation(proposer, wanted.num_speculative_tokens)


def _read_kv_scales(config: EngineConfig, model: ModelConfig) -> tuple[KVScales, ...] | None:
    """Read the scales per channel of an int8 cache, one entry per layer; None where the config names no file."""
    file = config.cache.kv_cache_scales
    if file is None:
        return None
    return read_kv_scales(Path(file), model.num_hidden_layers, model.num_key_value_heads, model.head_dim)


def _plan_cache(
    config: EngineConfig, model_config: ModelConfig, free: int, groups: list[CacheGroup] | None
) -> CachePlan:
    """Plan the cache of an engine that has no ledger."""
    if groups is not None:
        return plan_given_cache(config, model_config, free, groups)
    return plan_kv_cache(config, model_config, free)


def _load_ops(config: EngineConfig, model_config: ModelConfig) -> Ops:
    numerics = config.numerics
    threads = numerics.threads or 1
    cores = pinned_cores(numerics.cpu_affinity, threads) if numerics.kernels == "cpu" else ()
    dtype = dtype_for(model_config, numerics.kernels, numerics.dtype)
    return load_ops(numerics.kernels, dtype, threads=threads, cores=cores)


def _plan_memory(
    config: EngineConfig, model_config: ModelConfig, ops: Ops, free_bytes: int, draft_bytes: int
) -> tuple[EngineConfig, MemoryPlan | None]:
    """Return the ledger of an engine before its model is loaded; None where torch computes, whose memory is its own.

    Raises:
        InvalidRequestError: the engine does not fit the option `memory`, or the option needs a ledger.
    """
    if is_torch(ops.dtype):
        if config.cache.memory is not None:
            raise check.fail("memory", config.cache.memory, "null: only models of the native kernels can be planned")
        return config, None
    layout = HeadLayout(config.parallel.lm_head_pieces, config.parallel.pad_vocab_multiple)
    sizes = cache(lambda scheme: model_sizes(model_config, ops, scheme, layout))
    ledger = Ledger(model_config, sizes, resident_bytes(), free_bytes, draft_bytes)
    return ledger.fit(config)


def _find(config: EngineConfig, instance: object | None) -> tuple[ModelConfig, Weights]:
    """Return the numbers of the model and where its weights are, without reading them."""
    weights: Weights
    if instance is None:
        weights = resolve_model(config.model)
        model_config = load_model_config(weights)
    else:
        found = ModelInstance.of(instance)
        model_config, weights = found.config, found.weights
    try:  # requests without parameters get these
        SamplingParams(**model_config.default_sampling).check_vocabulary(model_config.vocab_size)
    except InvalidRequestError as error:
        raise ModelLoadError(f"generation_config.json: {error}") from error
    return replace(model_config, model_impl=config.numerics.model_impl), weights


def _resolve(config: EngineConfig, model: ModelConfig, weights: Weights) -> EngineConfig:
    """Choose every option that was left open: from a packed directory, the model and the machine."""
    numerics, reasons = config.numerics, dict[str, str]()
    if numerics.verify_files and not isinstance(weights, Path):
        raise fail("verify_files", True, "false: a model object has no files")
    if isinstance(weights, Path):
        numerics, reasons = packed.fit(numerics, weights)
        if numerics.verify_files and numerics.load_format == "auto":
            reasons["verify_files"] = f"on: {verify(weights)}"
    config = replace(config, numerics=numerics).resolve(model)
    return replace(config, reasons=config.reasons | reasons | _check_sharding(config, model))


def _check_sharding(config: EngineConfig, model: ModelConfig) -> dict[str, str]:
    """Check that a sharding file fits the model. Return its effect on one device, for EngineConfig.reasons."""
    file = config.parallel.sharding_config
    if file is None:
        return {}
    try:
        axes = ShardingMap.from_file(Path(file)).resolve(read_parameters(model))
    except ModelLoadError as error:
        raise InvalidRequestError(f"sharding_config: {error}", param="sharding_config") from error
    split = sum(axis is not None for axis in axes.values())
    reason = f"{file}: it fits, and splits {split} of {len(axes)} parameters; on one device nothing is split"
    return {"sharding_config": reason}


def _model_info(config: EngineConfig, model_config: ModelConfig, plan: CachePlan, weights: Weights) -> ModelInfo:
    if config.numerics.load_format != "auto":
        digest = config.numerics.load_format
    else:
        digest = fingerprint(weights) if isinstance(weights, Path) else weights.fingerprint()
    choices_made = {**config.reasons, "kv_cache_memory_bytes": plan.reason}
    if model_config.ignored_generation:
        choices_made["generation_config.json"] = f"{', '.join(model_config.ignored_generation)}: not applied"
    return ModelInfo(
        model=config.model,
        max_model_len=config.scheduler.max_model_len or 0,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        dtype=config.numerics.dtype,
        system_fingerprint=_system_fingerprint(config, model_config, digest),
        default_sampling=dict(model_config.default_sampling),
        choices_made=choices_made,
        certificate=_certificate(model_config, weights, digest),
        max_num_seqs=config.scheduler.max_num_seqs,
        block_size=plan.groups[0].block_size,
        scheduling_policy=config.scheduler.scheduling_policy,
    )


def _with_memory(info: ModelInfo, plan: MemoryPlan | None) -> ModelInfo:
    """Add the ledger, and what is in use now that the model is loaded."""
    if plan is None:
        return info
    shown = {"memory": f"{plan}; {mib(resident_bytes())} in use after loading"}
    return replace(info, memory=plan.entries, choices_made=info.choices_made | shown)


def _system_fingerprint(config: EngineConfig, model_config: ModelConfig, weights: str) -> str:
    """Name everything that can change a bit of an answer; `weights` is their fingerprint.

    tests/test_fingerprint.py holds it against every option of the engine.
    """
    numerics, kv_scales = config.numerics, config.cache.kv_cache_scales
    entry = find_model(model_config.architecture, model_config.model_impl)
    kernels = f"cpu.{level_of_bits()}" if numerics.kernels == "cpu" else numerics.kernels
    ropes = [rope for rope in (model_config.rope, model_config.local_rope) if rope is not None]
    parts = [
        weights,
        repr(replace(model_config, model_impl="")),
        _code_fingerprint(entry),
        *(rotary_fingerprint(rope, model_config.head_dim, config.scheduler.max_model_len or 0) for rope in ropes),
        numerics.dtype,
        config.cache.kv_cache_dtype,
        "" if kv_scales is None else kv_scales_fingerprint(Path(kv_scales)),
        repr(numerics.scheme),
        kernels,
        *(_torch_version() if numerics.kernels != "cpu" or entry.needs_torch else ()),
        *([files_fingerprint(config.imports)] if config.imports else []),
    ]
    digest = hashlib.blake2b("/".join(parts).encode(), digest_size=6).hexdigest()
    quantization = [] if numerics.quantization is None else [numerics.quantization]
    return "-".join(["penstock", str(NUMERICS_VERSION), kernels, numerics.dtype, *quantization, digest])


def _code_fingerprint(entry: ModelVersion) -> str:
    """Name the implementation; NUMERICS_VERSION stands for the code of a built-in one."""
    if isinstance(entry.source, str):
        return f"{entry.source} {entry.table_file.name}"
    return f"{entry.source.__qualname__} {files_fingerprint([inspect.getfile(entry.source), str(entry.table_file)])}"


def _torch_version() -> tuple[str, ...]:
    """Return what decides how plain torch rounds, as far as it is known: its version and its number of threads."""
    import torch

    return torch.__version__, str(torch.get_num_threads())


def _certificate(model_config: ModelConfig, place: Weights, weights: str) -> dict[str, Any] | None:
    """Return what `penstock check` has proved about this model, and whether it was with these weights."""
    if not isinstance(place, Path):  # a model object has no config.json that a proof could rest on
        return None
    entry = find_model(model_config.architecture, model_config.model_impl)
    try:
        file = Path(inspect.getfile(entry.model_class))
        config_file = place / "config.json"
        basis = find_basis(model_config.architecture, file, entry.table_file, config_file, NUMERICS_VERSION)
    except OSError:
        return None
    found = read_certificate(basis)
    return None if found is None else found | {"same_weights": found["weights"] == weights}
