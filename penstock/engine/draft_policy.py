"""Choose how many drafts a step computes: as many as pay, by the measured cost of steps and the share of right drafts.

    expected tokens of a request with k drafts   1 + p + p^2 + ... + p^k        p: share of its drafts that were right
    seconds                                      to compute all tokens in a step, and to make the drafts

The drafts that are likeliest to be accepted come first, and drafts are added as long as tokens per second rise. The
cost of a step is measured by its number of tokens. Estimates can be wrong, so a budget bounds the time that drafts,
trials and the choice itself may lose (Budget): a number of tokens that was never measured is tried when the
budget allows it, and nothing is done while the budget is used up. The first step of a size, and the first drafts of
all, have costs that occur once, such as recording a program; the budget pays at most one step's time for them. The
choice changes no bit of an answer.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from dataclasses import dataclass, field

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
        return num_tokens in self._times

    def estimate(self, num_tokens: int) -> float:
        """Estimate the seconds of a step: as measured, or on the line through the two nearest measured sizes.

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
        """Extrapolate the seconds of a step with more tokens than any measured one."""
        largest = self._sizes[-1]
        if len(self._sizes) == 1:
            return self._usual[largest]
        smaller = self._sizes[-2]
        slope = max(0.0, self._usual[largest] - self._usual[smaller]) / (largest - smaller)
        return self._usual[largest] + slope * (num_tokens - largest)

    def knows_beyond(self, num_tokens: int) -> bool:
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
        return 0.0 < num_steps * TRIAL_CREDIT * self._base <= self.seconds

    @property
    def may_enter(self) -> bool:
        return self._entries >= 0.0


REFRESH_STEPS = 48  # steps with drafts, after which one without drafts is timed again
MARGIN = 1.02  # factor by which drafts must be faster
MIN_TRIAL, MAX_TRIAL = 2, 8  # steps in a row of a trial: the first records its program
COLD_SECONDS = 0.003  # for so long, code and weights that were not used for a while are slower
TRIAL_DRAFTS = 2  # maximum number of drafts of all requests together until a step with drafts has been timed
NUMBERS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256)  # of drafts in a step
FIRST_WAIT, MAX_WAIT = 64, 4096  # steps until drafts that did not pay are tried again; doubled each time
RARE_LOSS = 0.005  # share of the time that a trial may lose again after it has lost more than a step
HOPE = 0.6  # share of right drafts assumed for a repeated trial, where only the trial can tell
WORTH = 1.1  # a repeated trial must promise this many times the tokens of a step without drafts
FORGETTING = 0.9  # weight of a request's earlier drafts relative to its latest
PRIOR_WEIGHT = 2.0  # weight of all requests' share of right drafts, counted in drafts of the one request
PRIOR_FORGETTING = 0.98


@dataclass(slots=True)
class Acceptance:
    """The share of right drafts among those whose predecessors were right; the latest count most."""

    right: float = 0.0
    seen: float = 0.0

    def note(self, num_drafts: int, num_accepted: int, forgetting: float) -> None:
        self.right = self.right * forgetting + num_accepted
        self.seen = self.seen * forgetting + min(num_drafts, num_accepted + 1)


@dataclass(frozen=True, slots=True)
class _Choice:
    """A number of drafts, the tokens that they are expected to give, and the estimated seconds of the step."""

    count: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


