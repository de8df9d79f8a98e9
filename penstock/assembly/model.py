"""The backend that computes, and a model with its weights."""

from pathlib import Path

from penstock.config import EngineConfig
from penstock.kernels.backends import load_ops
from penstock.kernels.cpu.cores import pinned_cores
from penstock.kernels.metadata import KVScales
from penstock.kernels.ops import Ops
from penstock.layers.context import CausalLM
from penstock.layers.lm_head import HeadLayout
from penstock.layers.split import Split
from penstock.planner.memory import (
    free_memory_bytes,
)
from penstock.spec.model_config import ModelConfig
from penstock.weights.instance import InstanceWeights
from penstock.weights.kv_scales import read_kv_scales
from penstock.weights.loader import dtype_for, load_model, load_part

Weights = Path | InstanceWeights


def make_ops(config: EngineConfig, model_config: ModelConfig) -> Ops:
    """Return the backend that a resolved config asks for."""
    numerics = config.numerics
    threads = numerics.threads or 1
    cores = pinned_cores(numerics.cpu_affinity, threads) if numerics.kernels == "cpu" else ()
    dtype = dtype_for(model_config, numerics.kernels, numerics.dtype)
    return load_ops(numerics.kernels, dtype, threads=threads, cores=cores)


def head_layout(config: EngineConfig) -> HeadLayout:
    """Return how the LM head is cut and padded."""
    return HeadLayout(config.parallel.lm_head_pieces, config.parallel.pad_vocab_multiple)


def make_model(
    config: EngineConfig, model_config: ModelConfig, weights: Weights, ops: Ops, split: Split | None = None
) -> CausalLM:
    """Load a model, or a rank's part of it, as a resolved config asks for it.

    Raises:
        ModelLoadError: its weights cannot be served.
    """
    numerics, length = config.numerics, config.scheduler.max_model_len
    if split is not None and isinstance(weights, Path):
        return load_part(
            weights, model_config, ops, numerics.load_format, split,
            scheme=numerics.scheme, max_model_len=length, free_memory=free_memory_bytes,
        )  # fmt: skip
    return load_model(
        weights,
        model_config,
        ops,
        numerics.load_format,
        scheme=numerics.scheme,
        max_model_len=length,
        head=head_layout(config),
        free_memory=free_memory_bytes,
    )


def read_scales(config: EngineConfig, model: ModelConfig) -> tuple[KVScales, ...] | None:
    """Read the scales per channel of an int8 cache, one entry per layer; None where the config names no file."""
    file = config.cache.kv_cache_scales
    if file is None:
        return None
    return read_kv_scales(Path(file), model.num_hidden_layers, model.num_key_value_heads, model.head_dim)
