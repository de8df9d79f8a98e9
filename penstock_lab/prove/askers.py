"""Ways in which a crowd of requests reaches an engine: in this process, through AsyncLLM, and over HTTP.

Each has `ask`, which returns the answers by member of the crowd and choice.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from penstock import AsyncLLM, EngineConfig, EngineError, InvalidRequestError, Logprob, RequestOutput
from penstock.assembly import build_engine
from penstock.engine.engine import Engine
from penstock.engine.observer import EngineObserver
from penstock.interface.messages import EngineRequest
from penstock_lab.prove.completions import Completion, Entry, Key, Member, Query, add_output
from penstock_lab.prove.every_draft import EveryDraft
from penstock_lab.prove.proof import Subject
from penstock_lab.prove.servers import serve, stream

PREEMPTION_RATE = 0.1  # share of the steps of a disturbed crowd after which a request is preempted
MAX_PREEMPTIONS = 12  # in a crowd, because a request that is computed token by token must not start over for ever
MAX_STEPS = 100_000  # maximum for a crowd; more would be a hang
MAX_WAIT_S = 180.0  # maximum time for a crowd on another process, which may hang
MAX_KILL_AFTER = 30  # maximum number of outputs of a crowd before the kill
PIN = "pin"
LONG_QUEUE_WAIT = (
    "--max-queue-wait=100000"  # for a server: this proof is about bits, and a busy machine is no reason to refuse
)
# What a request over HTTP would otherwise take from the model's generation_config.json
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
RETURN_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}


@dataclass(frozen=True, slots=True)
class _Preemptions(EngineObserver):
    """Notes in the answers which requests were preempted."""

    found: dict[Key, Completion]

    def preempted(self, request_id: str) -> None:
        self.found[_key(request_id)].preempted = True


class Offline:
    """Asks an engine in this process, step by step.

    expected: the answers of the queries' choices, for requests that bring outputs along.
    """

    def __init__(self, engine: Engine, queries: list[Query], expected: dict[Key, Completion]) -> None:
        self.engine = engine
        self._queries = queries
        self._expected = expected

    def ask(
        self, crowd: list[Member], random: Random, *, disturbed: bool, pinned: bool = False
    ) -> dict[Key, Completion]:
        """Answer a crowd.

        Args:
            disturbed: preempt running requests at random steps.
            pinned: pin the prompt of one of the requests, if it can be pinned and all requests find room beside it.
        """
        found = {(index, choice): Completion() for index, member in enumerate(crowd) for choice in range(member.n)}
        waiting = sorted(enumerate(crowd), key=lambda item: item[1].delay)
        scheduler, step, left = self.engine.scheduler, 0, MAX_PREEMPTIONS if disturbed else 0
        preemptions = _Preemptions(found)
        if pinned:
            with suppress(InvalidRequestError):
                self.engine.pin(PIN, self._queries[random.choice(crowd).query].prompt)
        self.engine.observe(preemptions)
        try:
            while waiting or self.engine.has_work:
                while waiting and waiting[0][1].delay <= step:
                    for request in self._requests(*waiting.pop(0)):
                        self._add(request)
                for output in self.engine.step():
                    index, choice = _key(output.request_id)
                    num = 1 if output.hypotheses is None else len(output.hypotheses)
                    add_output([found[index, choice + place] for place in range(num)], output)
                if left and scheduler.running and random.random() < PREEMPTION_RATE:
                    scheduler.preempt(random.choice(scheduler.running))
                    left -= 1
                step += 1
                if step > MAX_STEPS:
                    raise EngineError(f"the engine has not come to an end after {MAX_STEPS} steps")
        finally:
            self.engine.stop_observing(preemptions)
            self.engine.unpin(PIN)
        self.engine.check_integrity()
        if self.engine.kv_cache.num_free < self.engine.kv_cache.num_blocks:
            raise EngineError("blocks are in use, and no request is open")
        return found

    def _add(self, request: EngineRequest) -> None:
        try:
            self.engine.add_request(request)
        except InvalidRequestError:
            if not self.engine.unpin(PIN):
                raise
            self.engine.add_request(request)

    def _requests(self, index: int, member: Member) -> Iterator[EngineRequest]:
        query = self._queries[member.query]
        if query.is_search:
            yield EngineRequest(f"{index} 0", query.prompt, query.params(member.n), cache_salt=member.salt)
            return
        for choice in range(member.n):
            known = self._expected[member.query, choice] if member.cut else Completion()
            state = known.sampler_states[member.cut - 1] if member.cut else None
            yield EngineRequest(
                f"{index} {choice}", query.prompt, query.params(), choice, known.ids[: member.cut],
                sampler_state=state, cache_salt=member.salt, flow=f"flow {index % 3}", priority=index % 4,
                deadline=float(index % 5),
            )  # fmt: skip


def _key(request_id: str) -> Key:
    index, choice = request_id.split()
    return int(index), int(choice)


def open_offline(
    stack: ExitStack, options: dict[str, Any], queries: list[Query], expected: dict[Key, Completion]
) -> Offline:
    engine = build_engine(EngineConfig.from_options(**options)).engine
    stack.callback(engine.shutdown)
    if engine.speculation is not None:
        engine.speculation.policy = EveryDraft()
    return Offline(engine, queries, expected)


class Streaming:
    """Asks AsyncLLM. `disturbed`: the engine process is killed after a random number of outputs."""

    def __init__(self, options: dict[str, Any], queries: list[Query]) -> None:
        self._runner = asyncio.Runner()
        self._queries = queries
        self._llm = AsyncLLM(**options)

    def close(self) -> None:
        self._runner.run(self._llm.shutdown())
        self._runner.close()

    def ask(
        self, crowd: list[Member], random: Random, *, disturbed: bool, pinned: bool = False
    ) -> dict[Key, Completion]:
        return self._runner.run(self._ask(crowd, random.randint(1, MAX_KILL_AFTER) if disturbed else None))

    async def _ask(self, crowd: list[Member], kill_after: int | None) -> dict[Key, Completion]:
        found: dict[Key, Completion] = {}
        num_outputs = 0

        async def ask(index: int, member: Member) -> None:
            nonlocal num_outputs
            query = self._queries[member.query]
            prompt = {"prompt_token_ids": query.prompt, "cache_salt": member.salt}
            async for output in self._llm.generate(prompt, query.params(member.n)):
                num_outputs += 1
                if num_outputs == kill_after:
                    _kill(self._llm.status().pid)
                found.update(((index, choice), answer) for choice, answer in _answers(output))

        async with asyncio.timeout(MAX_WAIT_S):
            await asyncio.gather(*(ask(*item) for item in enumerate(crowd)))
        return found


def _answers(output: RequestOutput) -> Iterator[tuple[int, Completion]]:
    prompt = [_plain(at) for at in output.prompt_logprobs or () if at is not None]
    for choice in output.outputs:
        logprobs = [_plain(at) for at in choice.logprobs or ()]
        ended = str(choice.finish_reason)
        answer = Completion(choice.token_ids, logprobs, prompt, ended, output.error, output.num_cached_tokens)
        answer.pooled = output.pooled
        yield choice.index, answer


def _plain(at: dict[int, Logprob]) -> Entry:
    return {token: entry.logprob for token, entry in at.items()}


def _kill(pid: int | None) -> None:
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


def open_streaming(
    stack: ExitStack, options: dict[str, Any], queries: list[Query], expected: dict[Key, Completion]
) -> Streaming:
    asker = Streaming(options, queries)
    stack.callback(asker.close)
    return asker


class Serving:
    """Asks `penstock serve` for streams. `disturbed`: the engine process is killed in the middle of the first stream.

    Queries must not ask for log-probabilities of the prompt, because a stream has none.
    """

    def __init__(self, stack: ExitStack, options: dict[str, Any], queries: list[Query]) -> None:
        model = options["model"]
        subject = Subject(model, {name: value for name, value in options.items() if name != "model"})
        self._server = stack.enter_context(serve(subject, LONG_QUEUE_WAIT))
        self._queries = queries

    def ask(
        self, crowd: list[Member], random: Random, *, disturbed: bool, pinned: bool = False
    ) -> dict[Key, Completion]:
        kill_after = random.randint(0, 5) if disturbed else None

        def ask(index: int) -> dict[Key, Completion]:
            found: dict[Key, Completion] = {}
            for number, chunk in enumerate(stream(self._server.url, self._body(crowd[index]))):
                if index == 0 and number == kill_after:
                    _kill(self._server.engine_pid)
                for choice in chunk["choices"]:
                    _add_chunk(found.setdefault((index, choice["index"]), Completion()), choice)
            return found

        with ThreadPoolExecutor(len(crowd)) as pool:
            return {key: answer for found in pool.map(ask, range(len(crowd))) for key, answer in found.items()}

    def _body(self, member: Member) -> dict[str, Any]:
        query = self._queries[member.query]
        own = {"prompt": query.prompt, "n": member.n, "cache_salt": member.salt}
        return {**NEUTRAL, **own, **query.fields, **RETURN_IDS}


def _add_chunk(answer: Completion, choice: dict[str, Any]) -> None:
    answer.ids += choice.get("token_ids", [])
    if choice["logprobs"] is not None:
        for top in choice["logprobs"]["top_logprobs"]:
            answer.logprobs.append({int(name.removeprefix("token_id:")): value for name, value in top.items()})
    answer.ended = choice["finish_reason"] or answer.ended


def open_serving(
    stack: ExitStack, options: dict[str, Any], queries: list[Query], expected: dict[Key, Completion]
) -> Serving:
    return Serving(stack, options, queries)


Asker = Offline | Streaming | Serving
OFFLINE, STREAMING, SERVING = "offline", "AsyncLLM", "HTTP"
OPEN: dict[str, Callable[[ExitStack, dict[str, Any], list[Query], dict[Key, Completion]], Asker]] = {
    OFFLINE: open_offline,
    STREAMING: open_streaming,
    SERVING: open_serving,
}
