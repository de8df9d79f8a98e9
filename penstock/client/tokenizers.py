"""Find the tokenizer that belongs to a model, without importing torch."""

from typing import Any

from penstock.client.isolation import IsolatedTokenizer
from penstock.tokenizer.hf import adopt_tokenizer, load_tokenizer
from penstock.tokenizer.tokenizer import Tokenizer
from penstock.weights.hub import resolve_model

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json", "vocab.json",
                   "special_tokens_map.json")  # fmt: skip


def choose_tokenizer(given: Any, model: str | None, *, isolated: bool = False) -> Tokenizer | None:
    """Return the tokenizer that a user gave, or the model's own; None without one: prompts must then be ids.

    Args:
        given: an object (of Penstock or Transformers), a directory, a hub name, "demo", or None for the model's own.
        model: a directory, a hub name or "demo"; None for a model object, which has no tokenizer.
        isolated: whether a tokenizer from files handles texts in processes of its own (client/isolation.py); it must
            be loaded before it is used.

    Raises:
        ModelLoadError, InvalidRequestError: the tokenizer does not exist or cannot be used.
    """
    if given is not None and not isinstance(given, str):
        return adopt_tokenizer(given)
    source = given or model
    if source is None:
        return None
    directory = resolve_model(source)
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        return None
    return IsolatedTokenizer(directory) if isolated else load_tokenizer(directory)