@dataclass(slots=True)
class DraftPolicy:
    """Chooses numbers of drafts, and learns from the steps.

    Attributes:
        pays: whether drafts paid, or were worth a trial, when last asked.
        base: seconds of a step without drafts, with as many requests as the last step had.
        scores_unverified: whether guesses that were not verified are scored too, once the real tokens are known.
    """

    pays: bool = True
    base: float = 0.0
    scores_unverified: bool = False
    costs: StepCosts = field(default_factory=StepCosts)
    budget: Budget = field(default_factory=Budget)
    overall: Acceptance = field(default_factory=lambda: Acceptance(1.5, 2.0))
    _of_request: dict[str, Acceptance] = field(default_factory=dict)
    _proposals: StepCosts = field(default_factory=StepCosts)  # to make drafts, by the maximum number per request
    _thoughts: StepCosts = field(default_factory=StepCosts)
    _is_new: bool = False  # as many drafts per request have just been made for the first time
    _enters: bool = False  # drafts have just been made for a request that had none before
    _held_up: float = 0.0  # seconds by which these drafts took longer than is counted
    _trial: int = 0  # number of drafts of the running trial
    _trial_steps: int = 0  # of the running trial that are left
    _since_refresh: int = 0
    _steps_to_wait: int = 0  # until the next trial of drafts that did not pay
    _wait: int = FIRST_WAIT

    @property
    def may_think(self) -> bool:
        """Tell whether there is time to consider drafts at all. At first there is, so that a step is measured."""
        return not self.base or not self.budget.is_used_up or self._trial_steps > 0

    @property
    def may_enter(self) -> bool:
        return self.budget.may_enter

    def choose(self, limits: Mapping[str, int], num_requests: int) -> dict[str, int]:
        """Choose each request's number of drafts in a step of num_requests: at most `limits`, without zeros."""
        self.pays = bool(limits)
        if not limits or not self.costs.knows(num_requests) or self._since_refresh >= REFRESH_STEPS:
            return {}
        chances = {name: self._chance(name) for name in limits}
        # By likelihood; a draft never comes before the earlier drafts of its request.
        drafts = sorted(
            (-(chances[name] ** place), place, name) for name, limit in limits.items() for place in range(1, limit + 1)
        )
        chosen = self._best(drafts, num_requests)
        self.pays = chosen is not None
        return {} if chosen is None else _counted(drafts[: chosen.count])

    def _best(self, drafts: list[tuple[float, int, str]], num_requests: int) -> _Choice | None:
        """Find the choice that pays best. One that was never measured, or did not pay, is made only as a trial."""
        choices = self._choices(drafts, num_requests)
        if self._trial_steps:
            return min(choices, key=lambda choice: abs(choice.count - self._trial))
        plain = MARGIN * num_requests / self.costs.estimate(num_requests)
        known = [choice for choice in choices if self.costs.knows(num_requests + choice.count)]
        best = max(known, key=lambda choice: choice.rate, default=None)
        if not self.costs.knows_beyond(num_requests):
            choices = [choice for choice in choices if choice.count <= TRIAL_DRAFTS]
        promising = max(choices, key=lambda choice: choice.rate)
        least = plain if best is None else max(plain, MARGIN * best.rate)
        if promising.rate > least and promising not in known and self._can_afford(promising, num_requests):
            return self._try(promising)
        if best is not None and best.rate > plain:
            self._wait = FIRST_WAIT
            return best
        return self._again(best, num_requests)

    def _can_afford(self, trial: _Choice, num_requests: int) -> bool:
        """Check that the budget covers a trial in which each token costs as much as in a step without drafts."""
        loss = self.costs.estimate(num_requests) * (num_requests + trial.count - trial.tokens) / num_requests
        return self.budget.allows_trial(self._trial_length) or self.budget.seconds >= loss * self._trial_length

    def _choices(self, drafts: list[tuple[float, int, str]], num_requests: int) -> list[_Choice]:
        found, most, expected, done = [], 0, float(num_requests), 0
        for count in NUMBERS:
            if done == len(drafts):
                break
            for chance, place, _ in drafts[done:count]:
                expected -= chance
                most = max(most, place)
            done = min(count, len(drafts))
            seconds = self.costs.estimate(num_requests + done) + self._proposals.estimate(most)
            found.append(_Choice(done, expected, seconds))
        return found

    def _again(self, best: _Choice | None, num_requests: int) -> _Choice | None:
        """Repeat, now and then, a choice that did not pay when measured: the machine or the text may have changed."""
        if best is None or self._steps_to_wait or not self.budget.allows_trial(self._trial_length):
            return None
        hoped = best.tokens if self.scores_unverified else max(best.tokens, num_requests + HOPE)
        if hoped < WORTH * num_requests:
            return None
        self._wait = min(2 * self._wait, MAX_WAIT)
        self._steps_to_wait = self._wait
        return self._try(best)

    def _try(self, choice: _Choice) -> _Choice:
        """Begin a trial of a choice."""
        self._trial, self._trial_steps = choice.count, self._trial_length
        return choice

    @property
    def _trial_length(self) -> int:
        """The number of steps of a trial. A single one shows enough where drafts are looked up."""
        if self.scores_unverified:
            return 1
        return min(max(MIN_TRIAL, round(COLD_SECONDS / max(self.base, 1e-9))), MAX_TRIAL)

    def _chance(self, request_id: str) -> float:
        """Estimate the chance of a request's next draft from its own share of right drafts and from that of all."""
        own = self._of_request.get(request_id, Acceptance())
        overall = self.overall.right / self.overall.seen
        return (own.right + PRIOR_WEIGHT * overall) / (own.seen + PRIOR_WEIGHT)

    def note_drafts(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Learn which drafts of a request were right."""
        own = self._of_request.setdefault(request_id, Acceptance())
        own.note(num_drafts, num_accepted, FORGETTING)
        self.overall.note(num_drafts, num_accepted, PRIOR_FORGETTING)

    def note_proposal(self, most: int, seconds: float, *, enters: bool) -> None:
        """Learn what drafts cost to make, from the time of a proposal of at most `most` drafts per request.

        enters: whether a request had no drafts before. What that costs, such as reading its prompt, occurs only once.
        """
        self._is_new, self._enters = not self._proposals.has_seen(most), enters
        self._held_up = 0.0
        if not enters or self._is_new:
            self._held_up = seconds - self._proposals.note(most, seconds)

    def note_step(self, num_requests: int, num_tokens: int, seconds: float, num_accepted: int) -> None:
        """Learn the cost of a step in which every request decoded."""
        is_first = not self.costs.has_seen(num_tokens)
        is_trial, self._trial_steps = self._trial_steps > 0, max(0, self._trial_steps - 1)
        counted = self.costs.note(num_tokens, seconds)
        self.base = base = self.costs.estimate(num_requests)
        if num_tokens > num_requests:
            loss = counted - base * (num_requests + num_accepted) / num_requests
            self.budget.spend(min(loss, base) if is_first else loss)
            self._since_refresh += 1
            if loss > (2 * base if is_trial else base) and not is_first:
                # Unforeseen: wait until it is a small part of the time since.
                self._trial_steps = 0
                self._steps_to_wait = max(self._steps_to_wait, int(loss / base / RARE_LOSS))
        else:
            self._since_refresh = 0
        self._pass()

    def note_overhead(self, seconds: float) -> None:
        """Subtract the time that drafts cost outside the step: to make them, to choose, to learn."""
        if self.scores_unverified:  # always about the same; a longer time means that it was held up
            seconds = self._thoughts.note(1, seconds)
        seconds -= self._held_up
        if self._is_new:
            seconds = min(seconds, self.base)
        if self._enters:
            self.budget.enter(seconds)
        else:
            self.budget.spend(seconds)
        self._is_new, self._enters, self._held_up = False, False, 0.0

    def note_pause(self) -> None:
        """Count a step without drafts, which is taken to last `base` seconds."""
        self._pass()

    def _pass(self) -> None:
        self.budget.earn(self.base)
        self._steps_to_wait = max(0, self._steps_to_wait - 1)

    def forget(self, request_id: str) -> None:
        self._of_request.pop(request_id, None)


def _counted(drafts: list[tuple[float, int, str]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for _, place, name in drafts:
        counts[name] = max(place, counts.get(name, 0))
    return counts
