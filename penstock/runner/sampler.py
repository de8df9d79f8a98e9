"""Sampler: from the logits of a step to one token per row, and the log-probabilities that were asked for.

    rows on the host:   custom processors -> form -> warped (logits.py), if no kernel can adjust them
    all rows:           choose, with the forms of the other rows as bitmaps (structured.py); token_scores

Rows that are not finite, or in which no token may be chosen, get an error; the others are sampled all the same.
Log-probabilities are of the raw distribution, before all of this. The backend does the arithmetic (`ops.choose`,
`ops.token_scores`); this module collects its parameters. Only rows that need work that no kernel does are taken to the
host; a step without such rows waits for the device once, when it is finished. A parameter that no row of a step needs
is None in SamplingTensors, so that its pass over the logits is skipped. Rows without LogitAdjustments cost a few
indexed reads and no Python per row.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from penstock.interface.plugins import PROCESSORS, TimeLimitError, call_limited, takes_ids
from penstock.interface.step import SamplerState, TokenLogprobs
from penstock.kernels.ops import Ops
from penstock.kernels.sampling import NO_TOKEN, SamplingTensors, adjust, hide, pack_bits, score_tokens
from penstock.kernels.tensors import Array, Bools, Float32, Int32, Int64, Tensor, as_array, as_torch
from penstock.runner.input_batch import InputBatch, Positions
from penstock.runner.logits import NO_VALUES, Draw, LogitAdjustments, next_state
from penstock.runner.structured import StructuredRows

NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
ALL_MASKED = "bad_words: no token may be chosen: with min_tokens, the form and other masks, they leave none"
PROCESSOR_LIMIT_S = 2.0  # for one call of a custom logits processor; every request waits meanwhile


class AdjustedRow(NamedTuple):
    """A row with adjustments: its place in the logits, and what precedes the token that it decides."""

    place: int
    item: LogitAdjustments  # drafts counted
    history: Int32
    num_outputs: int


class HostRow(NamedTuple):
    """A row of a step's logits that is changed on the host.

    Attributes:
        place: its place in the logits.
        at: its row and offset, as in Positions.
        logits: [V] float32, changed in place.
    """

    place: int
    at: tuple[int, int]
    logits: Float32


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampler's results for M rows.

    Attributes:
        token_ids: [M] int64, NO_TOKEN where nothing may be chosen.
        logprobs: [M], None for a row that does not ask for any.
        sampler_state: the next state, by index, of the rows that have one and drew a token.
    """

    token_ids: Int64
    logprobs: list[TokenLogprobs | None]
    sampler_state: dict[int, SamplerState] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Cached:
    """State that stays the same from step to step as long as the rows and their requests do.

    Attributes:
        rows, version, vocab_size: what it is valid for; `rows` is the same array in steps of the same layout.
        asked: indices of the rows [M] that ask for log-probabilities.
        num_top: how many likeliest tokens each of these wants.
        listed: the ids whose scores it wants besides, by index.
        allowed: the bitmap of the ids that it allows, by index.
        params: None if any row has adjustments, because they change with every token.
    """

    rows: Int64
    version: int
    vocab_size: int
    asked: Int64
    num_top: list[int]
    listed: dict[int, Int64]
    allowed: dict[int, Int32]
    params: SamplingTensors | None = None

    def holds_for(self, rows: Int64, version: int, vocab_size: int) -> bool:
        """Tell whether these are the same rows, with the same requests."""
        if (self.version, self.vocab_size) != (version, vocab_size):
            return False
        return self.rows is rows or np.array_equal(self.rows, rows)


