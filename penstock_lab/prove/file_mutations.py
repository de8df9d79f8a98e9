"""Mutations of files: bytes, JSON, YAML, safetensors. The caller's random numbers make every choice.

The mutations know the file formats, so that most results pass the first check. They know nothing of models.
"""

import json
import struct
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

LENGTH_BYTES = 8  # length field of a safetensors file, before the header
INTEGERS = (0, 1, -1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400)
VALUES: tuple[Any, ...] = (
    *INTEGERS, 0.5, -0.0, 1e308, float("nan"), float("inf"), -float("inf"), 1e-320, None, True, False,
    "", "0", "-1", "NaN", "\0", "\ud800", "\U0001f642", "../../etc/passwd", "/etc/passwd", "C:\\x", "os.system",
    "__import__('os').system('true')", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% for a in range(9**9) %}",
    "a" * 100_000, "(a+)+$", "(" * 5000, [], {}, [[]], [None], {"": None}, {"auto_map": "x"}, [0] * 1000,
)  # fmt: skip
SPECIAL_KEYS = (
    "auto_map",
    "trust_remote_code",
    "__class__",
    "",
    "\ud800",
    "quantization_config",
    "type",
    "_x",
    "dtype",
)
YAML_PIECES = (
    "[" * 5000, "{" * 3000, "- " * 3000, "? " * 2000, "&a [*a]", "*a", "<<: *a", "!!python/object/apply:os.system [x]",
    "!!binary x", "? [a, b]\n: c", "\t", "'", '"', "|", ">-", "---", "...", "%YAML 9.9", "0x" + "f" * 500,
    "1:" * 300 + "1",
    "2001-99-99", ".nan", ".inf", "~", "\x00", "\ufeff", "\ud7ff", "a: &x [1, 2]\nb: *x", "9" * 5000,
    "a: &a [x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b, *b, *b, *b]",
    "a: &a {x: 1}\nb: {<<: [*a, *a]}",
)  # fmt: skip


def mutate_bytes(random: Random, content: bytes) -> bytes:
    """Change, remove, repeat or add one to four pieces of the content."""
    result = bytearray(content)
    for _ in range(random.randint(1, 4)):
        place, length = random.randrange(len(result) + 1), random.choice((1, 1, 2, 8, 64, 4096))
        piece = bytes(result[place : place + length])
        match random.randrange(6):
            case 0 if place < len(result):
                result[place] ^= 1 << random.randrange(8)
            case 1:
                del result[place : place + length]
            case 2:
                result[place:place] = piece * random.choice((1, 2, 50))
            case 3:
                result[place : place + length] = random.randbytes(length)
            case 4:
                del result[place:]
            case _:
                result[place:place] = random.choice((b"\0" * length, b"\xff" * length, b"[" * 5000, b'{"a":' * 3000))
    return bytes(result)


def mutate_json(random: Random, content: bytes) -> bytes:
    """Change one to three values or keys of a JSON text, or its bytes."""
    if random.random() < 0.15:
        return mutate_bytes(random, content)
    value = json.loads(content)
    for _ in range(random.randint(1, 3)):
        value = _mutate_value(random, value)
    text = json.dumps(value)
    if random.random() < 0.1:
        text = _repeat_key(random, text)
    if random.random() < 0.05:
        text = text.replace(":", ":" + "[" * 5000, 1)
    return text.encode("utf-8", "surrogatepass")


def _value(random: Random) -> Any:
    """Copy one of VALUES, because a later mutation may change it."""
    return deepcopy(random.choice(VALUES))


