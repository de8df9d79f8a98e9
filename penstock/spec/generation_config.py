"""Reads generation_config.json: the sampling that a model's author recommends, checked as SamplingParams checks it."""

from typing import Any

from penstock.interface.sampling_params import MAX_TOKENS, MIN_TEMPERATURE
from penstock.spec.config_reader import MAX_SIZE, ConfigReader, same

# Keys that change no token here.
HARMLESS_KEYS = """
    transformers_version pad_token_id decoder_start_token_id use_cache cache_implementation cache_config
    return_legacy_cache return_dict_in_generate output_scores output_logits output_attentions output_hidden_states
    is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    assistant_early_exit assistant_lookbehind target_lookbehind prompt_lookup_num_tokens max_matching_ngram_size
    compile_config disable_compile low_memory prefill_chunk_size use_model_defaults chat_format
"""
HARMLESS = frozenset(HARMLESS_KEYS.split())
# Keys that would, unless they have this value. Null and [] are neutral for all.
NEUTRAL: dict[str, Any] = {
    "max_length": 20,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "length_penalty": 1.0,
    "diversity_penalty": 0.0,
    "early_stopping": False,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "penalty_alpha": 0.0,
    "guidance_scale": 1.0,
    "renormalize_logits": False,
    "remove_invalid_values": False,
    "token_healing": False,
}
# Keys that become defaults of SamplingParams if the file says do_sample, with their ranges.
SAMPLING_RANGES = {"temperature": (0.0, 100.0), "top_p": (1e-12, 1.0), "min_p": (0.0, 1.0)}


def read_sampling(read: ConfigReader) -> dict[str, Any]:
    """Return defaults of SamplingParams. Keys that do not apply without do_sample need only be numbers."""
    sampling: dict[str, Any] = {}
    if read.has("repetition_penalty"):
        sampling["repetition_penalty"] = read.number("repetition_penalty", 0.01, 100.0)
    if read.has("max_new_tokens"):
        sampling["max_tokens"] = read.integer("max_new_tokens", 1, MAX_TOKENS)
    samples = read.boolean("do_sample", False)
    drawing: dict[str, Any] = {
        key: read.number(key, *(limits if samples else (-MAX_SIZE, MAX_SIZE)))
        for key, limits in SAMPLING_RANGES.items()
        if read.has(key)
    }
    if read.has("top_k"):
        drawing["top_k"] = read.integer("top_k", -1 if samples else -MAX_SIZE, MAX_SIZE)
    if samples and 0.0 < drawing.get("temperature", 0.0) < MIN_TEMPERATURE:
        raise read.fail("temperature", f"0 (greedy) or a number from {MIN_TEMPERATURE:g} to 100")
    if samples:
        return sampling | drawing
    return sampling | {"temperature": 0.0} if read.has("do_sample") else sampling


def read_ignored(read: ConfigReader) -> tuple[str, ...]:
    """Return every other key whose value is not neutral; to be called last."""
    unread = {key: read.raw(key) for key in read.unread(HARMLESS)}
    given = {key: value for key, value in unread.items() if value is not None and value != []}
    return tuple(key for key, value in given.items() if key not in NEUTRAL or not same(value, NEUTRAL[key]))
