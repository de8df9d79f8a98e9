"""Keys of attention plans: every combination has its own number, and every number reads well."""

import itertools
import math

import pytest

from penstock.kernels.attention.plan import CHOICES, encode_key
from penstock_lab.bench.native import decode_key, describe_key

KEY = {
    "phase": "decode", "query": "bfloat16", "cache": "int8", "output": "bfloat16", "scales": "token", "slices": "2",
    "template": "stream", "split": "spans", "memory": "paged", "window": "none", "prefix": "own", "level": "any",
}  # fmt: skip


@pytest.mark.covers("A24")
def test_combinations_come_back_and_differ() -> None:
    """Guards against: two choices with one number, and a number that reads as another choice. Of 419,904 combinations
    every 97th, in which each choice meets each of every other digit."""
    every = itertools.product(*(range(len(choices)) for choices in CHOICES.values()))
    sample = list(itertools.islice(every, 0, None, 97))
    for digits in sample:
        number = int("1" + "".join(map(str, digits)))
        assert encode_key(**decode_key(number)) == number < 2**64
    pairs = {(i, digits[i], j, digits[j]) for digits in sample for i, j in itertools.combinations(range(12), 2)}
    sizes = [len(choices) for choices in CHOICES.values()]
    assert len(pairs) == sum(a * b for a, b in itertools.combinations(sizes, 2))
    assert math.prod(sizes) == 3 * 2 * 3 * 3 * 3 * 4 * 3 * 2 * 3 * 3 * 2 * 7


@pytest.mark.covers("A24")
def test_each_digit_is_a_choice() -> None:
    """Guards against: digits that run into each other: changing one choice changes one digit."""
    assert encode_key(**KEY) == 1012112010000
    for name, choices in CHOICES.items():
        assert len(choices) <= 10
        for choice in choices:
            other = encode_key(**{**KEY, name: choice})
            differs = [a != b for a, b in zip(str(encode_key(**KEY)), str(other), strict=True)]
            assert sum(differs) == (choice != KEY[name])


@pytest.mark.covers("A24")
def test_a_key_reads_as_a_line() -> None:
    """Guards against: a trace with a number that nobody can read."""
    text = "decode, bfloat16 query, int8 cache, bfloat16 output, scales of tokens, 2 slices, few rows, heads together"
    assert describe_key(encode_key(**KEY)) == f"{text}, split over spans, paged"
    assert describe_key(encode_key(**{**KEY, "level": "amx"})).endswith(", paged, amx")


@pytest.mark.parametrize("number", [0, -5, 7, 2012112201000, 1912112201000, 10121120100001])
def test_other_numbers_are_refused(number: int) -> None:
    """Guards against: a wrong number that is explained as if it were a key."""
    with pytest.raises(ValueError, match="is not the key of an attention plan"):
        decode_key(number)


def test_a_choice_that_is_none_is_refused() -> None:
    """Guards against: a typing error that becomes digit 0."""
    with pytest.raises(ValueError, match="cache is one of float32, bfloat16, int8, not 'int4'"):
        encode_key(**{**KEY, "cache": "int4"})
