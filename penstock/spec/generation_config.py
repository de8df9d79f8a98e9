"""Read Transformers' GenerationConfig, from a model's generation_config.json or a call, as fields of SamplingParams.

Every field is in one of the tables, here or in generation_keys.toml: it is honoured, changes no token here, or is
refused (docs/sampling.md).
"""

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from penstock.errors import InvalidRequestError
from penstock.interface.sampling_params import MAX_TOKENS, MIN_TEMPERATURE, SamplingParams
from penstock.spec.config_reader import MAX_SIZE, ConfigReader, same

# Keys that are always honoured -> the name in SamplingParams, which checks the value.
HONOURED = {
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "suppress_tokens": "suppress_tokens",
    "begin_suppress_tokens": "begin_suppress_tokens",
    "bad_words_ids": "bad_words_ids",
    "sequence_bias": "sequence_bias",
    "forced_bos_token_id": "forced_bos_token_id",
    "forced_eos_token_id": "forced_eos_token_id",
    "min_length": "min_length",
    "min_new_tokens": "min_new_tokens",
    "exponential_decay_length_penalty": "exponential_decay_length_penalty",
    "stop_strings": "stop",
}
DEFAULTS = {item.name: item.default for item in fields(SamplingParams)}
# Keys honoured only if do_sample is true; Transformers also ignores them otherwise.
HONOURED_DRAWING = ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
# Keys that become defaults of SamplingParams if do_sample is true, with their ranges.
SAMPLING_RANGES = {"temperature": (0.0, 100.0), "top_p": (1e-12, 1.0), "min_p": (0.0, 1.0)}
# The other honoured keys, which are read by name.
READ = ("repetition_penalty", "max_new_tokens", "do_sample", "top_k", "eos_token_id", "bos_token_id")

KEYS = tomllib.loads(Path(__file__).with_name("generation_keys.toml").read_text(encoding="utf-8"))
OF_A_CALL: dict[str, list[Any]] = KEYS["of_a_call"]
HARMLESS = frozenset((*KEYS["harmless"], *OF_A_CALL))
REFUSED: dict[str, dict[str, Any]] = KEYS["refused"]


def read_sampling(read: ConfigReader) -> dict[str, Any]:
    """Read defaults of SamplingParams. Without do_sample, keys that apply only to sampling need only be numbers."""
    sampling: dict[str, Any] = {}
    if read.has("repetition_penalty"):
        sampling["repetition_penalty"] = read.number("repetition_penalty", 0.01, 100.0)
    if read.has("max_new_tokens"):
        sampling["max_tokens"] = read.integer("max_new_tokens", 1, MAX_TOKENS)
    for key, name in HONOURED.items():
        value = _checked(read, key, name)
        if value != DEFAULTS[name]:
            sampling[name] = value
    samples = read.boolean("do_sample", False)
    drawing = _read_drawing(read, samples)
    if samples:
        return sampling | drawing
    return sampling | {"temperature": 0.0} if read.has("do_sample") else sampling


def _read_drawing(read: ConfigReader, samples: bool) -> dict[str, Any]:
    drawing: dict[str, Any] = {
        key: read.number(key, *(limits if samples else (-MAX_SIZE, MAX_SIZE)))
        for key, limits in SAMPLING_RANGES.items()
        if read.has(key)
    }
    if read.has("top_k"):
        drawing["top_k"] = read.integer("top_k", -1 if samples else -MAX_SIZE, MAX_SIZE)
    for key in HONOURED_DRAWING:
        if read.has(key):
            drawing[key] = read.number(key, -MAX_SIZE, MAX_SIZE)
            if samples and _checked(read, key, key) == DEFAULTS[key]:
                del drawing[key]
    if samples and 0.0 < drawing.get("temperature", 0.0) < MIN_TEMPERATURE:
        raise read.fail("temperature", f"0 (greedy) or a number from {MIN_TEMPERATURE:g} to 100")
    return drawing


def _checked(read: ConfigReader, key: str, name: str) -> Any:
    """Read a key's value as the SamplingParams field `name` holds it, or the default if it is absent or null."""
    if not read.has(key):
        return DEFAULTS[name]
    try:
        return getattr(SamplingParams(**{name: read.raw(key)}), name)
    except InvalidRequestError as error:
        raise read.fail(key, error.message.rpartition("it must be ")[2]) from None


def read_ignored(read: ConfigReader) -> tuple[str, ...]:
    """List every key that was not read and whose value is not neutral. Must be called last."""
    return tuple(not_neutral(read, HARMLESS))


def not_neutral(read: ConfigReader, harmless: frozenset[str]) -> list[str]:
    unread: Mapping[str, Any] = {key: read.raw(key) for key in read.unread(harmless)}
    given = {key: value for key, value in unread.items() if value is not None and value != []}
    return [key for key, value in given.items() if key not in REFUSED or not same(value, REFUSED[key].get("neutral"))]
