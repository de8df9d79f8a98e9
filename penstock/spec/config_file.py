"""Find and read the file of a model directory that describes its architecture, in today's keys. No torch.

Besides Transformers' config.json, two original formats are read:

  * Mistral's params.json. The weights are in consolidated.safetensors, under the names that the tables of Llama and
    Mixtral list under `or`.
      {"dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8,
       "norm_eps": 1e-05, "vocab_size": 32000, "sliding_window": 4096}
  * Falcon's config.json from before Transformers had the family. The weights have today's names.
      {"architectures": ["RWForCausalLM"], "model_type": "RefinedWeb", "n_head": 128, "n_head_kv": 8, ...}

A directory of another kind, or of another kind of model, is refused by name.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ModelLoadError
from penstock.spec.config_reader import MAX_SIZE, ConfigReader, read_json

CONFIG, PARAMS = "config.json", "params.json"
SUPPORTED = "only autoregressive decoders with a key/value cache, and encoders like BERT, are supported"
# Files that other kinds of directories have instead of config.json.
OTHER_KINDS = {
    "model_index.json": f"a diffusion pipeline; {SUPPORTED}",
    "adapter_config.json": "a LoRA adapter; give the base model's directory; adapters are not supported yet",
}
# Pattern of class names -> the kind of model.
UNSUPPORTED: dict[str, str] = {
    r"^(?i:llada|dream)": "a diffusion language model: it refines all tokens of a text at once",
    r"Pipeline$|UNet|Diffusion|Autoencoder|Transformer2D": "a diffusion model: it refines a whole image at once",
    r"For(MaskedLM|PreTraining|(Sequence|Token|Image)Classification|QuestionAnswering|MultipleChoice)$|^Bert|Roberta": (
        "an encoder: it reads a text and does not continue one"
    ),
    r"^(T5|MT5|Bart|MBart|Pegasus|Marian|Whisper|Speech2Text)": "an encoder-decoder: it needs a cross-attention cache",
    r"Mamba|Rwkv|RecurrentGemma|Jamba|Zamba": "a recurrent model: its state is not a key/value cache",
    r"ForConditionalGeneration$|Vision|LlavaFor|Audio": "a multimodal model: it reads more than text",
    r"(?<!LMHead)Model$": "a model without a language-model head",
}
# Keys of config.json -> the kind of model that has them.
RECURRENT = "a hybrid model: some of its layers keep a recurrent state instead of keys and values"
LATENT = "latent attention: it keeps one compressed vector per token instead of keys and values"
UNSUPPORTED_KEYS: dict[str, str] = {
    "block_configs": "a pruned model: its layers have different heads and sizes, and some have no attention",
    "linear_attn_config": RECURRENT,
    "linear_num_key_heads": RECURRENT,
    "mamba_num_heads": RECURRENT,
    "sparse_attention_config": "sparse attention: it chooses keys by an index that it keeps beside them",
    "kv_lora_rank": LATENT,
}
# Of params.json:
CONTEXT = 32768  # default context
WINDOW_THETA, THETA = 1e4, 1e6  # default rotary base, with a window and without one
BOS, EOS = 1, 2  # the same in all Mistral tokenizers
SIZES = {  # Mistral's keys -> Transformers'
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
NEUTRAL = {"use_biases": False, "causal": True}
REFINED_WEB = ("RefinedWeb", "RefinedWebModel")
# Settings of one accelerator's implementation of 40B, found in its copies of the file; no number depends on them.
SETTINGS = ("batch_users", "efficient_40b", "flash_decode", "fracture_vocab", "padded_lmh", "split_mq", "user_rows")


def has_config(directory: Path) -> bool:
    """Tell whether a directory holds a config.json, or Mistral's params.json."""
    return any((directory / name).exists() for name in (CONFIG, PARAMS))


def read_config(directory: Path) -> dict[str, Any]:
    """Read config.json, or else Mistral's params.json with Transformers' keys.

    Raises:
        ModelLoadError: there is neither file, or the file cannot be read.
    """
    config, params = directory / CONFIG, directory / PARAMS
    for name, kind in OTHER_KINDS.items():
        if (directory / name).is_file() and not has_config(directory):
            raise ModelLoadError(f"{directory}: {name} makes it {kind}")
    is_params = params.is_file() and not config.exists()
    values = read_json(params if is_params else config)
    try:
        return config_of_params(values) if is_params else modern_falcon(values)
    except ModelLoadError as error:
        raise ModelLoadError(f"{directory}: {error}") from None


