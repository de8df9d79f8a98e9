"""The backend that computes, and a model with its weights."""

from functools import partial
from pathlib import Path

from penstock.config import EngineConfig
from penstock.kernels.backends import load_ops
from penstock.kernels.cpu.host import pinned_cores
from penstock.kernels.metadata import KVScales
from penstock.kernels.ops import Ops
from penstock.layers.lm_head import HeadLayout
from penstock.layers.module import CausalLM
from penstock.layers.split import Split
from penstock.layers.stage import Stage
from penstock.planner.memory import (
    free_memory_bytes,
)
from penstock.spec.model_config import ModelConfig
from penstock.tokenizer.grammars import Grammars
from penstock.tokenizer.tokenizer import Tokenizer
from penstock.weights.instance import InstanceWeights
from penstock.weights.kv_scales import read_kv_scales
from penstock.weights.loader import Place, dtype_for, load_model

Weights = Path | InstanceWeights


def make_ops(config: EngineConfig, model_config: ModelConfig) -> Ops:
    """Return the backend that a resolved config specifies."""
    numerics = config.numerics
    threads = numerics.threads or 1
    cores = pinned_cores(numerics.cpu_affinity, threads) if numerics.kernels == "cpu" else ()
    dtype = dtype_for(model_config, numerics.kernels, numerics.dtype)
    return load_ops(numerics.kernels, dtype, threads=threads, cores=cores)


def head_layout(config: EngineConfig) -> HeadLayout:
    """Return how the LM head is cut and padded."""
    return HeadLayout(config.parallel.lm_head_pieces, config.parallel.pad_vocab_multiple)


def make_model(
    config: EngineConfig,
    model_config: ModelConfig,
    weights: Weights,
    ops: Ops,
    split: Split | None = None,
    stage: Stage | None = None,
) -> CausalLM:
    """Load a model, a rank's part of it or a stage of it, as a resolved config specifies.

    Raises:
        ModelLoadError: its weights cannot be served.
    """
    return load_model(
        weights,
        model_config,
        ops,
        config.numerics.load_format,
        scheme=config.numerics.scheme,
        max_model_len=config.scheduler.max_model_len,
        head=head_layout(config),
        place=Place(free_memory_bytes, split, stage),
    )


def make_grammars(model_config: ModelConfig, weights: Weights) -> Grammars:
    """Return what compiles forms, with the tokenizer in the model's directory. A model object has no tokenizer."""
    has_tokenizer = isinstance(weights, Path) and (weights / "tokenizer.json").is_file()
    load = partial(_load_tokenizer, weights) if isinstance(weights, Path) and has_tokenizer else lambda: None
    return Grammars(load, model_config.vocab_size, model_config.eos_token_ids)


def _load_tokenizer(directory: Path) -> Tokenizer:
    """Load a tokenizer. Its libraries are imported only here, because most engines never need them."""
    from penstock.tokenizer.hf import load_tokenizer

    return load_tokenizer(directory)


def read_scales(config: EngineConfig, model: ModelConfig) -> tuple[KVScales, ...] | None:
    """Read the per-channel scales of an int8 cache, one entry per layer; None if the config names no file."""
    file = config.cache.kv_cache_scales
    if file is None:
        return None
    return read_kv_scales(Path(file), model.num_hidden_layers, model.num_key_value_heads, model.head_dim)
