"""Falcon's original config.json, from before Transformers had the family, translated into today's keys.

    {"architectures": ["RWForCausalLM"], "model_type": "RefinedWeb", "n_head": 128, "n_head_kv": 8, "n_layer": 60, ...}

RefinedWeb is Falcon-40B, with parallel branches that have a norm each, and key/value groups. RefinedWebModel is
Falcon-7B or RW; the file says which branches and heads the model has. The weights have today's names.
"""

from typing import Any

from penstock.spec.config_reader import ConfigReader

TYPES = ("RefinedWeb", "RefinedWebModel")
# Settings of one accelerator's implementation of 40B, found in its copies of the file; no number depends on them.
SETTINGS = ("batch_users", "efficient_40b", "flash_decode", "fracture_vocab", "padded_lmh", "split_mq", "user_rows")


def modern_falcon(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config in today's keys, or unchanged if its model_type is not in TYPES.

    Raises:
        ModelLoadError: keys contradict each other or are missing.
    """
    kind = config.get("model_type")
    if kind not in TYPES:
        return config
    read = ConfigReader(config, "config.json")
    is_40b = kind == "RefinedWeb"
    read.neutral({"new_decoder_architecture": is_40b} | ({"parallel_attn": True} if is_40b else {}))
    for key in () if is_40b else ("multi_query", "parallel_attn"):
        if not read.has(key):  # the original code and Transformers have different defaults
            raise read.fail(key, f"true or false where model_type is {kind}")
    heads, also = read.raw("n_head_kv"), read.raw("num_kv_heads")
    if heads is not None and also not in (None, heads):
        raise read.fail("num_kv_heads", f"the same as n_head_kv = {heads}, or absent")
    kept = {key: value for key, value in config.items() if key not in ("n_head_kv", *SETTINGS)}
    names = ["FalconForCausalLM"] if config.get("architectures") == ["RWForCausalLM"] else config.get("architectures")
    return kept | {
        "architectures": names,
        "model_type": "falcon",
        "num_kv_heads": also if heads is None else heads,
        "new_decoder_architecture": is_40b,
    }
