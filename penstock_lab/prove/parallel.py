"""Proof that a model that several ranks share answers with the bits of one process, however it is split.

The ranks are threads here: the arithmetic is the same as in processes, and a trial takes a tenth of the time. Every
fifth trial starts real processes. LocalGroup joins ranks that are threads.
"""

import queue
import random
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from penstock import EngineConfig, InvalidRequestError, SamplingParams
from penstock.assembly import build_engine
from penstock.errors import ExecutorLostError
from penstock.interface.messages import EngineOutput, EngineRequest
from penstock.interface.step import TokenLogprobs
from penstock.kernels.ops import Ops
from penstock.kernels.tensors import Array, Tensor, as_array
from penstock.models.config_json import load_model_config
from penstock.ranks.build import RankPlan, RanksExecutor, StartRanks, make_runner, open_pipeline, start_ranks
from penstock.ranks.group import Group, ParallelExecutor, StepOrder
from penstock.ranks.launcher import HostLauncher, Launcher
from penstock.ranks.links import BLOCKS, NoLinks
from penstock.ranks.pipeline import Channel
from penstock.ranks.process import serve
from penstock.ranks.sharding import general, is_beginning, module_of
from penstock.ranks.stage import FollowingRunner
from penstock.runner.structured import Forms
from penstock.weights.loader import make_ops
from penstock.weights.sources import read_parameters
from penstock_lab.prove import tiny_models
from penstock_lab.prove.proof import Trials

TIMEOUT_S = 60
PROCESSES_EVERY = 5
MAP_SHARE = 0.4  # share of the trials that have a sharding map
HINT_SHARE = 0.3  # share of the branches that have a hint in the map
SIZES_IN_MAP = ("attention_parallel_size", "mlp_parallel_size")
BASE: dict[str, Any] = {
    "load_format": "dummy", "max_model_len": 128, "threads": 1, "kernels": "cpu", "kv_cache_memory_bytes": 2**22,
    "max_num_batched_tokens": 48, "max_num_seqs": 8,
}  # fmt: skip
AXES: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32", "bfloat16"),
    "quantization": (None, "int8", "int8-x2", "int4", "int4-a16"),
    "kv_cache_dtype": ("auto", "int8"),
    "tensor_parallel_size": (1, 2, 4, 8),
    "attention_parallel_size": (None, 1, 2),
    "mlp_parallel_size": (None, 1, 2, 4, 8),
    "expert_parallel_size": (1, 1, 2, 4),
    "pipeline_parallel_size": (1, 1, 2),
    "lm_head_pieces": (1, 1, 3),
    "pad_vocab_multiple": (1, 1, 128),
    "speculative_config": (None, {"method": "ngram"}),
}
SPLITS = (
    "tensor_parallel_size", "attention_parallel_size", "mlp_parallel_size", "expert_parallel_size",
    "pipeline_parallel_size",
)  # fmt: skip


class LocalLinks(NoLinks):
    """The links of a rank that is a thread."""

    buffer_bytes = 2**30

    def __init__(self, rank: int, group: "LocalGroup") -> None:
        self.rank = rank
        self.bytes_received = 0
        self._group = group

    def gather(self, x: Tensor, degree: int, shapes: Sequence[tuple[int, ...]] | None = None) -> list[Array]:
        """Collect the arrays of the ranks of this rank's block."""
        first = self.rank // degree * degree
        arrays, barrier = self._group.arrays[degree], self._group.barriers[degree, first]
        arrays[self.rank] = as_array(x).copy()
        try:
            barrier.wait(TIMEOUT_S)
            found = [arrays[rank] for rank in range(first, first + degree)]
            barrier.wait(TIMEOUT_S)  # no rank stores its next array before all have read this one
        except threading.BrokenBarrierError as error:
            raise ExecutorLostError("a rank has ended") from error
        if shapes is not None and [item.shape for item in found] != list(shapes):
            raise ExecutorLostError(f"ranks passed {[item.shape for item in found]} but {list(shapes)} were expected")
        self.bytes_received += sum(item.nbytes for item in found) - found[self.rank - first].nbytes
        return found


