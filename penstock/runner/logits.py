"""Change one request's logits before a token is drawn, by its parameters and history. No torch here.

OPTIONS at the end lists every field of SamplingParams that does so, in the order in which they apply, which
docs/sampling.md repeats: masks, biases, penalties, DRY, forced tokens, end tokens, temperature, truncations.

Masks, biases and penalties become pairs of row and id, which the kernels apply (`adjusted_pairs`). If a request asks
for an option that the kernels do not have, its row is warped: everything up to the draw is computed here in numpy, and
the kernels only draw (`LogitAdjustments.warp`).

All of it is a function of the parameters and the history, and so the same after a preemption. Only mirostat needs more:
a state, which the caller carries from draw to draw. Token counts grow by one token at a time and are never rebuilt.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace

import numpy as np

from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import SamplerState
from penstock.kernels.sampling import XTC_STREAM, SamplingTensors, uniform_at
from penstock.kernels.tensors import Bools, Float32, Float64, Int32, Int64

OFF = {item.name: item.default for item in fields(SamplingParams)}
OF_KERNELS = {item.name for item in fields(SamplingTensors)}
NO_IDS: Int64 = np.zeros(0, dtype=np.int64)
NO_VALUES: Float32 = np.zeros(0, dtype=np.float32)
NEVER = np.float32(-np.inf)
LARGEST = np.finfo(np.float32).max
SPARE_IDS = 64  # room for new ids before a TokenCounts has to grow
LOG_OF_LARGEST = 88.7228391  # the natural logarithm of the largest float32
WORK = 16  # comparisons per token of the history after which DRY's search in linear time takes over
TOP_H_TOKENS = 100
MIROSTAT_TOKENS = 100  # the most likely tokens, from which version 1 estimates the shape of the distribution
FIRST_LOOK = 256  # how many tokens are sorted at first, instead of the whole vocabulary


def is_on(params: SamplingParams, field: str) -> bool:
    """Tell whether a field of the parameters is set to something other than its default."""
    value = getattr(params, field)
    return bool(value != OFF[field] and value not in (None, (), {}))


def ids_of(values: Iterable[int]) -> Int64:
    return np.array(list(values), dtype=np.int64)


# --- masks: which ids may not come next ------------------------------------------------------------------------------

Mask = Callable[[Int32, int], Int64]  # history [num_tokens], number of outputs in it -> ids [P]


def _min_tokens(params: SamplingParams, end_ids: Int64) -> Mask:
    fewest = max(params.min_tokens, params.min_new_tokens)
    return lambda history, num_outputs: end_ids if num_outputs < fewest else NO_IDS


def _min_length(params: SamplingParams, end_ids: Int64) -> Mask:
    return lambda history, num_outputs: end_ids if len(history) < params.min_length else NO_IDS


def _bad_words(params: SamplingParams, end_ids: Int64) -> Mask:
    return _completions(params.bad_words_token_ids)


def _bad_words_ids(params: SamplingParams, end_ids: Int64) -> Mask:
    ends = {(token_id,) for token_id in end_ids.tolist()}
    return _completions([word for word in map(tuple, params.bad_words_ids or ()) if word not in ends])


def _completions(words: Iterable[tuple[int, ...]]) -> Mask:
    """Make the mask of the last ids of words, where the other ids of a word are the end of the history."""
    listed = list(words)
    single = ids_of(word[0] for word in listed if len(word) == 1)
    longer = [(list(word[:-1]), word[-1]) for word in listed if len(word) > 1]
    longest = max((len(start) for start, _ in longer), default=0)

    def mask(history: Int32, num_outputs: int) -> Int64:
        if not longer:
            return single
        end = history[-longest:].tolist()
        return np.concatenate([single, ids_of(last for start, last in longer if end[-len(start) :] == start)])

    return mask


def _no_repeat_ngram(params: SamplingParams, end_ids: Int64) -> Mask:
    size = params.no_repeat_ngram_size

    def mask(history: Int32, num_outputs: int) -> Int64:
        """Find the ids that would complete a sequence of `size` ids that is in the history already."""
        num_starts = len(history) - size + 1
        if num_starts < 1:
            return NO_IDS
        at = np.arange(num_starts)  # positions at which such a sequence may begin
        for offset, token_id in enumerate(history[len(history) - size + 1 :].tolist()):
            at = at[history[at + offset] == token_id]
        return history[at + size - 1].astype(np.int64)

    return mask


def _suppress(params: SamplingParams, end_ids: Int64) -> Mask:
    ids = ids_of(params.suppress_tokens or ())
    return lambda history, num_outputs: ids


def _begin_suppress(params: SamplingParams, end_ids: Int64) -> Mask:
    """Make the mask of the first output, or of the second where forced_bos_token_id forces the first."""
    ids = ids_of(params.begin_suppress_tokens or ())
    is_forced = params.forced_bos_token_id is not None

    def mask(history: Int32, num_outputs: int) -> Int64:
        begins = 1 if is_forced and len(history) - num_outputs == 1 else 0
        return ids if num_outputs == begins else NO_IDS

    return mask


# --- penalties -------------------------------------------------------------------------------------------------------

Change = Callable[[Float32, Int32, int], None]  # logits [V], changed in place; history [num_tokens]; number of outputs


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
        """Copy the counts, with token_ids [n] int32 added."""
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


class Repetitions:
    """DRY ("don't repeat yourself"), as in llama.cpp: a penalty for tokens that continue a repetition.

        history:  a b c x a b      the last two tokens were there before, followed by c: c would make it three

    The longer the repetition, the larger the penalty. A repetition does not reach across a sequence breaker, and a
    token that is a breaker by itself gets no penalty.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._breakers: dict[int, list[tuple[int, ...]]] = {}  # first id -> the ids after it
        for first, *others in params.dry_sequence_breaker_ids:
            self._breakers.setdefault(first, []).append(tuple(others))

    def penalties(self, history: Int32) -> tuple[Int64, Float32]:
        """Compute ids [P] and the penalties [P] to subtract from their logits."""
        params = self._params
        last_n, allowed = params.dry_penalty_last_n, params.dry_allowed_length
        window = history if last_n < 0 else history[max(0, len(history) - last_n) :]
        limit = self._limit(window) if len(window) > allowed else -1
        if limit < allowed:
            return NO_IDS, NO_VALUES
        longest: dict[int, int] = {}  # id -> the longest repetition that it would continue
        for end, length in _repeats(window, allowed):
            token_id = int(window[end + 1])
            longest[token_id] = max(longest.get(token_id, 0), min(length, limit))
        found = {token_id: length for token_id, length in longest.items() if () not in self._breakers.get(token_id, ())}
        return ids_of(found), np.array([self._penalty(length - allowed) for length in found.values()], np.float32)

    def _penalty(self, excess: int) -> float:
        base = self._params.dry_base
        most = int(LOG_OF_LARGEST / math.log(base)) if base > 1.000001 else 0  # a larger exponent overflows a float32
        penalty = self._params.dry_multiplier * base ** (min(excess, most) if most else excess)
        return min(penalty, float(LARGEST))

    def _limit(self, window: Int32) -> int:
        """Count the tokens that follow the last sequence breaker, which is the longest repetition that counts."""
        if not self._breakers:
            return len(window)
        ids = window[::-1].tolist()  # the last one first
        for index, token_id in enumerate(ids):
            lengths = [
                len(tail)
                for tail in self._breakers.get(token_id, ())
                if len(tail) <= index and ids[index - len(tail) : index] == list(tail[::-1])
            ]
            if lengths:
                return index - max(lengths)
        return len(window)


