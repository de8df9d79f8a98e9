"""Runs the proofs one after the other within the given time. Time that a proof does not need goes to the later ones."""

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from penstock.errors import check_choice
from penstock_lab.prove.adapters import AdapterChanges
from penstock_lab.prove.engine_deaths import EngineDeaths, ReplicaDeaths, StandbyDeaths
from penstock_lab.prove.faults import Faults
from penstock_lab.prove.full_disks import FullDisks
from penstock_lab.prove.hostile import GeneratedInput, HostileRequests
from penstock_lab.prove.hostile_files import HostileFiles
from penstock_lab.prove.long_run import LongRun
from penstock_lab.prove.loop_holds import LoopHolds
from penstock_lab.prove.memory import MemoryPlanProof
from penstock_lab.prove.mixed import MixedRequests
from penstock_lab.prove.parallel import ParallelBits
from penstock_lab.prove.parent_deaths import ParentDeaths
from penstock_lab.prove.proof import Outcome, Proof, Subject, Trials
from penstock_lab.prove.rank_deaths import RankDeaths
from penstock_lab.prove.ray_deaths import RayDeaths
from penstock_lab.prove.records import Replays
from penstock_lab.prove.same_bits import SameBits
from penstock_lab.prove.server_deaths import ServerDeaths
from penstock_lab.prove.several_models import SeveralModels
from penstock_lab.prove.shutdown import Drains
from penstock_lab.prove.tenants import Tenants
from penstock_lab.prove.together import Together

PROOFS: tuple[Proof, ...] = (
    SameBits(),
    Together(),
    ParallelBits(),
    EngineDeaths(),
    StandbyDeaths(),
    ReplicaDeaths(),
    RankDeaths(),
    AdapterChanges(),
    *([RayDeaths()] if importlib.util.find_spec("ray") is not None else []),  # ray is optional
    ServerDeaths(),
    SeveralModels(),
    ParentDeaths(),
    Faults(),
    FullDisks(),
    Drains(),
    HostileRequests(),
    GeneratedInput(),
    MixedRequests(),
    HostileFiles(),
    LoopHolds(),
    Tenants(),
    LongRun(),
    MemoryPlanProof(),
    Replays(),
)
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]  # (name, goal) -> advance(number)


def chosen(names: Sequence[str]) -> tuple[Proof, ...]:
    """Look up the proofs with these names, or all without names. Raise InvalidRequestError for an unknown name."""
    known = {proof.name: proof for proof in PROOFS}
    for name in names:
        check_choice("only", name, tuple(known))
    return tuple(known[name] for name in names) or PROOFS


def run_proofs(
    subject: Subject,
    proofs: Sequence[Proof],
    *,
    minutes: float,
    trials: int | None = None,
    seed: int = 0,
    progress: Progress = lambda name, goal: nullcontext(lambda number: None),
) -> Iterator[Outcome]:
    """Run proofs and yield the outcome of each.

    Args:
        minutes: for all proofs together; each makes at least one trial.
        trials: how many each proof makes at most; None: its own goal.
        seed: of every random choice.
        progress: shows how far a proof is.
    """
    deadline = time.monotonic() + 60 * minutes
    for index, proof in enumerate(proofs):
        weight = proof.weight / sum(later.weight for later in proofs[index:])
        seconds = weight * max(0.0, deadline - time.monotonic())
        outcome = Outcome(proof.name, proof.promise, proof.unit)
        goal = proof.goal if trials is None else trials
        with progress(proof.name, goal) as advance:
            run = Trials(subject, outcome, goal=goal, seconds=seconds, seed=seed, advance=advance)
            started = time.monotonic()
            try:
                proof.run(run)
            except Exception as error:  # an interrupted proof has proved nothing
                run.wrong(f"the proof broke off: {type(error).__name__}: {error}")
            outcome.seconds = time.monotonic() - started
        yield outcome
