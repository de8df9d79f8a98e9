"""Describes an engine as it was built, so that a replay can build it again."""

from dataclasses import fields
from typing import Any

from penstock.config import PARTS, EngineConfig
from penstock.engine.engine import Engine
from penstock.interface.messages import ModelInfo
from penstock.recorder.records import EngineDescription

# Options that change no bit of an answer. They depend on the machine; drafts are in the record of each step.
LEFT_OUT = {"memory", "kv_cache_memory_bytes", "threads", "cpu_affinity", "sharding_config", "speculative_config"}


def describe(engine: Engine, config: EngineConfig, info: ModelInfo) -> EngineDescription:
    """Return the description of an engine. `config` is its resolved configuration."""
    options: dict[str, Any] = {"model": config.model, "imports": config.imports}
    for part, part_class in PARTS.items():
        names = (item.name for item in fields(part_class) if item.name not in LEFT_OUT)
        chosen = {name: getattr(getattr(config, part), name) for name in names}
        options |= {name: value for name, value in chosen.items() if value is not None}
    return EngineDescription(
        system_fingerprint=info.system_fingerprint,
        options=options,
        groups=engine.kv_cache.groups,
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.scheduler.max_num_seqs,
        max_num_batched_tokens=engine.scheduler.max_num_batched_tokens,
    )
