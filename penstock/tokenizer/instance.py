"""A tokenizer object of Transformers as ours, told by what it has; nothing here imports Transformers.

Its `tokenizers` backend is copied, because ours turns padding and truncation off. An object without one is saved to a
temporary directory and read from there.
"""

import tempfile
from typing import Any

from tokenizers import Tokenizer as Backend

from penstock.errors import InvalidRequestError
from penstock.tokenizer.chat_template import ChatTemplate
from penstock.tokenizer.hf import NAMED_TOKENS, HFTokenizer, load_tokenizer
from penstock.tokenizer.tokenizer import Tokenizer


def adopt_tokenizer(given: Any) -> Tokenizer:
    """Any tokenizer object as one that the engine's clients understand; ours passes as it is.

    Raises:
        InvalidRequestError: it is neither ours nor one of Transformers.
        ModelLoadError: it cannot be written as a tokenizer.json.
    """
    if callable(getattr(given, "token_to_bytes", None)):
        ours: Tokenizer = given
        return ours
    if isinstance(getattr(given, "backend_tokenizer", None), Backend):
        return _from_backend(given)
    if not callable(getattr(given, "save_pretrained", None)):
        raise InvalidRequestError(
            f"tokenizer: an object of type {type(given).__name__} is not supported; give a directory, a tokenizer of "
            f"Transformers, or one with the methods of penstock.tokenizer.tokenizer.Tokenizer",
            param="tokenizer",
        )
    with tempfile.TemporaryDirectory() as directory:
        given.save_pretrained(directory)
        return load_tokenizer(directory)


def _from_backend(given: Any) -> HFTokenizer:
    backend = Backend.from_str(given.backend_tokenizer.to_str())
    backend.encode_special_tokens = bool(getattr(given, "split_special_tokens", False))
    named = {name: str(getattr(given, name)) for name in NAMED_TOKENS if getattr(given, name, None) is not None}
    template = getattr(given, "chat_template", None)
    return HFTokenizer(
        backend,
        named_tokens=named,
        chat_template=None if template is None else ChatTemplate(template, named),
        clean_up=bool(getattr(given, "clean_up_tokenization_spaces", False)),
    )