def _dry(params: SamplingParams, end_ids: Int64) -> Change:
    repetitions = Repetitions(params)

    def change(logits: Float32, history: Int32, num_outputs: int) -> None:
        ids, values = repetitions.penalties(history)
        inside = ids < len(logits)
        logits[ids[inside]] -= values[inside]

    return change


def _repeats(window: Int32, least: int) -> list[tuple[int, int]]:
    """List (end, length) for each earlier `end` at which the last `length` >= `least` tokens occur as well."""
    num_tokens, work = len(window), 0
    ends = np.flatnonzero(window[:-1] == window[-1])
    found: list[tuple[int, int]] = []
    length = 1
    while len(ends):
        work += len(ends)
        if work > WORK * num_tokens:
            return _repeats_of_all(window.tolist(), least)
        longer = ends[ends >= length]
        longer = longer[window[longer - length] == window[num_tokens - 1 - length]]
        if length >= least:
            found += [(end, length) for end in np.setdiff1d(ends, longer, assume_unique=True).tolist()]
        ends, length = longer, length + 1
    return found


def _repeats_of_all(ids: list[int], least: int) -> list[tuple[int, int]]:
    """Find what `_repeats` finds, in linear time for any history: the Z algorithm, from the end."""
    num_tokens = len(ids)
    ids = ids[::-1]
    lengths = [0] * num_tokens
    left = right = 0  # ids[left:right] is the match seen so far that reaches farthest
    for start in range(1, num_tokens):
        length = min(right - start, lengths[start - left]) if start < right else 0
        while start + length < num_tokens and ids[length] == ids[start + length]:
            length += 1
        lengths[start] = length
        if start + length > right:
            left, right = start, start + length
    return [(num_tokens - 1 - start, length) for start, length in enumerate(lengths) if start and length >= least]


