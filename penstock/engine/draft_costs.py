"""The costs of drafts: how long steps take, by number of tokens, and a budget for the time that drafts may lose."""

from bisect import bisect_left, bisect_right, insort

DOWN, UP = 0.5, 0.1  # weights of a new time below and above the usual one: a slow step was held up
OUTLIER = 1.5  # times the usual time: a longer step counts as this long, and a single one changes nothing
FIRST_TIMES = 4  # first steps of a size: the shortest time counts, without the first (it records its program)
MAX_LOSS = 0.014  # share of the time of all steps that drafts may lose
CREDIT_STEPS = 4.0  # limit of what is saved up for later losses, in steps without drafts: a few steps with wrong drafts
TRIAL_CREDIT = 0.4  # what is enough for each step of a trial, in steps without drafts
ENTRY_LOSS = 0.004  # share of the time of all steps that the entries of requests may lose
ENTRY_STEPS = 64.0  # limit of what is saved up for entries, in steps without drafts


class StepCosts:
    """Seconds of a step in which every request decodes, by its number of tokens."""

    def __init__(self) -> None:
        self._usual: dict[int, float] = {}
        self._times: dict[int, int] = {}  # number of steps noted
        self._doubted: set[int] = set()  # sizes whose last step was an outlier
        self._sizes: list[int] = []  # keys of _usual, in order

    def note(self, num_tokens: int, seconds: float) -> float:
        """Learn how long a step took. Return the duration that is counted, capped for outliers."""
        usual, number = self._usual.get(num_tokens), self._times.get(num_tokens, 0)
        self._times[num_tokens] = number + 1
        if usual is None:
            if number:  # the first step records its program, and says little about the next
                self._usual[num_tokens] = seconds
                insort(self._sizes, num_tokens)
            return seconds
        counted, is_doubted = min(seconds, OUTLIER * usual), num_tokens in self._doubted
        if number < FIRST_TIMES:
            self._usual[num_tokens] = min(usual, counted)
        elif seconds <= OUTLIER * usual or is_doubted:
            self._usual[num_tokens] += (DOWN if counted < usual else UP) * (counted - usual)
        (self._doubted.discard if counted == seconds else self._doubted.add)(num_tokens)
        return counted

    def knows(self, num_tokens: int) -> bool:
        return num_tokens in self._usual

    def has_seen(self, num_tokens: int) -> bool:
        """Return whether there was any step of this size."""
        return num_tokens in self._times

    def estimate(self, num_tokens: int) -> float:
        """Return the seconds of a step: as measured, or on the line through the two nearest measured sizes.

        Beyond a single measured size, larger steps are taken to cost the same, so that they look worth a try. No
        estimate exceeds the cost of the same tokens in steps of the next smaller measured size.
        """
        usual, sizes = self._usual, self._sizes
        place = bisect_left(sizes, num_tokens)
        if not sizes:
            return 0.0
        if place == 0:
            return usual[sizes[0]]
        below = sizes[place - 1]
        if num_tokens in usual:
            found = usual[num_tokens]
        elif place < len(sizes):
            above = sizes[place]
            share = (num_tokens - below) / (above - below)
            found = usual[below] + share * max(0.0, usual[above] - usual[below])
        else:
            found = self._beyond(num_tokens)
        return min(found, usual[below] * num_tokens / below)

    def _beyond(self, num_tokens: int) -> float:
        """Return the seconds of a step with more tokens than any measured one."""
        largest = self._sizes[-1]
        if len(self._sizes) == 1:
            return self._usual[largest]
        smaller = self._sizes[-2]
        slope = max(0.0, self._usual[largest] - self._usual[smaller]) / (largest - smaller)
        return self._usual[largest] + slope * (num_tokens - largest)

    def knows_beyond(self, num_tokens: int) -> bool:
        """Return whether a step with more tokens was measured."""
        return bisect_right(self._sizes, num_tokens) < len(self._sizes)


class Budget:
    """Seconds that drafts may lose: a share of the time of all steps, and what other drafts have saved.

    It starts at zero and never exceeds CREDIT_STEPS steps, so what was saved long ago pays for little. An unforeseen
    loss makes it negative, and then nothing is tried until later steps have made up for it.

    A request's entry is what must be done once before its first draft, such as reading its prompt with a draft model.
    Entries have an account of their own, which also gets half of every gain, and what exceeds the limit of the first
    account. Once the entry of a request is paid, its drafts need no more than the first account.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._entries = 0.0
        self._base = 0.0  # seconds of a step without drafts

    def earn(self, step_seconds: float) -> None:
        """Add the shares of a step that takes `step_seconds` without drafts."""
        self._base = step_seconds
        self._save(ENTRY_LOSS * step_seconds)
        self._add(MAX_LOSS * step_seconds)

    def spend(self, seconds: float) -> None:
        """Subtract a loss; a negative one is a gain."""
        if seconds < 0.0:
            self._save(-seconds / 2)
            seconds /= 2
        self._add(-seconds)

    def _add(self, seconds: float) -> None:
        self.seconds += seconds
        if (excess := self.seconds - CREDIT_STEPS * self._base) > 0.0:
            self._save(excess)
            self.seconds -= excess

    def enter(self, seconds: float) -> None:
        """Pay for the entry of one or more requests."""
        self._entries -= seconds

    def _save(self, seconds: float) -> None:
        self._entries = min(self._entries + seconds, ENTRY_STEPS * self._base)

    @property
    def is_used_up(self) -> bool:
        return self.seconds < 0.0

    def allows_trial(self, num_steps: int) -> bool:
        """Return whether drafts may be tried for a number of steps."""
        return 0.0 < num_steps * TRIAL_CREDIT * self._base <= self.seconds

    @property
    def may_enter(self) -> bool:
        return self._entries >= 0.0
