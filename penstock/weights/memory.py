"""Refuse a model that does not fit into memory before it is allocated."""

from collections.abc import Mapping

from penstock.errors import ModelLoadError
from penstock.spec.model_config import ModelConfig

ROTARY_BYTES = 4  # per element of a table; float64 is used for only a few positions at a time


def rotary_bytes(model_config: ModelConfig, max_model_len: int | None = None) -> int:
    """Return the bytes of the cosine and sine tables of each kind of rotary embedding that the model has."""
    positions = max_model_len or model_config.context
    ropes = [rope for rope in (model_config.rope, model_config.local_rope) if rope is not None]
    return sum(ROTARY_BYTES * positions * rope.rotary_dim(model_config.head_dim) for rope in ropes)


def check_memory(needs: Mapping[str, int], free: int) -> None:
    """Raise ModelLoadError if one of the needs (description -> bytes) exceeds `free` bytes."""
    for what, needed in needs.items():
        if needed > free:
            raise ModelLoadError(
                f"the {what} need {needed / 2**20:,.1f} MiB according to config.json; only {free / 2**20:,.1f} MiB "
                f"are free"
            )