def _decay(params: SamplingParams, end_ids: Int64) -> Change:
    """Make the change that raises the logits of the end tokens, further with each output."""
    start, factor = params.exponential_decay_length_penalty or (0, 1.0)

    def change(logits: Float32, history: Int32, num_outputs: int) -> None:
        ids = end_ids[end_ids < len(logits)]
        ids = ids[np.isfinite(logits[ids])]
        if num_outputs > start and ids.size:
            with np.errstate(over="ignore"):
                growth = np.float32(np.float64(factor) ** (num_outputs - start) - 1.0)
                more = np.abs(logits[ids]) * growth
            logits[ids] = np.clip(logits[ids] + np.nan_to_num(more, nan=0.0), -LARGEST, LARGEST)

    return change


# --- truncations: which tokens stay in the draw ----------------------------------------------------------------------
# Each gets the logits [n] float32 of the remaining n tokens, divided by the temperature and ordered by id, and returns
# which of them stay, [n] bool: at least one. min_p, top_k and top_p mean the same as in kernels/sampling.py. They stand
# here once more, because only a row that also asks for another truncation comes here: what is left after that one is
# the input of the next, which no kernel takes, and its sums are in float64, which decides the bits.


@dataclass(frozen=True, slots=True)
class Draw:
    """The inputs of one draw besides logits and parameters.

    Attributes:
        noise_key: seed, choice and output position.
        state: what it needs of the draws before; None for requests that need nothing.
        vocab_size: set by `truncate`.
    """

    noise_key: tuple[int, int, int]
    state: SamplerState | None = None
    vocab_size: int = 0

    @property
    def mu(self) -> float:
        """Mirostat's limit of surprise, in bits."""
        return self.state[0] if self.state else 0.0


Truncation = Callable[[Float32, SamplingParams, Draw], Bools]


def log_probabilities(logits: Float32) -> Float64:
    """Compute the log-softmax of logits [n]; at least one of them is above -inf."""
    shifted = logits.astype(np.float64) - float(logits.max())
    found: Float64 = shifted - math.log(float(np.exp(shifted).sum()))
    return found


def _entropy(logs: Float64) -> float:
    weights = np.exp(logs)
    return float(-(logs[weights > 0] * weights[weights > 0]).sum())


def _only(logits: Float32, indices: Int64) -> Bools:
    kept = np.zeros(len(logits), dtype=np.bool_)
    kept[indices] = True
    return kept


def _smallest(keys: Float64 | Float32, count: int) -> Int64:
    """Find the indices of the `count` smallest keys [n], in order of key and index; more on a tie at the end."""
    found = np.arange(len(keys))
    if count < len(keys):
        found = np.flatnonzero(keys <= np.partition(keys, count - 1)[count - 1])
    ordered: Int64 = found[np.argsort(keys[found], kind="stable")]
    return ordered


def _in_order(keys: Float64 | Float32, probabilities: Float64, mass: float) -> tuple[Int64, Float64]:
    """Find the indices of the smallest keys in order, at least as many as have a total probability of `mass`, and their
    cumulative sums. Only the beginning is sorted, because sorting a whole vocabulary takes long."""
    count = FIRST_LOOK
    while True:
        indices = _smallest(keys, count)
        sums = np.cumsum(probabilities[indices])
        if sums[-1] >= mass or len(indices) == len(keys):
            return indices, sums
        count *= 8


def _top_h(logits: Float32, params: SamplingParams, draw: Draw) -> Bools:
    best = _smallest(-logits, TOP_H_TOKENS)[:TOP_H_TOKENS]
    logs = log_probabilities(logits[best])
    sums = np.cumsum(-np.exp(logs) * logs)
    within = sums <= (params.top_h or 1.0) * sums[-1]
    within[0] = True
    return _only(logits, best[within])


