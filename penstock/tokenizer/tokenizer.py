"""Tokenizer: text to ids and back. The engine never sees it.

This file knows no library: `hf` implements the protocol over tokenizer.json, tests implement it over bytes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from penstock.errors import InvalidRequestError

if TYPE_CHECKING:  # keeps Jinja out of processes that only talk to an engine
    from penstock.tokenizer.chat_template import ChatTemplate

MAX_CHARS_PER_TOKEN = 8  # a longer text than this many characters for each token of context is not even tokenised
MAX_CHARS_SLACK = 64


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        vocab_size: ids are below it (added tokens included).
        special_ids: ids that `skip_special_tokens` leaves out of texts.
        joins_bytes: decode(ids) is the bytes of the tokens one after the other, read as UTF-8: nothing is added,
            dropped or changed where two tokens meet (byte-level vocabularies).
        byte_fallback_ids: tokens of a vocabulary of pieces that stand for one byte (<0xE2>).
        chat_template: None where the model has none.
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
        """Ids of the text, begun as the model was trained (with its BOS, say) if add_special_tokens.

        Raises InvalidRequestError where the text is no Unicode (a lone surrogate).
        """

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD, ids that do not exist become nothing.

        spaces_between_special_tokens=False writes neighbouring added tokens without the space that decoders of
        whole words put between tokens.
        """

    def token_to_text(self, token_id: int) -> str:
        """The text of a single token, for logprobs: special tokens by name, a leading space kept, half characters as
        U+FFFD."""

    def token_to_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a single token, also where they are half a character; b"" for an id that does not
        exist."""


def check_prompt_length(text: str, max_model_len: int, *, param: str = "prompt") -> None:
    """Refuse a text that cannot fit, before tokenising it costs time and memory.

    Raises InvalidRequestError with code "context_length_exceeded".
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
    """Refuse a text with a lone surrogate: that is no character, it can be neither tokenised nor sent anywhere."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param}: holds a lone surrogate (\\u{ord(text[error.start]):x}) at character {error.start}", param=param
        ) from error