class LocalGroup(Group):
    """A Group with a thread for each rank except the leader."""

    def __init__(self, size: int) -> None:
        self.arrays: dict[int, dict[int, Array]] = {degree: {} for degree in BLOCKS}
        self.barriers = {
            (degree, first): threading.Barrier(degree) for degree in BLOCKS for first in range(0, size, degree)
        }
        self.ranks = [LocalLinks(rank, self) for rank in range(size)]
        self._inboxes: list[queue.SimpleQueue[StepOrder | None]] = []
        self._following = threading.Semaphore(0)
        self.cache_bytes = 0  # not counted

    @property
    def bytes_received(self) -> int:
        """The bytes that the leader has received from the other ranks so far."""
        return self.ranks[0].bytes_received

    def follow(self, runner: FollowingRunner) -> None:
        """Compute every step of one rank in the calling thread until the group is closed."""
        inbox: queue.SimpleQueue[StepOrder | None] = queue.SimpleQueue()
        self._inboxes.append(inbox)
        self._following.release()
        while (step := inbox.get()) is not None:
            runner.append_sampled(step.sampled)
            runner.execute(step.plan)

    def wait_until_whole(self) -> None:
        """Wait until every rank follows. Raise ExecutorLostError if one does not start in time."""
        for _ in self.ranks[1:]:
            if not self._following.acquire(timeout=TIMEOUT_S):
                raise ExecutorLostError("a rank has ended")

    def send(self, message: StepOrder | None) -> None:
        """Send a step to every rank."""
        for inbox in self._inboxes:
            inbox.put(message)

    def lost(self, error: Exception) -> ExecutorLostError:
        """End every rank because of an error. Return the exception to raise."""
        self.close()
        for barrier in self.barriers.values():
            barrier.abort()
        return ExecutorLostError(str(error))

    def close(self) -> None:
        """End every rank after its step. A second call does nothing."""
        self.send(None)