@dataclass(slots=True, eq=False)
class Draws:
    """The tokens of rows of logits [M, V] that are being chosen.

    Attributes:
        raw: the logits of the rows that ask for log-probabilities; None if no row asks.
        adjusted: the rows with adjustments, if the parameters of the kernels must be collected anew.
        forms: (row, offset) of the rows with a form, by index. What it allows is found while the model computes.
        on_host: indices of the rows that the host changes before a token of any row is chosen.
        fetch: waits for the ids and the health of the rows, and for the scores of those that ask for any.
    """

    logits: Tensor
    positions: Positions
    cached: _Cached
    raw: Tensor | None
    adjusted: list[AdjustedRow]
    forms: dict[int, tuple[int, int]]
    on_host: list[int]
    fetch: Callable[[], list[Array]] | None = None


@dataclass(slots=True, eq=False)
class _HostWork:
    """What the host did to rows of logits.

    Attributes:
        changed: the indices of the rows, which were healthy.
        masks: bitmaps of the ids that forms and requests allow in the other rows, by index.
        warped: the logits [V] of rows that are ready for the draw, by index.
        hidden: the tokens with which a beam may not continue, [V] bool, by index.
        errors: messages by index.
    """

    changed: set[int] = field(default_factory=set)
    masks: dict[int, Int32] = field(default_factory=dict)
    warped: dict[int, Float32] = field(default_factory=dict)
    hidden: dict[int, Bools] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Chooses tokens with the arithmetic of one backend, in two halves: the device computes between them."""

    def __init__(self, ops: Ops, batch: InputBatch, structured: StructuredRows) -> None:
        self._ops = ops
        self._batch = batch
        self._structured = structured
        self._cached: _Cached | None = None  # of the last step

    def begin(self, logits: Tensor, positions: Positions) -> Draws:
        """Begin to sample rows of logits [M, V] float32, which belong to the sampler until it has finished."""
        assert logits.shape[0] == len(positions.rows), "one row of logits per position"
        cached, raw = self._cached_for(positions.rows, logits.shape[1]), None
        adjusted = adjusted_rows(self._batch, positions) if cached.params is None else []
        by_row = self._structured.by_row
        forms = {index: at for index, at in positions if at[0] in by_row} if by_row else {}
        on_host = self._rows_on_host(positions, adjusted, forms)
        is_ready = not (on_host or forms)
        if cached.asked.size:
            is_whole = len(cached.asked) == len(positions.rows) and is_ready and not cached.allowed
            raw = logits if is_whole else logits[self._ops.tensor(cached.asked)]
        draws = Draws(logits, positions, cached, raw, adjusted, forms, on_host)
        if is_ready:
            self._choose(draws, _HostWork(masks=cached.allowed))
        return draws

    def finish(self, draws: Draws, failed: Bools | None) -> tuple[Sampled, dict[int, str]]:
        """Return the tokens, and the error messages of the rows that fail here, whose tokens mean nothing.

        failed: [M], rows whose sequence has an error already; None if no row has. The host leaves them as they are.
        """
        work = _HostWork()
        if draws.fetch is None:
            work.masks = dict(draws.cached.allowed)
            if draws.forms:
                masks, work.errors = self._structured.masks(draws.forms)
                work.masks |= {index: bits & work.masks.get(index, bits) for index, bits in masks.items()}
            if draws.on_host:
                self._work_on_host(draws, failed, work)
            self._choose(draws, work)
        assert draws.fetch is not None, "the tokens were chosen"
        token_ids, healthy, *scores = draws.fetch()
        scores, listed = scores[:3], scores[3:]
        rows, asked, errors = draws.positions.rows, draws.cached.asked, work.errors
        is_chosen = healthy & (token_ids != NO_TOKEN)
        if np.count_nonzero(is_chosen) < len(is_chosen):
            for index in np.flatnonzero(~is_chosen).tolist():
                is_masked = healthy[index] or index in work.changed
                errors.setdefault(index, ALL_MASKED if is_masked else NOT_FINITE)
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if asked.size:
            for index, scored in zip(asked.tolist(), token_logprobs(scores, draws.cached.num_top), strict=True):
                logprobs[index] = scored
            for row, (index, ids) in enumerate(draws.cached.listed.items()):
                if (entry := logprobs[index]) is not None:
                    more = listed[0][row][ids].tolist()
                    lists = entry.token_ids + ids.tolist(), entry.logprobs + more
                    logprobs[index] = TokenLogprobs(*lists, entry.rank, len(more))
            for index, hidden in work.hidden.items():
                logprobs[index] = self._logprobs_of_beam(draws, index, int(token_ids[index]), hidden)
        states = _next_states(self._batch, rows, work.warped, token_ids) if work.warped else {}
        return Sampled(token_ids, logprobs, states), errors

    def _rows_on_host(
        self, positions: Positions, adjusted: list[AdjustedRow], forms: Mapping[int, tuple[int, int]]
    ) -> list[int]:
        """List the rows that need what no kernel does: a custom processor, an option that warps, or a beam's form."""
        found = {row.place for row in adjusted if row.item.warps(row.history)}
        if custom := self._batch.sampling.custom_processors:
            found |= {index for index, (row, _) in positions if row in custom}
        found |= {index for index, (row, _) in forms.items() if self._batch.sampling.searches[row]}
        return sorted(found)

    def _work_on_host(self, draws: Draws, failed: Bools | None, work: _HostWork) -> None:
        """Take the rows that the host changes to the host, and put them back."""
        batch, at = self._batch, self._ops.tensor(np.array(draws.on_host))
        values = as_array(draws.logits[at])  # a copy
        usable = np.isfinite(values.max(axis=1)) & (True if failed is None else ~failed[draws.on_host])
        places = list(draws.positions)
        rows = {n: HostRow(*places[draws.on_host[n]], values[n]) for n in np.flatnonzero(usable).tolist()}
        work.changed, items = {row.place for row in rows.values()}, list(rows.values())
        work.errors |= apply_custom_processors(items, batch)
        asked = set(draws.cached.asked.tolist())
        for row in items:
            if row.place in work.masks:
                hide(row.logits, work.masks.pop(row.place))
            if row.place in asked and batch.sampling.searches[row.at[0]]:
                work.hidden[row.place] = np.isneginf(row.logits)
        work.warped = warp_rows(values, rows, draws.adjusted, batch)
        draws.logits[at] = self._ops.tensor(values)

    def _choose(self, draws: Draws, work: _HostWork) -> None:
        """Choose the tokens of all rows, and score those that ask for it. Do not wait for the results."""
        params, tensor = self._params(draws, work.warped), self._ops.tensor
        if work.masks:
            bits = np.stack([*work.masks.values()])
            params = replace(params, allowed=(tensor(np.array([*work.masks])), tensor(bits)))
        ids, healthy = self._ops.choose(draws.logits, params)
        results, cached = [ids, healthy], draws.cached
        if draws.raw is not None:
            of_asked = ids if len(cached.asked) == len(ids) else ids[self._ops.tensor(cached.asked)]
            scores = self._ops.token_scores(draws.raw, of_asked, max(cached.num_top))
            results += [scores.ids, scores.logprobs, scores.ranks]
            if cached.listed:
                places = np.searchsorted(cached.asked, [*cached.listed])
                results.append(self._ops.log_softmax(draws.raw[tensor(places)]))
        draws.fetch = self._ops.fetch(results)

    def _logprobs_of_beam(self, draws: Draws, index: int, token_id: int, hidden: Bools) -> TokenLogprobs:
        """Score the tokens with which a beam may continue, by their log-probabilities among all tokens."""
        place = int(np.searchsorted(draws.cached.asked, index))
        assert draws.raw is not None, "a beam asks for log-probabilities"
        logprobs = np.array(as_array(self._ops.log_softmax(draws.raw[place : place + 1])))
        logprobs[:, hidden] = -np.inf
        num_top = draws.cached.num_top[place]
        found = score_tokens(logprobs, np.array([token_id]), num_top)
        return token_logprobs([found.ids, found.logprobs, found.ranks], [num_top])[0]

    def _cached_for(self, rows: Int64, vocab_size: int) -> _Cached:
        """Look up what is known of these rows; collect it anew if they or their requests have changed."""
        own = self._batch.sampling
        if self._cached is not None and self._cached.holds_for(rows, own.version, vocab_size):
            return self._cached
        num_top = own.num_logprobs[rows]
        asked = np.flatnonzero(num_top >= 0)
        of_rows = list(enumerate(rows.tolist())) if own.allowed_ids or own.listed_ids else []
        allowed = {index: _bitmap(own.allowed_ids[row], vocab_size) for index, row in of_rows if row in own.allowed_ids}
        listed = {index: own.listed_ids[row] for index, row in of_rows if row in own.listed_ids}
        self._cached = _Cached(rows, own.version, vocab_size, asked, num_top[asked].tolist(), listed, allowed)
        return self._cached

    def _params(self, draws: Draws, warped: Collection[int]) -> SamplingTensors:
        """Collect the parameters of the kernels, or take those of the last step if they are still valid."""
        cached, batch, positions = draws.cached, self._batch, draws.positions
        if cached.params is None:
            params = sampling_tensors(batch, positions, cached.vocab_size, self._ops, draws.adjusted, warped)
            if not draws.adjusted:
                cached.params = params
            return params
        if cached.params.noise_key is not None:
            cached.params = replace(cached.params, noise_key=self._ops.tensor(_noise_key(batch, positions)))
        return cached.params


