"""The proof that no single fault costs more than the request that it concerns: each call at a seam fails in turn.

A trial sends a crowd of requests in which the N-th call of one kind fails. N goes from the first such call to the last,
and starts again at the first. Then every answer must be what it is alone, except at most one that ends with the fault
as its error; every block must be accounted for, and nothing may hang. N is counted within a crowd, because the engine
is idle between crowds, and reaching the 500th call overall would take a hundred crowds in which nothing happens.

The parts that may fail are subclasses of the engine's own, and are given to the engine when it is made; plans and the
beginnings of steps fail in an observer. So the engine has no code for faults, and nothing is replaced in its classes.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from penstock import EngineConfig, NotSupportedError
from penstock.assembly import PlannedEngine, build_engine
from penstock.assembly.memory import plan_kv_cache
from penstock.client import frames
from penstock.client.engine_handle import EngineChild, EnginePlan
from penstock.engine.block_pool import BlockPool
from penstock.engine.kv_cache_manager import KVCacheManager
from penstock.engine.observer import EngineObserver
from penstock.interface.step import BlockStore, CacheGroup, SchedulerOutput, StepOutput
from penstock.runner.block_store import BlockFiles, TieredBlockStore
from penstock.runner.model_runner import LocalExecutor
from penstock_lab.prove import axes
from penstock_lab.prove.askers import OFFLINE, STREAMING, Asker, Offline, Streaming
from penstock_lab.prove.completions import Completion, Key, Member, Query, ask_alone
from penstock_lab.prove.every_draft import EveryDraft
from penstock_lab.prove.proof import Trials

NUM_CALLS = 500  # of each kind; each call fails in one trial
UNLIMITED_BYTES = 2**50
MAX_CROWDS = 200  # consecutive crowds without a call of a kind after which nothing would be proved
CAUSE = "InjectedFault: injected by the proof"
# Each kind of call that may fail, and the way to the engine on which it lies. If the engine or its client writes files
# of another kind, add an entry here.
FAULTS: dict[str, str] = {
    "block allocations": OFFLINE,
    "block look-ups": OFFLINE,
    "block registrations": OFFLINE,
    "block releases": OFFLINE,
    "plans": OFFLINE,
    "steps begun": OFFLINE,
    "steps computed": OFFLINE,
    "block files written": OFFLINE,
    "block files read": OFFLINE,
    "frames sent": STREAMING,
    "frames received": STREAMING,
}


class InjectedFault(RuntimeError):
    """The fault, if it is an exception."""


class Fault:
    """The next fault: which call of which kind fails. The parts below share one, and ask it in each of their calls."""

    def __init__(self) -> None:
        self._kind, self._number, self._calls = "", 0, 0

    @contextmanager
    def at(self, kind: str, number: int) -> Iterator[Callable[[], bool]]:
        """Let the call of this kind with this number, from 1, fail. Yield a function that returns whether it has
        failed."""
        self._kind, self._number, self._calls = kind, number, 0
        try:
            yield lambda: self._calls >= number
        finally:
            self._kind = ""

    def hits(self, kind: str) -> bool:
        """Count a call. Return whether it fails."""
        if kind != self._kind:
            return False
        self._calls += 1
        return self._calls == self._number

    def strike(self, kind: str) -> None:
        """Count a call. Raise InjectedFault if it fails."""
        if self.hits(kind):
            raise InjectedFault("injected by the proof")


class FailingPool(BlockPool):
    def __init__(self, fault: Fault, num_blocks: int, evicted: Callable[[int, bytes], None] | None) -> None:
        super().__init__(num_blocks, evicted)
        self._fault = fault

    def allocate(self, count: int) -> list[int]:
        self._fault.strike("block allocations")
        return super().allocate(count)

    def lookup(self, block_hash: bytes) -> int | None:
        self._fault.strike("block look-ups")
        return super().lookup(block_hash)

    def register(self, block_id: int, block_hash: bytes) -> bool:
        self._fault.strike("block registrations")
        return super().register(block_id, block_hash)

    def release(self, block_ids: Iterable[int]) -> None:
        self._fault.strike("block releases")
        super().release(block_ids)


class FailingCache(KVCacheManager):
    """A cache of failing pools, also after a fault has made it begin again."""

    def __init__(self, fault: Fault, groups: list[CacheGroup], store: BlockStore) -> None:
        self._fault = fault
        super().__init__(groups, store=store)

    def make_pool(self, num_blocks: int, evicted: Callable[[int, bytes], None] | None) -> BlockPool:
        return FailingPool(self._fault, num_blocks, evicted)


class FailingObserver(EngineObserver):
    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def planning(self) -> None:
        self._fault.strike("plans")

    def submitting(self, plan: SchedulerOutput) -> None:
        self._fault.strike("steps begun")


class FailingExecutor:
    """An Executor that runs a step when it is collected, as LocalExecutor does, unless the step fails first."""

    depth = LocalExecutor.depth

    def __init__(self, fault: Fault, inner: LocalExecutor) -> None:
        self._fault, self._inner = fault, inner

    def submit(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        return scheduler_output

    def collect(self, handle: SchedulerOutput) -> StepOutput:
        self._fault.strike("steps computed")
        return self._inner.collect(self._inner.submit(handle))

    def shutdown(self) -> None:
        self._inner.shutdown()


class FailingFiles(BlockFiles):
    def __init__(self, fault: Fault, root: Path) -> None:
        super().__init__(root, "penstock-faults", UNLIMITED_BYTES)
        self._fault = fault

    def write(self, name: str, content: bytes) -> bool:
        self._fault.strike("block files written")
        return super().write(name, content)

    def read(self, name: str, num_bytes: int) -> bytes | None:
        self._fault.strike("block files read")
        return super().read(name, num_bytes)


class FailingChild(EngineChild):
    """An engine process whose connection fails. Its deaths do not count, because here they are intended."""

    is_remote = True

    def __init__(self, fault: Fault, start: frames.Start) -> None:
        super().__init__(start)
        self._fault = fault

    def send(self, frame: frames.ToEngine) -> None:
        if self._fault.hits("frames sent"):
            self.hang_up()
        else:
            super().send(frame)

    async def receive(self) -> frames.FromEngine | None:
        if self._fault.hits("frames received"):
            self.kill()
        return await super().receive()


def open_failing(
    way: str, stack: ExitStack, options: dict[str, Any], queries: list[Query], expected: dict[Key, Completion],
    fault: Fault,
) -> Asker:  # fmt: skip
    """Return a way to ask an engine in whose parts the fault may be."""
    if way == STREAMING:
        streaming = Streaming(options | {"engine_plan": EnginePlan(partial(FailingChild, fault))}, queries)
        stack.callback(streaming.close)
        return streaming
    blocks = Path(stack.enter_context(TemporaryDirectory()))  # removed after the engine, which writes to it, has ended
    built = build_engine(EngineConfig.from_options(**options))
    inner, groups = built.engine.executor, built.engine.kv_cache.groups
    stack.callback(inner.shutdown)
    if not isinstance(inner, LocalExecutor) or built.config.numerics.kernels != "cpu":
        raise NotSupportedError("only the native kernels (--kernels cpu) in one process keep blocks in files")
    files = FailingFiles(fault, blocks)  # for the blocks that are evicted
    store = inner.use_store(lambda block_bytes: TieredBlockStore(block_bytes, 0, files))
    planned = PlannedEngine(built.config, built.model_config, groups)
    engine = planned.make(FailingExecutor(fault, inner), kv_cache=FailingCache(fault, groups, store))
    engine.observe(FailingObserver(fault))
    engine.speculate(built.engine.speculation)
    if engine.speculation is not None:
        engine.speculation.policy = EveryDraft()
    return Offline(engine, queries, expected)


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
            fault = Fault()
            for _ in range(NUM_CALLS):
                for name, way in FAULTS.items():
                    if not trials.go_on():
                        break
                    if way not in askers:
                        askers[way] = open_failing(way, stack, busy, queries, expected, fault)
                    number, wrong = try_fault(
                        partial(fault.at, name), last[name] + 1, askers[way], queries, expected, trials.random
                    )
                    last[name] = number
                    deepest[name] = max(deepest[name], number)
                    calls[name] += 1
                    trials.tried()
                    if wrong is not None:
                        trials.wrong(f"{name}, number {number} of a crowd: {wrong}")
                        del askers[way]  # the next trial begins with a new asker
        trials.detail("calls that failed", {name: f"{calls[name]}, up to number {deepest[name]}" for name in calls})
        trials.figure("calls_of_each_kind", min(calls.values()))


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
    fault_at: Callable[[int], AbstractContextManager[Callable[[], bool]]], number: int, asker: Asker,
    queries: list[Query], expected: dict[Key, Completion], random: Random,
) -> tuple[int, str | None]:  # fmt: skip
    """Let the call with this number fail in a crowd; if the crowd has fewer calls, the first call of the next one.

    Args:
        fault_at: Fault.at for the kind of call.

    Returns:
        The number of the call that failed, and what went wrong; None if nothing did.
    """
    for _ in range(MAX_CROWDS):
        crowd = [_member(index, random) for index in range(len(queries))]
        with fault_at(number) as has_failed:
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
