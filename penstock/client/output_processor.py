"""Engine outputs (ids) to RequestOutputs (text), for all open requests of one client.

In: PreparedRequests and the engine's outputs, step by step. Out: RequestOutputs as SamplingParams.output_kind says, and
the engine requests that have to be aborted because a stop string ended them. Outputs of engine requests that are not
open (any more) are ignored. It knows no engine, no process and no clock; the text of an open request lives here, so it
survives the engine. Not for several threads at once.

    one choice's tokens:   [ shown as text | in the detokenizer: half a character ]
    one choice's text:     [ shown         | in StopStrings: may become a stop string ]
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.client.input_processor import PreparedRequest
from penstock.errors import InvalidRequestError
from penstock.interface.messages import EngineOutput
from penstock.interface.outputs import CompletionOutput, FinishReason, Logprob, LogprobsAt, RequestOutput
from penstock.interface.sampling_params import RequestOutputKind
from penstock.interface.step import TokenLogprobs
from penstock.tokenizer.detokenizer import IncrementalDetokenizer
from penstock.tokenizer.stop_strings import StopStrings
from penstock.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ProcessedStep:
    """What one step's outputs became.

    Attributes:
        outputs: one for each user's request that has something to say.
        abort_ids: engine requests that still run but are over for the user.
    """

    outputs: list[RequestOutput] = field(default_factory=list)
    abort_ids: list[str] = field(default_factory=list)


class OutputProcessor:
    """The open requests of one client.

    Attributes:
        num_gaps_total: outputs that came without the tokens before them: a bug somewhere, which ends the choice.
        num_duplicates_total: tokens that came a second time and were dropped.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}
        self._choices: dict[str, tuple[_Request, _Choice]] = {}  # by engine request id, while they run
        self.num_gaps_total = 0
        self.num_duplicates_total = 0

    @property
    def open_request_ids(self) -> list[str]:
        return list(self._requests)

    def add(self, prepared: PreparedRequest) -> None:
        """Open a request. Without a tokenizer its texts stay empty.

        Raises InvalidRequestError where its id is open already, or where it has stop strings and no tokenizer."""
        if prepared.request_id in self._requests:
            raise InvalidRequestError(f"request_id: {prepared.request_id!r} is in use", param="request_id")
        if self._tokenizer is None and prepared.params.stop:
            raise InvalidRequestError("stop: stop strings need a tokenizer, and there is none", param="stop")
        request = _Request(prepared, self._tokenizer)
        self._requests[prepared.request_id] = request
        self._choices |= {choice.engine_request_id: (request, choice) for choice in request.choices}

    def process(self, outputs: Sequence[EngineOutput]) -> ProcessedStep:
        """Take a step's outputs."""
        moved: dict[str, _Request] = {}
        step = ProcessedStep()
        for output in outputs:
            if output.request_id not in self._choices:
                continue
            request, choice = self._choices[output.request_id]
            self._take(request, choice, output)
            if choice.finish_reason is not None:
                del self._choices[output.request_id]
                if output.finish_reason is None:
                    step.abort_ids.append(output.request_id)
            moved[request.id] = request
        step.outputs.extend(made for made in map(self._make_output, moved.values()) if made is not None)
        return step

    def abort(self, request_id: str) -> list[str]:
        """Forget a request that nobody waits for. Returns its engine requests that still run; [] if it is not open."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        running = [choice.engine_request_id for choice in request.choices if choice.finish_reason is None]
        for engine_request_id in running:
            del self._choices[engine_request_id]
        return running

    def finish_all(self, error: str) -> list[RequestOutput]:
        """End all open requests with finish_reason "error"; returns their last outputs."""
        self._choices.clear()
        requests = list(self._requests.values())
        for request in requests:
            request.error = error
            for choice in request.choices:
                choice.end(FinishReason.ERROR)
        return [made for made in map(self._make_output, requests) if made is not None]

    def _take(self, request: "_Request", choice: "_Choice", output: EngineOutput) -> None:
        repeated = len(choice.token_ids) - output.start_index
        missing = request.add_prompt_logprobs(output)
        if missing or (repeated < 0 and output.new_token_ids):
            self.num_gaps_total += 1
            request.error = "tokens were lost between the engine and the client; this is a bug in Penstock"
            choice.end(FinishReason.ERROR)
            return
        if choice.index == 0 and request.num_cached_tokens is None:
            request.num_cached_tokens = output.num_cached_tokens
        repeated = min(max(repeated, 0), len(output.new_token_ids))
        self.num_duplicates_total += repeated
        choice.add_tokens(output, repeated)
        if output.finish_reason is not None and choice.finish_reason is None:
            request.error = output.error or request.error
            choice.end(output.finish_reason, output.stop_reason)

    def _make_output(self, request: "_Request") -> RequestOutput | None:
        if request.finished:
            self._requests.pop(request.id, None)
        return request.make_output()


class _Request:
    """A user's request: its choices and what they share."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer | None) -> None:
        self.id = prepared.request_id
        self.prepared = prepared
        self.num_cached_tokens: int | None = None
        self.error: str | None = None
        self.choices = [
            _Choice(index, engine_request.request_id, prepared, tokenizer)
            for index, engine_request in enumerate(prepared.engine_requests)
        ]
        self._tokenizer = tokenizer if prepared.params.detokenize else None
        self._prompt_logprobs: list[LogprobsAt | None] = [None]  # nothing comes before the first token
        self._prompt_logprobs_told = prepared.params.prompt_logprobs is None

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def add_prompt_logprobs(self, output: EngineOutput) -> bool:
        """Keep the new ones. True if some before them are missing."""
        if not output.prompt_logprobs:
            return False
        repeated = len(self._prompt_logprobs) - output.prompt_logprobs_start
        if repeated < 0:
            return True
        self._prompt_logprobs += [logprobs_at(entry, self._tokenizer) for entry in output.prompt_logprobs[repeated:]]
        return False

    def make_output(self) -> RequestOutput | None:
        """What there is to tell now; None if nothing."""
        kind = self.prepared.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        moved = [choice for choice in self.choices if choice.moved]
        if not moved:
            return None
        told = moved if kind is RequestOutputKind.DELTA else self.choices
        return RequestOutput(
            request_id=self.id,
            prompt=self.prepared.prompt,
            prompt_token_ids=self.prepared.prompt_token_ids,
            outputs=[choice.make_output(kind) for choice in told],
            finished=self.finished,
            prompt_logprobs=self._tell_prompt_logprobs(kind),
            num_cached_tokens=self.num_cached_tokens or 0,
            seed=self.prepared.seed,
            error=self.error,
        )

    def _tell_prompt_logprobs(self, kind: RequestOutputKind) -> list[LogprobsAt | None] | None:
        """All of them, once they are complete; told once if only news are told."""
        if self._prompt_logprobs_told or len(self._prompt_logprobs) < len(self.prepared.prompt_token_ids):
            return None
        self._prompt_logprobs_told = kind is RequestOutputKind.DELTA
        return list(self._prompt_logprobs)


