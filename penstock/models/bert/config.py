"""Read the config.json of encoders: BERT, RoBERTa and its kin, and Nomic BERT in both of its spellings."""

from collections.abc import Callable

from penstock.spec.config_reader import MAX_SIZE, ConfigReader
from penstock.spec.config_rules import (
    Numbers,
    activation,
    decoder_shape,
    fixed,
    harmless,
    no_windows,
    read_labels,
    read_rope,
    require_even_heads,
)

EPS = 1e-12  # Transformers' default for all of them
MAX_TYPES = 2**16
NOMIC = {  # of Nomic's own files
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
NOMIC_NEUTRAL = {
    "activation_function": "swiglu",
    "causal": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "parallel_block": False,
    "parallel_block_tied_norm": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "use_rms_norm": False,
}


def read_bert(read: ConfigReader) -> Numbers:
    """Read the numbers of BERT: learned positions from 0 on."""
    return _learned_positions(read, 0)


def read_roberta(read: ConfigReader) -> Numbers:
    """Read the numbers of RoBERTa: its positions begin behind the one that padding has."""
    return _learned_positions(read, 1 + read.integer("pad_token_id", 0, MAX_SIZE, 1))


def read_nomic_bert(read: ConfigReader) -> Numbers:
    """Read the numbers of Nomic BERT: rotary positions, a gate, no biases. A file of Nomic's own says to which length
    the model was trained, which is less than what its interpolation of positions, not built, could reach."""
    own = read.has("n_embd")
    numbers = _encoder(read, decoder_shape(read, spelling=NOMIC if own else None))
    require_even_heads(read, numbers["head_dim"])
    context = numbers["max_position_embeddings"]
    theta = read.number("rotary_emb_base", 1.001, MAX_SIZE, 1000.0)
    if own:
        context = min(context, read.integer("max_trained_positions", 1, MAX_SIZE, context))
        read.neutral(NOMIC_NEUTRAL)
        harmless(
            read, "attn_pdrop", "dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "pad_vocab_size_multiple"
        )
        harmless(
            read, "reorder_and_upcast_attn", "rotary_scaling_factor", "summary_activation", "summary_first_dropout"
        )
        harmless(read, "summary_proj_to_labels", "summary_type", "summary_use_proj", "use_flash_attn", "use_xentropy")
        eps, act = read.number("layer_norm_epsilon", 0.0, 1.0, EPS), "silu"
    else:
        eps, act = read.number("layer_norm_eps", 0.0, 1.0, EPS), activation(read)
    return numbers | {
        "hidden_act": act,
        "norm_eps": eps,
        "max_position_embeddings": context,
        "rope": read_rope(read, context, theta),
        "extra": {"has_head": False, "dense_head": False},
    }


def _learned_positions(read: ConfigReader, first: int) -> Numbers:
    """Read the numbers of a model whose position 0 is the row `first` of its table."""
    numbers = _encoder(read, decoder_shape(read))
    rows = numbers["max_position_embeddings"]
    if first >= rows:
        raise read.fail("max_position_embeddings", f"more than {first}, where the positions begin")
    read.neutral({"position_embedding_type": "absolute"})
    return numbers | {
        "hidden_act": activation(read, default="gelu"),
        "norm_eps": read.number("layer_norm_eps", 0.0, 1.0, EPS),
        "max_position_embeddings": rows - first,
        "rope": None,
        "gated_mlp": False,
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "extra": {"position_rows": rows, "first_position": first, "has_head": False, "dense_head": False},
    }


def _encoder(read: ConfigReader, shape: Numbers) -> Numbers:
    """Complete what all encoders share."""
    harmless(read, "classifier_dropout", "directionality", "pooler_fc_size", "pooler_num_attention_heads")
    harmless(read, "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type", "adapters", "output_past")
    return shape | {
        "norm": "layer",
        "bidirectional": True,
        "num_token_types": read.integer("type_vocab_size", 1, MAX_TYPES, 2),
        "layer_windows": no_windows(read, shape["num_hidden_layers"]),
        "tie_word_embeddings": fixed(read, "tie_word_embeddings", True),
    }


def classifier(read_config: Callable[[ConfigReader], Numbers], *, dense: bool) -> Callable[[ConfigReader], Numbers]:
    """Return the reader of an encoder's classifier. dense: its head has a product with tanh before the last one."""

    def read_classifier(read: ConfigReader) -> Numbers:
        numbers = read_config(read) | read_labels(read)
        return numbers | {"extra": numbers["extra"] | {"has_head": True, "dense_head": dense}}

    return read_classifier
