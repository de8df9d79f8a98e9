"""Read the config.json of GPT-2."""

from penstock.spec.config_reader import ConfigReader
from penstock.spec.config_rules import Numbers, activation, decoder_shape, harmless, no_windows

SPELLING = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def read_gpt2(read: ConfigReader) -> Numbers:
    """Read the numbers. `n_ctx` repeats n_positions, the number of learned positions; `summary_*` serve other heads."""
    shape = decoder_shape(
        read, spelling=SPELLING, defaults={"intermediate_size": lambda sizes: 4 * sizes["hidden_size"]}
    )
    for key in ("num_key_value_heads", "head_dim"):  # both follow from other keys
        if read.has(key):
            raise read.fail(key, "absent for this architecture")
    harmless(read, "n_ctx", "attn_pdrop", "summary_type", "summary_use_proj", "summary_activation")
    harmless(read, "summary_proj_to_labels", "summary_first_dropout")
    read.boolean("reorder_and_upcast_attn", False)  # the same mathematics; scores are float32 here anyway
    return shape | {
        "hidden_act": activation(read, "activation_function", "gelu_new"),
        "norm_eps": read.number("layer_norm_epsilon", 0.0, 1.0, 1e-5),
        "rope": None,
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "attention_scale": None if read.boolean("scale_attn_weights", True) else 1.0,
        "extra": {"scale_by_layer": read.boolean("scale_attn_by_inverse_layer_idx", False)},
        "layer_windows": no_windows(read, shape["num_hidden_layers"]),
        "tie_word_embeddings": read.boolean("tie_word_embeddings", True),
    }