def with_overrides(
    config: Mapping[str, Any], hf_overrides: Mapping[str, Any], rope_scaling: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Replace values of a config.json, section by section. Null removes a key.

    rope_scaling: replaces the section of this name, in the config of the text part if there is one; `rope_theta` stays.
    """
    result = dict(config)
    for key, value in hf_overrides.items():
        section = result.get(key)
        if isinstance(section, Mapping) and isinstance(value, Mapping):
            result[key] = with_overrides(section, value, None)
        else:
            result[key] = value
    if rope_scaling is not None:
        text = result.get("text_config")
        place = result
        if isinstance(text, Mapping):
            place = result["text_config"] = dict(text)
        parameters = place.get("rope_parameters")
        if isinstance(parameters, Mapping):  # the keys of Transformers 5
            by_type = isinstance(parameters.get("full_attention"), Mapping)
            found = parameters["full_attention"] if by_type else parameters
            scaled = {"rope_theta": found.get("rope_theta"), **rope_scaling}
            place["rope_parameters"] = {**parameters, "full_attention": scaled} if by_type else scaled
        else:
            place["rope_scaling"] = dict(rope_scaling)
    return result


def why_unsupported(architecture: str) -> str | None:
    """Find the kind of model that an architecture's name or a model_type indicates; None if neither is known."""
    return next((reason for pattern, reason in UNSUPPORTED.items() if re.search(pattern, architecture)), None)


def why_unsupported_config(config: dict[str, Any]) -> str | None:
    """Find the kind of model that the keys of a config.json indicate, or its name and model_type; None if they do
    not."""
    section = config.get("text_config")
    keys = config | (section if isinstance(section, dict) else {})
    found = next((reason for key, reason in UNSUPPORTED_KEYS.items() if keys.get(key)), None)
    return found or why_unsupported(str(config.get("model_type")))


def config_of_params(params: dict[str, Any]) -> dict[str, Any]:
    """Translate Mistral's params.json into the equivalent config.json.

    Raises:
        ModelLoadError: a key is missing, invalid or unknown.
    """
    read = ConfigReader(params, PARAMS)
    read.neutral(NEUTRAL)
    window, windowed = _windows(read)
    context = read.integer("max_seq_len", 1, MAX_SIZE, read.integer("max_position_embeddings", 1, MAX_SIZE, CONTEXT))
    experts: dict[str, int] = {}
    if moe := read.section("moe"):
        experts["num_local_experts"] = moe.integer("num_experts", 1, MAX_SIZE)
        experts["num_experts_per_tok"] = moe.integer("num_experts_per_tok", 1, MAX_SIZE)
        moe.finish(())
    if experts and windowed:
        raise read.fail("moe", "absent where the layers have different windows")
    family = "mixtral" if experts else "ministral" if windowed else "mistral"
    config = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        **{ours: read.integer(theirs, 1, MAX_SIZE) for theirs, ours in SIZES.items()},
        **experts,
        **windowed,
        "rms_norm_eps": read.number("norm_eps", 0.0, 1.0),
        "rope_theta": read.number("rope_theta", 1.0, 1e12, THETA if window is None else WINDOW_THETA),
        "sliding_window": window,
        "max_position_embeddings": context,
        "tie_word_embeddings": read.boolean("tied_embeddings", False),
        "dtype": "bfloat16",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    read.finish({"max_batch_size"})
    return config


def _windows(read: ConfigReader) -> tuple[int | None, dict[str, Any]]:
    """Read the window, and `layer_types` if only some layers have it.

    In that case the file has a list that repeats from the first layer to the last. Ministral's key is
    `_sliding_window`.
    """
    key = "sliding_window" if read.has("sliding_window") else "_sliding_window"
    if key == "sliding_window" and read.has("_sliding_window"):
        raise read.fail("_sliding_window", "null beside sliding_window, or absent")
    sizes = read.raw(key)
    if not isinstance(sizes, list):
        return read.integer(key, 1, MAX_SIZE) if read.has(key) else None, {}
    layers, windows = read.integer("n_layers", 1, MAX_SIZE), [size for size in sizes if size is not None]
    window = windows[0] if windows and type(windows[0]) is int else 0
    if not 1 <= window <= MAX_SIZE or windows.count(window) != len(windows) or layers % len(sizes):
        raise read.fail(key, f"an integer, or a list of one integer and null, as long as a divisor of {layers} layers")
    kinds = ["full_attention" if size is None else "sliding_attention" for size in sizes]
    return window, {} if None not in sizes else {"layer_types": kinds * (layers // len(sizes))}


def modern_falcon(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrite the config with today's keys; it is unchanged if its model_type is not in REFINED_WEB.

    RefinedWeb is Falcon-40B, with parallel branches that have a norm each, and key/value groups. RefinedWebModel is
    Falcon-7B or RW; the file says which branches and heads the model has.

    Raises:
        ModelLoadError: keys contradict each other or are missing.
    """
    kind = config.get("model_type")
    if kind not in REFINED_WEB:
        return config
    read = ConfigReader(config, "config.json")
    is_40b = kind == "RefinedWeb"
    read.neutral({"new_decoder_architecture": is_40b} | ({"parallel_attn": True} if is_40b else {}))
    for key in () if is_40b else ("multi_query", "parallel_attn"):
        if not read.has(key):  # the original code and Transformers have different defaults
            raise read.fail(key, f"true or false where model_type is {kind}")
    heads, also = read.raw("n_head_kv"), read.raw("num_kv_heads")
    if heads is not None and also not in (None, heads):
        raise read.fail("num_kv_heads", f"the same as n_head_kv = {heads}, or absent")
    kept = {key: value for key, value in config.items() if key not in ("n_head_kv", *SETTINGS)}
    names = ["FalconForCausalLM"] if config.get("architectures") == ["RWForCausalLM"] else config.get("architectures")
    return kept | {
        "architectures": names,
        "model_type": "falcon",
        "num_kv_heads": also if heads is None else heads,
        "new_decoder_architecture": is_40b,
    }
