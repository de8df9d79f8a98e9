"""Read a model's config.json, strictly, into a ModelConfig. No torch.

A missing key, a wrong type, a contradiction, or an unknown key that may change the mathematics raises a ModelLoadError
that names the key. Both spellings of Transformers are read: the older one (`rope_theta`, `rope_scaling`, `torch_dtype`)
and that of Transformers 5 (`rope_parameters`, `dtype`). The keys of an architecture are read by its family
(models/<family>/config.py).
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from penstock.errors import ModelLoadError, nearest, shown
from penstock.models.registry import (
    ARCHITECTURES,
    FALLBACK,
    find_architecture,
    is_registered,
    may_fall_back,
    unsupported,
)
from penstock.spec.config_file import SUPPORTED, read_config, why_unsupported_config, with_overrides
from penstock.spec.config_reader import MAX_SIZE, ConfigReader, read_json
from penstock.spec.generation_config import read_ignored, read_sampling
from penstock.spec.gguf import is_gguf
from penstock.spec.gguf_config import config_of_gguf
from penstock.spec.model_config import ModelConfig
from penstock.spec.quantization import KEY, find_quantization, parse_quantization
from penstock.spec.text_part import TIED, decoder_config

DTYPES = ("float32", "bfloat16", "float16")

# Keys of Transformers that do not affect a forward pass.
HARMLESS_KEYS = """
    transformers_version use_cache initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop
    output_hidden_states output_attentions return_dict chunk_size_feed_forward pretraining_tp torchscript
    use_bfloat16 gradient_checkpointing finetuning_task task_specific_params problem_type id2label label2id num_labels
    name_or_path tokenizer_class tokenizer_max_length prefix pad_token_id sep_token_id decoder_start_token_id
    unk_token_id attn_implementation experts_implementation tf_legacy_loss unsloth_version unsloth_fixed
    transformers.js_config is_llama_config max_sequence_length model_max_length is_matryoshka matryoshka_dimensions
    keys_to_ignore_at_inference hidden_dropout_prob attention_probs_dropout_prob dropout layerdrop
    num_logits_to_keep logits_to_keep

    max_length min_length do_sample num_beams temperature top_k top_p min_p typical_p repetition_penalty
    length_penalty diversity_penalty num_beam_groups num_return_sequences no_repeat_ngram_size early_stopping
    encoder_no_repeat_ngram_size bad_words_ids output_scores return_dict_in_generate forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    cache_implementation
"""  # the second paragraph: generation settings that old files repeat; Transformers 5 drops them too
HARMLESS = frozenset(HARMLESS_KEYS.split())

# Names in published files -> those that Transformers has today.
OLDER_NAMES = {"Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM", "PhiMoEForCausalLM": "PhimoeForCausalLM"}

# Keys that would change what is computed, each with the only value that does not.
NEUTRAL: dict[str, Any] = {
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "rope_interleaved": False,
    "use_mrope": False,
}
KNOWN_TO_MODULES = ("is_decoder",)  # Transformers' modules do what these say


def load_model_config(
    directory: str | Path,
    hf_overrides: Mapping[str, Any] | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Read the ModelConfig of a model directory from its config.json and, if it exists, generation_config.json.

    hf_overrides: values that replace those of config.json, or join them.
    rope_scaling: replaces the file's rotary scaling.

    Raises:
        ModelLoadError: as in parse_model_config; the message begins with the directory.
    """
    directory = Path(directory)
    generation: dict[str, Any] | None
    if is_gguf(directory):
        config, generation = config_of_gguf(directory)
    else:
        config = read_config(directory)
        quantization = find_quantization(directory, config)
        config |= {} if quantization is None else {KEY: quantization}
        generation_file = directory / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else None
    config = with_overrides(config, hf_overrides or {}, rope_scaling)
    try:
        found = parse_model_config(config, generation)
        return replace(found, max_seq_length=read_max_seq_length(directory))
    except ModelLoadError as error:
        problem = str(error)
        if is_gguf(directory):  # which has these keys under names of its own
            problem = problem.removeprefix("generation_").removeprefix("config.json: ")
        raise ModelLoadError(f"{directory}: {problem}") from None


