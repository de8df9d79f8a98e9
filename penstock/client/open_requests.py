"""OpenRequests: the table of a client's open requests, from the user's request to its reader's outputs.

An entry holds the prepared request, the tokens received, their text, and the mailbox of its reader. It lives on the
client's side of the process boundary, so that text and tokens survive the death of an engine: `resumed` returns what a
new engine needs to continue. The table knows no engine or process, and is not thread-safe.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass, replace

from penstock.client.choice import Choice, logprobs_at
from penstock.client.input_processor import PreparedRequest
from penstock.client.prefixes import Prefixes
from penstock.errors import InvalidRequestError, PenstockError, RequestFailedError
from penstock.interface.messages import EngineOutput, EngineRequest, Hypothesis
from penstock.interface.outputs import FinishReason, LogprobsAt, RequestOutput
from penstock.interface.sampling_params import RequestOutputKind
from penstock.interface.timeline import IntervalKind
from penstock.tokenizer.tokenizer import Tokenizer

LOGGER = logging.getLogger("penstock")
NOT_OURS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)
NOBODY = (None, None)  # the request and choice of an engine request that does not run


class OpenRequests:
    """Open requests by the user's request id, and their running choices by engine request id.

    A request is open until `close`. A choice runs until the engine or a stop string ends it, or it is cancelled;
    outputs for any other engine request are dropped.

    Attributes:
        prefixes: the pinned prefixes, and those that requests have found in the cache.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.prefixes = Prefixes()
        self._tokenizer = tokenizer
        self._requests: dict[str, OpenRequest] = {}
        self._running: dict[str, tuple[OpenRequest, Choice]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator["OpenRequest"]:
        return iter(list(self._requests.values()))

    def get(self, request_id: str) -> "OpenRequest | None":
        """Return the open request of this id."""
        return self._requests.get(request_id)

    def new_id(self) -> str:
        """Return an id that no open request has, for a request whose user has chosen none."""
        return next(name for number in self._numbers if (name := f"penstock-{number}") not in self._requests)

    @property
    def num_running(self) -> int:
        """Return the number of choices that run or wait in the engine."""
        return len(self._running)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens received for running choices."""
        return sum(len(choice.token_ids) for _, choice in self._running.values())

    def running(self) -> KeysView[str]:
        """Return the engine request ids of the running choices, oldest first."""
        return self._running.keys()

    def running_choices(self) -> Iterator[Choice]:
        """Yield the running choices, oldest first, without those that are paused."""
        return (choice for request, choice in self._running.values() if not request.paused)

    def running_of(self, request: "OpenRequest") -> list[str]:
        """Return the engine request ids of a request's running choices."""
        ids = (engine_request.request_id for engine_request in request.prepared.engine_requests)
        return [request_id for request_id in ids if request_id in self._running]

    def num_tokens_of(self, engine_request_id: str) -> int:
        """Return the number of tokens received for a running choice."""
        return len(self._running[engine_request_id][1].token_ids)

    def resumed(self, engine_request_id: str) -> EngineRequest:
        """Return the engine request of a running choice, with the tokens received so far as output_token_ids."""
        choice = self._running[engine_request_id][1]
        return replace(choice.request, output_token_ids=list(choice.token_ids), sampler_state=choice.sampler_state)

    def open(self, prepared: PreparedRequest) -> "OpenRequest":
        """Add a request. Raise InvalidRequestError if its id is in use."""
        if prepared.request_id in self._requests:
            raise InvalidRequestError(f"request_id: {prepared.request_id!r} is in use", param="request_id")
        request = self._requests[prepared.request_id] = OpenRequest(prepared, self._tokenizer)
        for choice in request.choices:  # a beam search runs under its first choice
            self._running.setdefault(choice.request.request_id, (request, choice))
        request.take_what_it_came_with()
        return request

    def owner(self, engine_request_id: str) -> "OpenRequest | None":
        """Return the request that a running choice belongs to."""
        request, _ = self._running.get(engine_request_id, NOBODY)
        return request

    def by_request(self, outputs: Iterable[EngineOutput]) -> "dict[OpenRequest, list[EngineOutput]]":
        """Return the outputs of a step grouped by open request."""
        grouped: dict[OpenRequest, list[EngineOutput]] = {}
        for output in outputs:
            request, _ = self._running.get(output.request_id, NOBODY)
            if request is not None:
                grouped.setdefault(request, []).append(output)
        return grouped

    def take_or_fail(
        self, request: "OpenRequest", outputs: Iterable[EngineOutput]
    ) -> tuple[RequestOutput | None, list[str]]:
        """Do what `take` does, but end the request, and no other, if its outputs cannot be turned into text."""
        try:
            return self.take(request, outputs)
        except NOT_OURS:
            raise
        except BaseException as error:  # a panic in the tokenizer's library is not an Exception
            LOGGER.exception("request %s: its output could not be turned into text", request.prepared.request_id)
            failed = request.failed(f"its output could not be turned into text: {error!r}")
            return failed, self.cancel(request)

    def take(self, request: "OpenRequest", outputs: Iterable[EngineOutput]) -> tuple[RequestOutput | None, list[str]]:
        """Add a request's outputs of a step.

        Returns:
            The output for the reader, if any, and the engine requests to abort, which ended here but not in the engine.
        """
        abort_ids = []
        for output in outputs:
            _, choice = self._running.get(output.request_id, NOBODY)
            if choice is None:  # an earlier output was the choice's last
                continue
            if output.num_cached_tokens and output.start_index == len(choice.request.output_token_ids):
                self.prefixes.note(choice.request, output.num_cached_tokens)
            if output.intervals:
                choice.timeline.extend(output.intervals)
            request.add(choice, output)
            if choice.finish_reason is not None:
                del self._running[output.request_id]
                told = output.finish_reason is not None and output.intervals  # not if a stop string ended it here
                choice.enter(IntervalKind.DELIVERY, choice.timeline.end if told else time.monotonic())
                if output.finish_reason is None:
                    abort_ids.append(output.request_id)
        return request.make_output(), abort_ids

    def interrupted(self, engine_request_ids: Iterable[str], state: IntervalKind, at: float) -> None:
        """Note that no engine has these choices any more, since the time `at`."""
        for request_id in engine_request_ids:
            if request_id in self._running:
                self._running[request_id][1].enter(state, at)

    def cancel(self, request: "OpenRequest") -> list[str]:
        """Drop what is still to come for a request. Return its engine requests that were running."""
        ids = self.running_of(request)
        for request_id in ids:
            del self._running[request_id]
        return ids

    def close(self, request: "OpenRequest") -> list[str]:
        """Remove a request and free its id. Return its engine requests that were running."""
        del self._requests[request.prepared.request_id]
        request.is_closed = True
        return self.cancel(request)


def token_by_token(outputs: Iterable[EngineOutput]) -> Iterator[EngineOutput]:
    """Yield the same outputs with at most one token each, so that the pieces of a stream depend on its tokens only."""
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

    Attributes:
        paused: whether the engine has stopped computing it until its reader has read everything.
        is_closed: whether it has left the table of open requests.
    """

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer | None) -> None:
        self.prepared = prepared
        self.choices = [Choice(engine_request, prepared, tokenizer) for engine_request in _of_choices(prepared)]
        self._timelines = [choice.timeline for choice in self.choices]
        self._kind = prepared.params.output_kind
        self.mailbox = Mailbox(prepared.params.output_kind)
        self.paused = self.is_closed = False
        self.wait: Wait | None = None  # limit for the first output; None: no limit
        self._tokenizer = tokenizer if prepared.params.detokenize else None
        self._error: str | None = None
        self._num_cached_tokens: int | None = None
        self._num_accepted_tokens = self._num_rejected_tokens = 0
        self._pooled: bytes | None = None
        self._prompt_logprobs: list[LogprobsAt | None] = [None]  # the first token has none
        self._prompt_logprobs_sent = prepared.params.prompt_logprobs is None

    def take_what_it_came_with(self) -> None:
        """Add the tokens of an earlier computation, one by one, so that a stream shows them as before."""
        for choice in self.choices:
            for position, token_id in enumerate(choice.request.output_token_ids):
                choice.add_tokens(EngineOutput(choice.request.request_id, position, [token_id]))
                if self.prepared.params.output_kind is RequestOutputKind.DELTA:
                    output = self.make_output()
                    if output is not None:
                        self.mailbox.put(output)

    def add(self, choice: Choice, output: EngineOutput) -> None:
        """Take an engine output. Tokens received before are skipped; a gap ends the choice with an error."""
        repeated = len(choice.token_ids) - output.start_index
        is_whole = not output.prompt_logprobs or self._add_prompt_logprobs(output)
        if not is_whole or (repeated < 0 and output.new_token_ids):
            self._error = "tokens were lost between the engine and the client; this is a bug in Penstock"
            choice.end(FinishReason.ERROR)
            return
        if choice.request.choice == 0 and self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        self._num_accepted_tokens += output.num_accepted_tokens
        self._num_rejected_tokens += output.num_rejected_tokens
        self._pooled = output.pooled
        if output.hypotheses is not None:
            self._add_hypotheses(output.hypotheses)
            return
        choice.add_tokens(output, max(repeated, 0))
        if output.finish_reason is not None and choice.finish_reason is None:
            self._error = output.error or self._error
            for ended in self.choices if self.prepared.params.use_beam_search else (choice,):
                ended.end(output.finish_reason, output.stop_reason)

    def _add_hypotheses(self, hypotheses: Sequence[Hypothesis]) -> None:
        """Take the answers of a beam search as the choices, best first."""
        searched = self.choices[0].timeline
        for choice, found in zip(self.choices, hypotheses, strict=True):
            if choice.timeline is not searched:
                choice.timeline.extend(searched.intervals)
                choice.timeline.state = IntervalKind.DELIVERY
            request_id, reason = choice.request.request_id, found.finish_reason
            choice.add_tokens(EngineOutput(request_id, 0, found.token_ids, found.logprobs, finish_reason=reason))
            choice.cumulative_logprob = found.cumulative_logprob
            choice.end(reason)

    def _add_prompt_logprobs(self, output: EngineOutput) -> bool:
        """Keep new prompt log-probabilities. Return False if earlier ones are missing."""
        repeated = len(self._prompt_logprobs) - output.prompt_logprobs_start
        if repeated >= 0:
            fresh = (output.prompt_logprobs or [])[repeated:]
            self._prompt_logprobs += [logprobs_at(entry, self._tokenizer) for entry in fresh]
        return repeated >= 0

    def make_output(self) -> RequestOutput | None:
        """Return the output for the reader; None if there is nothing new."""
        kind, changed, finished = self._kind, list[Choice](), True
        for choice in self.choices:
            if choice.changed:
                changed.append(choice)
            finished = finished and choice.finish_reason is not None
        if not changed or (kind is RequestOutputKind.FINAL_ONLY and not finished):
            return None
        return self._make_output(changed if kind is RequestOutputKind.DELTA else self.choices, finished=finished)

    def _make_output(self, shown: "list[Choice]", *, finished: bool) -> RequestOutput:
        prepared, kind = self.prepared, self._kind
        choices = [choice.make_output(kind) for choice in shown]
        output = RequestOutput(prepared.request_id, prepared.prompt, prepared.prompt_token_ids, choices, finished)
        if not self._prompt_logprobs_sent:
            output.prompt_logprobs = self._take_prompt_logprobs(kind)
        output.num_cached_tokens = self._num_cached_tokens or 0
        output.seed, output.error, output.pooled = prepared.params.seed, self._error, self._pooled
        output.num_accepted_tokens, output.num_rejected_tokens = self._num_accepted_tokens, self._num_rejected_tokens
        output.timelines = self._timelines
        return output

    def failed(self, error: str) -> RequestOutput:
        """End every choice with an error, keeping the text so far, and return the output for the reader."""
        self._error = error
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.finish_reason, choice.changed = FinishReason.ERROR, True
        return self._make_output(self.choices, finished=True)

    def aborted(self) -> RequestOutput:
        """End every choice as aborted, and return the last output of the request."""
        for choice in self.choices:
            choice.end(FinishReason.ABORT)
        return self._make_output(self.choices, finished=True)

    def _take_prompt_logprobs(self, kind: RequestOutputKind) -> list[LogprobsAt | None] | None:
        """Return all prompt log-probabilities once they are complete. In DELTA mode they are sent once."""
        if len(self._prompt_logprobs) < len(self.prepared.prompt_token_ids):
            return None
        self._prompt_logprobs_sent = kind is RequestOutputKind.DELTA
        return list(self._prompt_logprobs)


def _of_choices(prepared: PreparedRequest) -> Sequence[EngineRequest]:
    """Return the engine request of each choice. All choices of a beam search share one."""
    if not prepared.params.use_beam_search:
        return prepared.engine_requests
    return [replace(prepared.engine_requests[0], choice=choice) for choice in range(prepared.params.n)]


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
    """Return the number of tokens and log-probabilities of an output."""
    if isinstance(item, PenstockError):
        return 0
    return sum(len(choice.token_ids) + sum(map(len, choice.logprobs or ())) for choice in item.outputs)
