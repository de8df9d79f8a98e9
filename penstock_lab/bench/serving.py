"""Measure a running server from outside, over OpenAI's API, for `penstock bench serve`.

One process with one thread sends the requests and notes when the parts of their answers arrive. Afterwards it reads
the parts.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any

import msgspec

from penstock import EngineError
from penstock.errors import check_choice, invalid, one_line
from penstock_lab.bench.datasets import Sample
from penstock_lab.bench.http_client import HttpClient, HttpResponse
from penstock_lab.bench.outcomes import Load, Outcome, check_percentiles, figures

BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
DATA = b"data: "
SHOW_IDS = "return_token_ids"  # the body field that makes a server show tokens without text
NO_TEXT = (
    "the answer has tokens but no text, as from a model without a tokenizer, and the server does not return their ids"
)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    @property
    def has_token(self) -> bool:
        """True if a token came: an id, a delta with more than a role, or a text, even empty in mid-character."""
        if self.token_ids is not None:
            return bool(self.token_ids)
        if self.delta is None:
            return bool(self.text) or self.finish_reason is None
        return any(value for name, value in self.delta.items() if name != "role")


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class Target:
    """A server, and how requests are sent to it.

    Args:
        client: has the server's address and headers.
        backend: one of BACKENDS.
        model: the server's name for the model; None: the first that it lists.
        fields: of every body, besides model, prompt, lengths and streaming.
    """

    def __init__(self, client: HttpClient, backend: str, model: str | None, fields: Mapping[str, Any]) -> None:
        check_choice("backend", backend, tuple(BACKENDS))
        self._client = client
        self.model, self.backend, self.endpoint = model, backend, BACKENDS[backend]
        self._fields = dict(fields)
        self._read_event = msgspec.json.Decoder(_Event).decode

    async def close(self) -> None:
        self._client.close()
        await asyncio.sleep(0)  # the loop closes them in its next iteration

    async def find_model(self) -> None:
        """Ask the server for its model, unless one was given.

        Raises:
            EngineError: the server cannot be reached, or lists no model.
        """
        try:
            response = await self._client.request("GET", "/v1/models")
        except OSError as error:
            raise EngineError(f"the server cannot be reached: {error.strerror or error}; is it running?") from None
        if response.status != 200:
            raise EngineError(f"GET /v1/models: {_reason(response)}")
        if self.model is None:
            try:
                self.model = str(msgspec.json.decode(response.body)["data"][0]["id"])
            except (msgspec.DecodeError, LookupError, TypeError):
                raise EngineError("GET /v1/models: the server lists no model; give --served-model-name") from None

    async def ask(self, sample: Sample) -> Outcome:
        """Send a request and return its outcome; failures are outcomes as well.

        If a model without a tokenizer answers with tokens but no text, this request is sent again, and it and all later
        ones ask for ids.
        """
        had_ids = SHOW_IDS in self._fields
        outcome = await self._ask(sample)
        if outcome.error != NO_TEXT or had_ids:
            return outcome
        self._fields[SHOW_IDS] = True
        return await self._ask(sample)

    async def _ask(self, sample: Sample) -> Outcome:
        content = sample.prompt
        prompt = (
            {"prompt": content} if self.backend == "openai" else {"messages": [{"role": "user", "content": content}]}
        )
        body = {"model": self.model, **prompt, "max_tokens": sample.output_len, "stream": True,
                "stream_options": {"include_usage": True}, **self._fields}  # fmt: skip
        data = msgspec.json.encode(body)
        outcome = Outcome(sample.prompt_len, perf_counter())
        try:
            response = await self._client.request("POST", self.endpoint, data)
        except OSError as error:
            outcome.error = f"cannot connect: {error.strerror or error}"
            return outcome
        outcome.ended_at = response.arrivals[-1] if response.arrivals else perf_counter()
        if response.status == 200:
            self._read(response, outcome)
        else:
            outcome.error = _reason(response)
        return outcome

    def _read(self, response: HttpResponse, outcome: Outcome) -> None:
        """Find the tokens in a stream of events. Parts may cut events; an event arrives with its last part."""
        rest = b""
        for part, arrival in zip(response.parts, response.arrivals, strict=True):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(DATA) and not line.startswith(DATA + b"[DONE]"):
                    self._add_event(line[len(DATA) :], arrival, outcome)
        if not response.is_whole:
            outcome.error = outcome.error or "the connection ended in the middle of the answer"
        elif not outcome.arrivals:
            outcome.error = outcome.error or (NO_TEXT if outcome.output_len else "the answer has no token")
        outcome.output_len = outcome.output_len or len(outcome.arrivals)

    def _add_event(self, data: bytes, arrival: float, outcome: Outcome) -> None:
        try:
            event = self._read_event(data)
        except msgspec.DecodeError as error:
            outcome.error = f"an event does not have OpenAI's format: {error}"
            return
        if event.error is not None:
            outcome.error = one_line(event.error)
        if any(choice.has_token for choice in event.choices):
            outcome.arrivals.append(arrival)
        if event.usage is not None:
            outcome.output_len = event.usage.completion_tokens or outcome.output_len
            outcome.prompt_len = event.usage.prompt_tokens or outcome.prompt_len


def _reason(response: HttpResponse) -> str:
    return f"status {response.status}: {one_line(response.body[:300].decode(errors='replace'))}"


async def send_all(
    target: Target, samples: Sequence[Sample], load: Load, ended: Callable[[int], None]
) -> list[Outcome]:
    """Send the requests as `load` says, and return their outcomes. `ended(1)` is called at the end of each request."""
    free = asyncio.Semaphore(load.max_concurrency or len(samples))

    async def ask(sample: Sample) -> Outcome:
        async with free:
            outcome = await target.ask(sample)
        ended(1)
        return outcome

    began, at, tasks = perf_counter(), 0.0, []
    async with asyncio.TaskGroup() as group:
        for sample, gap in zip(samples, load.gaps(len(samples)), strict=True):
            at += gap
            if gap:
                await asyncio.sleep(began + at - perf_counter())
            tasks.append(group.create_task(ask(sample)))
    return [task.result() for task in tasks]


async def measure_serving(
    target: Target,
    samples: Sequence[Sample],
    loads: Sequence[Load],
    percentiles: Sequence[float],
    *,
    num_warmups: int,
    progress: Callable[[str, int], AbstractContextManager[Callable[[int], None]]],
) -> list[dict[str, Any]]:
    """Measure a server under one load after the other. Return the figures of each.

    Raises:
        EngineError: the server cannot be reached, or the first request fails.
        InvalidRequestError: a percentile is not a percentage, or there are no samples.
    """
    check_percentiles(percentiles)
    if not samples:
        raise invalid("num_prompts", "must be 1 or more")
    try:
        await target.find_model()
        for outcome in [await target.ask(samples[index % len(samples)]) for index in range(num_warmups)]:
            if outcome.error:
                raise EngineError(f"the first request failed, so nothing was measured: {outcome.error}")
        results = []
        for load in loads:
            with progress("requests", len(samples)) as advance:
                outcomes = await send_all(target, samples, load, advance)
            head = {"backend": target.backend, "endpoint": target.endpoint, "model_id": target.model}
            results.append(head | figures(outcomes, load, percentiles))
        return results
    finally:
        await target.close()
