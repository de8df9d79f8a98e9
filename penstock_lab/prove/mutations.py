"""Inputs made from the types that decode them: valid ones, almost valid ones, and damaged bytes.

Nothing here lists fields, so a new field of a request body or a frame is attacked automatically.
"""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import inspect

BAD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 17, 255, 256, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40,
    0.5, -0.0, 1e-45, 1e308, float("nan"), float("inf"), -float("inf"), "", "a", "NaN", "5", "\u0000", "\ud800",
    "\U0001f469\u200d", "x" * 300, "../../etc/passwd", "{{ 7*7 }}", "`$.n` - at ", [], {}, [[]], [None], {"": None},
)  # fmt: skip
NAMES = ("", "type", "role", "content", "n", "stream", "__class__", "a.b[0]", "x" * 200)
TOKENS = (b"\x00", b"\xff", b"\xc0\xaf", b"\\ud800", b"[" * 3000, b'{"a":' * 1500, b"1e999", b"NaN", b'"', b"\\", b",",
          b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc1", b"\x91" * 3000, b"9" * 400)  # fmt: skip
MAX_DEPTH = 4
LINES = ("POST", "GET", "PUT", "DELETE", "OPTIONS", "HEAD", "BREW", "", "get")
FIELDS = (
    "Content-Length: 5", "Content-Length: 999999999999", "Content-Length: -1", "Content-Length: 2, 2",
    "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Connection: close", "Connection: Upgrade",
    "Expect: 100-continue", "Upgrade: websocket", "Host: evil.example", "Host:", "X: \x00", "X : y", " folded", ":",
    "Content-Encoding: gzip", "Content-Type: text/plain", "Origin: null", "Authorization: Basic !!!", "Range: bytes=0-",
    "X-Request-Id: " + "\xe4" * 50, "Cookie: " + "a=b; " * 400, "TE: trailers", "Accept-Encoding: *",
)  # fmt: skip


class Mutator:
    """Makes inputs from a source of random numbers."""

    def __init__(self, source: random.Random) -> None:
        self.random = source

    def value(self, depth: int = 0) -> Any:
        """Draw a value that JSON can encode, or almost."""
        pick = self.random.random()
        if depth >= MAX_DEPTH or pick < 0.8:
            return self.random.choice(BAD_VALUES)
        items = [self.value(depth + 1) for _ in range(self.random.randrange(4))]
        return items if pick < 0.9 else {self.random.choice(NAMES): item for item in items}

    def valid(self, kind: inspect.Type, depth: int = 0) -> Any:
        """Draw a valid value of a type, as JSON or msgpack has it, without most of its optional fields."""
        rolled = self.random.randrange(20)
        match kind:
            case inspect.UnionType(types=types):
                return self.valid(self.random.choice(types), depth)
            case inspect.StructType() | inspect.DataclassType():
                tag = {kind.tag_field: kind.tag} if isinstance(kind, inspect.StructType) and kind.tag_field else {}
                kept = [field for field in kind.fields if field.required or self.random.random() < 0.15]
                return tag | {field.encode_name: self.valid(field.type, depth + 1) for field in kept}
            case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
                return [] if depth > MAX_DEPTH else [self.valid(item, depth + 1) for _ in range(rolled % 4)]
            case inspect.DictType(key_type=key, value_type=item):
                return {str(self.valid(key, depth)): self.valid(item, depth + 1) for _ in range(rolled % 3)}
            case inspect.IntType():
                return rolled
            case inspect.FloatType():
                return rolled / 10
            case inspect.BoolType():
                return rolled < 10
            case inspect.NoneType():
                return None
            case inspect.LiteralType(values=values):
                return self.random.choice(values)
            case inspect.EnumType(cls=enum):
                return self.random.choice([member.value for member in enum])
            case inspect.StrType():
                return "word " * (rolled % 4) + "x"
        return self.value(depth)

    def nearly(self, value: Any, names: Sequence[str] = NAMES) -> Any:
        """Change a value in one or a few places: another value, a place removed, or a place added.

        Args:
            names: possible names of a new place.
        """
        for _ in range(self.random.choice((1, 1, 1, 2, 5))):
            value = self._change(value, names)
        return value

    def _change(self, value: Any, names: Sequence[str]) -> Any:
        if isinstance(value, dict) and value and self.random.random() < 0.85:
            name = self.random.choice(list(value))
            pick = self.random.random()
            if pick < 0.3:
                return {**value, self.random.choice(names): self.value()}
            if pick < 0.4:
                return {key: item for key, item in value.items() if key != name}
            return {**value, name: self._change(value[name], names)}
        if isinstance(value, list) and value and self.random.random() < 0.7:
            place = self.random.randrange(len(value))
            return [*value[:place], self._change(value[place], names), *value[place + (self.random.random() < 0.7) :]]
        return self.value()

    def json(self, value: Any) -> bytes:
        """Encode as JSON, or in Python's extension of it for a value that JSON lacks."""
        return json.dumps(value).encode()

    def damaged(self, data: bytes) -> bytes:
        """Change, cut out, double or insert a few bytes."""
        out = bytearray(data)
        for _ in range(self.random.choice((1, 1, 2, 4, 16))):
            place = self.random.randrange(len(out) + 1)
            end = min(len(out), place + self.random.choice((1, 1, 4, 40)))
            match self.random.randrange(5):
                case 0:
                    out[place:end] = self.random.randbytes(end - place)
                case 1:
                    del out[place:end]
                case 2:
                    out[place:place] = out[place:end]
                case 3:
                    out[place:place] = self.random.choice(TOKENS)
                case _:
                    del out[place:]
        return bytes(out)

    def input(self, kind: inspect.Type, encode: Callable[[Any], bytes], names: Sequence[str] = NAMES) -> bytes:
        """Draw the bytes of an input: a tenth are valid, most are almost valid, the others are damaged.

        Args:
            encode: encodes a value that the type's decoder could have decoded; may raise for a value without encoding.
        """
        pick, value = self.random.random(), self.valid(kind)
        if pick > 0.1:
            value = self.nearly(value, names)
        try:
            data = encode(value)
        except (TypeError, ValueError, OverflowError):  # lone surrogates and large numbers have no msgpack
            data = encode(None)
        return data if pick < 0.65 else self.damaged(data)

    def http(self, path: str, body: bytes, key: str) -> bytes:
        """Write a request as it might come over the wire, more or less."""
        fields = [f"Host: localhost\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"]
        fields += [f"{self.random.choice(FIELDS)}\r\n" for _ in range(self.random.choice((0, 1, 1, 2, 6)))]
        fields += [f"Content-Length: {len(body)}\r\n"] * self.random.choice((0, 1, 1, 1))
        self.random.shuffle(fields)
        method = "POST" if self.random.random() < 0.7 else self.random.choice(LINES)
        data = f"{method} {path} HTTP/1.1\r\n{''.join(fields)}\r\n".encode("latin-1", "replace") + body
        return data if self.random.random() < 0.5 else self.damaged(data)