@dataclass(frozen=True, slots=True)
class Received:
    """Everything that a request received."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, output: EngineOutput) -> None:
        self.token_ids.extend(output.new_token_ids)
        self.logprobs.extend(output.logprobs or ())
        self.prompt_logprobs.extend(output.prompt_logprobs or ())
        self.errors.extend([output.error] if output.error is not None else ())


class ParallelBits:
    """Compares answers of one process with those of a split model."""

    name: ClassVar[str] = "parallel"
    promise: ClassVar[str] = "A model that several processes share answers with the bits of one process"
    unit: ClassVar[str] = "splits"
    goal: ClassVar[int] = 200
    weight: ClassVar[float] = 1.0

    def run(self, trials: Trials) -> None:
        """Compare one random split of one random model per trial."""
        place = Path(tempfile.mkdtemp(prefix="penstock-prove-"))
        models = tiny_models.write(place)
        num_processes = num_maps = 0
        file = place / "sharding.yaml"
        try:
            while trials.go_on():
                name = trials.random.choice(sorted(models))
                options = draw(trials.random)
                if trials.random.random() < MAP_SHARE:
                    file.write_text(draw_map(Path(models[name]), trials.random))
                    options |= dict.fromkeys(SIZES_IN_MAP) | {"expert_parallel_size": 1, "sharding_config": str(file)}
                    num_maps += 1
                as_processes = trials.outcome.tried % PROCESSES_EVERY == 0
                num_processes += as_processes
                wrong = differs(models[name], options, as_processes=as_processes)
                trials.tried()
                if wrong is not None:
                    text = file.read_text() if "sharding_config" in options else ""
                    trials.wrong(f"{name}, {options}, {'processes' if as_processes else 'threads'}: {wrong} {text}")
        finally:
            shutil.rmtree(place)
        trials.figure("splits_in_processes", num_processes)
        trials.figure("sharding_maps", num_maps)


def draw(chance: random.Random) -> dict[str, Any]:
    """Draw options that split a model."""
    options = {name: chance.choice(values) for name, values in AXES.items()}
    if all(options[name] in (None, 1) for name in SPLITS):
        options["tensor_parallel_size"] = 2
    return options


def draw_map(model: Path, chance: random.Random, version: str = "auto") -> str:
    """Draw a sharding map of a model: one axis or none for each parameter, and some hints. version: its model_impl."""
    parameters = read_parameters(replace(load_model_config(model), model_impl=version)).values()
    axes = {general(item.name): chance.randrange(-1, len(item.shape)) for item in parameters}
    modules = sorted({module_of(item) for item in parameters if is_beginning(item)})
    hints = {module: chance.choice((-1, 1)) for module in modules if chance.random() < HINT_SHARE}
    return "".join(f"{name}: {axis}\n" for name, axis in (axes | hints).items())


def differs(model: str, options: dict[str, Any], *, as_processes: bool) -> str | None:
    """Compare the answers of a split with those of one process; None if they are equal, or if the split is refused."""
    config = EngineConfig.from_options(model=model, **BASE, **options)
    expected = answers(replace(config, parallel=type(config.parallel)()))
    try:
        found = answers(config, start_ranks if as_processes else start_threads)
    except InvalidRequestError as error:
        return None if error.param in SPLITS else f"refused: {error}"
    for request_id, answer in expected.items():
        if found[request_id] != answer:
            return f"request {request_id}: {found[request_id].token_ids} instead of {answer.token_ids}"
    return None


def requests(vocab_size: int) -> list[EngineRequest]:
    """Make greedy and sampled requests, long and short, with log-probabilities."""
    made = []
    for index, length in enumerate((3, 70, 70, 18)):
        prompt = [(7 + 5 * index // 2 + 31 * place) % vocab_size for place in range(length)]
        params = SamplingParams(
            max_tokens=8, ignore_eos=True, logprobs=2, temperature=float(index % 2), seed=index,
            prompt_logprobs=1 if index == 3 else None,
        )  # fmt: skip
        made.append(EngineRequest(str(index), prompt, params))
    return made


def answers(config: EngineConfig, start: StartRanks = start_ranks) -> dict[str, Received]:
    """Ask an engine for answers to `requests`."""
    engine = build_engine(config, start=start).engine
    found: dict[str, Received] = {}
    try:
        for request in requests(engine.vocab_size):
            found[request.request_id] = Received()
            engine.add_request(request)
        while engine.has_work:
            for output in engine.step():
                found[output.request_id].add(output)
    finally:
        engine.executor.shutdown()
    return found


def start_threads(plan: RankPlan, ops: Ops, forms: Forms | None, launcher: Launcher) -> RanksExecutor:
    """Make every rank a thread of this process, where ranks.start_ranks makes them processes.

    Raises:
        PenstockError: the leader's part cannot be built.
    """
    if plan.config.parallel.pipeline_parallel_size > 1:
        return open_pipeline(plan, _StageThreads(plan.degrees.size))
    degrees = plan.degrees
    group = LocalGroup(degrees.size)
    for rank in range(1, degrees.size):
        threading.Thread(target=_be_rank, args=(plan, rank, group), daemon=True).start()
    runner = make_runner(plan, ops, 0, group.ranks[0], forms)
    group.wait_until_whole()
    return ParallelExecutor(runner, group)


def _be_rank(plan: RankPlan, rank: int, group: LocalGroup) -> None:
    try:
        ops = make_ops(plan.config, plan.model_config)
        runner = make_runner(plan, ops, rank, group.ranks[rank])
        if isinstance(runner, FollowingRunner):
            group.follow(runner)
    except ExecutorLostError:
        return  # the leader reports what happened
    except Exception as error:
        group.lost(error)
        raise


class _StageThreads(HostLauncher):
    """Makes the ranks of a pipeline threads of this process."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._groups: dict[int, LocalGroup] = {}  # by stage

    def start(self, number: int, module: str, words: Sequence[Any]) -> None:
        """Run this rank in a thread. words: its role, then its channels to the engine and to both neighbours."""
        stage, rank = divmod(number - 1, self._size)
        engine, before, after = (None if isinstance(end, str) else Channel(end.dup()) for end in words[1:4])
        group = self._groups.setdefault(stage, LocalGroup(self._size))
        links = group.ranks[rank] if self._size > 1 else None

        def work() -> None:
            if engine is not None:
                serve(engine, before, after, links)
                group.lost(ExecutorLostError("the rank has ended"))
            for channel in (engine, before, after):
                if channel is not None:
                    channel.close()

        threading.Thread(target=work, daemon=True).start()
