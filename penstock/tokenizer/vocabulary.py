"""The bytes of single tokens, derived from the decoder of a `tokenizers` backend.

Three kinds of vocabulary: byte-level (each character of a token represents a byte), pieces with byte fallback (▁ is a
space, <0xE2> a byte) and plain pieces (##ing). This file does not decode sequences.
"""

import json
from typing import Any

from tokenizers import Tokenizer as Backend


def byte_of_char() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes are themselves, the others the characters from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {chr(byte): byte for byte in shown}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


class TokenBytes:
    """Token id -> bytes.

    Attributes:
        joins: decoding ids joins these bytes (see `Tokenizer.joins_bytes`).
        fallback_ids: tokens like <0xE2>, if the decoder reads them as bytes.
    """

    def __init__(self, backend: Backend) -> None:
        steps = _decoder_steps(backend)
        kinds = [step["type"] for step in steps]
        self._backend = backend
        self._alphabet = byte_of_char() if "ByteLevel" in kinds else {}
        self._replacements = [pair for step in steps for pair in _replacements(step)]
        self._word_prefix = next((step["prefix"] for step in steps if step["type"] == "WordPiece"), "")
        self._fallback = _fallback_bytes(backend) if "ByteFallback" in kinds else {}
        self.joins = bool(kinds) and set(kinds) <= {"ByteLevel", "Fuse"} and "ByteLevel" in kinds
        self.fallback_ids = frozenset(self._fallback)

    def __getitem__(self, token_id: int) -> bytes:
        if token_id in self._fallback:
            return self._fallback[token_id]
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._alphabet:
            return self._byte_level(token)
        for before, after in self._replacements:
            token = token.replace(before, after)
        return token.removeprefix(self._word_prefix).encode()

    def _byte_level(self, token: str) -> bytes:
        """Return the bytes of a token; one with a character outside the alphabet is its own text."""
        try:
            return bytes([self._alphabet[char] for char in token])
        except KeyError:
            return token.encode()


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return steps


def _replacements(step: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (text, replacement) pairs that a step of the decoder applies within every token."""
    if step["type"] == "Metaspace":
        return [(step["replacement"], " ")]
    if step["type"] == "BPEDecoder":
        return [(step["suffix"], " ")]
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return [(step["pattern"]["String"], step["content"])]
    return []


def _fallback_bytes(backend: Backend) -> dict[int, bytes]:
    ids = {value: backend.token_to_id(f"<0x{value:02X}>") for value in range(256)}
    return {token_id: bytes([value]) for value, token_id in ids.items() if token_id is not None}
