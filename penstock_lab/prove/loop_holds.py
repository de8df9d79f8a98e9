"""Proof that no client holds the server's event loop, on which everybody else's requests wait."""

import statistics
from typing import ClassVar

from penstock_lab.prove.attacks import ATTACKS
from penstock_lab.prove.attacks.attack import FLAGS, Attack, Behaviour, Target
from penstock_lab.prove.attacks.holding import holding, key_file, keys_from_a_pipe
from penstock_lab.prove.proof import Trials
from penstock_lab.prove.watched import Watch, serve_watched

LIMIT_S = 0.05
ATTEMPTS = 3  # only what holds the loop each time is the attack's doing: a machine may be slow for a moment
OTHER_KEY = '[other]\nkey = "sk-other-0123456789abcdef"\n'
SAMPLE, CROWD = 1, 8  # sizes of the attacks


class LoopHolds:
    """Watches the event loop of a real server during each attack."""

    name: ClassVar[str] = "loop-holds"
    promise: ClassVar[str] = "No client holds the server's event loop for more than 50 ms"
    unit: ClassVar[str] = "attacks"
    goal: ClassVar[int] = 100_000
    weight: ClassVar[float] = 1.0

    def run(self, trials: Trials) -> None:
        with (
            key_file(OTHER_KEY) as keys,
            serve_watched(trials.subject, *FLAGS, f"--api-key-file={keys}") as (server, watch),
        ):
            target, held = Target(server.url), dict[str, float]()
            pipe = Behaviour("keys from a pipe", lambda at: keys_from_a_pipe(at, keys, server.process.pid))
            size = SAMPLE
            while trials.go_on():
                for attack in (pipe, *holding(size), *(ATTACKS if size > SAMPLE else ())):
                    if trials.go_on():
                        held[attack.name] = longest_hold_s(watch, target, attack)
                        trials.tried()
                size = CROWD
            for complaint in target.complaints:
                trials.wrong(complaint)
            for name, seconds in held.items():
                if seconds > LIMIT_S:
                    trials.wrong(f"{name}: the loop was held for {1000 * seconds:.0f} ms, each of {ATTEMPTS} times")
            trials.figure("longest_hold_ms", 1000 * max(held.values()))
            trials.figure("median_hold_ms", 1000 * statistics.median(held.values()))
            trials.detail("hold_ms", {name: round(1000 * seconds, 1) for name, seconds in held.items()})


def longest_hold_s(watch: Watch, target: Target, attack: Attack) -> float:
    """Attack until the loop was not held for too long, ATTEMPTS times at most; return the shortest of the holds."""
    holds: list[float] = []
    while len(holds) < ATTEMPTS and min(holds, default=LIMIT_S) >= LIMIT_S:
        watch.begin()
        attack.run(target)
        holds.append(watch.longest_s())
    return min(holds)
