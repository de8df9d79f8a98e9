"""Transformers' GenerationConfig, field by field: honoured, without effect on tokens, or refused by name."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from penstock.errors import ModelLoadError
from penstock.interface.sampling_params import SamplingParams
from penstock.spec.config_reader import ConfigReader
from penstock.spec.generation_config import (
    HONOURED,
    HONOURED_DRAWING,
    KEYS,
    OF_A_CALL,
    READ,
    REFUSED,
    SAMPLING_RANGES,
    read_ignored,
    read_sampling,
)
from penstock_lab.compat.colossalai_config import read_refused

TABLES = (HONOURED, HONOURED_DRAWING, SAMPLING_RANGES, READ, KEYS["harmless"], OF_A_CALL, REFUSED)
THEIRS = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
DOCUMENT = Path(__file__).parents[1] / "docs" / "sampling.md"
VALUES: dict[str, Any] = {  # of honoured fields -> what SamplingParams gets
    "no_repeat_ngram_size": 3,
    "suppress_tokens": [1, 2],
    "begin_suppress_tokens": [3],
    "bad_words_ids": [[1, 2]],
    "sequence_bias": [[[1, 2], 0.5]],
    "forced_bos_token_id": 7,
    "forced_eos_token_id": 8,
    "min_length": 4,
    "min_new_tokens": 5,
    "exponential_decay_length_penalty": [2, 1.5],
    "stop_strings": ["x"],
    "typical_p": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.2,
    "top_h": 0.3,
}


def reader(**values: Any) -> ConfigReader:
    return ConfigReader(values, "generation_config")


@pytest.mark.covers("C10")
@pytest.mark.parametrize("name", THEIRS)
def test_every_field_is_in_one_table_and_in_the_document(name: str) -> None:
    """Guards against a field of a newer Transformers that is ignored in silence: it belongs into a table."""
    assert sum(name in table for table in TABLES) == 1
    assert f"`{name}`" in DOCUMENT.read_text()


@pytest.mark.covers("C10")
def test_honoured_fields_arrive() -> None:
    """Guards against a field that is read and goes nowhere, and one that applies although nothing is drawn."""
    assert set(VALUES) == {*HONOURED, *HONOURED_DRAWING}
    found = read_sampling(reader(**VALUES, do_sample=True))
    expected = SamplingParams(**{HONOURED.get(name, name): value for name, value in VALUES.items()})
    assert SamplingParams(**found) == expected
    assert read_sampling(reader(**VALUES)).keys() == set(HONOURED.values())
    for name in VALUES:
        with pytest.raises(ModelLoadError, match=f"generation_config: {name} = .* is not allowed; it must be "):
            read_sampling(reader(**{name: {"a": 1}}, do_sample=True))


@pytest.mark.covers("C10")
def test_other_fields_are_refused_or_told() -> None:
    """Guards against a call that gets something else than it asked for, and a model whose bookkeeping is a mistake."""
    some: dict[str, Any] = {name: {"odd": 1} for name in (*REFUSED, *OF_A_CALL)}
    read = reader(**some, nonsense=1)
    assert read_ignored(read) == tuple(sorted([*REFUSED, "nonsense"]))
    refused = read_refused(reader(**some, nonsense=1))
    assert set(refused) == {*REFUSED, *OF_A_CALL, "nonsense"}
    assert all(refused.values())
    neutral = {name: item.get("neutral") for name, item in REFUSED.items()}
    neutral |= {name: values[0] for name, values in OF_A_CALL.items() if values}
    assert not read_refused(reader(**neutral))


def test_every_parameter_is_in_the_document() -> None:
    """Guards against an option that nobody finds."""
    elsewhere = {  # fields that do not choose among tokens
        "seed", "prompt_logprobs", "bad_words_token_ids", "logits_processors", "use_beam_search", "skip_special_tokens",
        "spaces_between_special_tokens", "ignore_eos", "include_stop_str_in_output", "structured_outputs",
        "guided_decoding", "detokenize", "output_kind", "pooling", "thinking_token_ids",
    }  # fmt: skip
    text = DOCUMENT.read_text()
    missing = {item.name for item in fields(SamplingParams) if f"`{item.name}`" not in text}
    assert missing <= elsewhere
