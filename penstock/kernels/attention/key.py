"""The key of a plan: one integer, each decimal digit a choice, so that a trace can say which kernel ran and why.

After the tiling key of Huawei's IncreFlashAttention operator. A key begins with a 1, which keeps the zeros behind it;
then come the digits in the order of TilingKey's fields. Nothing is decided by a key: it names what was decided.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from types import MappingProxyType

from penstock.kernels.attention.layout import AttentionShape

# By field: the choice that each digit stands for, and its text in a description; "" is left out.
CHOICES: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType(
    {
        "phase": (("decode", "decode"), ("chunk", "chunks of prompts"), ("mixed", "decode and chunks of prompts")),
        "query": (("float32", "float32 query"), ("bfloat16", "bfloat16 query")),
        "cache": (("float32", "float32 cache"), ("bfloat16", "bfloat16 cache"), ("int8", "int8 cache")),
        "output": (("float32", "float32 output"), ("bfloat16", "bfloat16 output"), ("int8", "int8 output")),
        "scales": (("none", ""), ("token", "scales of tokens"), ("channel", "scales of channels")),
        "slices": (("0", ""), ("1", "1 slice"), ("2", "2 slices"), ("3", "3 slices")),
        "template": (
            ("stream", "few rows, heads together"),
            ("blocks", "blocks of rows, one head"),
            ("both", "few rows with heads together, blocks of rows with one head"),
        ),
        "split": (("no", ""), ("spans", "split over spans")),
        "memory": (("paged", "paged"), ("rows", "whole rows"), ("ring", "rings")),
        "window": (("none", ""), ("window", "window"), ("sinks", "window and first tokens")),
        "prefix": (("own", ""), ("shared", "shared prefix")),
        "level": (("any", ""), ("portable", "portable"), ("avx2", "avx2"), ("avx512", "avx512"), ("amx", "amx")),
    }
)
_DIGITS = MappingProxyType(
    {name: {choice: digit for digit, (choice, _) in enumerate(choices)} for name, choices in CHOICES.items()}
)


@dataclass(frozen=True, slots=True)
class TilingKey:
    """The choices by name; CHOICES lists those of each field.

    Attributes:
        phase: decode: every sequence has one new token; chunk: none has; mixed: some have.
        query, cache, output: types of elements.
        scales, slices: of an int8 cache: what a scale belongs to, and how many int8 rows represent a query row.
        template: stream: an item takes few rows of many heads through the cache in the order of memory; blocks: an item
            takes a block of rows of one head; both: some sequences one, some the other.
        split: spans of one sequence are computed apart and combined.
        memory: blocks of a block table (paged), one block per sequence (rows), or one block repeated (ring).
        window: whether some row does not see all positions before it, and whether it keeps the first ones.
        prefix: shared: some spans are read once for several sequences.
        level: instruction level, where the backend names it.
    """

    phase: str
    query: str
    cache: str
    output: str
    scales: str
    slices: str
    template: str
    split: str
    memory: str
    window: str
    prefix: str
    level: str = "any"

    def encode(self) -> int:
        """Return the key as a number.

        Raises:
            ValueError: a field has no such choice.
        """
        number = 1
        for name in CHOICES:
            number = number * 10 + _digit(self, name)
        return number

    @staticmethod
    def decode(number: int) -> "TilingKey":
        """Return the key of a number.

        Raises:
            ValueError: no key has this number.
        """
        digits = str(number)
        if len(digits) != 1 + len(CHOICES) or digits[0] != "1":
            raise ValueError(f"{number} is not the key of an attention plan")
        chosen = {}
        for (name, choices), digit in zip(CHOICES.items(), digits[1:], strict=True):
            if int(digit) >= len(choices):
                raise ValueError(f"{number} is not the key of an attention plan: {name} has no choice {digit}")
            chosen[name] = choices[int(digit)][0]
        return TilingKey(**chosen)

    def describe(self) -> str:
        """Return one line for a reader."""
        words = (CHOICES[field.name][_digit(self, field.name)][1] for field in fields(self))
        return ", ".join(word for word in words if word)


def describe_key(number: int) -> str:
    """Return what the key of a plan says, in one line."""
    return TilingKey.decode(number).describe()


@lru_cache(maxsize=256)
def encode_key(
    shape: AttentionShape, phase: str, template: str, memory: str, window: str, *, split: bool, shared: bool
) -> int:
    """Return the key of a plan for layers of a shape; arguments as TilingKey's fields."""
    scales = "token" if shape.token_scales else "channel"
    return TilingKey(
        phase=phase,
        query=shape.dtype,
        cache=shape.kv_cache_dtype,
        output=shape.dtype,
        scales=scales if shape.kv_cache_dtype == "int8" else "none",
        slices=str(shape.slices),
        template=template,
        split="spans" if split else "no",
        memory=memory,
        window=window,
        prefix="shared" if shared else "own",
        level=shape.level,
    ).encode()


def _digit(key: TilingKey, name: str) -> int:
    choice = getattr(key, name)
    digit = _DIGITS[name].get(choice)
    if digit is None:
        raise ValueError(f"{name} is one of {', '.join(_DIGITS[name])}, not {choice!r}")
    return digit
