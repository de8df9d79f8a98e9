"""Structured outputs in a step: the tokens that the requests' forms allow, found in a thread while the model computes.

    begin   every row with a form: follow the answer so far (and its drafts), find what may come next   in a thread
    masks   what may come next, as bitmaps for the backend                                              after the model
    forced  tokens that the form dictates; they become outputs without another step

If a form cannot be followed any further, its request fails. Matchers (tokenizer/grammars.py) follow the history of a
row forwards and backwards, and have no other state. A row whose tokens take too long to find is given up together with
the thread; the limit is processor time, so a thread that waits for a core does not use it up.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from penstock.errors import InvalidRequestError
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import NewRequest
from penstock.interface.structured_outputs import FIELD, StructuredOutputsParams
from penstock.kernels.sampling import pack_bits
from penstock.kernels.tensors import Bools, Int32
from penstock.runner.input_batch import InputBatch, PackedStep
from penstock.runner.logits import OPTIONS, is_on

LIMIT_S = 1.0  # processor time after the model's pass to find one row's allowed tokens; all requests wait meanwhile
MAX_FORCED = 64  # maximum number of tokens forced at once
MASKS_OF_TEXT = [option.field for option in OPTIONS if option.mask is not None and not option.of_length]

Item = TypeVar("Item")


class Matcher(Protocol):
    """Follows one answer in its form; see tokenizer/grammars.py."""

    end_ids: frozenset[int]

    def follow(self, token_ids: list[int]) -> None: ...

    def allowed(self) -> Bools: ...

    def forced(self) -> int | None: ...


class Forms(Protocol):
    """Compiles the forms of requests, and starts a Matcher for each answer."""

    def start(self, form: StructuredOutputsParams) -> Matcher: ...


@dataclass(slots=True, eq=False)
class _FormRequest:
    """A request with a form.

    Attributes:
        may_force: whether tokens that the form dictates may become outputs without being sampled.
        matcher: None before the first step, and after the form could not be followed.
        output_ids, count: for the step asked for last: the outputs including its drafts, and the number of sampled
            positions.
        masks: bitmaps (pack_bits) of these positions. Those after a draft that is not allowed or ends the answer have
            none: what is sampled there is dropped.
    """

    row: int
    params: SamplingParams
    num_prompt_tokens: int
    may_force: bool
    matcher: Matcher | None = None
    output_ids: list[int] = field(default_factory=list)
    count: int = 0
    masks: list[Int32] = field(default_factory=list)
    error: str | None = None


class StructuredRows:
    """The rows of an InputBatch whose requests have a form. Without any, none of its methods need be called."""

    def __init__(self, forms: Forms | None, batch: InputBatch) -> None:
        self._forms = forms
        self._batch = batch
        self.by_row: dict[int, _FormRequest] = {}
        self._by_request: dict[str, _FormRequest] = {}
        self._worker = Worker[_FormRequest]("structured outputs", self._find)

    def remove(self, request_ids: Sequence[str]) -> None:
        """Remove those of these requests that have a form. Call it before `add`, because a row is used again."""
        for request_id in request_ids:
            item = self._by_request.pop(request_id, None)
            if item is not None and self.by_row.get(item.row) is item:
                del self.by_row[item.row]

    def add(self, request: NewRequest) -> None:
        """Add a request that the batch has just given a row."""
        row = self._batch.row(request.request_id)
        item = _FormRequest(row, request.params, request.num_prompt_tokens, _may_force(request.params))
        self._by_request[request.request_id] = self.by_row[row] = item

    def begin(self, step: PackedStep) -> None:
        """Begin to find, in a thread, which tokens may come next in the rows of a step."""
        self._worker.wait(LIMIT_S)  # for the rows of an earlier step that failed before it applied its masks
        asked, counts = [], np.bincount(step.layout.sampled, minlength=len(step.layout.rows))
        for row, count in zip(step.layout.rows.tolist(), counts.tolist(), strict=True):
            item = self.by_row.get(row)
            if item is not None and count:
                item.output_ids = self._batch.history(row, count - 1)[item.num_prompt_tokens :].tolist()
                item.count, item.masks, item.error = count, [], None
                asked.append(item)
        if asked:
            self._worker.start(asked)

    def _find(self, item: _FormRequest) -> None:
        """Set the masks of a row, or the error if its form cannot be followed."""
        try:
            item.masks = self._masks(item)
        except (ValueError, InvalidRequestError) as error:
            item.error, item.matcher = str(error).removeprefix(f"{FIELD}: "), None

    def _masks(self, item: _FormRequest) -> list[Int32]:
        """Compute the mask after the answer without its drafts (the last `count - 1` tokens), and after each draft.

        Raises:
            ValueError: the form cannot be followed.
        """
        form, output_ids = item.params.structured_outputs, item.output_ids
        if item.matcher is None and self._forms is not None and form is not None:
            item.matcher = self._forms.start(form)
        if item.matcher is None:
            raise ValueError("it needs a tokenizer, and the model has none")
        found = list[Int32]()
        for place in range(len(output_ids) - item.count + 1, len(output_ids) + 1):
            item.matcher.follow(output_ids[:place])
            allowed = _at_length(item, item.matcher, item.matcher.allowed(), place)
            found.append(pack_bits(allowed))
            draft = output_ids[place] if place < len(output_ids) else None
            if draft is not None and (not allowed[draft] or draft in item.matcher.end_ids):
                break
        return found

    def masks(self, places: Mapping[int, tuple[int, int]]) -> tuple[dict[int, Int32], dict[int, str]]:
        """Return what may come next as bitmaps (pack_bits), and error messages, both by index.

        places: (row, offset) of rows with a form, by index.
        """
        masks, errors = dict[int, Int32](), dict[int, str]()
        for late in self._worker.wait(LIMIT_S):
            late.error = f"the tokens that may come next were not found within {LIMIT_S:g} s; the form is too complex"
            late.matcher = None
        for index, (row, offset) in places.items():
            item = self.by_row[row]
            assert offset < item.count, "the masks were found for this step"
            if item.error is not None:
                errors[index] = f"{FIELD}: {item.error}"
            elif offset < len(item.masks):
                masks[index] = item.masks[offset]
        return masks, errors

    def forced(self, row: int) -> list[int]:
        """Find the tokens that must follow a row's history, which ends with tokens sampled in this step.

        There are none if the request asks for a draw of each token, or if other masks may forbid the token.
        """
        item = self.by_row.get(row)
        if item is None or item.matcher is None or not item.may_force:
            return []
        history, found = self._batch.history(row), list[int]()
        output_ids: list[int] = history[item.num_prompt_tokens :].tolist()
        room = min(MAX_FORCED, self._batch.token_ids.shape[1] - len(history))
        try:
            while len(found) < room and not _ends(item, item.matcher, output_ids[-1]):
                item.matcher.follow(output_ids)
                token_id = item.matcher.forced()
                if token_id is None:
                    break
                found.append(token_id)
                output_ids.append(token_id)
        except ValueError:  # the next step reports it
            item.matcher = None
        return found


def _at_length(item: _FormRequest, matcher: Matcher, allowed: Bools, num_outputs: int) -> Bools:
    """Leave out end tokens that may not come yet, unless nothing else is allowed: then the answer is complete."""
    params = item.params
    early = num_outputs < max(params.min_tokens, params.min_new_tokens)
    early = early or item.num_prompt_tokens + num_outputs < params.min_length
    if not early and not params.ignore_eos:
        return allowed
    left_out = {*matcher.end_ids, *((params.stop_token_ids or ()) if early else ())}
    others = allowed.copy()
    others[[token_id for token_id in left_out if token_id < len(others)]] = False
    return others if others.any() else allowed


def _ends(item: _FormRequest, matcher: Matcher, token_id: int) -> bool:
    return token_id in matcher.end_ids or token_id in (item.params.stop_token_ids or ())


def _may_force(params: SamplingParams) -> bool:
    if params.logprobs is not None or params.has_sampler_state or params.use_beam_search:
        return False
    if params.logits_processors or params.allowed_token_ids:
        return False
    return not any(is_on(params, name) for name in MASKS_OF_TEXT)


# --- the thread ------------------------------------------------------------------------------------------------------


class Worker(Generic[Item]):
    """Calls `work` with items, in a thread of its own that is started with the first items."""

    def __init__(self, name: str, work: Callable[[Item], None]) -> None:
        self._name, self._work = name, work
        self._thread: _Thread[Item] | None = None

    def start(self, items: Sequence[Item]) -> None:
        """Begin to work on these items. The caller has waited for the items before."""
        if self._thread is None:
            self._thread = _Thread(self._name, self._work)
        self._thread.start(items)

    def wait(self, limit_s: float) -> list[Item]:
        """Wait until all items are done or given up. Return those given up.

        An item is given up if it is not done after about `limit_s` of processor time, counted from this call or from
        the item's start, whichever is later.

        Raises whatever `work` raised; the items after that one are not begun.
        """
        given_up = list[Item]()
        while self._thread is not None and not self._thread.ends_within(limit_s):
            item, others = self._thread.give_up()
            given_up.append(item)
            self._thread = None
            self.start(others)
        return given_up


class _Thread(Generic[Item]):
    """A thread and the clock of its processor time."""

    def __init__(self, name: str, work: Callable[[Item], None]) -> None:
        self._work = work
        self._pool = ThreadPoolExecutor(1, name, self._note_clock)
        self._clock: int | None = None
        self._lock = threading.Lock()
        self._items: Sequence[Item] = ()
        self._index, self._began_s = 0, 0.0  # the current item, and the clock when it began
        self._is_given_up = False
        self._done: Future[None] | None = None

    def _note_clock(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def _clock_s(self) -> float:
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)

    def start(self, items: Sequence[Item]) -> None:
        self._done = self._pool.submit(self._run, items)

    def _run(self, items: Sequence[Item]) -> None:
        self._items = items
        for index, item in enumerate(items):
            with self._lock:
                if self._is_given_up:
                    return
                self._index, self._began_s = index, self._clock_s()
            self._work(item)

    def ends_within(self, limit_s: float) -> bool:
        since_s, done, self._done = self._clock_s(), self._done, None
        while done is not None:
            try:
                done.result(limit_s)
                return True
            except TimeoutError:
                if self._clock_s() - max(since_s, self._began_s) > 0.9 * limit_s:
                    return False
        return True

    def give_up(self) -> tuple[Item, Sequence[Item]]:
        """Begin no further item. Return the current item and those after it."""
        with self._lock:
            self._is_given_up = True
            self._pool.shutdown(wait=False)
            return self._items[self._index], self._items[self._index + 1 :]
