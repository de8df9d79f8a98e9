"""OpenRequests: the table of a client's open requests, from the user's request to its reader's outputs.

An entry holds a request that leaves nothing open, the tokens received, their text, and the mailbox of its reader. It
lives on the client's side of the process boundary, so that text and tokens survive the death of an engine: `resumed`
returns what a new engine needs to continue.

    tokens:  [ shown as text | in the detokenizer: part of a character ]
    text:    [ shown         | in StopStrings: may become a stop string ]

The table knows no engine or process, and is not thread-safe.
"""

import asyncio
import itertools
import logging
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from penstock.client.adapters import Adapters
from penstock.client.prefixes import Pin, Prefixes
from penstock.errors import EngineDeadError, InvalidRequestError, PenstockError, RequestFailedError, invalid
from penstock.interface.messages import EngineOutput, EngineRequest, EngineStats, Hypothesis, ModelInfo
from penstock.interface.outputs import CompletionOutput, FinishReason, Logprob, LogprobsAt, RequestOutput
from penstock.interface.sampling_params import RequestOutputKind, SamplingParams
from penstock.interface.step import TokenLogprobs
from penstock.interface.timeline import Arrivals, IntervalKind, Timeline
from penstock.tokenizer.tokenizer import IncrementalDetokenizer, StopStrings, Tokenizer

LOGGER = logging.getLogger("penstock")
NOT_OURS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)


class OpenRequests:
    """Open requests by the user's request id, and their running choices by engine request id.

    A request is open until `close`. A choice runs until the engine or a stop string ends it, or it is cancelled;
    outputs for any other engine request are dropped.

    Attributes:
        prefixes: the pinned prefixes, and those that requests have found in the cache.
        adapters: the adapters that requests may use, where the engines are in other processes.
    """

    def __init__(self) -> None:
        self.prefixes = Prefixes()
        self.adapters = Adapters()
        self._requests: dict[str, OpenRequest] = {}
        self._running: dict[str, Choice] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator["OpenRequest"]:
        return iter(list(self._requests.values()))

    def get(self, request_id: str) -> "OpenRequest | None":
        return self._requests.get(request_id)

    def new_id(self) -> str:
        """Make an id that no open request has, for a request whose user has chosen none."""
        return next(name for number in self._numbers if (name := f"penstock-{number}") not in self._requests)

    @property
    def num_running(self) -> int:
        """The number of choices that run or wait in the engine."""
        return len(self._running)

    @property
    def num_tokens(self) -> int:
        """The number of tokens received for running choices."""
        return sum(len(choice.token_ids) for choice in self._running.values())

    def running(self) -> KeysView[str]:
        """List the engine request ids of the running choices, oldest first."""
        return self._running.keys()

    def running_choices(self) -> Iterator["Choice"]:
        """Yield the running choices, oldest first, without those that are paused."""
        return (choice for choice in self._running.values() if not choice.owner.paused)

    def running_of(self, request: "OpenRequest") -> list[str]:
        """List the engine request ids of a request's running choices."""
        ids = (engine_request.request_id for engine_request in request.engine_requests)
        return [request_id for request_id in ids if request_id in self._running]

    def num_tokens_of(self, engine_request_id: str) -> int:
        return len(self._running[engine_request_id].token_ids)

    def resumed(self, engine_request_id: str) -> EngineRequest:
        """Make the request that continues a running choice: tokens received so far are its output_token_ids."""
        choice = self._running[engine_request_id]
        return replace(choice.request, output_token_ids=list(choice.token_ids), sampler_state=choice.sampler_state)

    def owner(self, engine_request_id: str) -> "OpenRequest | None":
        """Find the request that a running choice belongs to; None if the choice does not run."""
        choice = self._running.get(engine_request_id)
        return None if choice is None else choice.owner

    def open(self, request: "OpenRequest") -> None:
        """Add a request. Raise InvalidRequestError if its id is in use."""
        if request.request_id in self._requests:
            raise invalid("request_id", f"{request.request_id!r} is in use")
        assert not any(one.request_id in self._running for one in request.engine_requests), "their ids are never reused"
        self._requests[request.request_id] = request
        for choice in request.choices:  # a beam search runs under its first choice
            self._running.setdefault(choice.request.request_id, choice)

    def add(
        self, outputs: Iterable[EngineOutput], *, token_by_token: bool = False
    ) -> Iterator[tuple["OpenRequest", RequestOutput | None, list[str]]]:
        """Add the outputs of a step. A request whose outputs cannot be turned into text ends, and no other does.

        token_by_token: give a reader one output for each token of a step with several, so that the pieces of a stream
            depend on its tokens only.

        Yields:
            A request, its output for the reader, if any, and its engine requests to abort, which ended here but not in
            the engine.
        """
        by_request: dict[OpenRequest, list[EngineOutput]] = {}
        now = time.monotonic()
        for output in outputs:
            if (choice := self._running.get(output.request_id)) is not None:
                choice.arrivals.note(len(output.new_token_ids), now)
                by_request.setdefault(choice.owner, []).append(output)
                if output.num_cached_tokens and output.start_index == len(choice.request.output_token_ids):
                    self.prefixes.note(choice.request, output.num_cached_tokens)
        for request, received in by_request.items():
            parts = [received]
            if token_by_token and any(len(output.new_token_ids) > 1 for output in received):
                parts = [[output] for output in one_token_each(received)]
            for part in parts:
                to_abort: list[str] = []
                try:
                    for output in part:
                        choice = self._running.get(output.request_id)
                        if choice is not None:  # otherwise an earlier output was its last
                            choice.add(output)
                            if choice.finish_reason is not None:
                                self._note_end(choice, output, to_abort)
                    shown = request.make_output()
                except NOT_OURS:
                    raise
                except BaseException as error:  # a panic in the tokenizer's library is not an Exception
                    LOGGER.exception("request %s: its output could not be turned into text", request.request_id)
                    shown = request.failed(f"its output could not be turned into text: {error!r}")
                    to_abort = self.cancel(request)
                yield request, shown, to_abort

    def _note_end(self, choice: "Choice", output: EngineOutput, to_abort: list[str]) -> None:
        """Take a choice that this output has ended from the running ones."""
        del self._running[output.request_id]
        is_reported = output.finish_reason is not None and output.intervals  # not if a stop string ended it here
        choice.enter(IntervalKind.DELIVERY, choice.timeline.end if is_reported else time.monotonic())
        if output.finish_reason is None:
            to_abort.append(output.request_id)

    def interrupted(self, engine_request_ids: Iterable[str], state: IntervalKind, at: float) -> None:
        """Note that no engine has these choices any more, since the time `at`."""
        for request_id in engine_request_ids:
            if request_id in self._running:
                self._running[request_id].enter(state, at)

    def cancel(self, request: "OpenRequest") -> list[str]:
        """Drop the outputs still to come for a request. Return its engine requests that were running."""
        ids = self.running_of(request)
        for request_id in ids:
            del self._running[request_id]
        return ids

    def close(self, request: "OpenRequest") -> list[str]:
        """Remove a request and free its id. Return its engine requests that were running."""
        assert self._requests.get(request.request_id) is request, "a request is closed once"
        del self._requests[request.request_id]
        request.is_closed = True
        return self.cancel(request)


