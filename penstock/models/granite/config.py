"""Read the config.json of Granite 3, and of Granite 4 without experts and without mamba layers.

The model is Llama's (llama/model.py) with four factors. Granite 4 has a parameter table of its own.
"""

from penstock.models.llama.config import attention_biases, read_llama
from penstock.spec.config_reader import MAX_SIZE, ConfigReader
from penstock.spec.config_rules import LARGEST, Numbers, gated_decoder, harmless

MULTIPLIERS = {  # key -> field of ModelConfig
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention_scale",
    "residual_multiplier": "residual_scale",
}
ATTENTION = ("attention", "full_attention")
UNUSED = (  # keys of mamba layers and of experts, which this kind of Granite 4 does not have
    *(f"mamba_{key}" for key in ("chunk_size", "conv_bias", "d_conv", "d_head", "d_state", "expand")),
    *(f"mamba_{key}" for key in ("n_groups", "n_heads", "proj_bias")),
    *("time_step_limit", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"),
)


def read_granite(read: ConfigReader) -> Numbers:
    """Read the numbers of Granite 3."""
    return read_llama(read) | multipliers(read)


def read_granite_hybrid(read: ConfigReader) -> Numbers:
    """Read the numbers of Granite 4, where the branch that all tokens share is the only one."""
    numbers = gated_decoder(read) | attention_biases(read) | multipliers(read)
    layers, types = numbers["num_hidden_layers"], read.raw("layer_types")
    if not isinstance(types, list) or len(types) != layers or not all(item in ATTENTION for item in types):
        raise read.fail("layer_types", f"{layers} times attention: mamba layers are not supported")
    read.integer("num_local_experts", 0, 0)  # absent means 8
    read.neutral({"normalization_function": "rmsnorm"})
    harmless(read, "init_method", *UNUSED)
    if read.choice("position_embedding_type", ("nope", "rope"), "nope") == "nope":
        numbers["rope"] = None
    size = read.integer("shared_intermediate_size", 1, LARGEST["intermediate_size"], 1024)
    return numbers | {"intermediate_size": size, "layer_windows": (None,) * layers}


def multipliers(read: ConfigReader) -> Numbers:
    """Read the factors of the embeddings, of the scores and of each branch, and the divisor of the logits."""
    factors = {name: read.number(key, 1e-6, MAX_SIZE, 1.0) for key, name in MULTIPLIERS.items()}
    return factors | {"logit_scale": 1 / read.number("logits_scaling", 1e-6, MAX_SIZE, 1.0)}
