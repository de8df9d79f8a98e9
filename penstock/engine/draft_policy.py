"""How many drafts a step computes: as many as pay, by what steps have cost and how many drafts were right of late.

    expected tokens of a request with k drafts   1 + p + p^2 + ... + p^k        p: share of its drafts that were right
    seconds                                      of a step with all tokens, and of making the drafts

The draft that is likeliest to be accepted comes first, and drafts are added as long as tokens per second rise. What a
step costs is measured by its number of tokens. Estimates can be wrong, so an account is kept: seconds that drafts have
saved, less those that they cost. Below what the account allows there are none; and where none would pay, it allows a
few to see whether that is still so. The choice changes no bit of an answer.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

KEPT_TIMES = 7  # of steps with one number of tokens; their lower quartile counts: what is slower had to wait for others
REFRESH_STEPS = 48  # a step without drafts after so many with them, to see what it costs now
MAX_LOSS = 0.008  # of the time of the last steps, that drafts may cost in all
MEMORY_STEPS = 200  # after which a step's time counts for 1/e
FREE_LOSS_STEPS = 1.0  # what drafts may cost before there is any time to take a share of
TRIAL_DRAFTS = 2  # enough to see whether drafts are right, where none would pay
FORGETTING = 0.9  # weight of a request's earlier drafts beside its latest
PRIOR_WEIGHT = 1.0  # of all requests' share of right drafts, as drafts of the one request
PRIOR_FORGETTING = 0.98


class StepCosts:
    """Seconds of a step in which every request decodes, by its number of tokens."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._typical: dict[int, float] = {}

    def note(self, num_tokens: int, seconds: float) -> None:
        times = self._times.get(num_tokens)
        if times is None:  # the first one records its program (runner/programs.py), and says nothing of the next
            self._times[num_tokens] = deque(maxlen=KEPT_TIMES)
            return
        times.append(seconds)
        self._typical[num_tokens] = sorted(times)[len(times) // 4]

    def knows(self, num_tokens: int) -> bool:
        return num_tokens in self._typical

    def estimate(self, num_tokens: int) -> float:
        """Return the seconds of a step: as measured, else on the line through the two nearest sizes that were.

        At most those of smaller steps with as many tokens together: what is measured above had to wait for others.
        """
        known = self._typical
        below = max((size for size in known if size < num_tokens), default=None)
        above = min((size for size in known if size > num_tokens), default=None)
        if num_tokens in known:
            found = known[num_tokens]
        elif below is None:
            return 0.0 if above is None else known[above]
        elif above is None:
            found = self._beyond(below, num_tokens)
        else:
            share = (num_tokens - below) / (above - below)
            found = known[below] + share * max(0.0, known[above] - known[below])
        return found if below is None else min(found, known[below] * num_tokens / below)

    def _beyond(self, largest: int, num_tokens: int) -> float:
        """Return the seconds of a step with more tokens than any before; where only one size is known, the most."""
        smaller = max((size for size in self._typical if size < largest), default=None)
        if smaller is None:
            return self._typical[largest] * num_tokens / largest
        slope = max(0.0, self._typical[largest] - self._typical[smaller]) / (largest - smaller)
        return self._typical[largest] + slope * (num_tokens - largest)


@dataclass(slots=True)
class Acceptance:
    """The share of drafts that were right, of those whose predecessors were; the latest count most."""

    right: float = 0.0
    seen: float = 0.0

    def note(self, num_drafts: int, num_accepted: int, forgetting: float) -> None:
        self.right = self.right * forgetting + num_accepted
        self.seen = self.seen * forgetting + min(num_drafts, num_accepted + 1)


@dataclass(slots=True)
class Account:
    """Seconds that drafts have saved, less those that they cost, and the time of all steps; both fade."""

    balance: float = 0.0
    elapsed: float = 0.0

    def note(self, step_seconds: float, saved: float) -> None:
        fading = 1 - 1 / MEMORY_STEPS
        self.elapsed = self.elapsed * fading + step_seconds
        # What was saved long ago pays for nothing: else a text that turns unpredictable is slow for long.
        self.balance = min(self.balance * fading + saved, step_seconds)

    def allows(self, loss: float, base: float) -> bool:
        return self.balance - loss >= -(MAX_LOSS * self.elapsed + FREE_LOSS_STEPS * base)


@dataclass(slots=True)
class DraftPolicy:
    """Chooses numbers of drafts, and learns from the steps.

    Attributes:
        pays: whether drafts paid, or were worth a trial, when last asked.
    """

    pays: bool = True
    costs: StepCosts = field(default_factory=StepCosts)
    overall: Acceptance = field(default_factory=lambda: Acceptance(1.5, 2.0))
    _account: Account = field(default_factory=Account)
    _of_request: dict[str, Acceptance] = field(default_factory=dict)
    _rounds: StepCosts = field(default_factory=StepCosts)
    _seconds_per_round: float = 0.0  # of making one more draft for every request that wants as many
    _since_refresh: int = 0
    _base: float = 0.0  # seconds of a step without drafts

    def choose(self, limits: Mapping[str, int], num_requests: int) -> dict[str, int]:
        """Return how many drafts to compute, at most `limits`, of requests in a step of num_requests; without zeros."""
        self.pays = True
        if not limits or not self.costs.knows(num_requests) or self._since_refresh >= REFRESH_STEPS:
            return {}
        chances = {name: self._chance(name) for name in limits}
        # By likelihood; of one request a draft never comes before its predecessor.
        drafts = sorted(
            (-(chances[name] ** place), place, name) for name, limit in limits.items() for place in range(1, limit + 1)
        )
        base = self.costs.estimate(num_requests)
        best_rate, best, most, expected = num_requests / max(base, 1e-9), 0, 0, float(num_requests)
        for count, (chance, place, _) in enumerate(drafts, 1):
            expected -= chance
            most = max(most, place)
            cost = self.costs.estimate(num_requests + count) + most * self._seconds_per_round
            if expected > best_rate * cost:
                best_rate, best = expected / max(cost, 1e-9), count
        found = _counted(drafts[:best]) if best else self._trial(limits, chances, num_requests)
        self.pays = bool(found) and self._account.allows(0.0, base)
        return found if self.pays else {}

    def _trial(self, limits: Mapping[str, int], chances: dict[str, float], num_requests: int) -> dict[str, int]:
        """Return a few drafts of the likeliest request, to see how many are right now, if the account allows it."""
        name, base = max(limits, key=lambda item: chances[item]), self.costs.estimate(num_requests)
        for count in range(min(limits[name], TRIAL_DRAFTS), 0, -1):
            cost = self.costs.estimate(num_requests + count) + count * self._seconds_per_round
            if self._account.allows(cost - base, base):
                return {name: count}
        return {}

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
        self._rounds.note(1, seconds / rounds)
        self._seconds_per_round = self._rounds.estimate(1)

    def note_step(self, num_requests: int, num_tokens: int, seconds: float, num_accepted: int, proposal: float) -> None:
        """Learn what a step cost in which every request decodes. proposal: seconds that its drafts took to make."""
        self.costs.note(num_tokens, seconds)
        base, saved = self.costs.estimate(num_requests), 0.0
        drafted = num_tokens > num_requests
        if drafted:
            cost = self.costs.estimate(num_tokens)
            cost = cost if self.costs.knows(num_tokens) else min(cost, seconds)
            saved = num_accepted * base / num_requests - (cost - base)
        self._account.note(base, saved - proposal)
        self._since_refresh = self._since_refresh + 1 if drafted else 0
        self._base = base

    def note_pause(self) -> None:
        """Count a step without drafts, as long as the last one without."""
        self._account.note(self._base, 0.0)

    def forget(self, request_id: str) -> None:
        self._of_request.pop(request_id, None)


class EveryDraft(DraftPolicy):
    """Computes every draft that there is, whether it pays or not: for proofs."""

    def choose(self, limits: Mapping[str, int], num_requests: int) -> dict[str, int]:
        return dict(limits)


def _counted(drafts: list[tuple[float, int, str]]) -> dict[str, int]:
    """Return the number of drafts by request."""
    counts: dict[str, int] = {}
    for _, place, name in drafts:
        counts[name] = max(place, counts.get(name, 0))
    return counts
