"""The event loop is not held by any attack, however the machine is loaded, and a loop that is held is noticed."""

import asyncio
import time
from pathlib import Path

from penstock_lab.prove.loop_holds import LoopHolds
from penstock_lab.prove.proof import Outcome, Subject, Trials
from penstock_lab.prove.watched import Watch, beat_in


def test_no_attack_holds_the_loop() -> None:
    """Guards against a request, a connection or a file for which the server stops serving everybody else."""
    proof = LoopHolds()
    outcome = Outcome(proof.name, proof.promise, proof.unit)
    trials = Trials(Subject("demo", {"threads": 1, "dtype": "float32"}), outcome, goal=50, seed=0)
    proof.run(trials)
    assert outcome.wrong == []
    assert outcome.tried == 50


def test_a_loop_that_is_held_is_noticed(tmp_path: Path) -> None:
    """Guards against a watch that sees nothing: one callback computes, and one waits in a system call."""
    (tmp_path / "shared").write_bytes(bytes(16))
    watch = Watch(str(tmp_path / "shared"))

    def compute(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    async def hold() -> list[float]:
        beat_in(asyncio.get_running_loop(), watch)
        await asyncio.sleep(0.02)
        found = []
        for holds in (compute, time.sleep):
            await asyncio.to_thread(watch.begin)
            holds(0.08)
            found.append(await asyncio.to_thread(watch.longest_s))
        return found

    assert all(held_s > 0.07 for held_s in asyncio.run(hold()))
