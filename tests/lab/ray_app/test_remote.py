"""The client's end of an engine elsewhere, with real connections to a replica whose Ray is a fake."""

import asyncio
import contextlib
import secrets
import socket
from dataclasses import replace

import pytest

pytest.importorskip("ray", reason="an extra")

from penstock import InvalidRequestError
from penstock.client import frames
from penstock.interface.messages import EngineStats
from penstock_lab.ray_app import cluster as ray_cluster
from penstock_lab.ray_app import remote
from penstock_lab.ray_app.application import ReplicaOptions, connect
from penstock_lab.ray_app.door import TOKEN_BYTES, Door, read_exactly
from penstock_lab.ray_app.engines import ENGINE, LOAD, LOAD_FORMAT, ByQueuedTokens
from penstock_lab.ray_app.remote import EnginePool
from tests.fakes_engine import model_info

INFO = model_info(64, 100)
WAIT_S = 240.0  # for what takes milliseconds on a quiet machine


class Replica:
    """What a handle calls: a lease whose engine says what the test has for it, and ends when the test says so."""

    def __init__(self, name="r1", node="node1", said=(), failures=0):
        self.name, self.node, self.said, self.failures = name, node, list(said), failures
        self.heard, self.load = [], None
        self.over, self.is_lost = asyncio.Event(), False
        self.lease = self

    def options(self, *, stream):
        assert stream
        return self

    def remote(self):
        return Call(self._bear())

    async def _bear(self):
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the replica died before it had an engine")
        token = secrets.token_bytes(TOKEN_BYTES)
        with Door(token, "127.0.0.1") as door:
            yield {"address": door.address, "token": token, "replica": self.name, "node": self.node, "num_engines": 3}
            engine, self.load = await door.accept(ENGINE, LOAD, within_s=WAIT_S)
        with engine, self.load:
            header = await read_exactly(engine, frames.HEADER_BYTES)
            self.heard.append(frames.unpack_to_engine(await read_exactly(engine, frames.body_length(header))))
            yield {"pid": 77}
            for frame in self.said:
                await asyncio.get_running_loop().sock_sendall(engine, frames.pack(frame))
            await self.over.wait()
        if self.is_lost:
            raise RuntimeError("the machine was lost")
        yield {"code": 9}


