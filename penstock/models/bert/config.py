"""Read the config.json of encoders: BERT, RoBERTa and its kin, DistilBERT, MPNet, ModernBERT, Jina's BERT, and Nomic
BERT in both of its spellings.

`extra` has what only these have: `first_position` and `position_rows` of learned positions; `has_token_types`;
`norms_before`, of a block; `attention_norms`, whether each layer has its first norm; `relative_bias`; and of a head
`has_head`, `dense_head` (it has two products), `head_act`, `head_bias`, and `label_pooling`, the state that it reads.
`pooling` is what a GGUF file says of embeddings.
"""

from collections.abc import Callable, Mapping

from penstock.interface.pooling import POOLING_TYPES
from penstock.spec.config_reader import MAX_SIZE, ConfigReader
from penstock.spec.config_rules import (
    Numbers,
    Windows,
    activation,
    decoder_shape,
    fixed,
    harmless,
    no_windows,
    read_labels,
    read_rope,
    require_even_heads,
    ropes_by_type,
    windows_by_type,
)

EPS = 1e-12  # Transformers' default for all of them
MAX_TYPES = 2**16
BIASES = ("attention_bias", "attention_out_bias", "mlp_bias")
ROPE_THETAS = {"global": 160000.0, "local": 10000.0}  # ModernBERT's
DISTILBERT = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
}
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


def read_distilbert(read: ConfigReader) -> Numbers:
    """Read the numbers of DistilBERT: BERT without types of tokens."""
    harmless(read, "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_")
    numbers = _learned_positions(read, 0, spelling=DISTILBERT, act="activation", types=0)
    return numbers | {"norm_eps": EPS, "extra": numbers["extra"] | {"head_act": "relu"}}


def read_mpnet(read: ConfigReader) -> Numbers:
    """Read the numbers of MPNet: RoBERTa without types of tokens, and with a bias of each distance."""
    read.neutral({"relative_attention_num_buckets": 32})
    numbers = _learned_positions(read, 2, types=0)
    return numbers | {"extra": numbers["extra"] | {"relative_bias": True}}


def read_jina_bert(read: ConfigReader) -> Numbers:
    """Read the numbers of Jina's second BERT: BERT with ALiBi in both directions, and a gate without a bias."""
    harmless(read, "attn_implementation", "emb_pooler", "model_max_length")
    read.choice("position_embedding_type", ["alibi"])
    kind = read.choice("feed_forward_type", ["geglu", "reglu"])
    read.neutral({"hidden_act": "gelu"})
    numbers = _encoder(read, decoder_shape(read))
    return numbers | {
        "hidden_act": "gelu" if kind == "geglu" else "relu",
        "norm_eps": read.number("layer_norm_eps", 0.0, 1.0, EPS),
        "rope": None,
        "alibi": True,
        "scaled_alibi": False,
        **dict.fromkeys(BIASES, True),
    }


def read_modernbert(read: ConfigReader) -> Numbers:
    """Read the numbers of ModernBERT: norms before the branches, a gate, rotary positions, and windows in most layers,
    which have rotary embedding of their own."""
    harmless(read, "cls_token_id", "decoder_bias", "deterministic_flash_attn", "embedding_dropout", "layer_norm_eps")
    harmless(read, "initializer_cutoff_factor", "mlp_dropout", "position_embedding_type", "reference_compile")
    harmless(read, "repad_logits_with_grad", "sep_token_id", "sparse_pred_ignore_index", "sparse_prediction")
    shape = decoder_shape(read)
    require_even_heads(read, shape["head_dim"])
    layers, context = shape["num_hidden_layers"], shape["max_position_embeddings"]
    period = read.integer("global_attn_every_n_layers", 1, MAX_SIZE, 3)
    types = ["sliding_attention" if index % period else "full_attention" for index in range(layers)]
    window = read.integer("local_attention", 2, MAX_SIZE, 128) // 2 + 1  # a token, and half of the window on each side
    thetas = (read.number(f"{name}_rope_theta", 1.001, MAX_SIZE, usual) for name, usual in ROPE_THETAS.items())
    numbers = _encoder(read, shape, types=0, windows=windows_by_type(read, layers, window, types))
    head: Numbers = {"head_act": activation(read, "classifier_activation", "gelu")}
    head["head_bias"] = read.boolean("classifier_bias", False)
    head["label_pooling"] = read.choice("classifier_pooling", ["cls", "mean"], "cls").upper()
    norms = {"norms_before": True, "attention_norms": tuple(index > 0 for index in range(layers))}
    numbers |= ropes_by_type(read, context, *thetas) | {"extra": numbers["extra"] | head | norms}
    numbers |= dict.fromkeys(BIASES[:2], read.boolean("attention_bias", False))
    numbers |= {name: read.boolean(name, False) for name in ("norm_bias", "mlp_bias")}
    return numbers | {
        "hidden_act": activation(read, "hidden_activation", "gelu"),
        "norm_eps": read.number("norm_eps", 0.0, 1.0, 1e-5),
    }


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
    }


