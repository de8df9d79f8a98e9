"""Read the config.json of gpt-oss. The model is Mixtral's (mixtral/model.py) with its own parameter table."""

from penstock.models.mixtral.config import TRAINING, read_experts
from penstock.spec.config_reader import ConfigReader
from penstock.spec.config_rules import Numbers, gated_decoder, harmless, read_scaling, sliding_window, windows_by_type

WINDOW = 128
CLAMPED_SILU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # no model has other numbers
SCALING = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def read_gpt_oss(read: ConfigReader) -> Numbers:
    """Read the numbers: windows on every second layer, a sink logit for each head, all layers sparse. Products have
    biases; those of experts and of the router always."""
    read.choice("hidden_act", ("silu",), "silu")
    read.neutral(CLAMPED_SILU)
    numbers = gated_decoder(read, head_dim=64, theta=150000.0)
    bias = read.boolean("attention_bias", True)
    layers, experts = numbers["num_hidden_layers"], read_experts(read)
    if not read.has("rope_parameters") and not read.has("rope_scaling"):
        section = ConfigReader(SCALING, read.where)
        numbers["rope"] = read_scaling(section, numbers["rope"], numbers["max_position_embeddings"])
    kinds = ["full_attention" if index % 2 else "sliding_attention" for index in range(layers)]
    read.neutral({"experts_per_token": experts["num_experts_per_tok"]})
    harmless(read, *TRAINING, "initial_context_length")  # rope_scaling has the context before scaling
    return {
        **numbers,
        **experts,
        "attention_bias": bias,
        "attention_out_bias": bias,
        "hidden_act": "clamped_silu",
        "sink_logits": True,
        "layer_windows": windows_by_type(read, layers, sliding_window(read, WINDOW), kinds),
        "moe_intermediate_size": numbers["intermediate_size"],
        "sparse_layers": (True,) * layers,
    }