def _min_p(logits: Float32, params: SamplingParams, draw: Draw) -> Bools:
    probabilities = np.exp(log_probabilities(logits))
    kept: Bools = probabilities >= params.min_p * probabilities.max()
    return kept


def _top_k(logits: Float32, params: SamplingParams, draw: Draw) -> Bools:
    count = params.top_k if params.top_k > 0 else len(logits)
    return _only(logits, _smallest(-logits, count)[:count])


def _top_p(logits: Float32, params: SamplingParams, draw: Draw) -> Bools:
    probabilities = np.exp(log_probabilities(logits))
    indices, sums = _in_order(-logits, probabilities, params.top_p)
    before = sums - probabilities[indices]
    before[0] = 0.0
    return _only(logits, indices[before < params.top_p])


def _typical_p(logits: Float32, params: SamplingParams, draw: Draw) -> Bools:
    logs = log_probabilities(logits)
    distances = np.abs(-logs - _entropy(logs))
    indices, sums = _in_order(distances, np.exp(logs), params.typical_p)
    last = min(int((sums < params.typical_p).sum()), len(indices) - 1)
    kept: Bools = distances <= distances[indices[last]]
    return kept


def _epsilon_cutoff(logits: Float32, params: SamplingParams, draw: Draw) -> Bools:
    least = params.epsilon_cutoff if params.epsilon_cutoff < 1.0 else 0.0  # 1 is off, as in Transformers
    kept: Bools = (np.exp(log_probabilities(logits)) >= least) | (logits == logits.max())
    return kept


def _eta_cutoff(logits: Float32, params: SamplingParams, draw: Draw) -> Bools:
    logs = log_probabilities(logits)
    eta = params.eta_cutoff if params.eta_cutoff < 1.0 else 0.0
    least = min(eta, math.sqrt(eta) * math.exp(-_entropy(logs)))
    kept: Bools = (np.exp(logs) >= least) | (logits == logits.max())
    return kept


def _xtc(logits: Float32, params: SamplingParams, draw: Draw) -> Bools:
    kept = np.ones(len(logits), dtype=np.bool_)
    if params.xtc_threshold <= 0.5 and uniform_at(draw.noise_key, XTC_STREAM) <= params.xtc_probability:
        likely = np.flatnonzero(np.exp(log_probabilities(logits)) >= params.xtc_threshold)
        kept[likely[np.argsort(-logits[likely], kind="stable")][:-1]] = False
    return kept


def _mirostat(logits: Float32, params: SamplingParams, draw: Draw) -> Bools:
    logs = log_probabilities(logits)
    if params.mirostat == 1:
        count = min(_mirostat_count(logs, draw), len(logits))
        return _only(logits, _smallest(-logits, count)[:count])
    kept: Bools = -logs / math.log(2.0) <= draw.mu
    kept[int(logits.argmax())] = True
    return kept


def _mirostat_count(logs: Float64, draw: Draw) -> int:
    """Count the most likely tokens that version 1 keeps, from an estimated exponent of Zipf's distribution."""
    best = logs[_smallest(-logs, MIROSTAT_TOKENS)[:MIROSTAT_TOKENS]]
    best = best[best > -np.inf]
    if len(best) < 2:
        return 1
    steps = np.log(np.arange(2, len(best) + 1) / np.arange(1, len(best)))
    exponent = float((steps * (best[:-1] - best[1:])).sum() / (steps * steps).sum())
    excess, log_size = exponent - 1.0, math.log(draw.vocab_size)
    share = 1.0 / log_size if abs(excess) < 1e-9 else excess / -math.expm1(-excess * log_size)
    log_count = (math.log(share) + draw.mu * math.log(2.0)) / max(exponent, 1e-9)
    return max(1, int(math.exp(min(log_count, log_size))))


def first_state(params: SamplingParams) -> SamplerState | None:
    """Make the state before the first output, which is mirostat's mu; None if draws do not depend on each other."""
    return (2.0 * params.mirostat_tau,) if params.has_sampler_state and not params.greedy else None


def next_state(logits: Float32, token_id: int, params: SamplingParams, state: SamplerState) -> SamplerState:
    """Compute the state after token_id was drawn from truncated logits [V]."""
    (mu,) = state
    surprise = -float(log_probabilities(logits)[token_id]) / math.log(2.0)
    return (mu - params.mirostat_eta * (surprise - params.mirostat_tau),)


