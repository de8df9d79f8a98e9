"""Adapters in a client whose engines are scripted: one content for each request, in every engine or in none."""

import asyncio
import hashlib
import os
from dataclasses import replace

import pytest

from penstock.client import engine_handle, frames
from penstock.client.engine_client import EngineState
from penstock.client.engine_handle import EngineConnection, EnginePlan
from penstock.client.input_processor import PromptRequest
from penstock.client.process import ProcessClient
from penstock.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from penstock.interface.lora import LoRAConfig
from penstock.interface.messages import AdapterInfo, EngineOutput, EngineStats, LoRARequest
from penstock.interface.outputs import FinishReason
from penstock.interface.sampling_params import SamplingParams
from tests.client.test_process import until
from tests.fakes_engine import expected_outputs, model_info

NUM_TOKENS = 6
INFO = replace(model_info(64, 900), max_num_seqs=8, max_loras=3)
PROMPT = [3, 1, 4]


def tokens_of(content: str | None) -> list[int]:
    """The answer of the base model, or of an adapter with this content."""
    return expected_outputs([*PROMPT, *hashlib.sha256((content or "").encode()).digest()[:4]], NUM_TOKENS)


class Child(EngineConnection):
    """An engine process that computes with the adapters that it was given, one token of each request when told."""

    peak_memory_bytes = effort = lambda self: None
    pid = None

    def __init__(self, world: "World", start: frames.Start) -> None:
        super().__init__()
        self.world, self.epoch, self.pid = world, start.epoch, 1000 + start.epoch
        self.adapters: dict[str, str] = {}  # id -> content
        self.requests: dict[str, list] = {}  # id -> [request, content, number of tokens]
        self.answers: asyncio.Queue = asyncio.Queue()
        self.say(frames.Ready(start.epoch, INFO, EngineStats(kv_blocks_total=64), 4096))

    def say(self, frame: frames.FromEngine | None) -> None:
        self.answers.put_nowait(frame)

    async def connect(self) -> None:
        pass

    async def receive(self) -> frames.FromEngine | None:
        return await self.answers.get()

    def hang_up(self) -> None:
        self.say(None)

    kill = end = hang_up

    async def wait(self) -> int:
        return -9

    def send(self, frame: frames.ToEngine) -> None:
        match frame:
            case frames.LoadAdapter(adapter_id, path, sha256):
                self.world.loads.append((self.epoch, adapter_id))
                if self.world.dies_of == path:
                    self.say(None)
                elif self.world.refuses(self, path, sha256):
                    self.say(
                        frames.Rejected(self.epoch, adapter_id, f"lora_path: {path} is not for me", "lora_path", None)
                    )
                else:
                    self.adapters[adapter_id] = content_in(path)
                    info = AdapterInfo(adapter_id, path, 4, ("q",), sha256, 96)
                    self.say(frames.AdapterLoaded(self.epoch, info))
            case frames.UnloadAdapter(adapter_id):
                assert not any(request.adapter == adapter_id for request, *_ in self.requests.values()), "it is in use"
                self.adapters.pop(adapter_id, None)  # it may have died before it had it
            case frames.AddRequest(request):
                name = request.request_id
                if request.adapter is not None and request.adapter not in self.adapters:
                    self.say(frames.Rejected(self.epoch, name, "model: not loaded", "model", "model_not_found"))
                else:
                    content = self.adapters.get(request.adapter)
                    self.requests[name] = [request, content, len(request.output_token_ids)]
            case frames.Abort(request_ids):
                for request_id in request_ids:
                    self.requests.pop(request_id, None)

    def step(self) -> None:
        outputs = []
        for name, entry in list(self.requests.items()):
            at = entry[2]
            entry[2] += 1
            reason = FinishReason.LENGTH if at + 1 == NUM_TOKENS else None
            outputs.append(EngineOutput(name, at, [tokens_of(entry[1])[at]], finish_reason=reason))
            if reason is not None:
                del self.requests[name]
        self.say(frames.Outputs(self.epoch, outputs, EngineStats()))


def content_in(path: str) -> str:
    with open(os.path.join(path, "adapter_model.safetensors"), encoding="utf-8") as file:
        return file.read()


