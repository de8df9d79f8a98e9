"""Mistral's own params.json, translated into the equivalent config.json. No torch.

    {"dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8,
     "norm_eps": 1e-05, "vocab_size": 32000, "sliding_window": 4096}

The weights are in consolidated.safetensors, under the names that the tables of Llama and Mixtral list under `or`.
"""

from typing import Any

from penstock.spec.config_reader import MAX_SIZE, ConfigReader

NAME = "params.json"
CONTEXT = 32768  # default context
WINDOW_THETA, THETA = 1e4, 1e6  # default rotary base, with a window and without one
BOS, EOS = 1, 2  # the same in all Mistral tokenizers
SIZES = {  # Mistral's keys -> Transformers'
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
NEUTRAL = {"use_biases": False, "causal": True}


def config_of(params: dict[str, Any]) -> dict[str, Any]:
    """Return the equivalent config.json. Raise ModelLoadError if a key is missing, invalid or unknown."""
    read = ConfigReader(params, NAME)
    read.neutral(NEUTRAL)
    window, windowed = _windows(read)
    context = read.integer("max_seq_len", 1, MAX_SIZE, read.integer("max_position_embeddings", 1, MAX_SIZE, CONTEXT))
    experts: dict[str, int] = {}
    if moe := read.section("moe"):
        experts["num_local_experts"] = moe.integer("num_experts", 1, MAX_SIZE)
        experts["num_experts_per_tok"] = moe.integer("num_experts_per_tok", 1, MAX_SIZE)
        moe.finish(())
    if experts and windowed:
        raise read.fail("moe", "absent where the layers have different windows")
    family = "mixtral" if experts else "ministral" if windowed else "mistral"
    config = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        **{ours: read.integer(theirs, 1, MAX_SIZE) for theirs, ours in SIZES.items()},
        **experts,
        **windowed,
        "rms_norm_eps": read.number("norm_eps", 0.0, 1.0),
        "rope_theta": read.number("rope_theta", 1.0, 1e12, THETA if window is None else WINDOW_THETA),
        "sliding_window": window,
        "max_position_embeddings": context,
        "tie_word_embeddings": read.boolean("tied_embeddings", False),
        "dtype": "bfloat16",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    read.finish({"max_batch_size"})
    return config


def _windows(read: ConfigReader) -> tuple[int | None, dict[str, Any]]:
    """Return the window, and `layer_types` if only some layers have it.

    In that case the file has a list that repeats from the first layer to the last. Ministral's key is
    `_sliding_window`.
    """
    key = "sliding_window" if read.has("sliding_window") else "_sliding_window"
    if key == "sliding_window" and read.has("_sliding_window"):
        raise read.fail("_sliding_window", "null beside sliding_window, or absent")
    sizes = read.raw(key)
    if not isinstance(sizes, list):
        return read.integer(key, 1, MAX_SIZE) if read.has(key) else None, {}
    layers, windows = read.integer("n_layers", 1, MAX_SIZE), [size for size in sizes if size is not None]
    window = windows[0] if windows and type(windows[0]) is int else 0
    if not 1 <= window <= MAX_SIZE or windows.count(window) != len(windows) or layers % len(sizes):
        raise read.fail(key, f"an integer, or a list of one integer and null, as long as a divisor of {layers} layers")
    kinds = ["full_attention" if size is None else "sliding_attention" for size in sizes]
    return window, {} if None not in sizes else {"layer_types": kinds * (layers // len(sizes))}