def one_token_each(outputs: Iterable[EngineOutput]) -> Iterator[EngineOutput]:
    """Yield the same outputs with at most one token each."""
    for output in outputs:
        count = len(output.new_token_ids)
        if count <= 1:
            yield output
            continue
        for k, token_id in enumerate(output.new_token_ids):
            part = replace(output, start_index=output.start_index + k, new_token_ids=[token_id])
            part.logprobs = None if output.logprobs is None else output.logprobs[k : k + 1]
            if k > 0:
                part.prompt_logprobs = None
                part.num_accepted_tokens = part.num_rejected_tokens = 0
            if k < count - 1:
                part.finish_reason = part.stop_reason = part.error = part.intervals = None
            yield part


@dataclass(frozen=True, slots=True)
class Wait:
    """The terms on which a request that found no free row was let in.

    Attributes:
        limit_s: seconds within which its first token must come.
        forecast_s: seconds within which it was expected, by load and rate alone; 0.0: the rate was not known.
    """

    limit_s: float
    forecast_s: float


class OpenRequest:
    """A user's request: its choices, what they share, and the mailbox of its reader.

    Ids, lengths and seed are settled, so it gives the same tokens on any engine.

    Attributes:
        request_id: the user's, or a new one. OpenRequests checks whether it is in use.
        prompt: the text, if one was given.
        adapter: the id of the adapter that it is computed with (client/adapters.py); None: the base model.
        params: as the user gave them (stop strings included), with max_tokens and seed settled.
        engine_requests: one per choice, in order; a single one for a beam search. Their ids are never used twice, even
            if a request_id is. A stream shows their output_token_ids one by one, as when they were computed.
        paused: whether the engine has stopped computing it until its reader has read everything.
        is_closed: whether it has left the table of open requests.
        wait: the limit for its first output; None: no limit.
        error: why it ends, if its computation fails.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        engine_requests: Sequence[EngineRequest],
        tokenizer: Tokenizer | None,
    ) -> None:
        assert len(engine_requests) == (1 if params.use_beam_search else params.n), "one per choice"
        self.request_id, self.prompt, self.prompt_token_ids = request_id, prompt, engine_requests[0].prompt_token_ids
        self.adapter = engine_requests[0].adapter
        self.params = params
        self.tokenizer = tokenizer if params.detokenize else None
        self.engine_requests = of_choices = engine_requests
        if params.use_beam_search:  # the hypotheses of a search are the choices of one request
            of_choices = [replace(of_choices[0], choice=choice) for choice in range(params.n)]
        self.choices = [Choice(self, request) for request in of_choices]
        self._timelines = tuple(choice.timeline for choice in self.choices)
        self._arrivals = tuple(choice.arrivals for choice in self.choices)
        self._kind = params.output_kind
        self.mailbox = Mailbox(self._kind)
        self.paused = self.is_closed = False
        self.wait: Wait | None = None
        self.error: str | None = None
        self._num_cached_tokens: int | None = None
        self._num_accepted_tokens = self._num_rejected_tokens = 0
        self._pooled: bytes | None = None
        self._prompt_logprobs: list[LogprobsAt | None] = [None]  # the first token has none
        self._prompt_logprobs_sent = params.prompt_logprobs is None
        for choice in self.choices:
            for token_id in choice.request.output_token_ids:
                choice.append(token_id)
                if self._kind is RequestOutputKind.DELTA and (output := self.make_output()) is not None:
                    self.mailbox.put(output)

    def note(self, output: EngineOutput) -> bool:
        """Note the facts about the whole request in an output. Return False if an earlier output is missing."""
        if output.prompt_logprobs:
            repeated = len(self._prompt_logprobs) - output.prompt_logprobs_start
            if repeated < 0:
                return False
            fresh = output.prompt_logprobs[repeated:]
            self._prompt_logprobs += [logprobs_at(entry, self.tokenizer) for entry in fresh]
        if self._num_cached_tokens is None and output.request_id == self.engine_requests[0].request_id:
            self._num_cached_tokens = output.num_cached_tokens
        self._num_accepted_tokens += output.num_accepted_tokens
        self._num_rejected_tokens += output.num_rejected_tokens
        self._pooled = output.pooled
        return True

    def add_hypotheses(self, hypotheses: Sequence[Hypothesis]) -> None:
        """Take the answers of a beam search as the choices, best first."""
        searched = self.choices[0].timeline
        for choice, found in zip(self.choices, hypotheses, strict=True):
            if choice.timeline is not searched:
                choice.timeline.extend(searched.intervals)
                choice.timeline.state = IntervalKind.DELIVERY
            request_id, reason = choice.request.request_id, found.finish_reason
            choice.append_all(EngineOutput(request_id, 0, found.token_ids, found.logprobs, finish_reason=reason))
            choice.cumulative_logprob = found.cumulative_logprob
            choice.end(reason)

    def make_output(self) -> RequestOutput | None:
        """Make the output for the reader; None if there is nothing new."""
        kind, changed, finished = self._kind, list[Choice](), True
        for choice in self.choices:
            if choice.changed:
                changed.append(choice)
            finished = finished and choice.finish_reason is not None
        if not changed or (kind is RequestOutputKind.FINAL_ONLY and not finished):
            return None
        return self._make_output(changed if kind is RequestOutputKind.DELTA else self.choices, finished=finished)

    def _make_output(self, shown: "list[Choice]", *, finished: bool) -> RequestOutput:
        choices = [choice.make_output(self._kind) for choice in shown]
        output = RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, choices, finished)
        if not self._prompt_logprobs_sent and len(self._prompt_logprobs) >= len(self.prompt_token_ids):
            output.prompt_logprobs = list(self._prompt_logprobs)  # once they are complete; in DELTA mode only then
            self._prompt_logprobs_sent = self._kind is RequestOutputKind.DELTA
        output.num_cached_tokens = self._num_cached_tokens or 0
        output.seed, output.error, output.pooled = self.params.seed, self.error, self._pooled
        output.num_accepted_tokens, output.num_rejected_tokens = self._num_accepted_tokens, self._num_rejected_tokens
        output.timelines, output.arrivals = self._timelines, self._arrivals
        return output

    def failed(self, error: str) -> RequestOutput:
        """End every choice with an error, keeping the text so far, and return the output for the reader."""
        self.error = error
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.finish_reason, choice.changed = FinishReason.ERROR, True
        return self._make_output(self.choices, finished=True)

    def aborted(self) -> RequestOutput:
        """End every choice as aborted, and return the last output of the request."""
        for choice in self.choices:
            choice.end(FinishReason.ABORT)
        return self._make_output(self.choices, finished=True)


def request_of(pin: Pin) -> OpenRequest:
    """Make the request that computes a pin, in the form of a user's request."""
    return OpenRequest(f"pin {pin.name}", None, pin.request.params, [pin.request], None)


