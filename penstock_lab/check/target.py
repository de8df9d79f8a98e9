"""The model that is checked: a checkpoint, or a tiny random model that keeps every feature of a config."""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock import ModelLoadError
from penstock.models.certificate import RANDOM_TINY
from penstock.models.config_json import load_model_config, parse_model_config
from penstock.models.registry import is_registered, may_fall_back, unsupported
from penstock.spec.model_config import ModelConfig
from penstock.weights.hub import resolve_model
from penstock.weights.safetensors import BIN, INDEX, PACKED, SINGLE, find_files, fingerprint
from penstock_lab.check.twin import find_class, load_errors

CONFIG = "config.json"
VOCAB_SIZE = 199  # odd, as in many real models
HEAD_DIM = 16
HIDDEN_SIZE = 48  # if it does not follow from the heads
CONTEXT, OLD_CONTEXT = 512, 64  # positions after and before the scaling of the rotary frequencies
ORIGINAL = "original_max_position_embeddings"
MAX_RATIO = 8  # query heads per kv head
EMBEDDING_RMS = 0.2  # small enough for the epsilon of the first norm to matter

# Sizes by their names in config files. A size that a config lacks or leaves open is not added.
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "intermediate_size": 96,
    "intermediate_size_mlp": 112,
    "ffn_hidden_size": 96,
    "n_inner": 96,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
    "sliding_window": 16,
    "attention_chunk_size": 16,
    "max_position_embeddings": CONTEXT,
    "query_pre_attn_scalar": 24,
}
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
EXPERTS = ("num_local_experts", "num_experts")


@dataclass(frozen=True, slots=True)
class Target:
    """A model directory that both sides load.

    Attributes:
        weights: the fingerprint of the weights, or RANDOM_TINY.
        config_file: the config.json that a certificate is for; None if there was none, so the model cannot be served.
    """

    directory: Path
    weights: str
    config_file: Path | None


def find_target(model: str, scratch: Path, *, tiny: bool) -> Target:
    """Find the model that `model` names: a directory, a hub name, "demo", a config.json, or an architecture.

    Args:
        scratch: directory for a tiny model, which is made if `tiny` is set or there are no weights.

    Raises:
        ModelLoadError: there is no such model, or Transformers does not know it.
    """
    named = Path(os.path.expanduser(model))
    is_class = is_registered(model) or re.fullmatch(r"\w+(For[A-Z]\w+|LMHeadModel)", model) is not None
    if is_class and not named.exists():
        if not is_registered(model) and not may_fall_back(model):
            raise unsupported(model)
        config = find_class(model).config_class(architectures=[model])
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # some defaults are not in the default vocabulary
            if isinstance(found := getattr(config, name, None), int) and found >= config.vocab_size:
                setattr(config, name, None)
        if getattr(config, "hidden_size_per_layer_input", 0):  # Gemma 4's, which its larger models leave out
            config.hidden_size_per_layer_input = 0
        config.save_pretrained(scratch)
        return _tiny_target(scratch, scratch, None)
    if named.suffix == ".json" and named.is_file():
        shutil.copyfile(named, scratch / CONFIG)
        return _tiny_target(scratch, scratch, named)
    directory = resolve_model(model)
    if not tiny:
        if (directory / PACKED).is_file():
            raise ModelLoadError(
                f"{directory}: Transformers cannot read packed weights; check the checkpoint that they come from, or "
                f"use --tiny"
            )
        if any(directory.glob("*.bin")):
            find_files(directory)  # refuses a pickle, because random weights in its place would prove nothing about it
        if directory.is_file():  # of GGUF: without a config.json, on which a certificate would depend
            return Target(directory, fingerprint(directory), None)
        if any((directory / name).is_file() for name in (SINGLE, INDEX, BIN, f"{BIN}.index.json")):
            return Target(directory, fingerprint(directory), directory / CONFIG)
    return _tiny_target(directory, scratch, directory / CONFIG)


def _tiny_target(source: Path, scratch: Path, config_file: Path | None) -> Target:
    """Make a tiny model from the config of a directory.

    Raises:
        ModelLoadError: Transformers cannot make the model.
    """
    model_class = find_class(load_model_config(source).architecture)
    with load_errors(f"{source}: Transformers cannot make a small model like it"):
        config = model_class.config_class.from_pretrained(source, local_files_only=True)
        make_tiny(config, model_class, scratch / "tiny")
    return Target(scratch / "tiny", RANDOM_TINY, config_file)


def make_tiny(config: Any, model_class: Any, directory: Path, seed: int = 0) -> None:
    """Save a random model of a Transformers class, with a shrunk form of this config, to the directory."""
    small = type(config).from_dict(shrink(config.to_dict() | {"architectures": [model_class.__name__]}, config))
    small._attn_implementation = "eager"
    model = model_class(small).eval()
    randomise(model, seed)
    model.save_pretrained(directory)


