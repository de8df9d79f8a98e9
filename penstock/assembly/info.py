"""The description of an engine for clients: its ModelInfo, with the fingerprint of all that can change a bit."""

import hashlib
import inspect
import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from penstock.assembly.memory import CachePlan, MemoryPlan, mib
from penstock.config import TRITON, EngineConfig
from penstock.interface.messages import ModelInfo
from penstock.interface.plugins import files_fingerprint
from penstock.interface.pooling import PoolerConfig
from penstock.kernels.cpu.host import resident_bytes
from penstock.kernels.cpu.library import level_of_bits
from penstock.kernels.ops import NUMERICS_VERSION
from penstock.kernels.triton import device as gpu
from penstock.layers.rotary import rotary_fingerprint
from penstock.models.certificate import find_basis, read_certificate
from penstock.models.registry import FALLBACK, FallbackVersion, ModelVersion, find_architecture, find_model
from penstock.spec.model_config import ModelConfig
from penstock.spec.pooler import read_pooler, usual_pooler
from penstock.weights.adapters import digest_of
from penstock.weights.instance import Weights
from penstock.weights.kv_scales import kv_scales_fingerprint
from penstock.weights.safetensors import fingerprint


def describe(config: EngineConfig, model_config: ModelConfig, plan: CachePlan, weights: Weights) -> ModelInfo:
    if config.numerics.load_format != "auto":
        digest = config.numerics.load_format
    else:
        digest = fingerprint(weights) if isinstance(weights, Path) else weights.fingerprint()
    choices_made = {**config.reasons, "kv_cache_memory_bytes": plan.reason, **model_config.notes}
    if model_config.ignored_generation:
        choices_made["generation_config.json"] = f"{', '.join(model_config.ignored_generation)}: not applied"
    if model_config.quantization and model_config.quantization.kv_levels and config.cache.kv_cache_scales is None:
        choices_made["kv_cache_scales"] = "those of the checkpoint are not applied; name its directory to use them"
    pooler = _pooler(config, model_config, weights)
    if pooler.add_eos_token and "add_eos_token" not in (config.pooling.pooler_config or {}):
        choices_made["pooler_config"] = (
            "add_eos_token: EOS follows each text to embed, as tokenizer_config.json says; Transformers 5 leaves it out"
        )
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
        pooler=pooler,
        has_lm_head=find_architecture(model_config.architecture).has_lm_head,
        max_loras=config.lora.max_loras if config.lora.enable_lora else 0,
    )


def _pooler(config: EngineConfig, model_config: ModelConfig, weights: Weights) -> PoolerConfig:
    """Decide how hidden states become embeddings: as the model's files say, unless the user's options say otherwise."""
    usual = usual_pooler(model_config)
    found = read_pooler(weights, usual) if isinstance(weights, Path) else usual
    return found.with_options(config.pooling.pooler_config)


def with_memory(info: ModelInfo, plan: MemoryPlan | None) -> ModelInfo:
    """Add the memory plan, and the memory in use now that the model is loaded."""
    if plan is None:
        return info
    shown = {"memory": f"{plan}; {mib(resident_bytes())} in use after loading"}
    return replace(info, memory=plan.entries, choices_made=info.choices_made | shown)


def _system_fingerprint(config: EngineConfig, model_config: ModelConfig, weights: str) -> str:
    """Name everything that can change a bit of an answer. weights: the fingerprint of the weights.

    tests/test_fingerprint.py checks it against every option of the engine.
    """
    numerics, kv_scales = config.numerics, config.cache.kv_cache_scales
    entry = find_model(model_config.architecture, model_config.model_impl)
    kernels = numerics.kernels
    if kernels in ("cpu", TRITON):
        kernels = (
            f"cpu.{level_of_bits()}" if kernels == "cpu" else gpu.name_of(numerics.device, config.parallel.num_ranks)
        )
    parts = [
        weights,
        repr(replace(model_config, model_impl="")),
        _code_fingerprint(entry, model_config),
        *(rotary_fingerprint(*rope, config.scheduler.max_model_len or 0) for rope in model_config.ropes()),
        numerics.dtype,
        config.cache.kv_cache_dtype,
        "" if kv_scales is None else kv_scales_fingerprint(Path(kv_scales)),
        repr(numerics.scheme),
        *([] if config.lora.merge_lora is None else [digest_of(Path(config.lora.merge_lora))]),
        *([] if numerics.activation_dtype == "auto" else [numerics.activation_dtype]),
        kernels,
        *(_torch_version() if numerics.kernels == "reference" or entry.needs_torch else ()),
        *([gpu.fingerprint()] if numerics.kernels == TRITON else []),
        *([files_fingerprint(config.imports)] if config.imports else []),
    ]
    digest = hashlib.blake2b("/".join(parts).encode(), digest_size=6).hexdigest()
    quantization = [item for item in (numerics.quantization, numerics.activation_dtype) if item not in (None, "auto")]
    return "-".join(["penstock", str(NUMERICS_VERSION), kernels, numerics.dtype, *quantization, digest])


def _code_fingerprint(entry: ModelVersion, model_config: ModelConfig) -> str:
    """Name the implementation. The code of a built-in one is covered by NUMERICS_VERSION."""
    if isinstance(entry, FallbackVersion):  # its modules read more of config.json than ModelConfig has
        file = json.dumps(model_config.source, sort_keys=True)
        return f"{entry.source} {entry.REVISION} {metadata.version(FALLBACK)} {file}"
    if isinstance(entry.source, str):
        return f"{entry.source} {entry.table_file.name}"
    return f"{entry.source.__qualname__} {files_fingerprint([inspect.getfile(entry.source), str(entry.table_file)])}"


def _torch_version() -> tuple[str, ...]:
    """List what determines how plain torch rounds, as far as known: its version and its number of threads."""
    import torch

    return torch.__version__, str(torch.get_num_threads())


def _certificate(model_config: ModelConfig, place: Weights, weights: str) -> dict[str, Any] | None:
    """Find what `penstock check` has proved about this model, and whether that was with these weights."""
    if not isinstance(place, Path):  # a model object has no config.json on which a certificate depends
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
