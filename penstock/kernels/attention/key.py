"""The key of a plan: one integer, each decimal digit a choice, so that a trace can say which kernel ran and why.

After the tiling key of Huawei's IncreFlashAttention operator. A key begins with a 1, which keeps the zeros behind it;
then come the digits in the order of TilingKey's fields. Nothing is decided by a key: it names what was decided.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

# What each digit of a field stands for, and how a description says it; "" says nothing.
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
    """The choices by name; CHOICES has those of each field.

    Attributes:
        phase: decode: every sequence has one new token; chunk: none has; mixed: some have.
        query, cache, output: types of elements.
        scales, slices: of an int8 cache: whose the scales are, and how many int8 rows stand for a query row.
        template: stream: an item takes few rows of many heads through the cache as it lies in memory; blocks: an item
            takes a block of rows of one head; both: some sequences one, some the other.
        split: spans of one sequence are computed apart and combined.
        memory: blocks of a block table, one block a sequence, or a block table that repeats one block.
        window: whether some row does not see all positions before it, and keeps the first ones.
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
        """The number.

        Raises:
            ValueError: a field has no such choice.
        """
        number = 1
        for name in CHOICES:
            number = number * 10 + _digit(self, name)
        return number

    @staticmethod
    def decode(number: int) -> "TilingKey":
        """The other way.

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
        """One line for people."""
        words = (CHOICES[field.name][_digit(self, field.name)][1] for field in fields(self))
        return ", ".join(word for word in words if word)


def describe_key(number: int) -> str:
    """What a plan's key says."""
    return TilingKey.decode(number).describe()


def _digit(key: TilingKey, name: str) -> int:
    choice = getattr(key, name)
    digit = _DIGITS[name].get(choice)
    if digit is None:
        raise ValueError(f"{name} is one of {', '.join(_DIGITS[name])}, not {choice!r}")
    return digit