def shrink(values: dict[str, Any], config: Any) -> dict[str, Any]:
    """Make a Transformers config with small sizes, one layer of each kind, and the same ratio of query to kv heads.

    Args:
        values: the config as a dictionary.
        config: the config as an object, which has its own spelling of common names.
    """
    numbers = parse_model_config(json.loads(json.dumps(values)))  # whose keys are texts, as in a file
    spelling = getattr(config, "attribute_map", {})
    result: dict[str, Any] = _shrink_original_context(values)

    def put(name: str, value: Any) -> None:
        key = spelling.get(name, name)
        if result.get(key) is not None:
            result[key] = value

    for name, size in SMALL.items():
        old = result.get(spelling.get(name, name))
        put(name, min(old, size) if isinstance(old, int) else size)
    for name in KV_HEADS:
        if name in result and result[name] is None:
            result[name] = numbers.num_key_value_heads
    head_dim = _shrink_heads(numbers, values, put)
    if "head_dim" in result:  # even if it is null
        result["head_dim"] = head_dim
    _shrink_layers(numbers, result, put)
    for name in EXPERTS:
        put(name, min(numbers.num_experts, max(4, numbers.num_experts_per_tok + 1)))
    for key, value in result.items():  # special tokens must be in the small vocabulary
        ids = value if isinstance(value, list) else [value]
        if key.endswith("_token_id") and any(isinstance(item, int) and item >= VOCAB_SIZE for item in ids):
            result[key] = {"bos_token_id": 1, "eos_token_id": 2}.get(key)
    return result | {"dtype": "float32"}


def _shrink_heads(numbers: ModelConfig, values: dict[str, Any], put: Any) -> int:
    """Shrink the heads and the sizes that follow from them. Return the new head_dim."""
    ratio = numbers.num_attention_heads // numbers.num_key_value_heads
    kv_heads = min(numbers.num_key_value_heads, 4 if ratio == 1 else 2)
    heads = kv_heads * (ratio if ratio <= MAX_RATIO else MAX_RATIO - ratio % 2)
    head_dim = min(numbers.head_dim, HEAD_DIM)
    put("num_attention_heads", heads)
    for name in KV_HEADS:  # some files give the number of query heads although there is one kv head
        put(name, heads if values.get(name) == numbers.num_attention_heads else kv_heads)
    follows = numbers.hidden_size == numbers.num_attention_heads * numbers.head_dim
    put("hidden_size", heads * head_dim if follows else HIDDEN_SIZE)
    return head_dim


def _shrink_layers(numbers: ModelConfig, result: dict[str, Any], put: Any) -> None:
    """Keep the first layer of each kind in their order, and at least two layers."""
    count = numbers.num_hidden_layers
    sparse = numbers.sparse_layers or (False,) * count
    kinds = list(zip(numbers.layer_windows, sparse, strict=True))
    chosen = sorted({kinds.index(kind) for kind in kinds})
    chosen = sorted({*chosen, *range(min(count, 2))}) if len(chosen) < 2 else chosen
    for key, value in result.items():
        if isinstance(value, list) and len(value) == count:
            result[key] = [value[index] for index in chosen]
    put("num_hidden_layers", len(chosen))
    if result.get("per_layer_config"):
        own = {int(layer): _shrink_own(item) for layer, item in result["per_layer_config"].items()}
        result["per_layer_config"] = {str(at): own[index] for at, index in enumerate(chosen) if index in own}
    if "mlp_only_layers" in result:
        result["mlp_only_layers"] = [at for at, index in enumerate(chosen) if not sparse[index]]
        result["decoder_sparse_step"] = 1
    if result.get("moe_layers") is not None:
        result["moe_layers"] = [at for at, index in enumerate(chosen) if sparse[index]]
    if "first_k_dense_replace" in result:
        result["first_k_dense_replace"] = sum(not sparse[index] for index in chosen)
    windows = [numbers.layer_windows[index] is not None for index in chosen]
    put("max_window_layers", windows.index(True) if any(windows) else len(chosen))


def _shrink_own(values: dict[str, Any]) -> dict[str, Any]:
    """Shrink the heads of one layer, so that they still differ from those of the others and divide the query heads."""
    small = {"head_dim": 2 * HEAD_DIM, **dict.fromkeys(KV_HEADS, 1)}
    return values | {name: min(values[name], size) for name, size in small.items() if name in values}


def _shrink_original_context(values: Any) -> Any:
    """Shrink the context before a rotary scaling, at any depth, so that the prompt is longer than that context."""
    if not isinstance(values, dict):
        return values
    shrunk = {name: _shrink_original_context(value) for name, value in values.items()}
    return shrunk | {ORIGINAL: min(values[ORIGINAL], OLD_CONTEXT)} if values.get(ORIGINAL) else shrunk


def randomise(model: nn.Module, seed: int) -> None:
    """Draw every parameter anew so that activations stay near 1, logits differ by a few units, and every change shows.

    Norms differ from 1, biases differ from 0, and embeddings are small. With an initialisation for training, all tokens
    would be almost equally likely, and most mistakes invisible.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in embeddings:
                parameter.copy_(EMBEDDING_RMS * noise)
            elif parameter.ndim < 2:  # norm weights start as 1, or as 0 if 1 is added later; biases as 0
                parameter.copy_(parameter.mean().round() + (0.2 if name.endswith("weight") else 0.3) * noise)
            else:
                parameter.copy_(noise * (2 if "head" in name else 1) / parameter.shape[-1] ** 0.5)
