"""The checkpoint for a comparison: a Llama with random weights from a fixed seed, and a tokenizer made for it."""

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SEED = 0
STANDARD_DEVIATION = 0.02  # as in models initialised for training
COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "attention_bias": False,
    "mlp_bias": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "1b": COMMON  # TinyLlama's
    | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
    | {"num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 4096, "rope_theta": 10000.0}
    | {"tie_word_embeddings": False},
    "3b": COMMON  # Llama 3.2's, without its rotary scaling
    | {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24}
    | {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0}
    | {"head_dim": 128, "tie_word_embeddings": True},
}
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def read_shape(shape: str) -> dict[str, Any]:
    """Return the config.json of a shape: one of SHAPES, or a directory with a Llama.

    Raises:
        ValueError: there is no such shape, or the model is of another family.
    """
    if shape in SHAPES:
        return SHAPES[shape]
    file = Path(shape) / "config.json"
    if not file.is_file():
        raise ValueError(f"shape: {shape!r} is none of {', '.join(SHAPES)}, nor a directory with a config.json")
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if config.get("model_type") != "llama":
        raise ValueError(f"shape: {file} is of the family {config.get('model_type')!r}; only llama is compared")
    return COMMON | config


def make_checkpoint(config: dict[str, Any], target: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer. The directory appears once it is complete."""
    if target.is_dir():
        return
    writing = target.with_suffix(".writing")
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    (writing / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    generator = torch.Generator().manual_seed(SEED)
    tensors = {name: _random(shape, generator) for name, shape in shapes_of(config)}
    save_file(tensors, writing / "model.safetensors", metadata={"format": "pt"})
    _make_tokenizer(config["vocab_size"]).save(str(writing / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (writing / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    writing.rename(target)


def shapes_of(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the shape of every tensor in a Llama checkpoint."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // heads
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        for name, width in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"{at}.self_attn.{name}_proj.weight", (width * head, hidden)
        yield f"{at}.self_attn.o_proj.weight", (hidden, heads * head)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        for name in ("gate", "up"):
            yield f"{at}.mlp.{name}_proj.weight", (inner, hidden)
        yield f"{at}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape).normal_(0, STANDARD_DEVIATION, generator=generator).to(torch.bfloat16)


def _make_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE that merges pairs of bytes, then longer tokens, until the vocabulary is full."""
    vocab = {token: number for number, token in enumerate(["<s>", "</s>", *ALPHABET])}
    merges = []
    pairs = list(itertools.product(ALPHABET, repeat=2))
    longer = itertools.product(("".join(pair) for pair in pairs), ALPHABET)
    for left, right in itertools.islice(itertools.chain(pairs, longer), max(0, vocab_size - len(vocab))):
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
