"""DRY ("don't repeat yourself"), as in llama.cpp: a penalty for tokens that continue a repetition.

    history:  a b c x a b      the last two tokens were there before, followed by c: c would make it three

The longer the repetition, the larger the penalty. A repetition does not reach across a sequence breaker, and a token
that is a breaker by itself gets no penalty. The penalties depend on the history and the parameters only.
"""

import math
from collections.abc import Sequence

import numpy as np

from penstock.interface.sampling_params import SamplingParams
from penstock.kernels.tensors import Float32, Int32, Int64

LOG_OF_LARGEST = 88.7228391  # the natural logarithm of the largest float32
WORK = 16  # comparisons per token of the history after which the search in linear time takes over


class Repetitions:
    """Computes penalties with one request's parameters."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._breakers: dict[int, list[tuple[int, ...]]] = {}  # first id -> the ids after it
        for first, *others in params.dry_sequence_breaker_ids:
            self._breakers.setdefault(first, []).append(tuple(others))

    def penalties(self, history: Int32) -> tuple[Int64, Float32]:
        """Return ids [P] and the penalties [P] to subtract from their logits."""
        params = self._params
        last_n = params.dry_penalty_last_n
        window = history if last_n < 0 else history[max(0, len(history) - last_n) :]
        limit = self._limit(window) if len(window) > params.dry_allowed_length else -1
        if limit < params.dry_allowed_length:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        longest: dict[int, int] = {}  # id -> the longest repetition that it would continue
        for end, length in _repeats(window, params.dry_allowed_length):
            token_id = int(window[end + 1])
            longest[token_id] = max(longest.get(token_id, 0), min(length, limit))
        found = {token_id: length for token_id, length in longest.items() if () not in self._breakers.get(token_id, ())}
        values = [self._penalty(length - params.dry_allowed_length) for length in found.values()]
        return np.array([*found], np.int64), np.array(values, np.float32)

    def _penalty(self, excess: int) -> float:
        base = self._params.dry_base
        most = int(LOG_OF_LARGEST / math.log(base)) if base > 1.000001 else 0  # a larger exponent overflows a float32
        penalty = self._params.dry_multiplier * base ** (min(excess, most) if most else excess)
        return min(penalty, float(np.finfo(np.float32).max))

    def _limit(self, window: Int32) -> int:
        """Return how many tokens follow the last sequence breaker, which is the longest repetition that counts."""
        if not self._breakers:
            return len(window)
        ids = window[::-1].tolist()  # the last one first
        for index, token_id in enumerate(ids):
            tails = self._breakers.get(token_id)
            if tails is None:
                continue
            lengths = [len(tail) for tail in tails if _follows(ids, index, tail)]
            if lengths:
                return index - max(lengths)
        return len(window)


def _follows(ids: Sequence[int], index: int, tail: tuple[int, ...]) -> bool:
    """Return whether `tail` comes after ids[index] in the text, which `ids` lists backwards."""
    return len(tail) <= index and all(ids[index - 1 - offset] == token_id for offset, token_id in enumerate(tail))


def _repeats(window: Int32, least: int) -> list[tuple[int, int]]:
    """Return (end, length) for each earlier `end` at which the last `length` >= `least` tokens occur as well."""
    num_tokens, work = len(window), 0
    ends = np.flatnonzero(window[:-1] == window[-1])
    found: list[tuple[int, int]] = []
    length = 1
    while len(ends):
        work += len(ends)
        if work > WORK * num_tokens:
            return _repeats_of_all(window.tolist(), least)
        longer = ends[ends >= length]
        longer = longer[window[longer - length] == window[num_tokens - 1 - length]]
        if length >= least:
            found += [(end, length) for end in np.setdiff1d(ends, longer, assume_unique=True).tolist()]
        ends, length = longer, length + 1
    return found


def _repeats_of_all(ids: list[int], least: int) -> list[tuple[int, int]]:
    """Return what `_repeats` does, in linear time for any history: the Z algorithm, from the end."""
    num_tokens = len(ids)
    ids = ids[::-1]
    lengths = [0] * num_tokens
    left = right = 0  # ids[left:right] is the match seen so far that reaches farthest
    for start in range(1, num_tokens):
        length = min(right - start, lengths[start - left]) if start < right else 0
        while start + length < num_tokens and ids[length] == ids[start + length]:
            length += 1
        lengths[start] = length
        if start + length > right:
            left, right = start, start + length
    return [(num_tokens - 1 - start, length) for start, length in enumerate(lengths) if start and length >= least]
