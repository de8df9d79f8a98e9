"""LogitAdjustments: how one request's parameters and history change its logits before a token is drawn. No torch here.

Masks, biases and penalties become pairs of row and id, which the kernels apply. If a request asks for an option that
the kernels do not have, its row is shaped: `shape` computes everything up to the draw in numpy. The order, which
docs/sampling.md repeats:

    masks          min_tokens, bad words, n-grams, suppressed tokens, ... (masks.py)          -> -inf
    biases         logit_bias, sequence_bias
    penalties      repetition, frequency, presence; then DRY (repetitions.py)
    forced tokens  everything else -> -inf; suppressed tokens stay out
    end tokens     exponential_decay_length_penalty
    temperature    and the truncations (truncations.py); not where the request is greedy

All of it is a function of the parameters and the history, except for mirostat's mu, which the caller keeps. Token
counts grow by one token at a time and are never rebuilt.
"""

from collections.abc import Sequence
from copy import copy

import numpy as np

from penstock.interface.sampling_params import SamplingParams
from penstock.kernels.tensors import Float32, Int32, Int64
from penstock.runner.masks import AFTER_FORCED, MASKS, OF_LENGTH, Mask, ids_of, is_on
from penstock.runner.repetitions import Repetitions
from penstock.runner.truncations import IN_KERNELS, NEVER, TRUNCATIONS, Draw, truncate

SPARE_IDS = 64  # room for new ids before a TokenCounts has to grow
BIASES = ("logit_bias", "sequence_bias")
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
FORCED = ("forced_bos_token_id", "forced_eos_token_id")
SHAPED = ("dry_multiplier", "exponential_decay_length_penalty")  # these shape greedy requests, too
SHAPED_DRAWS = tuple(name for name in TRUNCATIONS if name not in IN_KERNELS)
LARGEST = np.finfo(np.float32).max


