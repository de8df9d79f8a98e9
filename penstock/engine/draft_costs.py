"""The costs of drafts: seconds of steps by their number of tokens, and the budget of time that drafts may lose."""

from bisect import bisect_left, bisect_right, insort

DOWN, UP = 0.5, 0.1  # weight of a new time that is below, or above, the usual one: what is slow had to wait for others
OUTLIER = 1.5  # times the usual: a step that took longer counts as so long, and changes nothing if it is alone
FIRST_TIMES = 4  # of which the least counts, and not the very first: it records its program (runner/programs.py)
MAX_LOSS = 0.02  # of the time of all steps, that drafts may lose
CREDIT_STEPS = 1.0  # most steps' time that is saved up for losses to come
FULL = 0.8  # of it is enough for a trial


class StepCosts:
    """Seconds of a step in which every request decodes, by its number of tokens."""

    def __init__(self) -> None:
        self._usual: dict[int, float] = {}
        self._times: dict[int, int] = {}  # that were noted
        self._doubted: set[int] = set()  # sizes whose last step was an outlier
        self._sizes: list[int] = []  # of _usual, in order

    def note(self, num_tokens: int, seconds: float) -> float:
        """Learn what a step took. Return what it counts as: of an outlier less."""
        usual, number = self._usual.get(num_tokens), self._times.get(num_tokens, 0)
        self._times[num_tokens] = number + 1
        if usual is None:
            if number:  # the first one records its program, and says little of the next
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
        """Return whether there was such a step, be it only the first."""
        return num_tokens in self._times

    def estimate(self, num_tokens: int) -> float:
        """Return the seconds of a step: as measured, else on the line through the two nearest sizes that were.

        Beyond a single one as much as that; so what was never measured looks worth a try. At most those of smaller
        steps with as many tokens together.
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
        """Return the seconds of a step with more tokens than any before."""
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

    It begins with nothing and is never more than CREDIT_STEPS steps, so what was saved long ago pays for little. A loss
    that nobody could foresee makes it negative, and then nothing is tried until time has made up for it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._most = 0.0

    def earn(self, step_seconds: float) -> None:
        """Take the share of a step that takes so long without drafts."""
        self._most = CREDIT_STEPS * step_seconds
        self.spend(-MAX_LOSS * step_seconds)

    def spend(self, seconds: float) -> None:
        """Take what was lost; negative: won."""
        self.seconds = min(self.seconds - seconds, self._most)

    @property
    def is_used_up(self) -> bool:
        return self.seconds < 0.0

    @property
    def is_full(self) -> bool:
        return 0.0 < FULL * self._most <= self.seconds
