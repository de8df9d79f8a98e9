"""Makes what drafts the next tokens, if a speculative config asks for it: prompt lookup or a draft model."""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from penstock.assembly.memory import Ledger, all_token_bytes
from penstock.assembly.sizes import model_sizes
from penstock.config import (
    BLOCK_SIZE_UNIT,
    BLOCK_SIZE_UNITS,
    CacheConfig,
    EngineConfig,
    NumericsConfig,
    SchedulerConfig,
)
from penstock.engine.speculation import NgramProposer, Speculation
from penstock.errors import InvalidRequestError
from penstock.interface.step import CacheGroup
from penstock.layers.weights import HeadLayout
from penstock.models.config_json import load_model_config
from penstock.runner.draft_model import DraftModelProposer
from penstock.runner.model_runner import ModelRunner
from penstock.spec.model_config import ModelConfig
from penstock.weights.hub import resolve_model
from penstock.weights.instance import Weights
from penstock.weights.loader import Place, make_model, make_ops, open_stored

MAX_DRAFTED = 16  # requests that a draft model follows; steps with more rows are busy enough without drafts
INDEX_BYTES = 64  # bytes per token of the index for prompt lookup; measured on texts with few equal tokens


@dataclass(frozen=True, slots=True)
class Draft:
    """A source of drafts, before anything is allocated.

    Attributes:
        num_bytes: the memory that it will take.
        config, model_config, weights, groups: those of a draft model, if there is one.
    """

    num_bytes: int = 0
    config: EngineConfig | None = None
    model_config: ModelConfig | None = None
    weights: Path | None = None
    groups: tuple[CacheGroup, ...] = ()


def find_draft(config: EngineConfig, target: ModelConfig, target_weights: Weights) -> Draft:
    """Choose the source of drafts that the speculative config asks for.

    Raises:
        InvalidRequestError: the draft model has a different vocabulary.
        ModelLoadError: the draft model cannot be served.
    """
    wanted, scheduler = config.speculation.drafts, config.scheduler
    if wanted is None or wanted.model is None:
        entries = 0 if wanted is None else scheduler.max_num_seqs * (scheduler.max_model_len or 0)
        return Draft(entries * INDEX_BYTES)
    weights = resolve_model(wanted.model)
    model = load_model_config(weights)
    if model.vocab_size != target.vocab_size or not _same_tokens(weights, target_weights):
        message = (
            f"its vocabulary ({model.vocab_size} tokens) is not that of {config.model} ({target.vocab_size} tokens)"
        )
        param = "speculative_config"
        raise InvalidRequestError(
            f"{param}.model: {wanted.model}: {message}; use a draft model that has it", param=param
        )
    own = _draft_config(config, wanted.model, model)
    rows, length = own.scheduler.max_num_seqs, own.cache.block_size or 0
    groups = tuple(
        CacheGroup(layers, window, rows, length, chunked=model.chunked_windows)
        for layers, window in model.cache_groups()
    )
    num_bytes = rows * length * all_token_bytes(own, model)
    ops = make_ops(own, model)
    if ops.is_planned:
        stored = open_stored(weights, model, own.numerics.load_format)
        sizes = partial(model_sizes, model, ops, HeadLayout(1, 1), stored, slices=own.numerics.activation_slices)
        ledger = Ledger(model, lambda scheme: sizes(scheme=scheme), 0, 0)
        num_bytes += ledger.bytes_beside_cache(own)
    return Draft(num_bytes, own, model, weights, groups)


def _same_tokens(draft: Path, target: Weights) -> bool:
    """Compare two models' vocabularies, as far as their tokenizer.json files show them."""
    if not isinstance(target, Path):
        return True
    files = [path / "tokenizer.json" for path in (draft, target)]
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return True
    try:
        one, other = (json.loads(file.read_bytes())["model"]["vocab"] for file in files)
    except (ValueError, LookupError, TypeError):
        return True  # loading the tokenizer reports the error
    return bool(one == other)


def _draft_config(config: EngineConfig, name: str, model: ModelConfig) -> EngineConfig:
    """Derive the resolved config of a draft model, with a cache of one block for each of up to MAX_DRAFTED requests."""
    length = min(config.scheduler.max_model_len or model.context, model.context)
    numerics = config.numerics
    unit = BLOCK_SIZE_UNITS.get(numerics.kernels, BLOCK_SIZE_UNIT)
    block_size = -(-length // unit) * unit
    found = EngineConfig(
        model=name,
        cache=CacheConfig(block_size=block_size, enable_prefix_caching=False),
        scheduler=SchedulerConfig(
            max_model_len=length,
            max_num_seqs=min(config.scheduler.max_num_seqs, MAX_DRAFTED),
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        ),
        numerics=NumericsConfig(
            dtype="auto",
            kernels=numerics.kernels,
            device=numerics.device,
            load_format=numerics.load_format,
            cpu_affinity="none",
        ),
    ).resolve(model)
    threads = min(found.numerics.threads or 1, numerics.threads or 1)
    return replace(found, numerics=replace(found.numerics, threads=threads))


def make_speculation(config: EngineConfig, draft: Draft) -> Speculation | None:
    """Load the draft model, if there is one. Return the engine's Speculation; None if drafts are off."""
    wanted = config.speculation.drafts
    if wanted is None:
        return None
    if draft.config is None or draft.model_config is None or draft.weights is None:
        lookup = NgramProposer(wanted.prompt_lookup_max or 1, wanted.prompt_lookup_min or 1)
        return Speculation(lookup, wanted.num_speculative_tokens)
    own, scheduler = draft.config, draft.config.scheduler
    ops = make_ops(own, draft.model_config)
    model = make_model(own, draft.model_config, draft.weights, ops, Place(ops.free_bytes))
    runner = ModelRunner(model, ops, draft.groups, own, draft.model_config)
    proposer = DraftModelProposer(runner, scheduler.max_num_seqs, scheduler.max_num_batched_tokens or 1)
    return Speculation(proposer, wanted.num_speculative_tokens)
