"""Tokenizer: text to ids and back. The engine never sees it."""

from typing import Protocol

from penstock.tokenizer.chat_template import ChatTemplate


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        vocab_size: ids are below it (added tokens included).
        special_ids: ids that `skip_special_tokens` leaves out of texts.
        chat_template: None where the model has none.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    special_ids: frozenset[int]
    chat_template: ChatTemplate | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of the text, begun as the model was trained (with its BOS, say) if add_special_tokens."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD."""

    def token_to_text(self, token_id: int) -> str:
        """The text of a single token, for logprobs; special tokens by name, half characters as U+FFFD."""

    def token_to_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a single token, also where they are half a character."""
