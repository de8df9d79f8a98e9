"""Read the config.json of Mixtral and of other decoders with a mixture of experts."""

from dataclasses import replace

from penstock.models.llama.config import attention_biases
from penstock.spec.config_reader import MAX_SIZE, ConfigReader
from penstock.spec.config_rules import (
    DEFAULT_WINDOW,
    LARGEST,
    MAX_HEAD_DIM,
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
MSCALES = ("short_mscale", "long_mscale")
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


def read_glm4_moe(read: ConfigReader) -> Numbers:
    """Read the numbers of GLM-4.5: dense layers first; experts are chosen by corrected sigmoids, in the best groups."""
    numbers = gated_decoder(read, partial_rotary=0.5)
    layers, largest = numbers["num_hidden_layers"], LARGEST["intermediate_size"]
    harmless(read, *TRAINING)
    experts = read_experts(read, "n_routed_experts")
    groups = read.integer("n_group", 1, experts["num_experts"] // 2 or 1, 1)
    top_groups = read.integer("topk_group", 1, groups, 1)
    if experts["num_experts"] % groups:
        raise read.fail("n_group", f"a divisor of the number of experts, {experts['num_experts']}")
    if experts["num_experts_per_tok"] > top_groups * experts["num_experts"] // groups:
        raise read.fail("topk_group", f"enough for {experts['num_experts_per_tok']} experts of {groups} groups")
    dense = read.integer("first_k_dense_replace", 0, MAX_SIZE, 1)
    width = read.integer("moe_intermediate_size", 1, largest, 1408)
    predicting = spelled(read, "num_mtp_layers", {"num_mtp_layers": "num_nextn_predict_layers"})
    return {
        **numbers,
        **experts,
        **_shared(read, "n_shared_experts", width, 1),
        "attention_bias": read.boolean("attention_bias", False),
        "qk_norm": read.boolean("use_qk_norm", False),
        "layer_windows": no_windows(read, layers),
        "moe_intermediate_size": width,
        "norm_topk_prob": read.boolean("norm_topk_prob", True),
        "num_nextn_predict_layers": read.integer(predicting, 0, layers, 1),
        "routed_scaling_factor": read.number("routed_scaling_factor", 0.0, MAX_SIZE, 1.0),
        "exact_router": True,
        "router_bias": 1,
        "router_groups": groups,
        "router_min_sum": 1e-20,
        "router_scores": "sigmoid",
        "router_top_groups": top_groups,
        "sparse_layers": tuple(index >= dense for index in range(layers)),
    }


def read_ernie4_5_moe(read: ConfigReader) -> Numbers:
    """Read the numbers of ERNIE 4.5 MoE: interleaved rotary embedding; experts are chosen by a corrected softmax."""
    numbers = gated_decoder(read, theta=500000.0, tied=True)
    layers, largest = numbers["num_hidden_layers"], LARGEST["intermediate_size"]
    harmless(read, *TRAINING, "moe_capacity", "num_nextn_predict_layers")  # of the latter, tensors have other names
    fixed(read, "use_bias", False)
    read.neutral({"moe_gate": "topk", "moe_use_aux_free": True})
    width = read.integer("moe_intermediate_size", 1, largest, 1536)
    start, step = (
        read.integer("moe_layer_start_index", 0, MAX_SIZE, 1),
        read.integer("moe_layer_interval", 1, MAX_SIZE, 1),
    )
    end = read.integer("moe_layer_end_index", -1, MAX_SIZE, -1)
    last = layers - 1 if end == -1 else end
    return {
        **numbers,
        **read_experts(read, "moe_num_experts", "moe_k"),
        **_shared(read, "moe_num_shared_experts", width, 2),
        "rope": replace(numbers["rope"], interleaved=True),
        "layer_windows": no_windows(read, layers),
        "moe_intermediate_size": width,
        "exact_router": True,
        "router_bias": 2,
        "router_min_sum": read.number("moe_norm_min", 0.0, 1.0, 1e-12),
        "sparse_layers": tuple((index + 1) % step == 0 and start <= index <= last for index in range(layers)),
    }


def read_minimax_m2(read: ConfigReader) -> Numbers:
    """Read the numbers of MiniMax-M2: experts are chosen by corrected sigmoids; the norms of q and k are over all
    heads, of which a part rotates."""
    head_dim = read.integer("head_dim", 1, MAX_HEAD_DIM, 128)
    rotated = read.integer("rotary_dim", 1, head_dim, head_dim)
    numbers = gated_decoder(read, theta=5e6, head_dim=128, partial_rotary=rotated / head_dim)
    layers = numbers["num_hidden_layers"]
    harmless(read, *TRAINING, "use_mtp", "mtp_transformer_layers", "num_mtp_modules")
    read.neutral(
        {
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "use_routing_bias": True,
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "attn_type_list": [1] * layers,
        }
    )
    return {
        **numbers,
        **read_experts(read),
        "qk_norm": True,
        "qk_norm_together": True,
        "layer_windows": no_windows(read, layers),
        "moe_intermediate_size": numbers["intermediate_size"],
        "router_bias": 1,
        "router_scores": "sigmoid",
        "sparse_layers": (True,) * layers,
    }


def read_phimoe(read: ConfigReader) -> Numbers:
    """Read the numbers of Phi-MoE: layer norms, biases outside of the experts, and SparseMixer as the router."""
    numbers = gated_decoder(read, theta=1000000.0, own=MSCALES)
    layers, experts, rope = numbers["num_hidden_layers"], read_experts(read), numbers["rope"]
    if experts["num_experts_per_tok"] != 2:
        raise read.fail("num_experts_per_tok", "2 for this architecture")
    key = "rope_parameters" if read.has("rope_parameters") else "rope_scaling"
    scaling = read.section(key)
    if rope.rope_type == "longrope" and scaling is not None:  # these factors, not the usual one
        short, long = (scaling.number(name, 0.0, MAX_SIZE) for name in MSCALES)
        if short != long:
            raise scaling.fail("long_mscale", f"the same as short_mscale = {short:g}")
        numbers["rope"] = replace(rope, attention_factor=short)
    elif rope.rope_type != "default":
        raise read.fail(key, "of rope_type default or longrope for this architecture, or absent")
    threshold = 2 * read.number("router_jitter_noise", 0.0, 1.0, 0.01)
    harmless(read, "output_router_logits", "router_aux_loss_coef", "input_jitter_noise")
    return {
        **numbers,
        **experts,
        **attention_biases(read),
        "norm": "layer",
        "norm_bias": True,
        "lm_head_bias": read.boolean("lm_head_bias", False),
        "layer_windows": same_windows(read, layers, None),
        "moe_intermediate_size": numbers["intermediate_size"],
        "norm_topk_prob": False,
        "router_scores": "sparsemixer",
        "router_threshold": threshold,
        "sparse_layers": (True,) * layers,
    }


def _shared(read: ConfigReader, key: str, width: int, default: int) -> Numbers:
    """Read the number of shared experts, each of the width of an expert; they are computed as one."""
    count = read.integer(key, 0, MAX_EXPERTS, default)
    return {"shared_expert_gate": False, "shared_expert_intermediate_size": count * width} if count else {}


def read_experts(read: ConfigReader, key: str = "num_local_experts", chosen: str = "num_experts_per_tok") -> Numbers:
    """Read the number of experts (`key` or `num_experts`), and the number of experts per token (`chosen`)."""
    count = read.integer(spelled(read, "num_experts", {"num_experts": key}), 1, MAX_EXPERTS)
    per_token = spelled(read, "num_experts_per_tok", {"num_experts_per_tok": chosen})
    return {"num_experts": count, "num_experts_per_tok": read.integer(per_token, 1, count)}


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
