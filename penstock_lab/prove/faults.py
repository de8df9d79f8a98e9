"""The proof that no single fault costs more than the request that it concerns: each call at a seam fails in turn.

A trial sends a crowd of requests in which the N-th call of one kind fails. N goes from the first such call to the last,
and starts again at the first. Then every answer must be what it is alone, except at most one that ends with the fault
as its error; every block must be accounted for, and nothing may hang. N is counted within a crowd, because the engine
is idle between crowds, and reaching the 500th call overall would take a hundred crowds in which nothing happens.

A plan, and the beginning of a step, fail in an observer of the engine. In parts that no observer sees, a wrapper
around the method makes the call fail, so these parts have no code for it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from penstock import EngineConfig
from penstock.assembly import build_engine
from penstock.assembly.memory import plan_kv_cache
from penstock.client import engine_handle
from penstock.client.engine_handle import EngineChild
from penstock.engine.block_pool import BlockPool
from penstock.engine.observer import EngineObserver
from penstock.interface.step import SchedulerOutput
from penstock.runner.block_store import BlockFiles
from penstock.runner.model_runner import ModelRunner
from penstock_lab.prove import axes
from penstock_lab.prove.askers import OFFLINE, OPEN, STREAMING, Asker, Offline
from penstock_lab.prove.completions import Completion, Key, Member, Query, ask_alone
from penstock_lab.prove.proof import Trials

NUM_CALLS = 500  # of each kind; each call fails in one trial
UNLIMITED_BYTES = 2**50
MAX_CROWDS = 200  # consecutive crowds without a call of a kind after which nothing would be proved
CAUSE = "InjectedFault: injected by the proof"


class InjectedFault(RuntimeError):
    """The fault, if it is an exception."""


class Seam(EngineObserver):
    """Sees an engine make plans and begin steps, and fails it there."""

    def planning(self) -> None:
        """Let a plan be made; Fault replaces this method."""

    def submitting(self, plan: SchedulerOutput) -> None:
        """Let a step begin; Fault replaces this method."""


def _raise(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    raise InjectedFault("injected by the proof")


def _hang_up(original: Callable[..., Any], child: EngineChild, frame: Any) -> Any:
    child.hang_up()


def _kill(original: Callable[..., Any], child: EngineChild) -> Any:
    child.kill()
    return original(child)


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of call that may fail.

    Attributes:
        owner, method: the class and the method that is called.
        effect: called instead of the method, with the method and its arguments.
        via: the way to the engine on which the call lies.
    """

    owner: type
    method: str
    effect: Callable[..., Any] = _raise
    via: str = OFFLINE

    @contextmanager
    def at(self, number: int) -> Iterator[Callable[[], bool]]:
        """Let the call with this number, from 1, fail. Yield a function that returns whether it has failed."""
        original, calls = getattr(self.owner, self.method), 0

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return self.effect(original, *args, **kwargs) if calls == number else original(*args, **kwargs)

        setattr(self.owner, self.method, call)
        try:
            yield lambda: calls >= number
        finally:
            setattr(self.owner, self.method, original)


# If the engine or its client writes another kind of file, add its entry here.
FAULTS: dict[str, Fault] = {
    "block allocations": Fault(BlockPool, "allocate"),
    "block look-ups": Fault(BlockPool, "lookup"),
    "block registrations": Fault(BlockPool, "register"),
    "block releases": Fault(BlockPool, "release"),
    "plans": Fault(Seam, "planning"),
    "steps begun": Fault(Seam, "submitting"),
    "steps computed": Fault(ModelRunner, "execute"),
    "block files written": Fault(BlockFiles, "write"),
    "block files read": Fault(BlockFiles, "read"),
    "frames sent": Fault(EngineChild, "send", _hang_up, STREAMING),
    "frames received": Fault(EngineChild, "receive", _kill, STREAMING),
}