class Choice:
    """One choice of a request, with the tokens received, their text, stop strings and log-probabilities.

    Attributes:
        owner: the request that it belongs to.
        request: what the engine was given.
        token_ids: outputs received so far; `request` with these as output_token_ids resumes the choice on any engine.
        sampler_state: the sampler's after them; the engine sends both together.
        timeline: where its time went, as far as engines have reported.
        arrivals: when its tokens came.
        finish_reason: None while it runs.
        changed: whether there is something that make_output has not returned yet.
        cumulative_logprob: sum over the tokens so far; None if log-probabilities are not requested.
    """

    def __init__(self, owner: OpenRequest, request: EngineRequest) -> None:
        params = owner.params
        self._owner = weakref.ref(owner)  # which has this choice: a cycle would wait for the garbage collector
        self.request = request
        self.token_ids: list[int] = []
        self.sampler_state = request.sampler_state
        self.timeline = Timeline(time.monotonic() if request.arrived_at is None else request.arrived_at)
        self.arrivals = Arrivals()
        self.finish_reason: FinishReason | None = None
        self.changed = False
        self._detokenizer = None
        if owner.tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                owner.tokenizer,
                prompt_token_ids=owner.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        self._stops = StopStrings(tuple(params.stop or ()), params.include_stop_str_in_output)
        self._stop_reason: int | str | None = None
        self._text: list[str] = []
        self._logprobs: list[LogprobsAt] | None = None if params.logprobs is None else []
        self.cumulative_logprob = None if params.logprobs is None else 0.0
        self._num_sent = 0  # tokens returned in DELTA mode

    @property
    def owner(self) -> OpenRequest:
        owner = self._owner()
        assert owner is not None, "a choice is used only while its request is open"
        return owner

    def enter(self, state: IntervalKind, at: float) -> None:
        """Note in the timeline the state from the time `at` on, whatever an engine has reported."""
        self.timeline.enter(state, at, len(self.token_ids) - len(self.request.output_token_ids))

    def add(self, output: EngineOutput) -> None:
        """Add an output of the engine. Tokens received before are skipped; a gap ends the choice with an error."""
        if output.intervals:
            self.timeline.extend(output.intervals)
        repeated = len(self.token_ids) - output.start_index
        if not self.owner.note(output) or (repeated < 0 and output.new_token_ids):
            self.owner.error = "tokens were lost between the engine and the client; this is a bug in Penstock"
            self.end(FinishReason.ERROR)
        elif output.hypotheses is not None:
            self.owner.add_hypotheses(output.hypotheses)
        else:
            self.append_all(output, max(repeated, 0))
            if output.finish_reason is not None and self.finish_reason is None:
                self.owner.error = output.error or self.owner.error
                for ended in self.owner.choices if self.owner.params.use_beam_search else (self,):
                    ended.end(output.finish_reason, output.stop_reason)

    def append_all(self, output: EngineOutput, start: int = 0) -> None:
        """Append the output's tokens from index `start` on, up to the one that completes a stop string."""
        params, ids = self.owner.params, output.new_token_ids
        last_is_stop = output.finish_reason is FinishReason.STOP and not params.include_stop_str_in_output
        for position in range(start, len(ids)):
            self.sampler_state = self.sampler_state if output.sampler_state is None else output.sampler_state
            logprobs = None if output.logprobs is None else output.logprobs[position]
            self.append(ids[position], logprobs, is_hidden=last_is_stop and position == len(ids) - 1)
            if self.finish_reason is not None:
                return

    def append(self, token_id: int, logprobs: TokenLogprobs | None = None, *, is_hidden: bool = False) -> None:
        """Append a token, and its text unless that is to be hidden. A stop string in it ends the choice."""
        self.changed = True
        self.token_ids.append(token_id)
        if logprobs is not None and self._logprobs is not None:
            self._logprobs.append(logprobs_at(logprobs, self.owner.tokenizer))
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + logprobs.logprobs[0]
        if self._detokenizer is not None and not is_hidden:
            self._add_text(self._detokenizer.push([token_id]))

    def _add_text(self, text: str) -> None:
        shown, stop = self._stops.push(text, may_stop=len(self.token_ids) > self.owner.params.min_tokens)
        self._text.append(shown)
        if stop is not None:
            self.finish_reason, self._stop_reason = FinishReason.STOP, stop

    def end(self, reason: FinishReason, stop_reason: int | None = None) -> None:
        """End the choice, unless it has ended. If the text held back completes a stop string, that is the reason."""
        if self.finish_reason is not None:
            return
        self.changed = True
        if self._detokenizer is not None:
            self._add_text(self._detokenizer.finish())
        if self.finish_reason is None:
            self._text.append(self._stops.finish())
            self.finish_reason, self._stop_reason = reason, stop_reason
            if reason is FinishReason.REPETITION:
                self._stop_reason = "repetition_detected"  # as vLLM says it

    def make_output(self, kind: RequestOutputKind) -> CompletionOutput:
        """Describe the state so far or, in DELTA mode, what is new since the last call."""
        output = CompletionOutput(self.request.choice, "".join(self._text), self.token_ids[self._num_sent :])
        output.cumulative_logprob = self.cumulative_logprob
        if self._logprobs is not None:
            output.logprobs = list(self._logprobs)
        output.finish_reason, output.stop_reason = self.finish_reason, self._stop_reason
        self.changed = False
        self._text = [output.text]
        if kind is RequestOutputKind.DELTA:
            self._num_sent, self._text = len(self.token_ids), []
            self._logprobs = None if self._logprobs is None else []
        return output