def _bitmap(ids: Int64, vocab_size: int) -> Int32:
    allowed = np.zeros(vocab_size, dtype=np.bool_)
    allowed[ids[ids < vocab_size]] = True
    return pack_bits(allowed)


# --- the parameters of the kernels -----------------------------------------------------------------------------------


def adjusted_rows(batch: InputBatch, positions: Positions) -> list[AdjustedRow]:
    found = []
    for index, (row, offset) in positions:
        item = batch.sampling.adjustments[row]
        if item is not None:
            history = batch.history(row, offset)
            num_outputs = batch.num_outputs(row) + offset
            found.append(AdjustedRow(index, item.after(history[len(history) - offset :]), history, num_outputs))
    return found


def adjusted_pairs(rows: Sequence[AdjustedRow], num_rows: int, vocab_size: int) -> dict[str, Any]:
    """Collect the masked, bias, repetition and counts of SamplingTensors that any row needs, as arrays, for logits
    [num_rows, vocab_size]."""
    assert all(row.place < num_rows for row in rows), "a row of other logits"
    repetition, frequency, presence = np.ones(num_rows, np.float32), *np.zeros((2, num_rows), np.float32)
    masked, bias, seen, counts = list[_Part](), list[_Part](), list[_Part](), list[_Part]()
    for place, item, history, num_outputs in rows:
        masked += [(place, ids, NO_VALUES) for ids in item.masked_ids(history, num_outputs)]
        if (added := item.bias(history)) is not None:
            bias.append((place, *added))
        if item.seen is not None:
            repetition[place] = item.params.repetition_penalty
            seen.append((place, item.seen.ids, NO_VALUES))
        if item.generated is not None:
            frequency[place], presence[place] = item.params.frequency_penalty, item.params.presence_penalty
            counts.append((place, item.generated.ids, item.generated.counts))
    found: dict[str, Any] = {}
    if pairs := _pairs(masked, vocab_size):
        found["masked"] = pairs[0]
    if pairs := _pairs(bias, vocab_size):
        found["bias"] = pairs
    if pairs := _pairs(seen, vocab_size):
        found["repetition"] = repetition, pairs[0]
    if pairs := _pairs(counts, vocab_size):
        found["counts"] = frequency, presence, *pairs
    return found


