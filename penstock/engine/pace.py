"""Pace: how many prompt tokens a step may compute beside running streams, which wait for all of them.

    a step with D tokens of streams and P of prompts takes  base(D) + extra,  and extra stays below max_stall_s

base(D) is measured in steps without prompts, extra in steps with prompts. What was not measured is assumed to be slow:
a further token costs as much as one in the cheapest step, with all of that step's time charged to its prompts, and a
token that attends to more tokens costs proportionally more, apart from a share that does not grow. So the chunk rises
to its limit from below, in a few steps. It has no clock: times are given to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.interface.step import ScheduledRequest

SHORT_CONTEXT = 1024  # attending to this many tokens costs at most as much as all other work on a token
BASE_WEIGHT = 0.1  # weight of a new base that is slower than the old one; a faster one replaces it
FORGET = 1.01  # factor by which the cost of a token rises with each step, to notice that a machine has become slow


@dataclass(frozen=True, slots=True)
class _Sample:
    """The measured time of a step with prompts.

    Attributes:
        context: mean number of tokens that its prompt tokens attended to.
    """

    num_tokens: int = 0
    extra_s: float = 0.0
    context: float = 0.0


@dataclass(frozen=True, slots=True)
class _TokenCost:
    """The most that a further prompt token costs, if it attends to no more than `context` tokens."""

    seconds: float = float("inf")
    context: float = 0.0


@dataclass(slots=True)
class Allowance:
    """What a step has left for prompts.

    Attributes:
        tokens: number of prompt tokens that attend to no more than `context` tokens.
    """

    tokens: float
    context: float

    def fit(self, num_new: int, start: int) -> int:
        """Return how many of num_new tokens, the first of them at position `start`, are allowed."""
        if self.tokens < 1.0:
            return 0
        num_new = int(min(num_new, self.tokens))
        return max(1, int(min(num_new, self.tokens / self._weight(num_new, start))))

    def take(self, num_new: int, start: int) -> None:
        """Subtract num_new tokens, the first of them at position `start`."""
        self.tokens = max(0.0, self.tokens - num_new * self._weight(num_new, start))

    def _weight(self, num_new: int, start: int) -> float:
        return max(1.0, (start + num_new / 2 + SHORT_CONTEXT) / (self.context + SHORT_CONTEXT))


class Pace:
    """Measures steps, and says how many prompt tokens the next one may have."""

    def __init__(self, max_stall_s: float) -> None:
        self.max_stall_s = max_stall_s
        self._base_s: dict[int, float] = {0: 0.0}  # by the number of tokens of streams
        self._sample = _Sample()
        self._token = _TokenCost()

    def allowance(self, num_stream_tokens: int) -> Allowance:
        """Return what prompts may have in a step with num_stream_tokens.

        Nothing until a step with as many stream tokens, or fewer, has been measured without prompts; then at least one
        token.
        """
        if not self._known_base(num_stream_tokens):
            return Allowance(0.0, 0.0)
        sample = self._sample
        if sample.extra_s > self.max_stall_s:
            tokens = sample.num_tokens * self.max_stall_s / sample.extra_s
        else:
            per_token = max(self._token.seconds, sample.extra_s / max(1, sample.num_tokens))
            tokens = sample.num_tokens + (self.max_stall_s - sample.extra_s) / per_token
            if tokens < sample.num_tokens + 1 and sample.extra_s / max(1, sample.num_tokens) <= (
                self.max_stall_s - sample.extra_s
            ):
                tokens = sample.num_tokens + 1  # to learn what it costs
        return Allowance(max(1.0, tokens), min(sample.context, self._token.context))

    def _known_base(self, num_stream_tokens: int) -> int:
        """Return the largest number of stream tokens, up to this one, measured without prompts; or 0."""
        return max(number for number in self._base_s if number <= num_stream_tokens)

    def note(self, scheduled: Sequence[ScheduledRequest], seconds: float) -> None:
        """Learn from a step and the time that it took."""
        streams = sum(item.num_new_tokens for item in scheduled if is_stream(item))
        prompts = [item for item in scheduled if not is_stream(item)]
        if not prompts:
            before = self._base_s.get(streams, seconds)
            self._base_s[streams] = min(seconds, before + BASE_WEIGHT * (seconds - before))
            return
        count = sum(item.num_new_tokens for item in prompts)
        attended = sum(item.num_new_tokens * (item.num_computed_tokens + item.num_new_tokens / 2) for item in prompts)
        extra_s = max(0.0, seconds - self._base_s[self._known_base(streams)])
        self._sample = _Sample(count, extra_s, attended / count)
        self._token = replace(self._token, seconds=FORGET * self._token.seconds)
        if seconds / count < self._token.seconds:
            self._token = _TokenCost(seconds / count, attended / count)


def is_stream(item: ScheduledRequest) -> bool:
    """Return whether a scheduled request samples after each of its tokens, as a running stream does."""
    return item.num_new_tokens == item.num_samples
