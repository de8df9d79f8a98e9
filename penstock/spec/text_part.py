"""The text part of multimodal checkpoints: its config as that of a decoder, and its tensors' names. No torch.

A checkpoint that reads images holds a language model of a known family: its config is the section `text_config` (in
the oldest files, the keys beside `vision_config`), and its tensors have a prefix. Only text is served. The rotary
embedding of Qwen's models has a position per axis of an image (mrope); for text, all of them are equal.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.errors import ModelLoadError, shown


class TextPart(NamedTuple):
    """The decoder in a multimodal architecture: its own architecture, the model_type of its section, and that of the
    decoder's own config.json."""

    architecture: str
    section_type: str
    model_type: str


TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": TextPart("Gemma3ForCausalLM", "gemma3_text", "gemma3_text"),
    "Gemma4ForConditionalGeneration": TextPart("Gemma4ForCausalLM", "gemma4_text", "gemma4_text"),
    "Llama4ForConditionalGeneration": TextPart("Llama4ForCausalLM", "llama4_text", "llama4_text"),
    "Mistral3ForConditionalGeneration": TextPart("MistralForCausalLM", "mistral", "mistral"),
    "Qwen2VLForConditionalGeneration": TextPart("Qwen2ForCausalLM", "qwen2_vl_text", "qwen2"),
    "Qwen2_5_VLForConditionalGeneration": TextPart("Qwen2ForCausalLM", "qwen2_5_vl_text", "qwen2"),
    "Qwen3VLForConditionalGeneration": TextPart("Qwen3ForCausalLM", "qwen3_vl_text", "qwen3"),
    "Qwen3VLMoeForConditionalGeneration": TextPart("Qwen3MoeForCausalLM", "qwen3_vl_moe_text", "qwen3_moe"),
}
# Others in the same architectures, by the model_type of the section.
OTHER_TEXT_PARTS = {
    ("Mistral3ForConditionalGeneration", "ministral3"): TextPart("Ministral3ForCausalLM", "ministral3", "ministral3"),
}
# What the section leaves out, where the decoder's own config.json does not.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
    },
    "qwen3_moe": {"norm_topk_prob": True},
}
# Keys about images beside the section, and in the oldest files among those of the decoder.
IMAGE_KEYS = frozenset(
    {"vision_config", "audio_config", "image_token_id", "image_token_index", "video_token_id", "vision_start_token_id"}
    | {"vision_end_token_id", "vision_token_id", "boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index"}
    | {"mm_tokens_per_image", "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size"}
    | {"vision_feature_layer", "vision_feature_select_strategy", "image_seq_length", "vision_soft_tokens_per_image"}
    | {"audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"}
)
SHARED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "quantization_config")
TIED = "tie_word_embeddings"
MROPE = ("mrope_section", "mrope_interleaved")
PREFIX = re.compile(r"^(model\.language_model\.|language_model\.model\.|language_model\.(?=lm_head\.))")
IMAGE_TENSORS = re.compile(
    r"^(model\.)?(vision_(tower|model|encoder)|visual|multi_modal_projector|audio_tower|embed_(vision|audio))\."
)


def decoder_config(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the config of the decoder in a multimodal config.json, and the keys beside it that are not about images.

    None: the architecture is not one of TEXT_PARTS.

    Raises:
        ModelLoadError: the decoder is of another family.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    part = TEXT_PARTS.get(name) if isinstance(name, str) else None
    if part is None:
        return None
    beside = {key: value for key, value in config.items() if key not in IMAGE_KEYS}
    section = beside.pop("text_config", beside)
    if not isinstance(section, dict) or (section is beside and "vision_config" not in config):
        raise ModelLoadError(
            f"config.json: text_config = {shown(config.get('text_config'))} must be an object in {name}"
        )
    if section is beside:  # the oldest files
        found, beside = section, {}
    else:
        kind = section.get("model_type", part.section_type)
        if isinstance(kind, str):
            part = OTHER_TEXT_PARTS.get((str(name), kind), part)
        if kind not in (part.section_type, part.model_type):
            raise ModelLoadError(
                f"config.json: text_config: model_type = {shown(kind)} is not supported in {name}; supported is "
                f"{part.section_type}"
            )
        found = DEFAULTS.get(part.model_type, {}) | {key: beside.pop(key) for key in SHARED if key in beside}
        given = {key: value for key, value in section.items() if key not in IMAGE_KEYS}
        found |= {key: value for key, value in given.items() if value is not None or key not in found}
        if beside.get(TIED) is not None:  # this one decides whether there is an LM head
            found[TIED] = beside[TIED]
    found = {**found, "architectures": [part.architecture], "model_type": part.model_type}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(found.get(key), dict):
            found[key] = _without_mrope(found[key])
    return found, beside


def _without_mrope(scaling: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in scaling.items() if key not in MROPE}
    return {
        key: "default" if key in ("type", "rope_type") and value == "mrope" else value for key, value in kept.items()
    }


def text_name(name: str) -> str:
    """Return the decoder's name of a tensor in a multimodal checkpoint."""
    prefix = PREFIX.match(name)
    if prefix is None:
        return name
    return name[prefix.end() :] if prefix[0] == "language_model." else "model." + name[prefix.end() :]
