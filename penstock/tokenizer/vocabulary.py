"""The bytes of single tokens, derived from the decoder of a `tokenizers` backend. Sequences are not decoded here.

There are three kinds of vocabulary: byte-level (each character of a token represents a byte), pieces with byte fallback
(▁ is a space, <0xE2> a byte) and plain pieces (##ing).
"""

import json
from typing import Any

from tokenizers import Tokenizer as Backend


def _byte_of_char() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes represent themselves, and U+0100 and following the other bytes."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {chr(byte): byte for byte in shown}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


class TokenBytes:
    """A mapping of token ids to bytes.

    Attributes:
        joins: see `Tokenizer.joins_bytes`.
        fallback_ids: see `Tokenizer.byte_fallback_ids`; empty if the decoder does not read <0xE2> as a byte.
    """

    def __init__(self, backend: Backend) -> None:
        steps = _decoder_steps(backend)
        kinds = [step["type"] for step in steps]
        self._backend = backend
        self._alphabet = _byte_of_char() if "ByteLevel" in kinds else {}
        self._replacements = [pair for step in steps for pair in _replacements(step)]
        self._word_prefix = next((step["prefix"] for step in steps if step["type"] == "WordPiece"), "")
        values = range(256) if "ByteFallback" in kinds else ()
        ids = ((backend.token_to_id(f"<0x{value:02X}>"), bytes([value])) for value in values)
        self._fallback = {token_id: byte for token_id, byte in ids if token_id is not None}
        self.joins = bool(kinds) and set(kinds) <= {"ByteLevel", "Fuse"} and "ByteLevel" in kinds
        self.fallback_ids = frozenset(self._fallback)

    def __getitem__(self, token_id: int) -> bytes:
        if token_id in self._fallback:
            return self._fallback[token_id]
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._alphabet:
            try:
                return bytes([self._alphabet[char] for char in token])
            except KeyError:  # an added token, which is plain text
                return token.encode()
        for before, after in self._replacements:
            token = token.replace(before, after)
        return token.removeprefix(self._word_prefix).encode()


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return steps


def _replacements(step: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the (text, replacement) pairs that a step of the decoder applies within every token."""
    if step["type"] == "Metaspace":
        return [(step["replacement"], " ")]
    if step["type"] == "BPEDecoder":
        return [(step["suffix"], " ")]
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return [(step["pattern"]["String"], step["content"])]
    return []
