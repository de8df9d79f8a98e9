"""The protocol of tokenizers, and checks of a text before it is tokenised. The engine uses neither.

hf.py implements the protocol over tokenizer.json; tests implement it over bytes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from penstock.errors import InvalidRequestError

if TYPE_CHECKING:  # keeps Jinja out of processes that only talk to an engine
    from penstock.tokenizer.chat_template import ChatTemplate

MAX_CHARS_PER_TOKEN = 8  # longer texts are refused before they are tokenised
MAX_CHARS_SLACK = 64


class Tokenizer(Protocol):
    """A converter from text to token ids and back.

    Attributes:
        special_ids: ids that `skip_special_tokens` leaves out of texts.
        joins_bytes: decode(ids) is the concatenation of the tokens' bytes, read as UTF-8 (byte-level vocabularies).
        byte_fallback_ids: tokens of a sentencepiece-like vocabulary that represent one byte (<0xE2>).
        chat_template: None if the model has none.
    """

    bos_token_id: int | None
    eos_token_id: int | None
    special_ids: frozenset[int]
    joins_bytes: bool
    byte_fallback_ids: frozenset[int]
    chat_template: "ChatTemplate | None"

    @property
    def vocab_size(self) -> int:
        """The number of ids including added tokens: one more than the largest id."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of the text, by default with the special tokens that the model expects around it (BOS).

        Raises:
            InvalidRequestError: the text contains a lone surrogate.
        """

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Return the text of the ids. Invalid UTF-8 becomes U+FFFD; ids outside the vocabulary are left out.

        spaces_between_special_tokens=False joins neighbouring added tokens without the space that word-level decoders
        put between tokens.
        """

    def token_to_text(self, token_id: int) -> str:
        """Return the text of one token, for logprobs: special tokens by name, incomplete characters as U+FFFD."""

    def token_to_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may end inside a character; b"" for an id outside the vocabulary."""


def encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of each text, without special tokens. It is one call if the tokenizer has `encode_all`."""
    at_once = getattr(tokenizer, "encode_all", None)
    if at_once is not None:
        return list(at_once(texts, add_special_tokens=False))
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def check_prompt_length(text: str, max_model_len: int, *, param: str = "prompt") -> None:
    """Check that a text can fit into the context, before tokenising it costs time and memory.

    Raises:
        InvalidRequestError: the text is too long (code "context_length_exceeded").
    """
    limit = MAX_CHARS_PER_TOKEN * max_model_len + MAX_CHARS_SLACK
    if len(text) > limit:
        raise InvalidRequestError(
            f"{param}: {len(text)} characters are too many; the context of {max_model_len} tokens takes at most "
            f"{limit} characters",
            param=param,
            code="context_length_exceeded",
        )
