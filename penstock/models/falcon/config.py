"""Read the config.json of Falcon and of BLOOM.

Three generations of Falcon share one architecture. 7B and RW state their features: `parallel_attn`, `multi_query`,
`alibi`. 40B has `new_decoder_architecture`, which means parallel branches and key/value groups, regardless of the older
keys. 11B also has the new architecture, with one norm instead of two. The very first files are translated by
spec/config_file.py. BLOOM is RW with a norm of the embedding.
"""

from penstock.spec.config_reader import ConfigReader
from penstock.spec.config_rules import (
    Numbers,
    activation,
    decoder_shape,
    fixed,
    harmless,
    no_windows,
    read_rope,
    require_even_heads,
    spelled,
)

OLDEST = {"hidden_size": "n_embed", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
CONTEXT = 2048  # Transformers' default for Falcon; the texts that BLOOM was trained with


def read_falcon(read: ConfigReader) -> Numbers:
    """Read the numbers of any generation. `bias` applies to all products of a block."""
    shape = read_shape(read)
    fixed(read, "apply_residual_connection_post_layernorm", False)
    harmless(read, "ff_factor")  # repeats ffn_hidden_size
    alibi, bias = read.boolean("alibi", False), read.boolean("bias", False)
    rope = read_rope(read, shape["max_position_embeddings"])
    if not alibi:
        require_even_heads(read, shape["head_dim"])
    return shape | {
        "hidden_act": activation(read, "activation", "gelu"),
        "norm_eps": read.number("layer_norm_epsilon", 0.0, 1.0, 1e-5),
        "rope": None if alibi else rope,
        "alibi": alibi,
        "num_parallel_norms": read_parallel_norms(read),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "layer_windows": no_windows(read, shape["num_hidden_layers"]),
        "tie_word_embeddings": read.boolean("tie_word_embeddings", True),
    }


def read_shape(read: ConfigReader) -> Numbers:
    """Read the sizes. Heads divide the hidden size evenly. The generation determines the number of key/value heads."""
    oldest = {name: key for name, key in OLDEST.items() if read.has(key)}
    shape = decoder_shape(
        read,
        spelling=oldest | {"intermediate_size": "ffn_hidden_size", "num_key_value_heads": "num_kv_heads"},
        defaults={
            "intermediate_size": lambda sizes: 4 * sizes["hidden_size"],
            "max_position_embeddings": lambda sizes: CONTEXT,
        },
    )
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    if shape["head_dim"] * heads != hidden:
        raise read.fail("head_dim", f"hidden_size / num_attention_heads = {hidden // heads}, or absent")
    multi_query = read.boolean("multi_query", True)
    if read.boolean("new_decoder_architecture", False):
        return shape
    if multi_query:  # here Transformers writes num_kv_heads = num_attention_heads, but computes with one head
        return shape | {"num_key_value_heads": 1}
    if shape["num_key_value_heads"] != heads:
        key = spelled(read, "num_key_value_heads", {"num_key_value_heads": "num_kv_heads"})
        raise read.fail(key, f"num_attention_heads = {heads}, where multi_query is false")
    return shape


def read_bloom(read: ConfigReader) -> Numbers:
    """Read the numbers of BLOOM. Files also have keys of its training code, which Transformers does not read."""
    context = "seq_length" if read.has("seq_length") else "max_position_embeddings"
    shape = decoder_shape(
        read,
        spelling=OLDEST | {"max_position_embeddings": context},
        defaults={
            "intermediate_size": lambda sizes: 4 * sizes["hidden_size"],
            "max_position_embeddings": lambda sizes: CONTEXT,
        },
    )
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    fixed(read, "apply_residual_connection_post_layernorm", False)
    read.neutral({"num_key_value_heads": heads, "head_dim": hidden // heads})
    read.neutral({"intermediate_size": 4 * hidden, "n_inner": 4 * hidden})
    read.boolean("slow_but_exact", False)  # the same mathematics: the sum of a product in several parts
    harmless(read, "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion")
    harmless(read, "offset_alibi", "skip_bias_add", "skip_bias_add_qkv")
    return shape | {
        "hidden_act": "gelu_tanh",
        "norm_eps": read.number("layer_norm_epsilon", 0.0, 1.0, 1e-5),
        "rope": None,
        "alibi": True,
        "scaled_alibi": False,
        "embedding_norm": True,
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "layer_windows": no_windows(read, shape["num_hidden_layers"]),
        "tie_word_embeddings": read.boolean("tie_word_embeddings", True),
    }


def read_parallel_norms(read: ConfigReader) -> int:
    """Read the number of norms before parallel branches; 0: the branches follow each other."""
    parallel = read.boolean("parallel_attn", True)
    if read.boolean("new_decoder_architecture", False):
        return read.integer("num_ln_in_parallel_attn", 1, 2, 2)
    one = read.integer("num_ln_in_parallel_attn", 1, 1, 1)
    return one if parallel else 0
