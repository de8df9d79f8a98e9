"""The proof that adapters come and go under traffic: every answer is of its own adapter, and nothing is left behind.

Streams with different adapters, and without one, run at once in an AsyncLLM, while names are given to other adapters,
taken away and given again, and while engines are killed. There are fewer places than adapters. Every answer must be
the one that the same stream gets alone, from a client that has that adapter only.
"""

import asyncio
import json
import os
import signal
import tempfile
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np

from penstock import AsyncLLM, EngineError, InvalidRequestError, LoRARequest
from penstock.client.engine_client import EngineState
from penstock.client.input_processor import PromptRequest
from penstock.layers.lora import is_adaptable
from penstock.models.config_json import load_model_config
from penstock.weights.hub import resolve_model
from penstock.weights.safetensors import pack_header
from penstock.weights.sources import read_table
from penstock_lab.prove.levels import memory_bytes, open_files
from penstock_lab.prove.proof import Trials
from penstock_lab.prove.servers import no_core_dumps, no_log, send_signal
from penstock_lab.prove.streams import ReceivedStream, Stream, read

NAMES = ("sql", "summary", "code")
NUM_CONTENTS, MAX_LORAS, MAX_RANK = 6, 4, 8
NUM_STREAMS, NUM_READERS = 6, 10
LOADS_PER_CLIENT, KILLS_PER_CLIENT = 250, 4  # a client gives up after five deaths in a minute
DROP_SHARE = 0.3  # of the changes of a name that is in use
MAX_GROWTH = 32 << 20  # bytes of a process over LOADS_PER_CLIENT loads, after the first WARM_UP
WARM_UP = 20  # loads between two kills, and after the last one before the levels are read
TIMEOUT_S, PAUSE_S = 120.0, 0.02
Answers = dict[tuple[str | None, int], ReceivedStream]  # by the adapter's directory, and the index of the stream


class AdapterChanges:
    """Loads and drops adapters under streams, and kills engines in between."""

    name: ClassVar[str] = "adapters"
    promise: ClassVar[str] = "However adapters come and go, a stream is computed with its own"
    unit: ClassVar[str] = "loads"
    goal: ClassVar[int] = 500
    weight: ClassVar[float] = 2.0

    def run(self, trials: Trials) -> None:
        with tempfile.TemporaryDirectory() as folder, no_core_dumps(), no_log():
            asyncio.run(self._run(trials, Path(folder)))

    async def _run(self, trials: Trials, folder: Path) -> None:
        options = trials.subject.options | {"enable_lora": True, "max_loras": MAX_LORAS, "max_lora_rank": MAX_RANK}
        paths = [write_adapter(trials.subject.model, folder / str(seed), seed) for seed in range(NUM_CONTENTS)]
        streams: list[Stream] = []
        alone: Answers = {}
        async with AsyncLLM(trials.subject.model, **options) as llm:
            if "-cpu." not in llm.model_info.system_fingerprint:
                return trials.skip("only the native kernels promise the same bits")
            streams += [Stream.at_random(trials.random, llm.model_info) for _ in range(NUM_STREAMS)]
            for path in (None, *paths):
                request = None if path is None else LoRARequest("alone", path)
                for index, stream in enumerate(streams):
                    prompt = {"prompt_token_ids": stream.prompt_token_ids}
                    outputs = llm.generate(prompt, stream.params, lora_request=request)
                    alone[path, index] = await read(outputs, stream, lambda: None)
                await llm.unload_adapter("alone")
        num_different = len({str(alone[path, 0].choices[0].token_ids) for path in (None, *paths)})
        trials.figure("different_answers", num_different)
        num_streams = num_kills = 0
        while trials.go_on():
            async with AsyncLLM(trials.subject.model, **options) as llm:
                traffic = Traffic(llm, trials, paths, streams, alone)
                await traffic.run()
                num_streams, num_kills = num_streams + traffic.num_streams, num_kills + traffic.num_kills
        trials.figure("streams", num_streams)
        trials.figure("kills", num_kills)