_Part = tuple[int, Int64, Float32]  # a row of the logits, ids [P], their values [P] or NO_VALUES


def _pairs(parts: list[_Part], vocab_size: int) -> tuple[Array, Array] | None:
    """Join all (row, id) pairs [P, 2] int64 and their values, [P] float32 or [0] without; None if there are no pairs.

    Ids beyond the vocabulary are left out, because they have no logit.
    """
    if not parts:
        return None
    rows, ids, values = zip(*parts, strict=True)
    pairs = np.stack([np.repeat(rows, [len(part) for part in ids]), np.concatenate(ids)], axis=1)
    numbers, inside = np.concatenate(values), pairs[:, 1] < vocab_size
    if not inside.all():
        pairs, numbers = pairs[inside], numbers[inside] if len(numbers) else numbers
    return (pairs, numbers) if len(pairs) else None


def warp_rows(
    values: Float32, rows: Mapping[int, HostRow], adjusted: Sequence[AdjustedRow], batch: InputBatch
) -> dict[int, Float32]:
    """Warp those of the rows [n] of logits that the kernels cannot adjust, in place. Return their logits [V], ready for
    the draw, by their place in the step.

    values: [n, V], the logits of all rows. rows: the rows that may change, by their place in `values`.
    """
    at = {row.place: (n, row) for n, row in rows.items()}
    chosen = [item for item in adjusted if item.place in at and item.item.warps(item.history)]
    if not chosen:
        return {}
    numbered = [item._replace(place=at[item.place][0]) for item in chosen]
    adjust(values, SamplingTensors(np.zeros(len(values), np.float32), **adjusted_pairs(numbered, *values.shape)))
    found: dict[int, Float32] = {}
    for place, item, history, num_outputs in chosen:
        (row, _), logits = at[place][1].at, at[place][1].logits
        seed, choice = batch.sampling.noise_key[row].tolist()
        draw = Draw((seed, choice, num_outputs), batch.sampling.sampler_state[row])
        logits[:] = item.warp(logits, history, num_outputs, draw)
        found[place] = logits
    return found


