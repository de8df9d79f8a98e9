"""Choice: one choice of a request, with the tokens received, their text, stop strings and log-probabilities.

    tokens:  [ shown as text | in the detokenizer: part of a character ]
    text:    [ shown         | in StopStrings: may become a stop string ]

It knows neither the engine nor the other choices of its request.
"""

import time

from penstock.client.input_processor import PreparedRequest
from penstock.interface.messages import EngineOutput, EngineRequest
from penstock.interface.outputs import CompletionOutput, FinishReason, Logprob, LogprobsAt
from penstock.interface.sampling_params import RequestOutputKind
from penstock.interface.step import TokenLogprobs
from penstock.interface.timeline import IntervalKind, Timeline
from penstock.tokenizer.detokenizer import IncrementalDetokenizer, StopStrings
from penstock.tokenizer.tokenizer import Tokenizer


class Choice:
    """Output state of one choice.

    Attributes:
        request: what the engine was given.
        token_ids: outputs received so far; `request` with these as output_token_ids resumes the choice on any engine.
        mirostat_mu: mirostat's state after them; the engine sends both together.
        timeline: where its time went, as far as engines have reported.
        finish_reason: None while it runs.
        changed: whether there is something that make_output has not returned yet.
        cumulative_logprob: sum over the tokens so far; None if log-probabilities are not requested.
    """

    def __init__(self, request: EngineRequest, prepared: PreparedRequest, tokenizer: Tokenizer | None) -> None:
        params = prepared.params
        self.request = request
        self.token_ids: list[int] = []
        self.mirostat_mu = request.mirostat_mu
        self.timeline = Timeline(time.monotonic() if request.arrived_at is None else request.arrived_at)
        self.finish_reason: FinishReason | None = None
        self.changed = False
        self._params = params
        self._tokenizer = tokenizer if params.detokenize else None
        self._detokenizer = None if self._tokenizer is None else _make_detokenizer(self._tokenizer, prepared)
        self._stops = StopStrings(tuple(params.stop or ()), params.include_stop_str_in_output)
        self._stop_reason: int | str | None = None
        self._text: list[str] = []
        self._logprobs: list[LogprobsAt] | None = None if params.logprobs is None else []
        self.cumulative_logprob = None if params.logprobs is None else 0.0
        self._num_sent = 0  # tokens returned in DELTA mode

    def turn(self, state: IntervalKind, at: float) -> None:
        """Note in the timeline the state from the time `at` on, whatever an engine has reported."""
        self.timeline.turn(state, at, len(self.token_ids) - len(self.request.output_token_ids))

    def add_tokens(self, output: EngineOutput, start: int = 0) -> None:
        """Take the output's tokens from index `start` on, up to the one that completes a stop string."""
        ids = output.new_token_ids
        last_is_stop = output.finish_reason is FinishReason.STOP and not self._params.include_stop_str_in_output
        for position in range(start, len(ids)):
            self.changed = True
            self.token_ids.append(ids[position])
            self.mirostat_mu = self.mirostat_mu if output.mirostat_mu is None else output.mirostat_mu
            if output.logprobs is not None and self._logprobs is not None:
                self._logprobs.append(logprobs_at(output.logprobs[position], self._tokenizer))
                self.cumulative_logprob = (self.cumulative_logprob or 0.0) + output.logprobs[position].logprobs[0]
            is_hidden = last_is_stop and position == len(ids) - 1
            if self._detokenizer is not None and not is_hidden:
                self._add_text(self._detokenizer.push(ids[position : position + 1]))
            if self.finish_reason is not None:
                return

    def _add_text(self, text: str) -> None:
        shown, stop = self._stops.push(text, may_stop=len(self.token_ids) > self._params.min_tokens)
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

    def make_output(self, kind: RequestOutputKind) -> CompletionOutput:
        """Return the state so far or, in DELTA mode, what is new since the last call."""
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


def _make_detokenizer(tokenizer: Tokenizer, prepared: PreparedRequest) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(
        tokenizer,
        prompt_token_ids=prepared.prompt_token_ids,
        skip_special_tokens=prepared.params.skip_special_tokens,
        spaces_between_special_tokens=prepared.params.spaces_between_special_tokens,
    )


def logprobs_at(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> LogprobsAt:
    """Return the chosen token first, then the most likely ones, best first; texts are None without a tokenizer."""
    ranks = [entry.rank, *range(1, len(entry.token_ids))]
    found: LogprobsAt = {}
    for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
        text = None if tokenizer is None else tokenizer.token_to_text(token_id)
        found.setdefault(token_id, Logprob(logprob, rank, text))
    return found
