"""Read the config.json of Llama 4's text model, which is Mixtral's (mixtral/model.py) with its own parameter table."""

from dataclasses import replace

from penstock.models.llama.config import attention_biases, rotary_pattern
from penstock.models.mixtral.config import TRAINING, read_experts
from penstock.spec.config_reader import MAX_SIZE, ConfigReader
from penstock.spec.config_rules import LARGEST, Numbers, gated_decoder, harmless, windows_by_type
from penstock.spec.model_config import QueryScale

CHUNK = 8192


def read_llama4(read: ConfigReader) -> Numbers:
    """Read the numbers: chunks in the layers that rotate; in the others, a factor of the queries that grows with the
    position; a shared expert, and one chosen expert whose inputs are weighed. Dense layers are wider than experts."""
    numbers = gated_decoder(read, head_dim=128, kv_heads=8, theta=500000.0) | attention_biases(read)
    layers, width, rope = numbers["num_hidden_layers"], numbers["intermediate_size"], numbers["rope"]
    rotates = rotary_pattern(read, layers)
    chunk = None if read.is_null("attention_chunk_size") else read.integer("attention_chunk_size", 1, MAX_SIZE, CHUNK)
    kinds = ["chunked_attention" if item and chunk is not None else "full_attention" for item in rotates]
    windows = windows_by_type(read, layers, chunk, kinds, kind="chunked_attention")
    unit_norm = read.boolean("use_qk_norm", True)
    if unit_norm and rope.attention_factor != 1.0:  # the norm comes after the rotation, and removes the factor
        raise read.fail("use_qk_norm", "false where rotary embedding has an attention_factor")
    harmless(read, *TRAINING)
    return {
        **numbers,
        **read_experts(read),
        "rope": replace(rope, interleaved=True),
        "rotary_layers": rotates,
        "layer_windows": windows,
        "chunked_windows": any(windows),
        "query_scale": _query_scale(read),
        "qk_unit_norm": unit_norm,
        "intermediate_size": read.integer("intermediate_size_mlp", 1, LARGEST["intermediate_size"], 16384),
        "moe_intermediate_size": width,
        "sparse_layers": _sparse_layers(read, layers),
        "router_scores": "chosen_sigmoid",
        "norm_topk_prob": False,
        "weigh_expert_inputs": True,
        "shared_expert_gate": False,
        "shared_expert_intermediate_size": width,
    }


def _query_scale(read: ConfigReader) -> QueryScale | None:
    """Read the factor of the queries. Its switch is a number in older files."""
    length, beta = read.integer("floor_scale", 1, MAX_SIZE, 8192), read.number("attn_scale", 0.0, MAX_SIZE, 0.1)
    tuned = read.raw("attn_temperature_tuning") if read.has("attn_temperature_tuning") else True
    if type(tuned) not in (bool, int):
        raise read.fail("attn_temperature_tuning", "true, false, or an integer")
    return QueryScale(beta=beta, length=length, offset=1, only_unrotated=True) if tuned and beta else None


def _sparse_layers(read: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Read which layers are mixtures of experts: `moe_layers`, or every interleave_moe_layer_step-th."""
    step = read.integer("interleave_moe_layer_step", 1, LARGEST["num_hidden_layers"], 1)
    sparse = read.raw("moe_layers") if read.has("moe_layers") else list(range(step - 1, layers, step))
    if not isinstance(sparse, list) or not all(type(item) is int and 0 <= item < layers for item in sparse):
        raise read.fail("moe_layers", f"a list of layers from 0 to {layers - 1}")
    return tuple(index in sparse for index in range(layers))