class Faults:
    """Makes the calls of every kind fail, one after the other."""

    name: ClassVar[str] = "faults"
    promise: ClassVar[str] = "A fault anywhere fails at most the request that it concerns"
    unit: ClassVar[str] = "faults"
    goal: ClassVar[int] = NUM_CALLS * len(FAULTS)
    weight: ClassVar[float] = 1.0

    def run(self, trials: Trials) -> None:
        options = trials.subject.options | {"model": trials.subject.model, "max_model_len": axes.MAX_MODEL_LEN}
        queries = make_queries(trials.random)
        undisturbed = build_engine(EngineConfig.from_options(**options | axes.UNDISTURBED))
        wanted = [(query, choice) for query in range(len(queries)) for choice in range(2)]
        expected = ask_alone(undisturbed.engine, queries, wanted)
        undisturbed.engine.shutdown()
        busy = options | {"max_num_batched_tokens": 24, "max_num_seqs": 2}
        plan = plan_kv_cache(
            EngineConfig.from_options(**busy).resolve(undisturbed.model_config),
            undisturbed.model_config,
            UNLIMITED_BYTES,
        )
        busy |= {"max_num_seqs": 6, "kv_cache_memory_bytes": plan.num_bytes}  # so that requests are preempted too
        calls = dict.fromkeys(FAULTS, 0)
        last = dict.fromkeys(FAULTS, 0)  # the number in its crowd of the call that failed last
        deepest = dict.fromkeys(FAULTS, 0)
        with ExitStack() as stack:
            askers: dict[str, Asker] = {}
            files = {"kv_offload_dir": stack.enter_context(TemporaryDirectory())}  # for the blocks that are evicted
            ways = {OFFLINE: busy | files, STREAMING: busy}
            for _ in range(NUM_CALLS):
                for name, fault in FAULTS.items():
                    if not trials.go_on():
                        break
                    if fault.via not in askers:
                        askers[fault.via] = asker = OPEN[fault.via](stack, ways[fault.via], queries, expected)
                        if isinstance(asker, Offline):
                            asker.engine.observe(Seam())
                    with _many_restarts():
                        number, wrong = try_fault(
                            fault, last[name] + 1, askers[fault.via], queries, expected, trials.random
                        )
                    last[name] = number
                    deepest[name] = max(deepest[name], number)
                    calls[name] += 1
                    trials.tried()
                    if wrong is not None:
                        trials.wrong(f"{name}, number {number} of a crowd: {wrong}")
                        del askers[fault.via]  # the next trial begins with a new asker
        trials.detail("calls that failed", {name: f"{calls[name]}, up to number {deepest[name]}" for name in calls})
        trials.figure("calls_of_each_kind", min(calls.values()))


@contextmanager
def _many_restarts() -> Iterator[None]:
    """Lift the limit on deaths of the engine process, because here they are intended."""
    limit = engine_handle.MAX_DEATHS
    engine_handle.MAX_DEATHS = 10**9
    try:
        yield
    finally:
        engine_handle.MAX_DEATHS = limit


def make_queries(random: Random) -> list[Query]:
    """Draw short and long prompts, greedy and sampled. Two of them have a common beginning."""
    prompts = [random.choices(range(3, 1000), k=length) for length in (3, 17, 40, 110, 120, 70)]
    prompts.append(prompts[-1][:48] + prompts[0])
    common = {"max_tokens": 6, "logprobs": 1, "ignore_eos": True}
    return [
        Query(prompt, {**common, "temperature": 0.9 * (index % 2), "seed": index})
        for index, prompt in enumerate(prompts)
    ]


def _member(query: int, random: Random) -> Member:
    """Draw a request for this query. Half have a new salt: no cache has their blocks, so files are written."""
    salt = f"{random.random()}" if random.random() < 0.5 else None
    return Member(query, 1 + query % 2, delay=random.randint(0, 6), salt=salt)


def try_fault(
    fault: Fault, number: int, asker: Asker, queries: list[Query], expected: dict[Key, Completion], random: Random
) -> tuple[int, str | None]:
    """Let the call with this number fail in a crowd; if the crowd has fewer calls, the first call of the next one.

    Returns:
        The number of the call that failed, and what went wrong; None if nothing did.
    """
    for _ in range(MAX_CROWDS):
        crowd = [_member(index, random) for index in range(len(queries))]
        with fault.at(number) as has_failed:
            try:
                found = asker.ask(crowd, random, disturbed=False)
            except Exception as error:
                return number, f"{type(error).__name__}: {error}"
        wrong = _wrong(found, crowd, expected)
        if wrong is not None or has_failed():
            return number, wrong
        number = 1
    return number, f"there was no such call in {MAX_CROWDS} crowds"


def _wrong(found: dict[Key, Completion], crowd: list[Member], expected: dict[Key, Completion]) -> str | None:
    """Explain what is wrong with the answers of a crowd in which one call has failed; None if nothing is."""
    failed = 0
    for (index, choice), answer in found.items():
        if answer.error == CAUSE:
            failed += 1
        elif (wrong := answer.difference(expected[crowd[index].query, choice])) is not None:
            return f"query {index}, choice {choice}: {wrong}"
    return f"{failed} answers failed" if failed > 1 else None