class _Choice:
    """One choice: its tokens, its text and how it ended.

    Attributes:
        moved: there is something that make_output has not told.
    """

    def __init__(
        self, index: int, engine_request_id: str, prepared: PreparedRequest, tokenizer: Tokenizer | None
    ) -> None:
        params = prepared.params
        self.index = index
        self.engine_request_id = engine_request_id
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.moved = False
        self._params = params
        self._tokenizer = tokenizer if params.detokenize else None
        self._detokenizer = _make_detokenizer(tokenizer, prepared) if tokenizer and params.detokenize else None
        self._stops = StopStrings(tuple(params.stop or ()), params.include_stop_str_in_output)
        self._stop_reason: int | str | None = None
        self._text: list[str] = []
        self._logprobs: list[LogprobsAt] | None = None if params.logprobs is None else []
        self._cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self._num_told = 0  # tokens that a DELTA output has told

    def add_tokens(self, output: EngineOutput, start: int) -> None:
        """Take the output's tokens from `start` on, as far as no stop string ends the text."""
        ids = output.new_token_ids
        last_is_stop = output.finish_reason is FinishReason.STOP and not self._params.include_stop_str_in_output
        for position in range(start, len(ids)):
            self.moved = True
            self.token_ids.append(ids[position])
            if output.logprobs is not None:
                self._add_logprobs(output.logprobs[position])
            is_hidden = last_is_stop and position == len(ids) - 1
            if self._detokenizer is not None and not is_hidden:
                self._add_text(self._detokenizer.push(ids[position : position + 1]))
            if self.finish_reason is not None:
                return

    def _add_logprobs(self, entry: TokenLogprobs) -> None:
        if self._logprobs is None or self._cumulative_logprob is None:
            return
        self._logprobs.append(logprobs_at(entry, self._tokenizer))
        self._cumulative_logprob += entry.logprobs[0]

    def _add_text(self, text: str) -> None:
        shown, stop = self._stops.push(text, may_stop=len(self.token_ids) > self._params.min_tokens)
        self._text.append(shown)
        if stop is not None:
            self.finish_reason, self._stop_reason = FinishReason.STOP, stop

    def end(self, reason: FinishReason, stop_reason: int | None = None) -> None:
        """Show what was held back and end, unless it has ended (what was held back may complete a stop string)."""
        if self.finish_reason is not None:
            return
        self.moved = True
        if self._detokenizer is not None:
            self._add_text(self._detokenizer.finish())
        if self.finish_reason is None:
            self._text.append(self._stops.finish())
            self.finish_reason, self._stop_reason = reason, stop_reason

    def make_output(self, kind: RequestOutputKind) -> CompletionOutput:
        output = CompletionOutput(
            index=self.index,
            text="".join(self._text),
            token_ids=self.token_ids[self._num_told :],
            cumulative_logprob=self._cumulative_logprob,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )
        self.moved = False
        self._text = [output.text]
        if kind is RequestOutputKind.DELTA:
            self._num_told, self._text = len(self.token_ids), []
            self._logprobs = None if self._logprobs is None else []
        return output


def _make_detokenizer(tokenizer: Tokenizer, prepared: PreparedRequest) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(
        tokenizer,
        prompt_token_ids=prepared.prompt_token_ids,
        skip_special_tokens=prepared.params.skip_special_tokens,
        spaces_between_special_tokens=prepared.params.spaces_between_special_tokens,
    )


def logprobs_at(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> LogprobsAt:
    """The chosen token first, then the most likely ones, best first; without texts if there is no tokenizer."""
    ranks = [entry.rank, *range(1, len(entry.token_ids))]
    found: LogprobsAt = {}
    for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
        text = None if tokenizer is None else tokenizer.token_to_text(token_id)
        found.setdefault(token_id, Logprob(logprob, rank, text))
    return found