def truncate(logits: Float32, params: SamplingParams, draw: Draw) -> Float32:
    """Copy logits [V] with the truncations that are on: dropped tokens become -inf. Does not change `logits`."""
    wanted = [option.truncation for option in OPTIONS if option.truncation and is_on(params, option.field)]
    if not wanted:
        return logits
    ids = np.flatnonzero(logits > NEVER)
    left, draw = logits[ids], replace(draw, vocab_size=len(logits))
    for truncation in wanted if ids.size else ():
        kept = truncation(left, params, draw)
        assert kept.any(), "a truncation keeps at least one token"
        ids, left = ids[kept], left[kept]
    found: Float32 = np.full_like(logits, NEVER)
    found[ids] = left
    return found


# --- the end of reasoning --------------------------------------------------------------------------------------------


def _thought_enough(params: SamplingParams, outputs: Int32) -> bool:
    """Tell whether outputs [n] int32 end within reasoning that has as many tokens as thinking_token_budget allows."""
    begin, (end,) = params.thinking_token_ids
    ends = np.flatnonzero(outputs == end)
    if len(ends):
        outputs = outputs[ends[-1] + 1 :]
    starts = np.arange(0 if len(ends) and not begin else len(outputs) - len(begin) + 1)
    for offset, token_id in enumerate(begin):
        starts = starts[outputs[starts + offset] == token_id]
    budget = params.thinking_token_budget
    assert budget is not None, "a budget comes with the ids"
    return len(starts) > 0 and len(outputs) - (int(starts[0]) + len(begin)) >= budget


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """A field of SamplingParams that changes logits unless it has its default.

    Attributes:
        mask: makes the request's mask, from its parameters and its end tokens.
        of_length: whether the mask only keeps answers from ending early; structured.py does this where there is a form.
        after_forced: whether the mask applies to forced tokens, too.
        change: makes what changes the logits of the request's rows, from the same.
        truncation: removes tokens from the draw. Greedy requests draw nothing, and so ignore it.
    """

    field: str
    mask: Callable[[SamplingParams, Int64], Mask] | None = None
    of_length: bool = False
    after_forced: bool = False
    change: Callable[[SamplingParams, Int64], Change] | None = None
    truncation: Truncation | None = None

    @property
    def warps(self) -> bool:
        """Tell whether a row that asks for it is warped: the kernels have no changes, and only the truncations of
        SamplingTensors."""
        return self.change is not None or (self.truncation is not None and self.field not in OF_KERNELS)

    def applies(self, params: SamplingParams) -> bool:
        return is_on(params, self.field) and not (params.greedy and self.truncation is not None)


OPTIONS = (  # in the order in which they apply
    Option("min_tokens", mask=_min_tokens, of_length=True),
    Option("min_new_tokens", mask=_min_tokens, of_length=True),
    Option("min_length", mask=_min_length, of_length=True),
    Option("bad_words_token_ids", mask=_bad_words),
    Option("bad_words_ids", mask=_bad_words_ids),
    Option("no_repeat_ngram_size", mask=_no_repeat_ngram),
    Option("suppress_tokens", mask=_suppress, after_forced=True),
    Option("begin_suppress_tokens", mask=_begin_suppress, after_forced=True),
    Option("logit_bias"),
    Option("sequence_bias"),
    Option("repetition_penalty"),
    Option("frequency_penalty"),
    Option("presence_penalty"),
    Option("dry_multiplier", change=_dry),
    Option("forced_bos_token_id"),  # the forced ones warp a row only where they force its token
    Option("forced_eos_token_id"),
    Option("thinking_token_ids"),  # set with thinking_token_budget
    Option("exponential_decay_length_penalty", change=_decay),
    Option("top_h", truncation=_top_h),
    Option("min_p", truncation=_min_p),
    Option("top_k", truncation=_top_k),
    Option("top_p", truncation=_top_p),
    Option("typical_p", truncation=_typical_p),
    Option("epsilon_cutoff", truncation=_epsilon_cutoff),
    Option("eta_cutoff", truncation=_eta_cutoff),
    Option("xtc_probability", truncation=_xtc),
    Option("mirostat", truncation=_mirostat),
)


