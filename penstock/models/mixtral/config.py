"""Read the config.json of Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE."""

from penstock.models.llama.config import attention_biases
from penstock.spec.config_reader import MAX_SIZE, ConfigReader
from penstock.spec.config_rules import (
    DEFAULT_WINDOW,
    LARGEST,
    Numbers,
    Windows,
    fixed,
    gated_decoder,
    harmless,
    no_windows,
    same_windows,
    sliding_window,
    spelled,
    windows_by_type,
)

MAX_EXPERTS = 2**16
NEUTRAL = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}  # keys of Qwen3-Coder
TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")


def read_mixtral(read: ConfigReader) -> Numbers:
    """Read the numbers of Mixtral: every layer is sparse, and an expert is as large as a dense branch."""
    numbers = gated_decoder(read, theta=1000000.0)
    layers = numbers["num_hidden_layers"]
    fixed(read, "attention_bias", False)
    harmless(read, *TRAINING)
    return {
        **numbers,
        **read_experts(read),
        "layer_windows": same_windows(read, layers, None),
        "moe_intermediate_size": numbers["intermediate_size"],
        "sparse_layers": (True,) * layers,
    }


def read_qwen2_moe(read: ConfigReader) -> Numbers:
    """Read the numbers of Qwen2-MoE: a shared expert with a gate; biases of q, k and v alone."""
    numbers = gated_decoder(read)
    layers, largest = numbers["num_hidden_layers"], LARGEST["intermediate_size"]
    harmless(read, *TRAINING)
    return {
        **numbers,
        **read_experts(read),
        "attention_bias": read.boolean("qkv_bias", True),
        "layer_windows": _lower_windows(read, layers),
        "moe_intermediate_size": read.integer("moe_intermediate_size", 1, largest, 1408),
        "norm_topk_prob": read.boolean("norm_topk_prob", False),
        "shared_expert_gate": True,
        "shared_expert_intermediate_size": read.integer("shared_expert_intermediate_size", 1, largest, 5632),
        "sparse_layers": _sparse_layers(read, layers),
    }


def read_olmoe(read: ConfigReader) -> Numbers:
    """Read the numbers of OLMoE: every layer is sparse, and the norms of q and k are over all heads."""
    numbers = gated_decoder(read)
    layers = numbers["num_hidden_layers"]
    harmless(read, *TRAINING)
    if read.has("clip_qkv"):
        raise read.fail("clip_qkv", "null, or absent")
    return {
        **numbers,
        **read_experts(read),
        **attention_biases(read),
        "qk_norm": True,
        "qk_norm_together": True,
        "layer_windows": no_windows(read, layers),
        "moe_intermediate_size": numbers["intermediate_size"],
        "norm_topk_prob": read.boolean("norm_topk_prob", False),
        "sparse_layers": (True,) * layers,
    }


def read_qwen3_moe(read: ConfigReader) -> Numbers:
    """Read the numbers of Qwen3-MoE: every decoder_sparse_step-th layer not in mlp_only_layers is sparse."""
    numbers = gated_decoder(read)  # head_dim defaults to hidden_size / heads, unlike Qwen3's
    layers = numbers["num_hidden_layers"]
    harmless(read, *TRAINING)
    read.neutral(NEUTRAL)
    return {
        **numbers,
        **read_experts(read),
        **attention_biases(read),
        "qk_norm": True,
        "layer_windows": (_window(read),) * layers,
        "moe_intermediate_size": read.integer("moe_intermediate_size", 1, LARGEST["intermediate_size"]),
        "norm_topk_prob": read.boolean("norm_topk_prob", False),
        "sparse_layers": _sparse_layers(read, layers),
    }


def read_experts(read: ConfigReader) -> Numbers:
    """Read the number of experts (`num_local_experts` or `num_experts`), and the number of experts per token."""
    count = read.integer(spelled(read, "num_experts", {"num_experts": "num_local_experts"}), 1, MAX_EXPERTS)
    return {"num_experts": count, "num_experts_per_tok": read.integer("num_experts_per_tok", 1, count)}


def _sparse_layers(read: ConfigReader, layers: int) -> tuple[bool, ...]:
    step = read.integer("decoder_sparse_step", 1, LARGEST["num_hidden_layers"], 1)
    dense = read.raw("mlp_only_layers") if read.has("mlp_only_layers") else []
    if not isinstance(dense, list) or not all(type(item) is int and 0 <= item < layers for item in dense):
        raise read.fail("mlp_only_layers", f"a list of layers from 0 to {layers - 1}")
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(layers))


def _lower_windows(read: ConfigReader, layers: int) -> Windows:
    """Read Qwen2-MoE's windows: with use_sliding_window, layer_types or, without it, every second layer below
    max_window_layers has one, from the first on."""
    window = sliding_window(read, DEFAULT_WINDOW) if read.boolean("use_sliding_window", False) else None
    harmless(read, "sliding_window")  # Transformers writes 0 where it is not used
    end = read.integer("max_window_layers", 0, MAX_SIZE, 28)
    slides = [window is not None and index < end and index % 2 == 0 for index in range(layers)]
    default = ["sliding_attention" if item else "full_attention" for item in slides]
    return windows_by_type(read, layers, window, default)


def _window(read: ConfigReader) -> int | None:
    """Read the window of all layers. Transformers ignores max_window_layers here, so it is refused where a window is
    used."""
    window = sliding_window(read, DEFAULT_WINDOW)
    if not read.boolean("use_sliding_window", False):
        harmless(read, "max_window_layers")
        return None
    if read.has("max_window_layers"):
        raise read.fail("max_window_layers", "absent where use_sliding_window is true: all layers have the window")
    return window
