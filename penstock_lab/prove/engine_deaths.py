"""The proof that no stream is dropped when the engine dies.

Sixteen mixed streams run at once in an AsyncLLM, again and again, while its engine is ended at random moments and in
random ways. Every answer must be that of the same stream in a client whose engine was not disturbed: no token is lost,
repeated or changed. A client survives four deaths a minute (client/engine_handle.py), so each client gets four deaths,
and then a new client takes its place.
"""

import asyncio
import resource
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

from penstock import AsyncLLM, EngineError, ModelLoadError
from penstock.client.engine_client import EngineState
from penstock.client.engine_handle import MAX_DEATHS
from penstock_lab.prove.proof import Trials
from penstock_lab.prove.servers import no_core_dumps, no_log, send_signal
from penstock_lab.prove.streams import ReceivedStream, Stream, read

NUM_STREAMS = 16
NUM_CROWDS = 8  # sets of streams, whose undisturbed answers are computed once
KILLS_PER_CLIENT = MAX_DEATHS - 1
MAX_DEATH_DELAY_S = 0.3  # maximum time from the recovery to the next death
SHARE_DURING_RECOVERY = 0.1  # share of deaths that come during the recovery from the last one
SHARE_OF_STANDBY = 0.1  # share of the engine's deaths that follow a death of the standby
TIMEOUT_S = 180.0  # maximum wait for a recovery or a stream, on a busy machine
POLL_S = 0.002
MEMORY_GRACE_S = 2.0  # an engine that asks for no memory within this time is killed
OUT_OF_MEMORY = "out of memory"
DEATH_WEIGHTS: dict[str, int] = {  # ways of dying, and how often: a hang takes seconds until it is noticed
    "SIGKILL": 80, "SIGSEGV": 6, "SIGABRT": 4, "SIGILL": 2, "SIGBUS": 2, OUT_OF_MEMORY: 4, "SIGSTOP": 2,
}  # fmt: skip


@dataclass(slots=True)
class Case:
    """A stream, its undisturbed answer, and whether its reader waits for the first output after a death."""

    stream: Stream
    expected: ReceivedStream
    is_interrupted: bool = False


@dataclass(slots=True)
class Pauses:
    """The times that the readers of streams waited for their next token after a death, in seconds."""

    after_death: list[float] = field(default_factory=list)
    after_hang: list[float] = field(default_factory=list)

    def report(self, trials: Trials) -> None:
        for name, values in (("next_token", self.after_death), ("after_hang", self.after_hang)):
            if values:
                trials.figure(f"{name}_median_s", statistics.median(values))
                trials.figure(f"{name}_p99_s", sorted(values)[int(0.99 * (len(values) - 1))])


class EngineDeaths:
    """Ends engines under streams."""

    name: ClassVar[str] = "engine-deaths"
    promise: ClassVar[str] = "No stream is dropped when the engine dies"
    unit: ClassVar[str] = "kills"
    goal: ClassVar[int] = 1000
    weight: ClassVar[float] = 4.0

    def run(self, trials: Trials) -> None:
        with no_core_dumps(), no_log():
            asyncio.run(self._run(trials))

    def _options(self, trials: Trials) -> dict[str, Any]:
        """Draw the options of the next client, in addition to the subject's."""
        return {}

    def _crowd(self) -> "type[Crowd]":
        """Choose the class that reads the streams and ends processes under them."""
        return Crowd

    async def _run(self, trials: Trials) -> None:
        crowds: dict[int, list[Case]] = {}
        pauses = Pauses()
        num_streams = num_tokens = 0
        while trials.go_on():
            number = trials.random.randrange(NUM_CROWDS)
            options = trials.subject.options | self._options(trials)
            async with AsyncLLM(trials.subject.model, **options) as llm:
                if "-cpu." not in llm.model_info.system_fingerprint:
                    trials.skip("only the native kernels promise the same bits")
                    return
                if number not in crowds:
                    crowds[number] = await undisturbed(llm, trials.random, NUM_STREAMS)
                crowd = self._crowd()(llm, trials, crowds[number], pauses)
                await crowd.run()
            num_streams, num_tokens = num_streams + crowd.num_streams, num_tokens + crowd.num_tokens
        pauses.report(trials)
        trials.figure("streams", num_streams)
        trials.figure("tokens", num_tokens)


class StandbyDeaths(EngineDeaths):
    """Ends engines under streams while another engine stands by, and sometimes ends the standby."""

    name: ClassVar[str] = "standby-deaths"
    promise: ClassVar[str] = "A standby engine takes over at once"
    goal: ClassVar[int] = 400
    weight: ClassVar[float] = 2.0

    def _options(self, trials: Trials) -> dict[str, Any]:
        return {"standby": True}


class ReplicaDeaths(EngineDeaths):
    """Ends one of two or three engines under streams. Some engines have two ranks or a standby.

    The streams of the other engines do not pause, and are included in the median.
    """

    name: ClassVar[str] = "data-parallel"
    promise: ClassVar[str] = "The streams of an engine that dies go on in another one"
    goal: ClassVar[int] = 400
    weight: ClassVar[float] = 2.0

    def _options(self, trials: Trials) -> dict[str, Any]:
        more: dict[str, Any] = trials.random.choice([{}, {}, {"tensor_parallel_size": 2}, {"standby": True}])
        return {"data_parallel_size": trials.random.choice([2, 2, 3]), **more}