def _next_states(
    batch: InputBatch, rows: Int64, warped: dict[int, Float32], token_ids: Array
) -> dict[int, SamplerState]:
    """Compute the next state, by index, of the warped rows that have one and drew a token."""
    found: dict[int, SamplerState] = {}
    for index, logits in warped.items():
        row, token_id = int(rows[index]), int(token_ids[index])
        state, item = batch.sampling.sampler_state[row], batch.sampling.adjustments[row]
        if state is not None and item is not None and token_id != NO_TOKEN:
            found[index] = next_state(logits, token_id, item.params, state)
    return found


def sampling_tensors(
    batch: InputBatch,
    positions: Positions,
    vocab_size: int,
    ops: Ops,
    adjusted: Sequence[AdjustedRow],
    warped: Collection[int] = (),
) -> SamplingTensors:
    """Collect the parameters for logits [M, vocab_size]. A parameter that no row needs is None.

    warped: indices of rows whose logits are warped already, so that only the draw remains.
    """
    own, rows = batch.sampling, positions.rows
    temperature = own.temperature[rows]
    top_k, top_p, min_p = own.top_k[rows], own.top_p[rows], own.min_p[rows]
    if warped:
        done = list(warped)
        temperature[done] = temperature[done] > 0
        top_k[done], top_p[done], min_p[done] = 0, 1.0, 0.0
    left = [row for row in adjusted if row.place not in warped]
    pairs = adjusted_pairs(left, len(rows), vocab_size) if left else {}
    limited = (top_k > 0) & (top_k < vocab_size)
    tensor = ops.tensor
    return SamplingTensors(
        temperature=tensor(temperature),
        top_k=tensor(np.where(limited, top_k, vocab_size)) if limited.any() else None,
        top_p=tensor(top_p) if (top_p < 1.0).any() else None,
        min_p=tensor(min_p) if (min_p > 0.0).any() else None,
        noise_key=tensor(_noise_key(batch, positions)) if temperature.any() else None,
        **{name: tuple(map(tensor, item)) if isinstance(item, tuple) else tensor(item) for name, item in pairs.items()},
    )


