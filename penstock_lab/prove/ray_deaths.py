"""The proof that no stream is dropped when a Ray cluster loses an engine, a replica or a machine.

A cluster of three nodes with four replicas is started on this machine. 32 mixed streams run at once while engines,
replicas and whole nodes are killed. Every answer must be that of the same stream in an engine that this process starts.
Then requests with a shared prompt show how much of it is found in caches with the router, and by taking slots.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar

from penstock import AsyncLLM, SamplingParams
from penstock.client.admission import Router
from penstock.client.engine_client import EngineState
from penstock_lab.prove.engine_deaths import Case, Crowd, Pauses, undisturbed
from penstock_lab.prove.proof import Trials
from penstock_lab.prove.servers import no_core_dumps, no_log, send_signal

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

NUM_NODES, NUM_REPLICAS, NUM_STREAMS = 3, 4, 32
OBJECT_STORE_BYTES = 100 * 2**20  # nothing passes through the store
CPUS_PER_NODE = 4  # number that Ray assumes, whatever the machine has
ENGINE, REPLICA, NODE = "SIGKILL of an engine", "SIGKILL of a replica", "a node lost"
DEATH_WEIGHTS: dict[str, int] = {ENGINE: 4, REPLICA: 10, NODE: 6}
SHARED_TOKENS, OWN_TOKENS, NUM_SHARING, AT_ONCE = 512, 8, 60, 4


class RayDeaths:
    """Kills engines, replicas and nodes of a Ray cluster under streams."""

    name: ClassVar[str] = "ray"
    promise: ClassVar[str] = "The streams of a replica or machine that dies go on in another one"
    unit: ClassVar[str] = "kills"
    goal: ClassVar[int] = 20
    weight: ClassVar[float] = 2.0

    def run(self, trials: Trials) -> None:
        with no_core_dumps(), no_log(), cluster_of(NUM_NODES) as cluster:
            asyncio.run(self._run(trials, cluster))

    async def _run(self, trials: Trials, cluster: "Cluster") -> None:
        from penstock_lab.ray_app.application import ReplicaOptions, connect, deployed

        options = {"max_num_seqs": NUM_STREAMS} | trials.subject.options
        async with AsyncLLM(trials.subject.model, **options) as own:
            if "-cpu." not in own.model_info.system_fingerprint:
                trials.skip("only the native kernels promise the same bits")
                return
            cases = await undisturbed(own, trials.random, NUM_STREAMS)
        replicas, pauses = ReplicaOptions(num_replicas=NUM_REPLICAS), Pauses()
        with deployed(replicas, "penstock-prove") as handle:
            async with connect(handle, replicas, model=trials.subject.model, **options) as llm:
                crowd = ClusterCrowd(cluster, llm, trials, cases, pauses)
                await crowd.run()
                await crowd.until_whole()
                await measure_prefix_hits(llm, trials)
        pauses.report(trials)
        trials.figure("streams", crowd.num_streams)
        trials.figure("tokens", crowd.num_tokens)
        trials.detail("ways", crowd.counts)


class ClusterCrowd(Crowd):
    """Streams over the replicas of a cluster. Ray replaces what dies, and a new node is added for each lost one."""

    num_kills: ClassVar[int] = 1000  # the goal is reached before

    def __init__(self, cluster: "Cluster", llm: AsyncLLM, trials: Trials, cases: list[Case], pauses: Pauses) -> None:
        super().__init__(llm, trials, cases, pauses)
        self.counts: dict[str, int] = {}  # number of deaths, by way
        self._cluster = cluster

    async def end_engine(self, *, hurry: bool) -> None:
        """End an engine, a replica or a node at a random moment, while at least two engines serve."""
        await self.until(self.recovered, "streams to go on")
        await self.until(lambda: len(self._ready_pids()) >= 2, "two engines")
        await asyncio.sleep(self.trials.random.uniform(0, 0.3))
        way = self.trials.random.choices([*DEATH_WEIGHTS], [*DEATH_WEIGHTS.values()])[0]
        self.counts[way] = self.counts.get(way, 0) + 1
        self.expect_death(way)
        pid = self.trials.random.choice(self._ready_pids())
        node = self._node_of(pid)
        if way == NODE and node is not None:
            await asyncio.to_thread(self._cluster.remove_node, node, allow_graceful=False)
            add_node(self._cluster)  # in this thread, because Ray sets a signal handler
        else:
            send_signal(pid if way == ENGINE else parent_of(pid), signal.SIGKILL)

    async def until_whole(self) -> None:
        """Wait until every replica serves again."""
        await self.until(self.is_whole, "every replica")

    def _ready_pids(self) -> list[int]:
        engines = self.llm.status().replicas
        return [one.pid for one in engines if one.pid is not None and one.state is EngineState.READY]

    def _node_of(self, pid: int) -> Any:
        """Find the node of an engine; None for the head node, with which the cluster would end."""
        raylet = parent_of(parent_of(pid))
        nodes = [node for node in self._cluster.list_all_nodes() if not node.is_head()]
        return next((node for node in nodes if node.all_processes["raylet"][0].process.pid == raylet), None)


class RoundRobin(Router[int]):
    """Takes slots, whatever is cached."""

    def choose(self, hashes: Sequence[bytes], num_tokens: int, queued: Mapping[int, float]) -> int:
        return super().choose([], 0, dict.fromkeys(queued, 0.0))


async def measure_prefix_hits(llm: AsyncLLM, trials: Trials) -> None:
    """Report the share of the tokens in a common prompt that many requests find in caches, with either router."""
    info, random = llm.model_info, trials.random
    if info.max_model_len < SHARED_TOKENS + 2 * OWN_TOKENS:
        return
    for name, router in (("router", Router[int](info.block_size)), ("round_robin", RoundRobin(info.block_size))):
        llm.client._fleet.router = router
        shared = [random.randrange(info.vocab_size) for _ in range(SHARED_TOKENS)]
        before = llm.status().stats.num_cached_tokens_total
        slots = asyncio.Semaphore(AT_ONCE)
        own = [[random.randrange(info.vocab_size) for _ in range(OWN_TOKENS)] for _ in range(NUM_SHARING)]
        await asyncio.gather(*(_ask(llm, shared + tail, slots) for tail in own))
        found = llm.status().stats.num_cached_tokens_total - before
        trials.figure(f"prefix_hits_{name}", found / (SHARED_TOKENS * NUM_SHARING))


async def _ask(llm: AsyncLLM, prompt: list[int], slots: asyncio.Semaphore) -> None:
    async with slots:
        async for _ in llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=4, ignore_eos=True)):
            pass


@contextmanager
def cluster_of(num_nodes: int) -> "Iterator[Cluster]":
    """Start a Ray cluster of processes on this machine, connect to it, and end it afterwards."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_DEDUP_LOGS"] = "0"
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112  # a dozen processes without a use
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # deaths are expected here
    cluster = Cluster()
    try:
        for number in range(num_nodes):
            add_node(cluster, **({"include_dashboard": False} if number == 0 else {}))
        ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
        yield cluster
    finally:
        if ray.is_initialized():
            with suppress(Exception):  # the cluster itself may have failed
                serve.shutdown()
            ray.shutdown()
        cluster.shutdown()


def add_node(cluster: "Cluster", **options: Any) -> None:
    """Add a node to a cluster of processes, and wait until it has joined."""
    cluster.add_node(num_cpus=CPUS_PER_NODE, object_store_memory=OBJECT_STORE_BYTES, **options)


def parent_of(pid: int) -> int:
    """Find the parent of a process on this machine. A replica is the parent of its engine."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return int(file.read().rpartition(")")[2].split()[1])