def _learned_positions(
    read: ConfigReader,
    first: int,
    *,
    spelling: Mapping[str, str] | None = None,
    act: str = "hidden_act",
    types: int | None = None,
) -> Numbers:
    """Read the numbers of a model whose position 0 is the row `first` of its table.

    spelling, act: the file's keys for sizes and the activation. types: as in _encoder.
    """
    numbers = _encoder(read, decoder_shape(read, spelling=spelling), types=types)
    rows = numbers["max_position_embeddings"]
    if first >= rows:
        raise read.fail("max_position_embeddings", f"more than {first}, where the positions begin")
    read.neutral({"position_embedding_type": "absolute"})
    return numbers | {
        "hidden_act": activation(read, act, "gelu"),
        "norm_eps": read.number("layer_norm_eps", 0.0, 1.0, EPS),
        "max_position_embeddings": rows - first,
        "rope": None,
        "gated_mlp": False,
        **dict.fromkeys(BIASES, True),
        "extra": numbers["extra"] | {"has_positions": True, "position_rows": rows, "first_position": first},
    }


def _encoder(
    read: ConfigReader, shape: Numbers, *, types: int | None = None, windows: Windows | None = None
) -> Numbers:
    """Complete what all encoders share.

    types: the number of types of tokens, if the file does not say. windows: None: the architecture has none.
    """
    harmless(read, "classifier_dropout", "directionality", "pooler_fc_size", "pooler_num_attention_heads")
    harmless(read, "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type", "adapters", "output_past")
    types = read.integer("type_vocab_size", 1, MAX_TYPES, 2) if types is None else types
    pooling = read.choice("pooling_type", POOLING_TYPES[:3]) if read.has("pooling_type") else None
    layers = shape["num_hidden_layers"]
    return shape | {
        "norm": "layer",
        "norm_bias": True,
        "bidirectional": True,
        "num_token_types": types,
        "layer_windows": no_windows(read, layers) if windows is None else windows,
        "tie_word_embeddings": fixed(read, "tie_word_embeddings", True),
        "extra": {
            "pooling": pooling,
            "has_token_types": types > 0,
            "has_positions": False,
            "norms_before": False,
            "attention_norms": (True,) * layers,
            "relative_bias": False,
            "has_head": False,
            "dense_head": False,
            "head_act": "tanh",
            "head_bias": True,
            "label_pooling": "CLS",
        },
    }


def classifier(read_config: Callable[[ConfigReader], Numbers], *, of_tokens: bool) -> Callable[[ConfigReader], Numbers]:
    """Return the reader of an encoder's classifier, of texts or of tokens. Only the former has two products in its
    head, unless norms come before the branches."""

    def read_classifier(read: ConfigReader) -> Numbers:
        numbers = read_config(read) | read_labels(read)
        extra = numbers["extra"]
        head = {"has_head": True, "dense_head": not of_tokens or extra["norms_before"]}
        return numbers | {"extra": extra | head | ({"label_pooling": "ALL"} if of_tokens else {})}

    return read_classifier