def _noise_key(batch: InputBatch, positions: Positions) -> Int64:
    """Pack [M, 3] int64: seed, choice, and the number of outputs so far, which is the position of the next output."""
    rows = positions.rows
    num_outputs = batch.num_tokens[rows] - batch.num_prompt_tokens[rows] + positions.offsets
    return np.concatenate([batch.sampling.noise_key[rows], num_outputs[:, None]], axis=1)


# --- log-probabilities -----------------------------------------------------------------------------------------------


def token_logprobs(scores: Sequence[Array], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Make one entry per row of the ids, log-probabilities and ranks of TokenScores, with the row's num_top best."""
    if len(set(num_top)) > 1:  # some rows may want the whole vocabulary
        rows = zip(*scores, num_top, strict=True)
        return [TokenLogprobs(a[: top + 1].tolist(), b[: top + 1].tolist(), int(rank)) for a, b, rank, top in rows]
    return [TokenLogprobs(*parts) for parts in zip(*(part.tolist() for part in scores), strict=True)]


# --- custom logits processors (interface/plugins.py) -----------------------------------------------------------------
# Every call of one is limited in time and gets copies. Whatever it does wrong ends its own request only.


def apply_custom_processors(rows: Sequence[HostRow], batch: InputBatch) -> dict[int, str]:
    """Run the custom logits processors of these rows, in place. Return the error messages of the rows that failed, by
    index. These keep their logits, so that a faulty function fails only the requests that named it."""
    errors: dict[int, str] = {}
    for index, (row, offset), logits in rows:
        wanted = batch.sampling.custom_processors.get(row)
        if wanted is None:
            continue
        found = _process_row(logits[None], wanted, batch.history(row, offset).tolist())
        if isinstance(found, str):
            errors[index] = found
        elif not np.isfinite(found.max()):
            errors[index] = f"logits_processors: {', '.join(wanted)}: returned NaN or +inf, or left no token to choose"
        else:
            logits[:] = found[0]
    return errors


def _process_row(logits: Array, wanted: dict[str, Any], token_ids: list[int]) -> Array | str:
    """Apply the named functions to logits [1, V], in order. Return the result, or an error message.

    Every function gets its own torch.Tensor and lists, so that it cannot change what other functions see.
    """
    for name, args in wanted.items():
        function = PROCESSORS[name]
        more = (list(token_ids),) if takes_ids(function) else ()
        try:
            found = call_limited(function, as_torch(logits.copy()), deepcopy(args), *more, seconds=PROCESSOR_LIMIT_S)
        except KeyboardInterrupt:
            raise
        except TimeLimitError:
            return f"logits_processors: {name}: it took longer than {PROCESSOR_LIMIT_S:g} s for one token"
        except BaseException as error:  # sys.exit() in a user's function must not end the engine either
            text = " ".join(str(error).split())
            return f"logits_processors: {name}: {type(error).__name__}: {text}"
        wrong = _wrong_result(found, logits.shape)
        if wrong is not None:
            return f"logits_processors: {name}: returned {wrong}; it must be a tensor {list(logits.shape)} of floats"
        logits = as_array(found.detach().to("cpu").float().contiguous())
    return logits


def _wrong_result(found: Any, shape: tuple[int, ...]) -> str | None:
    """Describe what a processor returned instead of a float tensor of this shape; None if it returned one."""
    import torch

    if not isinstance(found, torch.Tensor):
        return type(found).__name__
    if tuple(found.shape) != tuple(shape):
        return str(list(found.shape))
    return None if found.is_floating_point() and found.layout == torch.strided else str(found.dtype)
