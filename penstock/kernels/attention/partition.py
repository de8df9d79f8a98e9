"""Items of work in contiguous ranges, one per core, so that the greatest load of a core is as small as possible."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise


def partition(loads: Sequence[int], num_cores: int) -> list[int]:
    """Return the first item of each core, then the number of items. loads: of each item, not negative.

    No other contiguous ranges have a smaller greatest load; among equally good ones, range ends are as near to equal
    shares as the greatest load allows.
    """
    if num_cores == 1 or not loads:
        return [0] * num_cores + [len(loads)]
    sums = list(accumulate(loads, initial=0))
    limit = _least_limit(sums, max(loads), num_cores)
    return _even_ranges(sums, limit, num_cores)


def greatest_load(loads: Sequence[int], starts: Sequence[int]) -> int:
    """Return the greatest load of a core."""
    sums = list(accumulate(loads, initial=0))
    return max(sums[end] - sums[begin] for begin, end in pairwise(starts))


def _least_limit(sums: list[int], largest: int, num_cores: int) -> int:
    """Return the smallest limit that every core can keep, by bisection over loads that really occur."""
    low = max(largest, -(-sums[-1] // num_cores))  # no partition is better
    reached, missed = _fill(sums, low, num_cores)
    if missed is None:
        return reached
    low, high = missed, low + largest  # filling core by core wastes less than one item per core
    while low < high:
        reached, missed = _fill(sums, (low + high) // 2, num_cores)
        if missed is None:
            high = reached
        else:
            low = missed
    return low


def _fill(sums: list[int], limit: int, num_cores: int) -> tuple[int, int | None]:
    """Give each core as much as the limit allows. Return the greatest load of a core and, if items are left over, the
    smallest limit that would change anything."""
    count = len(sums) - 1
    begin, reached, missed = 0, 0, sums[-1]
    for _ in range(num_cores):
        base = sums[begin]
        end = bisect_right(sums, base + limit, begin) - 1
        reached = max(reached, sums[end] - base)
        if end == count:
            return reached, None
        missed = min(missed, sums[end + 1] - base)
        begin = end
    return reached, missed


def _even_ranges(sums: list[int], limit: int, num_cores: int) -> list[int]:
    """Return ranges within the limit whose ends are near to equal shares."""
    earliest = [len(sums) - 1]  # from the end: where each core begins if those after it take all they can
    for _ in range(num_cores):
        earliest.append(bisect_left(sums, sums[earliest[-1]] - limit, 0, earliest[-1] + 1))
    earliest.reverse()
    starts = [0]
    for core in range(1, num_cores):
        share = sums[-1] * core / num_cores
        nearest = bisect_left(sums, share)
        if nearest > 0 and share - sums[nearest - 1] <= sums[nearest] - share:
            nearest -= 1
        latest = bisect_right(sums, sums[starts[-1]] + limit) - 1
        starts.append(min(max(nearest, earliest[core], starts[-1]), latest))
    return [*starts, len(sums) - 1]
