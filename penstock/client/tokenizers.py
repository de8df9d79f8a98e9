"""Finds the tokenizer that belongs to a model. Imports no torch."""

from typing import Any

from penstock.tokenizer.hf import adopt_tokenizer, load_tokenizer
from penstock.tokenizer.tokenizer import Tokenizer
from penstock.weights.hub import resolve_model

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "special_tokens_map.json",
)


def choose_tokenizer(given: Any, model: str | None) -> Tokenizer | None:
    """What a user gave as tokenizer: an object (ours or of Transformers), a directory, or None for the model's own.

    model: None where the model is an object, which has none.

    Raises:
        ModelLoadError, InvalidRequestError: there is no such tokenizer, or it is of no use.
    """
    if given is not None and not isinstance(given, str):
        return adopt_tokenizer(given)
    source = given or model
    return None if source is None else tokenizer_for(source)


def tokenizer_for(model: str) -> Tokenizer | None:
    """The tokenizer of a model directory, hub name or "demo"; None where the directory has no tokenizer file at all.

    A model without one takes prompts as token ids and gives no text.

    Raises:
        ModelLoadError: there is no such model, or its tokenizer files are of no use.
    """
    directory = resolve_model(model)
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        return None
    return load_tokenizer(directory)
