"""How many drafts a step computes: as many as pay, by what steps have cost and how many drafts were right of late.

    expected tokens of a request with k drafts   1 + p + p^2 + ... + p^k        p: share of its drafts that were right
    seconds                                      of a step with all tokens, and of making the drafts

The draft that is likeliest to be accepted comes first, and drafts are added as long as tokens per second rise. What a
step costs is measured by its number of tokens. Estimates can be wrong, so a budget bounds what all drafts, trials and
thoughts about them may lose (draft_costs.py): what was never measured is tried when the budget bears it, and nothing is
done while it is used up. The first step of a size, and the first drafts that are made at all, record programs and the
like, once: of that the budget bears one step's time. The choice changes no bit of an answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.engine.draft_costs import Budget, StepCosts

REFRESH_STEPS = 48  # a step without drafts after so many with them, to see what it costs now
MARGIN = 1.02  # by which drafts must be faster
TRIAL_DRAFTS = 2  # of all requests together, where nothing is known of steps with drafts
NUMBERS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256)  # of drafts in a step
FIRST_WAIT, MAX_WAIT = 64, 4096  # steps until what did not pay is tried again; doubled each time
RARE_LOSS = 0.005  # of the time, that trials may lose again that have lost more than a step
HOPE = 0.6  # share of right drafts that is hoped for then, where only a trial can tell
WORTH = 1.1  # times as many tokens, that a step must be hoped to give, to be tried again
FORGETTING = 0.9  # weight of a request's earlier drafts beside its latest
PRIOR_WEIGHT = 2.0  # of all requests' share of right drafts, as drafts of the one request
PRIOR_FORGETTING = 0.98


@dataclass(slots=True)
class Acceptance:
    """The share of drafts that were right, of those whose predecessors were; the latest count most."""

    right: float = 0.0
    seen: float = 0.0

    def note(self, num_drafts: int, num_accepted: int, forgetting: float) -> None:
        self.right = self.right * forgetting + num_accepted
        self.seen = self.seen * forgetting + min(num_drafts, num_accepted + 1)


@dataclass(frozen=True, slots=True)
class _Choice:
    """So many drafts, and what they give: tokens, and the seconds that the step is thought to take."""

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
        base: seconds of a step without drafts, of as many requests as the last one had.
        hears_of_all: also drafts that were not computed are noted, once it is known whether they were right.
    """

    pays: bool = True
    base: float = 0.0
    hears_of_all: bool = False
    costs: StepCosts = field(default_factory=StepCosts)
    budget: Budget = field(default_factory=Budget)
    overall: Acceptance = field(default_factory=lambda: Acceptance(1.5, 2.0))
    _of_request: dict[str, Acceptance] = field(default_factory=dict)
    _rounds: StepCosts = field(default_factory=StepCosts)
    _thoughts: StepCosts = field(default_factory=StepCosts)
    _seconds_per_round: float = 0.0  # of making one more draft for every request that wants as many
    _is_new: bool = False  # drafts were made for the first time just now
    _since_refresh: int = 0
    _steps_to_wait: int = 0  # until the next trial of what did not pay
    _wait: int = FIRST_WAIT

    @property
    def may_think(self) -> bool:
        """Return whether there is time to think about drafts at all; at first, to measure a step."""
        return not self.base or not self.budget.is_used_up

    def choose(self, limits: Mapping[str, int], num_requests: int) -> dict[str, int]:
        """Return how many drafts to compute, at most `limits`, of requests in a step of num_requests; without zeros."""
        self.pays = bool(limits)
        if not limits or not self.costs.knows(num_requests) or self._since_refresh >= REFRESH_STEPS:
            return {}
        chances = {name: self._chance(name) for name in limits}
        # By likelihood; of one request a draft never comes before its predecessor.
        drafts = sorted(
            (-(chances[name] ** place), place, name) for name, limit in limits.items() for place in range(1, limit + 1)
        )
        chosen = self._best(drafts, num_requests)
        self.pays = chosen is not None
        return {} if chosen is None else _counted(drafts[: chosen.count])

    def _best(self, drafts: list[tuple[float, int, str]], num_requests: int) -> _Choice | None:
        """Return what pays best; what is not known, or did not pay, only as a trial."""
        choices = self._choices(drafts, num_requests)
        plain = MARGIN * num_requests / self.costs.estimate(num_requests)
        known = [choice for choice in choices if self.costs.knows(num_requests + choice.count)]
        best = max(known, key=lambda choice: choice.rate, default=None)
        if not self.costs.knows_beyond(num_requests):
            choices = [choice for choice in choices if choice.count <= TRIAL_DRAFTS]
        promising = max(choices, key=lambda choice: choice.rate)
        least = plain if best is None else max(plain, MARGIN * best.rate)
        if promising.rate > least and promising not in known and self._can_afford(promising, num_requests):
            return promising
        if best is not None and best.rate > plain:
            self._wait = FIRST_WAIT
            return best
        return self._again(best, num_requests)

    def _can_afford(self, trial: _Choice, num_requests: int) -> bool:
        """Return whether the budget bears a trial whose every token costs as much as one of a step without drafts."""
        loss = self.costs.estimate(num_requests) * (num_requests + trial.count - trial.tokens) / num_requests
        return self.budget.is_full or self.budget.seconds >= loss

    def _choices(self, drafts: list[tuple[float, int, str]], num_requests: int) -> list[_Choice]:
        found, most, expected, done = [], 0, float(num_requests), 0
        for count in NUMBERS:
            if done == len(drafts):
                break
            for chance, place, _ in drafts[done:count]:
                expected -= chance
                most = max(most, place)
            done = min(count, len(drafts))
            seconds = self.costs.estimate(num_requests + done) + most * self._seconds_per_round
            found.append(_Choice(done, expected, seconds))
        return found

    def _again(self, best: _Choice | None, num_requests: int) -> _Choice | None:
        """Return what did not pay when it was measured, now and then: the machine, or the text, may be another now."""
        if best is None or self._steps_to_wait or not self.budget.is_full:
            return None
        hoped = best.tokens if self.hears_of_all else max(best.tokens, num_requests + HOPE)
        if hoped < WORTH * num_requests:
            return None
        self._wait = min(2 * self._wait, MAX_WAIT)
        self._steps_to_wait = self._wait
        return best

    def _chance(self, request_id: str) -> float:
        """Return the chance of a request's next draft: its own share of right ones, with that of all as one more."""
        own = self._of_request.get(request_id, Acceptance())
        overall = self.overall.right / self.overall.seen
        return (own.right + PRIOR_WEIGHT * overall) / (own.seen + PRIOR_WEIGHT)

    def note_drafts(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Learn which drafts of a request were right."""
        own = self._of_request.setdefault(request_id, Acceptance())
        own.note(num_drafts, num_accepted, FORGETTING)
        self.overall.note(num_drafts, num_accepted, PRIOR_FORGETTING)

    def note_proposal(self, rounds: int, seconds: float) -> None:
        """Learn what drafts cost to make: the time of a proposal of at most `rounds` drafts for a request."""
        self._is_new = not self._rounds.has_seen(1)
        self._rounds.note(1, seconds / rounds)
        self._seconds_per_round = self._rounds.estimate(1)

    def note_step(self, num_requests: int, num_tokens: int, seconds: float, num_accepted: int) -> None:
        """Learn what a step cost in which every request decodes."""
        is_first = not self.costs.has_seen(num_tokens)
        counted = self.costs.note(num_tokens, seconds)
        self.base = base = self.costs.estimate(num_requests)
        if num_tokens > num_requests:
            loss = counted - base * (num_requests + num_accepted) / num_requests
            self.budget.spend(min(loss, base) if is_first else loss)
            self._since_refresh += 1
            if loss > base and not is_first:  # nobody foresaw it: again only when it is a small part of the time since
                self._steps_to_wait = max(self._steps_to_wait, int(loss / base / RARE_LOSS))
        else:
            self._since_refresh = 0
        self._pass()

    def note_overhead(self, seconds: float) -> None:
        """Take the time that drafts cost beside a step: to make them, to choose, to learn."""
        if self.hears_of_all:  # always about the same, so that what is longer had to wait for others
            seconds = self._thoughts.note(1, seconds)
        self.budget.spend(min(seconds, self.base) if self._is_new else seconds)
        self._is_new = False

    def note_pause(self) -> None:
        """Count a step without drafts, as long as the last one without."""
        self._pass()

    def _pass(self) -> None:
        self.budget.earn(self.base)
        self._steps_to_wait = max(0, self._steps_to_wait - 1)

    def forget(self, request_id: str) -> None:
        self._of_request.pop(request_id, None)


class EveryDraft(DraftPolicy):
    """Computes every draft that there is, whether it pays or not: for proofs."""

    @property
    def may_think(self) -> bool:
        return True

    def choose(self, limits: Mapping[str, int], num_requests: int) -> dict[str, int]:
        return dict(limits)


def _counted(drafts: list[tuple[float, int, str]]) -> dict[str, int]:
    """Return the number of drafts by request."""
    counts: dict[str, int] = {}
    for _, place, name in drafts:
        counts[name] = max(place, counts.get(name, 0))
    return counts
