"""The generation_config.json of a model: which of its keys become defaults of a request, and which are told."""

import json
from typing import Any

import pytest
from transformers import GenerationConfig, LlamaConfig

from penstock.errors import ModelLoadError
from penstock.models.config_json import parse_model_config
from tests.models.configs import LLAMA


def test_generation_config_goes_first() -> None:
    """Guards against chat models that end only at config.json's token: their own end token stands in
    generation_config.json."""
    generation = {"eos_token_id": [7, 2, 7], "bos_token_id": 5, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    config = parse_model_config(LLAMA, generation)
    assert (config.eos_token_ids, config.bos_token_id) == ((7, 2), 5)
    assert config.default_sampling == {"temperature": 0.6, "top_p": 0.9}
    alone = parse_model_config(LLAMA, {})
    assert (alone.eos_token_ids, alone.bos_token_id, alone.default_sampling) == ((2,), 1, {})


def test_sampling_defaults_count_only_where_transformers_samples() -> None:
    """Guards against a temperature taken from a file whose author generates greedily. The repetition penalty is no
    part of sampling and counts always."""
    fields = {"temperature": 0.6, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    assert parse_model_config(LLAMA, fields).default_sampling == {"repetition_penalty": 1.1}
    assert parse_model_config(LLAMA, fields | {"do_sample": True}).default_sampling == fields


def test_do_sample_false_is_greedy_and_temperature_zero_loads() -> None:
    """Guards against drawing at temperature 1 where the author says not to draw, and against a model that does not
    load because its file spells greedy as temperature 0."""
    assert parse_model_config(LLAMA, {"do_sample": False, "top_p": 0.9}).default_sampling == {"temperature": 0.0}
    fields = {"do_sample": True, "temperature": 0, "top_k": 20}
    assert parse_model_config(LLAMA, fields).default_sampling == {"temperature": 0.0, "top_k": 20}
    assert parse_model_config(LLAMA, {"temperature": 0.0, "top_p": 0.0}).default_sampling == {}


def test_generation_keys_that_are_not_applied_are_told() -> None:
    """Guards against settings that are accepted and ignored: what changes the answer and is not built, and what nobody
    knows, is listed. Neutral values and bookkeeping are not; a limit of new tokens is applied."""
    told = {"watermarking_config": {"x": 1}, "guidance_scale": 3, "num_beams": 4, "nonsense": 1, "max_length": 4096}
    odd = {"early_stopping": 0, "num_return_sequences": True}
    quiet = {"num_beam_groups": 1, "length_penalty": 1, "suppress_tokens_at": None, "bad_words_ids": []}
    book = {
        "transformers_version": "4.40",
        "_from_model_config": True,
        "pad_token_id": [0],
        "cache_implementation": "x",
    }
    config = parse_model_config(LLAMA, told | odd | quiet | book | {"max_new_tokens": 64, "eos_token_id": 3})
    assert config.ignored_generation == tuple(sorted(told | odd))
    assert config.default_sampling == {"max_tokens": 64}
    assert parse_model_config(LLAMA, quiet | book).ignored_generation == ()


def test_what_transformers_writes_for_generation_is_all_known() -> None:
    """Guards against a complaint about the defaults of Transformers' own GenerationConfig, spelt out."""
    for theirs in (GenerationConfig(), GenerationConfig.from_model_config(LlamaConfig())):
        contents = json.loads(theirs.to_json_string(use_diff=False))
        assert parse_model_config(LLAMA, contents | {"bos_token_id": 1, "eos_token_id": 2}).ignored_generation == ()


@pytest.mark.parametrize("do_sample", [{}, {"do_sample": True}, {"do_sample": False}])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "0.7"),
        ("temperature", True),
        ("top_p", [0.9]),
        ("min_p", float("nan")),
        ("top_k", 1.5),
        ("repetition_penalty", "1"),
        ("repetition_penalty", 10**400),
        ("max_new_tokens", "64"),
        ("max_new_tokens", 0),
        ("do_sample", "yes"),
    ],
)
def test_wrong_generation_values_are_named(key: str, value: object, do_sample: dict[str, Any]) -> None:
    """Guards against a value of a wrong type that is skipped because it would not count."""
    with pytest.raises(ModelLoadError, match=rf"generation_config\.json: {key} = "):
        parse_model_config(LLAMA, do_sample | {key: value})