class World:
    """A client, its engines, and the adapters on disk."""

    def __init__(self, monkeypatch, folder, *, num_engines: int = 1, standby: bool = False, modules=()) -> None:
        monkeypatch.setattr(engine_handle, "STANDBY_CHECK_S", 0.001)
        monkeypatch.setattr(engine_handle, "BACK_OFF_S", 0.0)
        self.folder, self.children, self.loads = folder, [], []
        self.dies_of, self.refuses = None, lambda child, path, sha256: False
        plan = EnginePlan(self.start, num_engines, lora_modules=tuple(modules))
        self.client = ProcessClient({}, None, standby=standby, engine_plan=plan)

    def start(self, first: frames.Start) -> Child:
        self.children.append(Child(self, first))
        return self.children[-1]

    async def __aenter__(self) -> "World":
        await self.client.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.client.shutdown()

    @property
    def living(self) -> list[Child]:
        pids = [one.pid for engine in self.client.status().replicas for one in (engine, engine.standby) if one]
        return [child for child in self.children if child.pid in pids]

    def read(self, adapter) -> "asyncio.Task[list[int]]":
        return asyncio.create_task(self._read(None if adapter is None else adapter.id))

    async def _read(self, adapter_id: str | None) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, detokenize=False)
        async for output in self.client.generate(PromptRequest(PROMPT, adapter=adapter_id, params=params)):
            found = output.outputs[0].token_ids
        return found

    async def begun(self, *contents: str | None) -> None:
        """Wait until engines compute requests with these contents, and give each its first token."""
        await until(lambda: sorted(map(str, contents)) == sorted(map(str, self.computed())), 10)
        for child in self.living:
            child.step()
        await asyncio.sleep(0.01)

    def computed(self) -> list[str | None]:
        return [content for child in self.living for _, content, _ in child.requests.values()]

    async def finish(self, *readers: "asyncio.Task[list[int]]") -> list[list[int]]:
        while not all(reader.done() for reader in readers):
            for child in self.living:
                child.step()
            await asyncio.sleep(0.001)
        return [reader.result() for reader in readers]

    async def kill(self, child: Child) -> None:
        before = self.client.status().restarts
        child.say(None)
        await until(lambda: self.client.status().restarts > before, 10)
        await until(lambda: self.client.status().state is EngineState.READY, 10)


def adapter(folder, name: str, content: str) -> LoRARequest:
    """Write an adapter whose content is a text."""
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_text(content)
    return LoRARequest(name, str(path))


async def test_a_request_keeps_the_content_it_began_with(monkeypatch, tmp_path):
    """Guards against a stream that changes its adapter in the middle, because the name was given to another one, or
    taken away; and against adapters that stay in the engine for ever."""
    async with World(monkeypatch, tmp_path) as world:
        first = await world.client.load_adapter(adapter(tmp_path, "sql", "one"))
        old, base = world.read(first), world.read(None)
        await world.begun("one", None)
        with pytest.raises(InvalidRequestError, match="loaded with other content"):
            await world.client.load_adapter(adapter(tmp_path, "sql", "two"))
        second = await world.client.load_adapter(adapter(tmp_path, "sql", "two"), load_inplace=True)
        assert (first.name, first.id == second.id) == (second.name, False)
        new = world.read(second)
        await world.begun("one", "two", None)
        assert await world.client.unload_adapter("sql")
        assert not await world.client.unload_adapter("sql")
        assert world.client.adapters() == []
        assert await world.finish(old, base, new) == [tokens_of("one"), tokens_of(None), tokens_of("two")]
        assert world.living[0].adapters == {}
        with pytest.raises(InvalidRequestError, match="not loaded, or no longer"):
            await world.read(second)


async def test_a_successor_has_the_adapters_before_the_requests(monkeypatch, tmp_path):
    """Guards against streams that a death of the engine ends, because the next one lacks their adapter."""
    modules = [adapter(tmp_path, "a", "one"), adapter(tmp_path, "b", "two")]
    async with World(monkeypatch, tmp_path, modules=modules) as world:
        one, two = world.client.adapters()
        assert one.info.rank == 4
        readers = [world.read(one), world.read(two), world.read(None)]
        await world.begun("one", "two", None)
        await world.client.unload_adapter("b")  # the new engine needs it all the same
        await world.kill(world.living[0])
        await world.begun("one", "two", None)
        assert await world.finish(*readers) == [tokens_of("one"), tokens_of("two"), tokens_of(None)]
        assert list(world.living[0].adapters) == [one.id]


