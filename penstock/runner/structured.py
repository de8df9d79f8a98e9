"""Structured outputs in a step: what the forms of its requests allow, found in a thread while the model computes.

    begin   every row with a form: follow the answer so far (and its drafts), find what may come next   in a thread
    apply   logits of what may not come next -> -inf                                                    after the model
    forced  tokens of which there is no choice, which are outputs without another step

A form that cannot be followed any further ends its own request. Matchers hold no state of their own: they follow the
history of a row, back and forth (tokenizer/grammars.py has them).
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from penstock.errors import InvalidRequestError
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import SchedulerOutput
from penstock.interface.structured_outputs import FIELD, StructuredOutputsParams
from penstock.kernels.ops import Ops
from penstock.kernels.tensors import Array, Tensor, as_array
from penstock.runner.input_batch import InputBatch, PackedStep, Positions
from penstock.runner.masks import Bool, is_on

LIMIT_S = 1.0  # of processor time beyond the model's step, for what one row may have next, while which everybody waits
MAX_FORCED = 64  # tokens at once
MASKS_OF_TEXT = ("bad_words_token_ids", "bad_words_ids", "no_repeat_ngram_size", "suppress_tokens",
                 "begin_suppress_tokens")  # fmt: skip


class Matcher(Protocol):
    """Follows one answer; see tokenizer/grammars.py."""

    end_ids: frozenset[int]

    def follow(self, token_ids: list[int]) -> None: ...

    def allowed(self) -> Bool: ...

    def forced(self) -> int | None: ...


class Forms(Protocol):
    """Compiles forms."""

    def start(self, form: StructuredOutputsParams) -> Matcher: ...


@dataclass(slots=True)
class _Row:
    """A request with a form.

    Attributes:
        matcher: None before its first step, and once the form could not be followed.
        masks: what may come at each position of the step that was asked for; after a draft that may not come, all may:
            what is sampled there counts as nothing.
    """

    row: int
    params: SamplingParams
    matcher: Matcher | None = None
    work: "Callable[[], list[Bool | None]] | None" = None
    masks: "Future[list[Bool | None]] | None" = None
    found: list[Bool | None] = field(default_factory=list)
    error: str | None = None


class StructuredRows:
    """The rows of an InputBatch whose requests have a form."""

    def __init__(self, forms: Forms | None, batch: InputBatch, ops: Ops) -> None:
        self._forms = forms
        self._batch = batch
        self._ops = ops
        self._rows: dict[str, _Row] = {}
        self._of_row: dict[int, _Row] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._clock: int | None = None  # of the pool's thread

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Forget requests, and learn new ones, after the batch has."""
        for request_id in scheduler_output.removed_request_ids:
            known = self._rows.pop(request_id, None)
            if known is not None and self._of_row.get(known.row) is known:
                del self._of_row[known.row]
        for request in scheduler_output.new_requests:
            if request.params.structured_outputs is not None:
                known = _Row(self._batch.row(request.request_id), request.params)
                self._rows[request.request_id] = self._of_row[known.row] = known

    def begin(self, step: PackedStep) -> None:
        """Find what may come next in the rows of a step, in a thread."""
        if not self._of_row:
            return
        counts = np.bincount(step.sampled, minlength=len(step.rows)).tolist()
        for row, count in zip(step.rows.tolist(), counts, strict=True):
            known = self._of_row.get(row)
            if known is not None and count:
                history = self._batch.history(row, count - 1).tolist()
                answer = history[int(self._batch.num_prompt_tokens[row]) :]
                known.found, known.error = [], None
                known.work = partial(self._masks, known, answer, len(history), count)
                known.masks = self._submit(known.work)

    def _submit(self, work: "Callable[[], list[Bool | None]]") -> "Future[list[Bool | None]]":
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "structured outputs", self._note_clock)
        return self._pool.submit(work)

    def _note_clock(self) -> None:
        """Remember the clock of the thread that calls: a form is not to blame for a thread that gets no processor."""
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def _masks(self, known: _Row, answer: list[int], length: int, count: int) -> "list[Bool | None]":
        """Return what may come after the answer without its last `count - 1` tokens, which are drafts, and after each.

        Raises:
            ValueError: the form cannot be followed.
        """
        form = known.params.structured_outputs
        if known.matcher is None and self._forms is not None and form is not None:
            known.matcher = self._forms.start(form)
        if known.matcher is None:
            raise ValueError("the model has no tokenizer to follow it with")
        start, found = len(answer) - count + 1, list[Bool | None]()
        for place in range(start, len(answer) + 1):
            known.matcher.follow(answer[:place])
            found.append(self._at_length(known, known.matcher.allowed(), place, length - len(answer)))
            allowed = found[-1]
            draft = answer[place] if place < len(answer) else None
            if draft is not None and (allowed is None or not allowed[draft] or draft in known.matcher.end_ids):
                break
        return found + [None] * (count - len(found))

    def _at_length(self, known: _Row, allowed: Bool, num_outputs: int, num_prompt: int) -> Bool:
        """Leave out end tokens that may not come yet, unless nothing else may: then the answer is complete."""
        params = known.params
        early = num_outputs < max(params.min_tokens, params.min_new_tokens)
        early = early or num_prompt + num_outputs < params.min_length
        ends = known.matcher.end_ids if known.matcher is not None else frozenset()
        left_out = {*(ends if early or params.ignore_eos else ()), *((params.stop_token_ids or ()) if early else ())}
        if not left_out:
            return allowed
        others = allowed.copy()
        others[[token_id for token_id in left_out if token_id < len(others)]] = False
        return others if others.any() else allowed

    def apply(self, logits: Tensor, positions: Positions) -> tuple[Tensor, dict[int, str]]:
        """Mask logits [M, V], in a copy if some are asked for raw; return why rows have no token, too, by index."""
        if not self._of_row:
            return logits, {}
        asked = [(index, row, offset) for index, (row, offset) in positions if row in self._of_row]
        if not asked:
            return logits, {}
        are_kept = np.count_nonzero(self._batch.sampling.num_logprobs[positions.rows] >= 0)
        masked, errors = as_array(logits).copy() if are_kept else as_array(logits), dict[int, str]()
        for index, row, offset in asked:
            known = self._of_row[row]
            self._wait(known)
            allowed = known.found[offset] if offset < len(known.found) else None
            if known.error is not None:
                errors[index] = f"{FIELD}: {known.error}"
            elif allowed is not None:
                _forbid(masked[index], allowed)
        return self._ops.tensor(masked), errors

    def _wait(self, known: _Row) -> None:
        """Take the masks of a row from the thread. One that takes too long is given up, with its thread."""
        if known.masks is None or known.work is None:
            return
        masks, known.masks = known.masks, None
        if masks.cancelled():  # its thread was given up
            masks = self._submit(known.work)
        try:
            known.found = self._result(masks)
        except (ValueError, InvalidRequestError) as error:
            known.error = str(error).removeprefix(f"{FIELD}: ")
        except (TimeoutError, CancelledError):
            known.error = f"what may come next was not found within {LIMIT_S:g} s; the form is too complex"
            self._abandon()
        if known.error is not None:
            known.matcher = None

    def _result(self, masks: "Future[list[Bool | None]]") -> "list[Bool | None]":
        """Return what the thread finds. Raise TimeoutError if it has worked for too long."""
        began_s = time.clock_gettime(self._clock) if self._clock is not None else 0.0
        while True:
            try:
                return masks.result(LIMIT_S)
            except TimeoutError:
                if self._clock is not None and time.clock_gettime(self._clock) - began_s > 0.9 * LIMIT_S:
                    raise

    def _abandon(self) -> None:
        """Give up the thread: the rows that wait for it are computed by a new one."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = self._clock = None

    def __len__(self) -> int:
        return len(self._rows)

    def forced(self, row: int) -> list[int]:
        """Return the tokens that must follow the history of a row, of which the last were sampled in this step.

        None where the draw itself is asked for, or where something else may forbid the token.
        """
        known = self._of_row.get(row)
        if known is None or known.matcher is None or not _may_force(known.params):
            return []
        history = self._batch.history(row).tolist()
        answer, found = history[int(self._batch.num_prompt_tokens[row]) :], list[int]()
        room = min(MAX_FORCED, self._batch.token_ids.shape[1] - len(history))
        ends = {*known.matcher.end_ids, *(known.params.stop_token_ids or ())}
        try:
            while len(found) < room and answer[-1] not in ends:
                known.matcher.follow(answer)
                token_id = known.matcher.forced()
                if token_id is None:
                    break
                found.append(token_id)
                answer = [*answer, token_id]
        except ValueError:  # the next step says so
            known.matcher = None
        return found


def _forbid(logits: Array, allowed: Bool) -> None:
    """Set logits [V] of what is not allowed to -inf. Most forms allow a few tokens or nearly all: few are picked."""
    if 2 * np.count_nonzero(allowed) > len(allowed):
        logits[np.flatnonzero(~allowed)] = -np.inf
        return
    token_ids = np.flatnonzero(allowed)
    kept = logits[token_ids]
    logits.fill(-np.inf)
    logits[token_ids] = kept


def _may_force(params: SamplingParams) -> bool:
    drawn = params.logprobs is not None or params.mirostat or params.use_beam_search or params.logits_processors
    return not drawn and not any(is_on(params, name) for name in MASKS_OF_TEXT)
