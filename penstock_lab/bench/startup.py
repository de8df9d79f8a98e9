"""Measure start-up times, and how long a stream waits for its next token when its engine is killed.

The start-up times are those of `penstock --version` and of `penstock serve demo` until /health answers 200. The engine
is killed with and without a standby, and beside a second engine.

python -m penstock_lab.bench.startup
"""

import asyncio
import contextlib
import logging
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import IO, Any, cast

from penstock import SamplingParams
from penstock.client.engine_client import EngineState
from penstock.client.engine_handle import EnginePlan
from penstock.client.input_processor import PromptRequest
from penstock.client.open_requests import OpenRequest
from penstock.client.process import ProcessClient
from penstock.interface.messages import EngineOutput, EngineStats, ModelInfo

REPEATS = 5
TIMEOUT_S = 60.0
NUM_KILLS = 4  # more kills within a minute would end the service
NUM_TOKENS_BEFORE_KILL = 200
PARTS = ("death noticed", "engine ready", "next token")


@contextlib.contextmanager
def python_process(*arguments: str, stderr: int | None = None) -> Iterator[IO[str]]:
    """Run this Python in a new process, yield the process's standard output, and terminate it at the end."""
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            yield cast(IO[str], process.stdout)
        finally:
            process.terminate()


def time_version() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "penstock", "--version"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def time_health() -> float:
    """Time from process start until /health answers 200, in seconds.

    Raises:
        TimeoutError: it took longer than TIMEOUT_S.
    """
    started = time.perf_counter()
    with python_process("-m", "penstock", "serve", "demo", "--port", "0", stderr=subprocess.DEVNULL) as output:
        line = output.readline()
        url = next((word for word in line.split() if word.startswith("http://")), None)
        while url is not None and time.perf_counter() - started < TIMEOUT_S:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=1.0):
                return time.perf_counter() - started
            time.sleep(0.005)
        raise TimeoutError(f"the server did not become healthy; the first line it printed was {line!r}")


class TimedClient(ProcessClient):
    """Notes when a death is noticed, when the next engine is ready, and when the next token arrives.

    Attributes:
        times: of the last death, by PARTS; empty before the first.
    """

    times: dict[str, float]

    def engine_lost(self, index: int, num_rows: int, to_blame: OpenRequest | None) -> None:
        self.times = {"death noticed": time.perf_counter()}
        super().engine_lost(index, num_rows, to_blame)

    def engine_ready(self, index: int, num_rows: int, info: ModelInfo) -> None:
        if self.times:
            self.times["engine ready"] = time.perf_counter()
        super().engine_ready(index, num_rows, info)

    def received(self, index: int, outputs: Sequence[EngineOutput], stats: EngineStats) -> None:
        if self.times:
            self.times.setdefault("next token", time.perf_counter())
        super().received(index, outputs, stats)


async def time_deaths(*, standby: bool = False, data_parallel_size: int = 1) -> dict[str, list[float]]:
    """Time from a kill to each of PARTS, in seconds, for NUM_KILLS kills of the engine that computes a stream."""
    client = TimedClient(
        {"model": "demo"}, None, standby=standby, engine_plan=EnginePlan(num_engines=data_parallel_size)
    )
    client.times = {}
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    params = SamplingParams(max_tokens=2 * NUM_TOKENS_BEFORE_KILL, ignore_eos=True, seed=1)
    try:
        for _ in range(NUM_KILLS):
            while (second := client.status().standby) is not None and second.state is not EngineState.READY:
                await client.start()
                await asyncio.sleep(0.01)
            killed_at = 0.0
            async for output in client.generate(PromptRequest([1], params=params)):
                pid = next((one.pid for one in client.status().replicas if one.journal_requests), None)
                if len(output.outputs[0].token_ids) >= NUM_TOKENS_BEFORE_KILL and not killed_at and pid is not None:
                    killed_at = time.perf_counter()
                    os.kill(pid, signal.SIGKILL)
            while "engine ready" not in client.times:  # another engine may have continued the stream in the meantime
                await asyncio.sleep(0.01)
            for part in PARTS:
                found[part].append(client.times[part] - killed_at)
    finally:
        await client.shutdown()
    return found


def main() -> int:
    logging.getLogger("penstock").setLevel(logging.CRITICAL)  # the deaths are intended
    for name, measure in (("penstock --version", time_version), ("serve demo until /health is 200", time_health)):
        times = [measure() for _ in range(REPEATS)]
        print(f"{name}: median {statistics.median(times):.3f} s, best {min(times):.3f} s of {REPEATS}")
    ways: dict[str, dict[str, Any]] = {
        "one engine": {},
        "one engine and a standby": {"standby": True},
        "two engines": {"data_parallel_size": 2},
    }
    for way, options in ways.items():
        for part, times in asyncio.run(time_deaths(**options)).items():
            name = f"from a kill, with {way}: {part}"
            print(f"{name}: median {statistics.median(times):.3f} s, best {min(times):.3f} s of {NUM_KILLS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