def parse_model_config(config: dict[str, Any], generation_config: dict[str, Any] | None = None) -> ModelConfig:
    """Make a ModelConfig from the contents of config.json and, if it exists, generation_config.json.

    Raises:
        ModelLoadError: a key is missing, wrong, contradictory or unknown, or the architecture is not supported.
        NotSupportedError: a method of quantisation, or a kind of rotary scaling, is not supported.
    """
    decoder = decoder_config(config)
    if decoder is not None:
        config, beside = decoder
        around = ConfigReader(beside, "config.json")
        around.neutral(NEUTRAL)
        around.finish({*HARMLESS, "architectures", "model_type", "auto_map", TIED})
    read = ConfigReader(config, "config.json" if decoder is None or not beside else "config.json: text_config")
    generation = ConfigReader(generation_config or {}, "generation_config.json")
    name = _read_name(read)
    model_type = str(read.raw("model_type"))
    if not is_registered(name) and not may_fall_back(name, model_type):
        raise unsupported(name, why_unsupported_config(config))
    architecture = find_architecture(name)
    notes = {"auto_map": "not followed: code of a checkpoint is never run"} if read.has("auto_map") else {}
    if decoder is not None:
        notes["vision_config"] = "images are not served, only the text part of this checkpoint"
    if architecture.model_type is not None:
        read.choice("model_type", [architecture.model_type])
    knows = KNOWN_TO_MODULES if FALLBACK in architecture.versions else ()
    read.neutral({key: value for key, value in NEUTRAL.items() if key not in knows})
    model_type = read.raw("model_type") or architecture.model_type or ""
    numbers = architecture.read_config(read)
    quantization = parse_quantization(read.raw(KEY)) if read.section(KEY) else None
    _check_fields(name, numbers)
    vocab_size = numbers["vocab_size"]
    bos = _read_ids("bos_token_id", vocab_size, generation, read)
    result = ModelConfig(
        architecture=name,
        model_type=model_type,
        **numbers,
        dtype=read.choice(
            "dtype", DTYPES, read.choice("torch_dtype", DTYPES, "bfloat16" if quantization else "float32")
        ),
        eos_token_ids=_read_ids("eos_token_id", vocab_size, generation, read),
        bos_token_id=bos[0] if bos else None,
        quantization=quantization,
        default_sampling=read_sampling(generation),
        ignored_generation=read_ignored(generation),
        is_text_part=decoder is not None,
        notes=notes,
        source=config,
    )
    for rope, head_dim in result.ropes():
        rope.check(head_dim)
    read.finish(HARMLESS)
    return result


def read_max_seq_length(directory: Path) -> int | None:
    """Read the length of texts that sentence-transformers keeps. Raise ModelLoadError if it is none."""
    file = directory / "sentence_bert_config.json"
    if not file.is_file():
        return None
    read = ConfigReader(read_json(file), file.name)
    read.neutral({"do_lower_case": False})
    return read.integer("max_seq_length", 1, MAX_SIZE) if read.has("max_seq_length") else None


def _check_fields(architecture: str, numbers: dict[str, Any]) -> None:
    """Check that an architecture's config function has returned fields of ModelConfig.

    Raises:
        ModelLoadError: a name is not a field.
    """
    known = {item.name for item in fields(ModelConfig)}
    for name in numbers.keys() - known:
        raise ModelLoadError(
            f"{architecture}: its config function returns {name!r}, which is not a field of ModelConfig (did you mean "
            f"{nearest(name, known)}? put numbers of your own into `extra`)"
        )


def _read_name(read: ConfigReader) -> str:
    """Read the architecture's name.

    Raises:
        ModelLoadError: `architectures` does not name exactly one, or the file belongs to a diffusion pipeline.
    """
    if read.has("_class_name"):
        raise ModelLoadError(
            f"config.json: _class_name = {shown(read.raw('_class_name'))} is part of a diffusion model; {SUPPORTED}"
        )
    names = read.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise read.fail("architectures", "a list of one of " + ", ".join(sorted(ARCHITECTURES)))
    return OLDER_NAMES.get(names[0], names[0])


def _read_ids(key: str, vocab_size: int, *files: ConfigReader) -> tuple[int, ...]:
    """Read the token ids of a key, whose value is an id or a list, without repetitions. The first file with any ids
    decides."""
    result: tuple[int, ...] = ()
    for read in files:
        value = read.raw(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for item in ids:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
                raise read.fail(key, f"an id from 0 to {vocab_size - 1}, or a list of such ids")
        result = result or tuple(dict.fromkeys(ids))
    return result