class Crowd:
    """Streams that run at once. Each is repeated when it has ended, until the client has had its share of deaths."""

    num_kills: ClassVar[int] = KILLS_PER_CLIENT

    def __init__(self, llm: AsyncLLM, trials: Trials, cases: list[Case], pauses: Pauses) -> None:
        self.num_streams = self.num_tokens = 0
        self.llm = llm
        self.trials = trials
        self._cases = cases
        self._pauses = pauses
        self._over = False  # no more deaths come
        self._way = "no death"
        self._died_at = 0.0
        self._restarts = 0  # restarts at the last death

    async def run(self) -> None:
        readers = [asyncio.create_task(self._read_again_and_again(case)) for case in self._cases]
        try:
            for number in range(self.num_kills):
                if number and not self.trials.go_on():
                    break
                # Never two in a row: a request that gets no token between three deaths fails, as intended.
                hurry = number % 2 == 1 and self.trials.random.random() < 2 * SHARE_DURING_RECOVERY
                await self.end_engine(hurry=hurry)
                self.trials.tried()
            await self.until(self.recovered, "streams to go on")
        finally:
            self._over = True
            await asyncio.wait_for(asyncio.gather(*readers), TIMEOUT_S)

    # --- deaths ----------------------------------------------------------------------------------------------------

    async def end_engine(self, *, hurry: bool) -> None:
        """End the engine at a random moment. In a hurry, the recovery from the last death may still be under way."""
        if not hurry:
            await self.until(self.recovered, "streams to go on")
            await self.until(self.is_whole, "every engine and standby")
            if self.llm.status().standby is not None and self.trials.random.random() < SHARE_OF_STANDBY:
                await self._end_standby()
        await asyncio.sleep(self.trials.random.uniform(0, MAX_DEATH_DELAY_S))
        await self.until(lambda: self.llm.status().pid is not None, "an engine process")
        pid = self._victim([one.pid for one in self.llm.status().replicas if one.pid is not None])
        self.expect_death(self.trials.random.choices([*DEATH_WEIGHTS], [*DEATH_WEIGHTS.values()])[0])
        if self._way == OUT_OF_MEMORY:
            await self._limit_memory(pid)
        else:
            send_signal(pid, signal.Signals[self._way])

    def expect_death(self, way: str) -> None:
        """Note that an engine is about to die this way. From now on readers report how long they wait."""
        for case in self._cases:
            case.is_interrupted = True
        self._way = way
        self._restarts, self._died_at = self.llm.status().restarts, time.monotonic()

    def _victim(self, engines: list[int]) -> int:
        """Choose the process to end, out of these engines or their ranks."""
        return self.trials.random.choice(engines)

    async def _end_standby(self) -> None:
        standby = self.llm.status().standby
        send_signal(None if standby is None else standby.pid, signal.SIGKILL)
        await self.until(lambda: self.llm.status().standby != standby, "the standby's death to be noticed")
        await self.until(self.is_whole, "another standby")

    async def _limit_memory(self, pid: int | None) -> None:
        """Allow an engine no more memory than it has. If it needs none for a while, it is killed."""
        if pid is not None:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_AS, (0, resource.RLIM_INFINITY))
        deadline = time.monotonic() + MEMORY_GRACE_S
        while self.llm.status().restarts == self._restarts:
            if time.monotonic() > deadline:
                self._died_at = time.monotonic()
                send_signal(pid, signal.SIGKILL)
            await asyncio.sleep(POLL_S)

    def recovered(self) -> bool:
        return not any(case.is_interrupted for case in self._cases)

    def is_whole(self) -> bool:
        """Check that no process is starting. A process that is ended repeatedly before it is ready is given up."""
        engines = self.llm.status().replicas
        standbys = [one.standby for one in engines]
        states = [one.state for one in engines] + [one.state for one in standbys if one is not None]
        return all(state is EngineState.READY for state in states)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                raise EngineError(f"waited {TIMEOUT_S:.0f} s in vain for {what}, after {self._way}")
            await asyncio.sleep(POLL_S)

    # --- streams ---------------------------------------------------------------------------------------------------

    async def _read_again_and_again(self, case: Case) -> None:
        stream = case.stream
        while not self._over:
            try:
                outputs = self.llm.generate({"prompt_token_ids": stream.prompt_token_ids}, stream.params)
                answer = await read(outputs, stream, lambda: self._noticed(case))
                difference = answer.difference(case.expected)
            except (EngineError, ValueError) as error:
                difference = f"{type(error).__name__}: {error}"
                case.is_interrupted = False
            if difference is not None:
                what = f"{', '.join(stream.features)} after {self._way}: {difference[:2000]}; {stream.params}"
                self.trials.wrong(what)
                continue
            self.num_streams += 1
            self.num_tokens += answer.num_tokens

    def _noticed(self, case: Case) -> None:
        """Note an output. The first output of another engine shows how long its reader has waited."""
        if case.is_interrupted and self.llm.status().restarts > self._restarts:
            case.is_interrupted = False
            pauses = self._pauses.after_hang if self._way == "SIGSTOP" else self._pauses.after_death
            pauses.append(time.monotonic() - self._died_at)


async def undisturbed(llm: AsyncLLM, random: Random, number: int) -> list[Case]:
    """Draw new streams, and compute the answers that their readers get when nothing dies."""
    try:
        has_text = llm.tokenizer is not None
    except ModelLoadError:
        has_text = False
    streams = [Stream.at_random(random, llm.model_info, has_text=has_text) for _ in range(number)]
    outputs = [llm.generate({"prompt_token_ids": stream.prompt_token_ids}, stream.params) for stream in streams]
    reading = (read(its, stream, lambda: None) for its, stream in zip(outputs, streams, strict=True))
    answers = await asyncio.gather(*reading)
    return [Case(stream, answer) for stream, answer in zip(streams, answers, strict=True)]