# --- one request -----------------------------------------------------------------------------------------------------


class LogitAdjustments:
    """One request's adjustments.

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
        wanted = [option for option in OPTIONS if option.applies(params)]
        masks = [
            (option.mask(params, self._end_ids), option.after_forced)
            for option in wanted
            if option.mask is not None and not (option.of_length and params.structured_outputs is not None)
        ]
        self._masks = [mask for mask, _ in masks]
        self._masks_after_forced = [mask for mask, after_forced in masks if after_forced]
        bias = params.logit_bias or {}
        self._bias = (ids_of(bias), np.array([*bias.values()], np.float32)) if bias else None
        self._sequences: Sequence[tuple[tuple[int, ...], float]] = tuple(params.sequence_bias or ())
        room = max_model_len - num_prompt_tokens
        self._last = num_prompt_tokens + min(room, params.max_tokens or room) - 1  # length before the last token
        self._num_prompt_tokens = num_prompt_tokens
        self._changes = [option.change(params, self._end_ids) for option in wanted if option.change is not None]
        self._is_warped = any(option.warps for option in wanted)
        self.seen = TokenCounts(token_ids) if params.repetition_penalty != 1.0 else None
        counted = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        self.generated = TokenCounts(token_ids[num_prompt_tokens:]) if counted else None

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Tell whether the parameters ask for anything beyond the truncations of the kernels."""
        return any(option.applies(params) for option in OPTIONS if option.warps or option.truncation is None)

    def append(self, token_id: int) -> None:
        """Count a new output token."""
        if self.seen is not None:
            self.seen.add(token_id)
        if self.generated is not None:
            self.generated.add(token_id)

    def after(self, drafts: Int32) -> "LogitAdjustments":
        """Copy the adjustments for the token after drafts [n] int32, counting these as outputs. Changes nothing."""
        if not len(drafts):
            return self
        found = copy(self)
        found.seen = None if self.seen is None else self.seen.after(drafts)
        found.generated = None if self.generated is None else self.generated.after(drafts)
        return found

    def masked_ids(self, history: Int32, num_outputs: int) -> list[Int64]:
        """Find the ids that may not follow the history [num_tokens] int32, which has `num_outputs` outputs."""
        found = [mask(history, num_outputs) for mask in self._masks]
        return [ids for ids in found if ids.size]

    def bias(self, history: Int32) -> tuple[Int64, Float32] | None:
        """Compute distinct ids [P] and the biases [P] float32 to add to their logits; None if there are no biases."""
        if not self._sequences:
            return self._bias
        total = {} if self._bias is None else dict(zip(*(part.tolist() for part in self._bias), strict=True))
        for (*start, last), value in self._sequences:
            if not start or (len(start) <= len(history) and history[-len(start) :].tolist() == start):
                total[last] = total.get(last, 0.0) + value
        return (ids_of(total), np.array([*total.values()], np.float32)) if total else None

    def warps(self, history: Int32) -> bool:
        """Tell whether the row that follows this history must be warped."""
        return self._is_warped or self._forced(history) is not None

    def warp(self, logits: Float32, history: Int32, num_outputs: int, draw: Draw) -> Float32:
        """Make logits [V] ready for the draw. They have been adjusted by this history's pairs; may change them."""
        forced = self._forced(history)
        if forced is None:
            for change in self._changes:
                change(logits, history, num_outputs)
        else:
            logits[:] = NEVER
            logits[forced[forced < len(logits)]] = 0.0
            for mask in self._masks_after_forced:
                ids = mask(history, num_outputs)
                logits[ids[ids < len(logits)]] = NEVER
        if self.params.greedy:
            return logits
        with np.errstate(over="ignore"):
            logits /= np.float32(self.params.temperature)
        return truncate(np.minimum(logits, LARGEST, out=logits), self.params, draw)  # inf - inf is NaN

    def _forced(self, history: Int32) -> Int64 | None:
        """Find the ids from which the next token must be chosen; None if any id may follow."""
        params = self.params
        if params.forced_bos_token_id is not None and len(history) == 1:
            return ids_of([params.forced_bos_token_id])
        forced = params.forced_eos_token_id
        if isinstance(forced, tuple) and forced and len(history) == self._last:
            return ids_of(forced)
        if params.thinking_token_ids and _thought_enough(params, history[self._num_prompt_tokens :]):
            return ids_of(params.thinking_token_ids[1])
        return None