def logprobs_at(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> LogprobsAt:
    """List the chosen token first, then the most likely ones, best first; texts are None without a tokenizer."""
    ranks = [entry.rank, *range(1, len(entry.token_ids) - entry.num_listed), *[None] * entry.num_listed]
    found: LogprobsAt = {}
    for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
        text = None if tokenizer is None else tokenizer.token_to_text(token_id)
        found.setdefault(token_id, Logprob(logprob, rank, text))
    return found


class Mailbox:
    """Outputs of one request on their way to its reader: all deltas, or the newest state.

    Attributes:
        ended: whether the last output, or the error that ended the request, was put. It may still be unread.
        num_unread: tokens and log-probabilities that wait for the reader.
    """

    def __init__(self, kind: RequestOutputKind) -> None:
        self.ended = False
        self.num_unread = 0
        self._newest_only = kind is not RequestOutputKind.DELTA  # unread states would only fill the memory
        self._items: deque[RequestOutput | PenstockError] = deque()
        self._arrived = asyncio.Event()

    def put(self, item: RequestOutput | PenstockError) -> None:
        """Add an output, or the error that ends the request."""
        if self._newest_only:
            self._items.clear()
        else:
            self.num_unread += _size(item)
        self._items.append(item)
        self.ended = self.ended or isinstance(item, PenstockError) or item.finished
        self._arrived.set()

    async def get(self) -> RequestOutput:
        """Wait for the next output. Raise the error that was put, or RequestFailedError if the computation failed."""
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        item = self._items.popleft()
        self.num_unread = self.num_unread - _size(item) if self._items else 0
        if isinstance(item, PenstockError):
            raise item
        if item.error is not None:
            raise RequestFailedError(item.error)
        return item


def _size(item: RequestOutput | PenstockError) -> int:
    """Count the tokens and log-probabilities of an output."""
    if isinstance(item, PenstockError):
        return 0
    return sum(len(choice.token_ids) + sum(map(len, choice.logprobs or ())) for choice in item.outputs)


class EngineListener(Protocol):
    """The owner of the requests, which is told about the engines that compute them."""

    def engine_ready(self, index: int, num_rows: int, info: ModelInfo) -> None:
        """Handle a new engine. num_rows: rows of all engines that are ready."""

    def engine_lost(self, index: int, num_rows: int, to_blame: OpenRequest | None) -> None:
        """Handle a death. to_blame: the request that the engine was computing alone."""

    def engine_failed(self, error: EngineDeadError) -> None:
        """End all open requests: there will be no engine any more, or only one with other bits."""

    def received(self, index: int, outputs: Sequence[EngineOutput], stats: EngineStats) -> None:
        """Handle an engine's outputs."""

    def rejected(self, request_id: str, error: InvalidRequestError) -> None:
        """Handle an engine request, or the pin that it computes, that an engine has not accepted; or the id of an
        adapter that it could not load again."""