class Traffic:
    """A client, its readers, and what is done to its adapters."""

    def __init__(self, llm: AsyncLLM, trials: Trials, paths: list[str], streams: list[Stream], alone: Answers) -> None:
        self.num_streams = self.num_kills = 0
        self._llm, self._trials, self._paths, self._streams, self._alone = llm, trials, paths, streams, alone
        self._random = Random(trials.random.random())
        self._over = False

    async def run(self) -> None:
        readers = [asyncio.create_task(self._read_again_and_again()) for _ in range(NUM_READERS)]
        num_loads, before = 0, dict[str, tuple[int, int]]()
        try:
            while num_loads < LOADS_PER_CLIENT and (num_loads == 0 or self._trials.go_on()):
                if self.num_kills < KILLS_PER_CLIENT and num_loads >= WARM_UP * (self.num_kills + 1):
                    await self._kill()
                elif not before and num_loads >= WARM_UP * (KILLS_PER_CLIENT + 2):
                    before = self._held()
                num_loads += await self._change()
                await asyncio.sleep(self._random.uniform(0, PAUSE_S))
        finally:
            self._over = True
            await asyncio.wait_for(asyncio.gather(*readers), TIMEOUT_S)
        for adapter in self._llm.adapters():
            await self._llm.unload_adapter(adapter.name)
        for process, (files, memory) in self._held().items() if before else ():
            files_before, memory_before = before[process]
            self._trials.figure(f"{process}_growth_mib", (memory - memory_before) / 2**20)
            if files > files_before or memory > memory_before + MAX_GROWTH:
                self._trials.wrong(f"the {process} has {files} files and {memory} bytes; before: {before[process]}")
        for index in range(MAX_LORAS):  # every place is free again
            await self._llm.load_adapter(LoRARequest(f"last {index}", self._paths[index]))

    def _held(self) -> dict[str, tuple[int, int]]:
        """Count the open files and the bytes of each process."""
        pids = {"engine": self._llm.status().pid, "client": os.getpid()}
        return {name: (len(open_files(name, pid)), memory_bytes(pid or 0)) for name, pid in pids.items()}

    async def _change(self) -> bool:
        """Give a name to an adapter, or take it away. Return whether an adapter was loaded."""
        name, path = self._random.choice(NAMES), self._random.choice(self._paths)
        known = {adapter.name: adapter for adapter in self._llm.adapters()}
        if name in known and self._random.random() < DROP_SHARE:
            await self._llm.unload_adapter(name)
            return False
        try:
            adapter = await self._llm.load_adapter(LoRARequest(name, path), load_inplace=True)
        except InvalidRequestError as error:
            if error.code != "adapter_limit_exceeded":
                raise
            return False  # until open streams have ended
        except EngineError:  # the engine was killed meanwhile
            await self._until_ready()
            return False
        if adapter.source.lora_path != path:
            self._trials.wrong(f"{name} was to stand for {path}, and stands for {adapter.source.lora_path}")
        if adapter is known.get(name):
            return False
        self._trials.tried()
        return True

    async def _kill(self) -> None:
        before = self._llm.status().restarts
        send_signal(self._llm.status().pid, signal.SIGKILL)
        self.num_kills += 1
        async with asyncio.timeout(TIMEOUT_S):
            while self._llm.status().restarts == before:
                await asyncio.sleep(PAUSE_S)
        if self._random.random() < 0.5:  # otherwise the next load meets the recovery
            await self._until_ready()

    async def _until_ready(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while self._llm.status().state is not EngineState.READY:
                await asyncio.sleep(PAUSE_S)

    async def _read_again_and_again(self) -> None:
        while not self._over:
            index = self._random.randrange(len(self._streams))
            stream, adapter = self._streams[index], self._random.choice([None, *self._llm.adapters()])
            path = None if adapter is None else adapter.source.lora_path
            adapter_id = None if adapter is None else adapter.id
            request = PromptRequest(stream.prompt_token_ids, adapter=adapter_id, params=stream.params)
            try:
                answer = await read(self._llm.client.generate(request), stream, lambda: None)
                difference = answer.difference(self._alone[path, index])
            except (EngineError, ValueError, InvalidRequestError) as error:
                if getattr(error, "code", None) == "model_not_found":
                    continue  # it was taken away before the request was accepted
                difference = f"{type(error).__name__}: {error}"
            self.num_streams += 1
            if difference is not None:
                self._trials.wrong(f"{adapter_id}, {', '.join(stream.features)}: {difference[:2000]}; {stream.params}")


def write_adapter(model: str, directory: Path, seed: int) -> str:
    """Write a LoRA adapter with random values for a model, in PEFT's format. Return its directory."""
    config = load_model_config(resolve_model(model))
    rank, random = 1 + seed % MAX_RANK, np.random.default_rng(seed)
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for parameter in read_table(config).parameters(config).values():
        if not is_adaptable(parameter):
            continue
        layout = parameter.layouts[0]
        for name, shape in layout.sources.items():
            n, k = shape[:: -1 if layout.transposed else 1]
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = random.standard_normal((rank, k), np.float32) / k**0.5
            tensors[f"{module}.lora_B.weight"] = random.standard_normal((n, rank), np.float32) / 8
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    content = pack_header(header, 8) + b"".join(values.tobytes() for values in tensors.values())
    (directory / "adapter_model.safetensors").write_bytes(content)
    return str(directory)
