"""Tokenizer: the protocol for text to ids and back. The engine never sees it.

`hf` implements it over tokenizer.json; tests implement it over bytes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from penstock.errors import InvalidRequestError

if TYPE_CHECKING:  # keeps Jinja out of processes that only talk to an engine
    from penstock.tokenizer.chat_template import ChatTemplate

MAX_CHARS_PER_TOKEN = 8  # a text with more characters per token of context is not even tokenised
MAX_CHARS_SLACK = 64


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        vocab_size: all ids are below it (added tokens included).
        special_ids: ids that `skip_special_tokens` leaves out of texts.
        joins_bytes: decode(ids) is the tokens' bytes one after the other, read as UTF-8, with nothing added, dropped
            or changed between two tokens (byte-level vocabularies).
        byte_fallback_ids: tokens of a vocabulary of pieces that represent one byte (<0xE2>).
        chat_template: None if the model has none.
    """

    bos_token_id: int | None
    eos_token_id: int | None
    special_ids: frozenset[int]
    joins_bytes: bool
    byte_fallback_ids: frozenset[int]
    chat_template: "ChatTemplate | None"

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of the text, with the special tokens of training (BOS, for instance) if add_special_tokens.

        Raises:
            InvalidRequestError: the text has a lone surrogate, which is no Unicode character.
        """

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Return the text of the ids; invalid UTF-8 becomes U+FFFD, ids that do not exist are left out.

        spaces_between_special_tokens=False joins neighbouring added tokens without the space that decoders of whole
        words put between tokens.
        """

    def token_to_text(self, token_id: int) -> str:
        """Return the text of a single token, for logprobs: special tokens by name, half characters as U+FFFD."""

    def token_to_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a single token, which may be half a character; b"" for an id that does not exist."""


def check_prompt_length(text: str, max_model_len: int, *, param: str = "prompt") -> None:
    """Refuse a text that cannot fit, before tokenising it costs time and memory.

    Raises:
        InvalidRequestError: with code "context_length_exceeded".
    """
    limit = MAX_CHARS_PER_TOKEN * max_model_len + MAX_CHARS_SLACK
    if len(text) > limit:
        raise InvalidRequestError(
            f"{param}: {len(text)} characters are too many; the context of {max_model_len} tokens takes at most "
            f"{limit} characters",
            param=param,
            code="context_length_exceeded",
        )


def check_unicode(text: str, *, param: str = "prompt") -> None:
    """Refuse a text with a lone surrogate, which can be neither tokenised nor encoded."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param}: holds a lone surrogate (\\u{ord(text[error.start]):x}) at character {error.start}", param=param
        ) from error