class Call:
    def __init__(self, generator):
        self._generator = generator

    def __aiter__(self):
        return self._generator

    def cancel(self):
        pass


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setattr(remote, "LEASE_AGAIN_S", 0.001)
    monkeypatch.setattr(remote, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(remote, "refused_nodes", set())
    monkeypatch.setattr(remote, "listeners", [])


def run(story):
    async def limited():
        async with asyncio.timeout(WAIT_S):
            await story()

    asyncio.run(limited())


async def next_frame(engine):
    """The next frame that is no heartbeat."""
    while isinstance(frame := await engine.receive(), frames.Heartbeat):
        pass
    return frame


def ready(fingerprint=INFO.system_fingerprint):
    return frames.Ready(0, replace(INFO, system_fingerprint=fingerprint), EngineStats())


def test_an_engine_elsewhere_is_like_a_child():
    """Guards against a lease that fails for good, a first frame with descriptors of this machine, and an exit code or
    reason that is lost."""

    async def story():
        replica = Replica(said=[ready()], failures=2)
        pool = EnginePool(replica, 2, 1)
        engine = pool.engine_plan.start(frames.Start(0, {"model": "demo"}, ring=5, num_engines=2))
        await engine.connect()
        assert isinstance(await engine.receive(), frames.Heartbeat)  # so that nobody takes the wait for a hang
        assert isinstance(await next_frame(engine), frames.Ready)
        assert replica.heard == [frames.Start(0, {"model": "demo"}, ring=None, num_engines=3)]
        assert (engine.pid, engine.replica, engine.is_remote) == (77, "r1", True)
        engine.report(123.0)
        assert LOAD_FORMAT.unpack(await read_exactly(replica.load, 8)) == (123.0,)
        replica.over.set()
        assert await next_frame(engine) is None
        engine.hang_up()
        code = await engine.wait()
        assert (code, engine.reason_of(code)) == (9, "replica r1 on node node1: exit code 9")
        assert remote.listeners == []  # with its last engine, the pool leaves Serve's thread and the loop alone
        await asyncio.sleep(0)
        assert {task.get_name() for task in asyncio.all_tasks()} & {"queued tokens"} == set()

    run(story)


def test_a_machine_that_is_lost_or_leaves_is_noticed():
    """Guards against a stream that waits for a machine that is gone without a word, and against work for a replica that
    Serve is about to stop."""

    async def story():
        replica = Replica(said=[ready(), *[frames.Heartbeat(0, EngineStats())] * 3])
        engine = EnginePool(replica, 2, 1).engine_plan.start(frames.Start(0, {}))
        await engine.connect()
        assert isinstance(await next_frame(engine), frames.Ready)
        remote.listeners[0]({"r1", "r2"})
        remote.listeners[0]({"r2"})
        await asyncio.sleep(0)  # in Serve's thread; the loop is told
        await asyncio.sleep(0)
        assert await engine.receive() == frames.Leaving(0)
        assert not isinstance(await engine.receive(), frames.Leaving)
        replica.is_lost = True
        replica.over.set()
        assert await next_frame(engine) is None
        code = await engine.wait()
        assert engine.reason_of(code).endswith("the connection ended")

    run(story)


def test_a_machine_with_other_bits_is_refused(caplog):
    """Guards against a stream that goes on with the bits of another instruction level."""

    async def story():
        first, second = Replica(said=[ready()]), Replica("r2", "node2", said=[ready("other")])
        pool = EnginePool(first, 2, 1)
        engine = pool.engine_plan.start(frames.Start(0, {}))
        await engine.connect()
        assert isinstance(await next_frame(engine), frames.Ready)
        pool.handle = second
        other = pool.engine_plan.start(frames.Start(0, {}))
        await other.connect()
        assert await next_frame(other) is None
        assert remote.refused_nodes == {"node2"}
        assert "PENSTOCK_CPU_LEVEL" in caplog.text
        for replica, one in ((first, engine), (second, other)):
            replica.over.set()
            one.hang_up()
            await one.wait()

    run(story)


def test_only_the_token_opens_the_door():
    """Guards against a stranger on the network who speaks to an engine, or keeps the client out of it."""

    async def story():
        token = secrets.token_bytes(TOKEN_BYTES)
        with Door(token, "127.0.0.1") as door:
            waiting = asyncio.create_task(door.accept(ENGINE, LOAD, within_s=WAIT_S))
            silent = await asyncio.open_connection(*door.address)
            for wrong in (bytes(TOKEN_BYTES) + ENGINE, b"GET / HTTP/1.1\r\n" * 3):
                reader, writer = await asyncio.open_connection(*door.address)
                writer.write(wrong)
                with contextlib.suppress(ConnectionResetError):  # it had more to say than is read
                    assert await reader.read() == b""
                writer.close()
            assert not waiting.done()
            kept = [await remote._connect(door.address, token + kind) for kind in (ENGINE, LOAD)]
            found = await waiting
            for one in (*found, *kept):
                one.close()
        assert await silent[0].read() == b""  # the door is shut, and keeps nobody
        silent[1].close()

    run(story)


def test_as_many_replicas_as_queued_tokens_need():
    """Guards against a policy that leaves the bounds, or counts a share of the queue as all of it."""

    class Context:
        capacity_adjusted_min_replicas, capacity_adjusted_max_replicas = 1, 4
        aggregated_metrics = None

    policy = ByQueuedTokens(target_queued_tokens=1000.0)
    for queued, wanted in (([], 1), ([0.0], 1), ([600.0, 600.0], 2), ([900.0], 1), ([3001.0], 4), ([9e9], 4)):
        Context.aggregated_metrics = {"queued_tokens": dict(enumerate(queued))}
        assert policy(Context) == (wanted, {})
    Context.aggregated_metrics = {}
    assert policy(Context) == (1, {})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"num_replicas": 0}, "num_replicas"),
        ({"num_replicas": 3, "max_replicas": 2}, "max_replicas"),
        ({"num_cpus": 0.0}, "num_cpus"),
        ({"target_queued_tokens": float("nan")}, "target_queued_tokens"),
    ],
)
def test_wrong_numbers_of_replicas_are_refused(fields, problem):
    with pytest.raises(InvalidRequestError, match=problem):
        ReplicaOptions(**fields)


@pytest.mark.parametrize(
    "option",
    [{"standby": True}, {"distributed_executor_backend": "ray"}, {"flight_recorder": 2**20}, {"kv_role": "prefill"}],
)
def test_what_needs_this_machine_is_refused(option):
    """Guards against an option that is accepted and ignored."""
    with pytest.raises(InvalidRequestError, match=next(iter(option))):
        connect(None, ReplicaOptions(), model="demo", **option)


def test_a_cluster_that_does_not_answer_is_said_at_once(monkeypatch):
    """Guards against minutes in which Ray tries an address that is stale."""
    monkeypatch.setattr(ray_cluster, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for address, problem in (
            (f"127.0.0.1:{port}", "does not answer as Ray does"),
            ("127.0.0.1:1", "cannot be reached"),
            ("nonsense", "not an address"),
        ):
            monkeypatch.setenv("RAY_ADDRESS", address)
            with pytest.raises(InvalidRequestError, match=problem):
                ray_cluster.join_cluster("on_ray")
