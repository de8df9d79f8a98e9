"""Composition root: from an EngineConfig to an engine with its executor. The only file that knows every part.

directory -> ModelConfig -> resolved EngineConfig -> backend -> model with weights -> cache plan -> worker -> engine
"""

import hashlib
import inspect
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Before torch is loaded: threads that wait by spinning take the core from whoever they wait for as soon as another
# process wants one (measured on 2 cores with one busy neighbour: 5 tokens/s spinning, 100 sleeping).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.errors import EngineError, InvalidRequestError, ModelLoadError
from penstock.interface.messages import ModelInfo
from penstock.interface.sampling_params import SamplingParams
from penstock.kernels.backends import load_ops
from penstock.kernels.cpu.library import chosen_level
from penstock.kernels.metadata import KVScales
from penstock.kernels.ops import NUMERICS_VERSION, Ops
from penstock.layers.causal_lm import CausalLM
from penstock.layers.lm_head import HeadLayout
from penstock.models.certificate import find_basis, read_certificate
from penstock.models.config_json import load_model_config
from penstock.models.registry import find_model
from penstock.planner.memory import CachePlan, free_memory_bytes, plan_kv_cache
from penstock.plugins.user_files import files_fingerprint, import_files
from penstock.runner.executor import TorchExecutor
from penstock.runner.model_runner import ModelRunner
from penstock.spec.model_config import ModelConfig
from penstock.spec.sharding_map import ShardingMap
from penstock.weights import packed
from penstock.weights.hub import resolve_model
from penstock.weights.instance import InstanceWeights, ModelInstance
from penstock.weights.kv_scales import kv_scales_fingerprint, read_kv_scales
from penstock.weights.loader import load_model
from penstock.weights.safetensors import fingerprint
from penstock.weights.sources import read_parameters

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine ready to work, its resolved config, and what it says of its model.

    Model, its numbers and the backend are there for those who measure; they are the engine's own.
    """

    engine: Engine
    config: EngineConfig
    info: ModelInfo
    cache_bytes: int
    model: CausalLM
    model_config: ModelConfig
    ops: Ops


def build_engine(config: EngineConfig, instance: object | None = None) -> BuiltEngine:
    """Load the model and make its engine.

    instance: a model object of Transformers, to be served instead of what config.model names. Its weights are packed
        here and not looked at again.

    Raises:
        ModelLoadError: the model directory, or the object, cannot be served.
        InvalidRequestError: an option does not fit the model or the machine.
    """
    import_files(config.imports)
    found = _find(config.model) if instance is None else ModelInstance.of(instance)
    model_config = replace(found.config, model_impl=config.numerics.model_impl)
    _check_defaults(model_config)
    numerics, held = config.numerics, dict[str, str]()
    if isinstance(found.weights, Path):
        numerics, held = packed.fit(numerics, found.weights)
    config = replace(config, numerics=numerics).resolve(model_config)
    config, numerics = replace(config, reasons=config.reasons | held), config.numerics
    config = _check_sharding(config, model_config)
    kv_scales = _kv_scales(config, model_config)
    ops = load_ops(numerics.kernels, TORCH_DTYPES[numerics.dtype], threads=numerics.threads or 1)
    model = load_model(
        found.weights,
        model_config,
        ops,
        numerics.load_format,
        scheme=numerics.scheme,
        max_model_len=config.scheduler.max_model_len,
        head=HeadLayout(config.parallel.lm_head_pieces, config.parallel.pad_vocab_multiple),
        free_memory=free_memory_bytes,
    )
    plan = plan_kv_cache(config, model_config, free_memory_bytes())
    runner = ModelRunner(model, ops, plan.groups, config, model_config, kv_scales)
    if runner.cache_bytes != plan.num_bytes:
        raise EngineError(f"the cache takes {runner.cache_bytes} bytes where {plan.num_bytes} were planned")
    weights = "dummy" if numerics.load_format == "dummy" else _fingerprint(found)
    info = replace(
        _model_info(config, model_config, plan, weights),
        certificate=_certificate(model_config, found.weights, weights),
    )
    engine = _engine(config, model_config, plan, runner)
    return BuiltEngine(engine, config, info, plan.num_bytes, model, model_config, ops)


@dataclass(frozen=True, slots=True)
class _Directory:
    """What a ModelInstance is for a model object."""

    config: ModelConfig
    weights: Path


def _find(model: str) -> _Directory:
    directory = resolve_model(model)
    return _Directory(load_model_config(directory), directory)


def _fingerprint(found: _Directory | ModelInstance) -> str:
    return fingerprint(found.weights) if isinstance(found, _Directory) else found.weights.fingerprint()


def _check_sharding(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """A sharding file has to fit the model. The config comes back with what it is good for on one device.

    Raises:
        InvalidRequestError: it cannot be read, or does not fit.
    """
    file = config.parallel.sharding_config
    if file is None:
        return config
    try:
        axes = ShardingMap.from_file(Path(file)).resolve(read_parameters(model))
    except ModelLoadError as error:
        raise InvalidRequestError(f"sharding_config: {error}", param="sharding_config") from error
    split = sum(axis is not None for axis in axes.values())
    reason = f"{file}: it fits, and splits {split} of {len(axes)} parameters; on one device nothing is split"
    return replace(config, reasons=config.reasons | {"sharding_config": reason})


def _kv_scales(config: EngineConfig, model: ModelConfig) -> tuple[KVScales, ...] | None:
    file = config.cache.kv_cache_scales
    if file is None:
        return None
    return read_kv_scales(Path(file), model.num_hidden_layers, model.num_key_value_heads, model.head_dim)


def _check_defaults(model_config: ModelConfig) -> None:
    """Values that requests without parameters will get have to be ones that they could give."""
    try:
        SamplingParams(**model_config.default_sampling)
    except InvalidRequestError as error:
        raise ModelLoadError(f"generation_config.json: {error}") from error


def _engine(config: EngineConfig, model_config: ModelConfig, plan: CachePlan, runner: ModelRunner) -> Engine:
    scheduler = config.scheduler
    if scheduler.max_model_len is None or scheduler.max_num_batched_tokens is None:
        raise EngineError("the engine needs a resolved config")
    return Engine(
        TorchExecutor(runner),
        plan.groups,
        max_model_len=scheduler.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        enable_prefix_caching=config.cache.enable_prefix_caching,
    )


def _model_info(config: EngineConfig, model_config: ModelConfig, plan: CachePlan, weights: str) -> ModelInfo:
    numerics, kv_scales = config.numerics, config.cache.kv_cache_scales
    kernels = f"cpu.{chosen_level()}" if numerics.kernels == "cpu" else numerics.kernels
    parts = [
        weights,
        repr(model_config),
        numerics.dtype,
        config.cache.kv_cache_dtype,
        "" if kv_scales is None else kv_scales_fingerprint(Path(kv_scales)),
        repr(numerics.scheme),
        kernels,
        *([files_fingerprint(config.imports)] if config.imports else []),
    ]
    quantization = [] if numerics.quantization is None else [numerics.quantization]
    digest = hashlib.blake2b("/".join(parts).encode(), digest_size=6).hexdigest()
    return ModelInfo(
        model=config.model,
        max_model_len=config.scheduler.max_model_len or 0,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        dtype=numerics.dtype,
        system_fingerprint="-".join(
            ["penstock", str(NUMERICS_VERSION), kernels, numerics.dtype, *quantization, digest]
        ),
        default_sampling=dict(model_config.default_sampling),
        choices_made={**config.reasons, "kv_cache_memory_bytes": plan.reason, **_not_applied(model_config)},
    )


def _certificate(model_config: ModelConfig, place: Path | InstanceWeights, weights: str) -> dict[str, Any] | None:
    """What has been proved about this model, if anything; weights are told apart by their fingerprint."""
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


def _not_applied(model_config: ModelConfig) -> dict[str, str]:
    """What the model's author asked for and does not get, so that it is not ignored in silence."""
    if not model_config.ignored_generation:
        return {}
    return {"generation_config.json": f"{', '.join(model_config.ignored_generation)}: not applied"}