def _mutate_value(random: Random, root: Any) -> Any:
    """Change one random node of a tree of lists and objects. Return the tree."""
    nodes: list[tuple[Any, Any]] = []  # (the parent, the key or index)

    def collect(parent: Any) -> None:
        for key in parent if isinstance(parent, dict) else range(len(parent)):
            nodes.append((parent, key))
            if isinstance(parent[key], dict | list):
                collect(parent[key])

    if not isinstance(root, dict | list) or not root or random.random() < 0.02:
        return _value(random)
    collect(root)
    parent, key = _choose(random, nodes)
    old = parent[key]
    match random.randrange(8):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[random.choice(SPECIAL_KEYS)] = _value(random)
        case 2 if isinstance(parent, dict):
            parent[random.choice((*SPECIAL_KEYS, key + "x"))] = parent.pop(key)
        case 3:
            other, at = random.choice(nodes)
            if isinstance(other, dict) == isinstance(at, str) and (isinstance(at, str) or at < len(other)):
                parent[key] = json.loads(json.dumps(other.get(at) if isinstance(other, dict) else other[at]))
        case 4 if isinstance(old, int | float):
            parent[key] = random.choice((old + 1, old - 1, -old, old * 2, old * 1000, random.choice(INTEGERS)))
        case 5 if isinstance(old, list):
            parent[key] = old * random.choice((0, 2, 300))
        case 6 if isinstance(old, str):
            parent[key] = mutate_bytes(random, old.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")
        case _:
            parent[key] = _value(random)
    return root


def _choose(random: Random, nodes: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Choose a node, mostly one of an object, because most of a vocabulary is in lists of thousands."""
    named = [(parent, key) for parent, key in nodes if isinstance(parent, dict) and len(parent) < 100]
    return random.choice(named if named and random.random() < 0.7 else nodes)


def _repeat_key(random: Random, text: str) -> str:
    """Repeat one key of the text and its value."""
    try:
        key, value = random.choice(list(json.loads(text).items()))
    except (ValueError, AttributeError, IndexError):
        return text
    return "{" + f"{json.dumps(key)}: {json.dumps(value)}, " + text.lstrip()[1:]


def mutate_yaml(random: Random, content: bytes) -> bytes:
    """Change or repeat lines of a YAML text, or replace them by pieces that are hard to parse."""
    if random.random() < 0.2:
        return mutate_bytes(random, content)
    lines = content.decode().split("\n")
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(lines))
        match random.randrange(5):
            case 0:
                lines[at] = random.choice(YAML_PIECES)
            case 1:
                lines.insert(at, random.choice(YAML_PIECES))
            case 2:
                lines.insert(at, lines[at])
            case 3:
                head, colon, _ = lines[at].partition(":")
                lines[at] = f"{head}{colon} {random.choice(YAML_PIECES)}"
            case _:
                words = lines[at].split(" ")
                words[random.randrange(len(words))] = str(_value(random))[:2000].replace("\n", " ")
                lines[at] = " ".join(words)
    return "\n".join(lines).encode("utf-8", "replace")


def mutate_safetensors(random: Random, content: bytes) -> bytes:
    """Change a file's length, its header, its offsets or its data."""
    size = int.from_bytes(content[:LENGTH_BYTES], "little")
    header, data = content[LENGTH_BYTES : LENGTH_BYTES + size], content[LENGTH_BYTES + size :]
    match random.randrange(8):
        case 0:
            lengths = (0, 1, size - 1, size + 1, len(content), len(content) - 8, 100_000_000, 2**31, 2**63, 2**64 - 1)
            return struct.pack("<Q", random.choice(lengths)) + header + data
        case 1:
            return content[: random.randrange(len(content))]
        case 2:
            return content + random.randbytes(random.choice((1, 8, 4096)))
        case 3:
            return struct.pack("<Q", size) + mutate_bytes(random, header)[:size].ljust(size) + data
        case 4:
            return mutate_bytes(random, content)
        case 5:
            header = _move_tensor(random, header)
        case _:
            header = mutate_json(random, header)
    return struct.pack("<Q", len(header)) + header + data


def _move_tensor(random: Random, header: bytes) -> bytes:
    """Let one tensor of the header overlap another, leave a gap, or have another shape or type."""
    entries = json.loads(header)
    names = [name for name in entries if name != "__metadata__"]
    name, other = random.choice(names), random.choice(names)
    begin, end = entries[name]["data_offsets"]
    changes: tuple[Callable[[], dict[str, Any]], ...] = (
        lambda: {"data_offsets": entries[other]["data_offsets"]},
        lambda: {"data_offsets": [begin + random.choice((1, -1, 64)), end]},
        lambda: {"data_offsets": [end, begin]},
        lambda: {"data_offsets": [begin, end + random.choice((*INTEGERS, 1, 64))]},
        lambda: {"shape": [*entries[name]["shape"], random.choice(INTEGERS)]},
        lambda: {"shape": [2**32, 2**32, random.choice(INTEGERS)]},
        lambda: {"shape": entries[name]["shape"][::-1]},
        lambda: {"dtype": random.choice(("F64", "F16", "BF16", "I8", "U8", "BOOL", "F8_E4M3", "F4", "", "x", "I16"))},
    )
    entries[name] = entries[name] | random.choice(changes)()
    if random.random() < 0.1:
        entries[random.choice((other, "__metadata__"))] = entries[name]
    return json.dumps(entries).encode()


def mutate_gguf(random: Random, content: bytes) -> bytes:
    """Change a few bytes, or a length, a count, a type or an offset, which are integers of 4 or 8 bytes."""
    if random.random() < 0.3:
        return mutate_bytes(random, content)
    result = bytearray(content)
    for _ in range(random.randint(1, 3)):
        size = random.choice((1, 4, 8))
        place = random.randrange(len(result) - size) if random.random() < 0.3 else random.randrange(4, 4000)
        old = int.from_bytes(result[place : place + size], "little")
        new = random.choice((old + random.choice((-1, 1)), old * 2, random.choice(INTEGERS), random.randrange(40)))
        result[place : place + size] = (new % 2 ** (8 * size)).to_bytes(size, "little")
    return bytes(result)