class TokenCounts:
    """The distinct ids of a growing sequence and how often each occurred. Adding an id takes constant time."""

    def __init__(self, token_ids: Int32) -> None:
        ids, counts = np.unique(token_ids, return_counts=True)
        self._index: dict[int, int] = {token_id: index for index, token_id in enumerate(ids.tolist())}
        self._ids: Int64 = np.concatenate([ids.astype(np.int64), np.zeros(SPARE_IDS, np.int64)])
        self._counts: Float32 = np.concatenate([counts.astype(np.float32), np.zeros(SPARE_IDS, np.float32)])

    def add(self, token_id: int) -> None:
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token_id
        self._counts[index] += 1

    def after(self, token_ids: Int32) -> "TokenCounts":
        """Return a copy with token_ids [n] int32 added."""
        found = copy(self)
        found._index, found._ids, found._counts = dict(self._index), self._ids.copy(), self._counts.copy()
        for token_id in token_ids.tolist():
            found.add(token_id)
        return found

    @property
    def ids(self) -> Int64:
        """[P] int64 distinct ids, a view that the next `add` may change."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> Float32:
        """[P] float32, how often each of `ids` occurred; a view as well."""
        return self._counts[: len(self._index)]


class LogitAdjustments:
    """One row's adjustments.

    Attributes:
        params: the request's parameters.
        seen: distinct ids of prompt and output, for the repetition penalty; None if that is off.
        generated: distinct ids of the output with their counts, for the other penalties; None if both are off.
    """

    def __init__(
        self,
        params: SamplingParams,
        token_ids: Int32,
        num_prompt_tokens: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        """token_ids: the history [num_tokens] int32, including the outputs so far."""
        self.params = params
        end_ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids)}
        self._end_ids = ids_of(sorted(end_ids))
        self._masks: dict[str, Mask] = {
            name: make(params, self._end_ids)
            for name, make in MASKS.items()
            if is_on(params, name) and (params.structured_outputs is None or name not in OF_LENGTH)
        }
        bias = params.logit_bias or {}
        self._bias = (ids_of(bias), np.array([*bias.values()], np.float32)) if bias else None
        self._sequences: Sequence[tuple[tuple[int, ...], float]] = tuple(params.sequence_bias or ())
        room = max_model_len - num_prompt_tokens
        self._last = num_prompt_tokens + min(room, params.max_tokens or room) - 1  # length before the last token
        self._repetitions = Repetitions(params) if is_on(params, "dry_multiplier") else None
        self._is_shaped = _shapes(params)
        self.seen = TokenCounts(token_ids) if params.repetition_penalty != 1.0 else None
        counted = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        self.generated = TokenCounts(token_ids[num_prompt_tokens:]) if counted else None

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Return whether the parameters ask for any adjustment."""
        return _shapes(params) or any(is_on(params, name) for name in (*MASKS, *BIASES, *PENALTIES, *FORCED))

    def append(self, token_id: int) -> None:
        """Count a new output token."""
        if self.seen is not None:
            self.seen.add(token_id)
        if self.generated is not None:
            self.generated.add(token_id)

    def after(self, drafts: Int32) -> "LogitAdjustments":
        """Return the adjustments for the token after drafts [n] int32, counting these as outputs. Changes nothing."""
        if not len(drafts):
            return self
        found = copy(self)
        found.seen = None if self.seen is None else self.seen.after(drafts)
        found.generated = None if self.generated is None else self.generated.after(drafts)
        return found

    def masked_ids(self, history: Int32, num_outputs: int) -> list[Int64]:
        """Return the ids that may not follow the history [num_tokens] int32, which has `num_outputs` outputs."""
        found = [mask(history, num_outputs) for mask in self._masks.values()]
        return [ids for ids in found if ids.size]

    def bias(self, history: Int32) -> tuple[Int64, Float32] | None:
        """Return distinct ids [P] and the biases [P] float32 to add to their logits; None if there are no biases."""
        if not self._sequences:
            return self._bias
        total = {} if self._bias is None else dict(zip(*(part.tolist() for part in self._bias), strict=True))
        for (*start, last), value in self._sequences:
            if not start or (len(start) <= len(history) and history[-len(start) :].tolist() == start):
                total[last] = total.get(last, 0.0) + value
        return (ids_of(total), np.array([*total.values()], np.float32)) if total else None

    def shapes(self, history: Int32) -> bool:
        """Return whether `shape` must compute the row that follows this history."""
        return self._is_shaped or self._forced(history) is not None

    def shape(self, logits: Float32, history: Int32, num_outputs: int, draw: Draw) -> Float32:
        """Return logits [V] after all adjustments, ready for the draw. Changes nothing."""
        found = self._adjusted(logits, history, num_outputs)
        forced = self._forced(history)
        if forced is not None:
            found[:] = NEVER
            found[forced[forced < len(found)]] = 0.0
            for name in AFTER_FORCED:
                if name in self._masks:
                    _mask(found, self._masks[name](history, num_outputs))
        self._decay(found, num_outputs)
        if self.params.greedy:
            return found
        with np.errstate(over="ignore"):
            found /= np.float32(self.params.temperature)
        return truncate(np.minimum(found, LARGEST, out=found), self.params, draw)  # inf - inf is NaN

    def _adjusted(self, logits: Float32, history: Int32, num_outputs: int) -> Float32:
        """Apply masks, biases and penalties to a copy of logits [V]."""
        found, params = logits.copy(), self.params
        for ids in self.masked_ids(history, num_outputs):
            _mask(found, ids)
        bias = self.bias(history)
        if bias is not None:
            ids, values = _inside(found, *bias)
            found[ids] += values
        if self.seen is not None:
            ids = self.seen.ids[self.seen.ids < len(found)]
            penalty, some = np.float32(params.repetition_penalty), found[ids]
            found[ids] = np.where(some > 0, some / penalty, some * penalty)
        if self.generated is not None:
            ids, counts = _inside(found, self.generated.ids, self.generated.counts)
            found[ids] -= np.float32(params.frequency_penalty) * counts
            found[ids] -= np.float32(params.presence_penalty)
        if self._repetitions is not None:
            ids, values = _inside(found, *self._repetitions.penalties(history))
            found[ids] -= values
        return found

    def _forced(self, history: Int32) -> Int64 | None:
        """Return the ids from which the next token must be chosen; None if any id may follow."""
        params = self.params
        if params.forced_bos_token_id is not None and len(history) == 1:
            return ids_of([params.forced_bos_token_id])
        forced = params.forced_eos_token_id
        return ids_of(forced) if isinstance(forced, tuple) and forced and len(history) == self._last else None

    def _decay(self, logits: Float32, num_outputs: int) -> None:
        """Raise the logits [V] of end tokens in place, by exponential_decay_length_penalty."""
        if self.params.exponential_decay_length_penalty is None:
            return
        start, factor = self.params.exponential_decay_length_penalty
        ids = self._end_ids[self._end_ids < len(logits)]
        ids = ids[np.isfinite(logits[ids])]
        if num_outputs > start and ids.size:
            with np.errstate(over="ignore"):
                growth = np.float32(np.float64(factor) ** (num_outputs - start) - 1.0)
                more = np.abs(logits[ids]) * growth
            logits[ids] = np.clip(logits[ids] + np.nan_to_num(more, nan=0.0), -LARGEST, LARGEST)


def _shapes(params: SamplingParams) -> bool:
    names = SHAPED if params.greedy else (*SHAPED, *SHAPED_DRAWS)
    return any(is_on(params, name) for name in names)


def _mask(logits: Float32, ids: Int64) -> None:
    logits[ids[ids < len(logits)]] = NEVER


def _inside(logits: Float32, ids: Int64, values: Float32) -> tuple[Int64, Float32]:
    """Leave out ids beyond the vocabulary, which have no logit."""
    inside = ids < len(logits)
    return ids[inside], values[inside]