async def test_an_adapter_that_has_changed_ends_its_own_streams_only(monkeypatch, tmp_path):
    """Guards against other weights in the middle of an answer, and against the end of streams that have their own."""
    modules = [adapter(tmp_path, "a", "one"), adapter(tmp_path, "b", "two")]
    async with World(monkeypatch, tmp_path, modules=modules) as world:
        one, two = world.client.adapters()
        readers = [world.read(one), world.read(two)]
        await world.begun("one", "two")
        adapter(tmp_path, "a", "three")
        world.refuses = lambda child, path, sha256: path.endswith("/a")
        await world.kill(world.living[0])
        with pytest.raises(RequestFailedError, match="adapter a could not be loaded again"):
            await readers[0]
        assert await world.finish(readers[1]) == [tokens_of("two")]
        assert world.client.adapters() == [two]
        world.refuses = lambda child, path, sha256: False
        again = await world.client.load_adapter(adapter(tmp_path, "a", "three"))
        assert await world.finish(world.read(again)) == [tokens_of("three")]


@pytest.mark.parametrize("engines", [{"num_engines": 2}, {"standby": True}], ids=["replicas", "standby"])
async def test_every_engine_has_an_adapter_or_none(monkeypatch, tmp_path, engines):
    """Guards against an adapter that one engine of several has, or that the standby lacks when it takes over."""
    async with World(monkeypatch, tmp_path, **engines) as world:
        await until(lambda: len(world.living) == 2, 10)
        world.refuses = lambda child, path, sha256: (
            child.epoch == world.children[1].epoch and child is world.children[1]
        )
        with pytest.raises(InvalidRequestError, match="is not for me"):
            await world.client.load_adapter(adapter(tmp_path, "a", "one"))
        assert [child.adapters for child in world.living] == [{}, {}]
        assert world.client.adapters() == []
        world.refuses = lambda child, path, sha256: False
        loaded = await world.client.load_adapter(adapter(tmp_path, "a", "one"))
        assert [list(child.adapters) for child in world.living] == [[loaded.id]] * 2
        before = len(world.loads)
        assert await world.client.load_adapter(adapter(tmp_path, "a", "one")) is loaded
        assert len(world.loads) == before
        reader = world.read(loaded)
        await world.begun("one")
        busy = next(child for child in world.living if child.requests)
        busy.say(None)
        assert await world.finish(reader) == [tokens_of("one")]


async def test_an_adapter_that_ends_the_engine_is_given_up(monkeypatch, tmp_path):
    """Guards against an adapter that ends one engine after the other, and against a caller who waits for ever."""
    async with World(monkeypatch, tmp_path) as world:
        world.dies_of = str(tmp_path / "a")
        with pytest.raises(EngineDeadError, match="died while it loaded the adapter"):
            await world.client.load_adapter(adapter(tmp_path, "a", "one"))
        await until(lambda: world.client.status().state is EngineState.READY, 10)
        assert await world.finish(world.read(None)) == [tokens_of(None)]
        assert (len(world.loads), world.client.status().restarts) == (1, 1)


async def test_a_server_does_not_start_without_its_adapters(monkeypatch, tmp_path):
    """Guards against a server that looks ready, and has no adapter."""
    world = World(monkeypatch, tmp_path, modules=[adapter(tmp_path, "a", "one")])
    world.refuses = lambda child, path, sha256: True
    with pytest.raises(InvalidRequestError, match="is not for me"):
        await world.client.start()
    with pytest.raises(InvalidRequestError, match="is not for me"):
        world.client.model_info  # noqa: B018
    await world.client.shutdown()
    with pytest.raises(InvalidRequestError, match=r"lora_path: .*no adapter_config\.json"):
        World(monkeypatch, tmp_path, modules=[LoRARequest("x", str(tmp_path))])


def test_modules_are_named_in_vllms_ways() -> None:
    found = LoRAConfig(enable_lora=True, max_loras=2, lora_modules=["a=/x=1", '{"name": "b", "path": "/y"}'])
    assert found.modules == {"a": "/x=1", "b": "/y"}
    for wrong in ("a", "=/x", "a=", '{"name": "b"}', '{"name": "b", "path": "/y", "base_model_name": "c"}', "{", "{}"):
        with pytest.raises(InvalidRequestError, match="lora_modules"):
            LoRAConfig(enable_lora=True, lora_modules=[wrong])


async def test_there_is_a_place_for_so_many(monkeypatch, tmp_path):
    """Guards against an engine that drops an adapter with a name, because a further one is loaded."""
    async with World(monkeypatch, tmp_path) as world:
        for name in "abc":
            await world.client.load_adapter(adapter(tmp_path, name, name))
        with pytest.raises(InvalidRequestError, match="3 adapters are loaded"):
            await world.client.load_adapter(adapter(tmp_path, "d", "d"))
        await world.client.unload_adapter("b")
        await world.client.load_adapter(adapter(tmp_path, "d", "d"))
        assert [one.name for one in world.client.adapters()] == ["a", "c", "d"]
