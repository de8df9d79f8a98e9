"""Masks: which token ids may not come next, as functions of the history alone.

MASKS has an entry per field of SamplingParams that masks tokens. It makes a Mask, a function of the history and the
number of outputs in it. A mask has no state, so it gives the same ids for the same history after a preemption.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields

import numpy as np

from penstock.interface.sampling_params import SamplingParams
from penstock.kernels.tensors import Int32, Int64

Mask = Callable[[Int32, int], Int64]  # history [num_tokens], number of outputs in it -> ids [P]

OFF = {item.name: item.default for item in fields(SamplingParams)}
NO_IDS: Int64 = np.zeros(0, dtype=np.int64)


def is_on(params: SamplingParams, name: str) -> bool:
    """Return whether a field of the parameters is set to something other than its default."""
    value = getattr(params, name)
    return bool(value != OFF[name] and value not in (None, (), {}))


def ids_of(values: Iterable[int]) -> Int64:
    return np.array(list(values), dtype=np.int64)


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
    """Return the mask of the last ids of words, where the other ids of a word are the end of the history."""
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
    return lambda history, num_outputs: repeated_ngrams(history, size)


def repeated_ngrams(history: Int32, size: int) -> Int64:
    """Return the ids that would complete a sequence of `size` ids that is in the history already."""
    num_starts = len(history) - size + 1
    if num_starts < 1:
        return NO_IDS
    start = history[len(history) - size + 1 :]
    at = np.arange(num_starts)  # positions at which such a sequence may begin
    for offset, token_id in enumerate(start.tolist()):
        at = at[history[at + offset] == token_id]
    return history[at + size - 1].astype(np.int64)


def _suppress(params: SamplingParams, end_ids: Int64) -> Mask:
    ids = ids_of(params.suppress_tokens or ())
    return lambda history, num_outputs: ids


def _begin_suppress(params: SamplingParams, end_ids: Int64) -> Mask:
    """Return the mask of the first output, or of the second where forced_bos_token_id forces the first."""
    ids = ids_of(params.begin_suppress_tokens or ())
    is_forced = params.forced_bos_token_id is not None

    def mask(history: Int32, num_outputs: int) -> Int64:
        begins = 1 if is_forced and len(history) - num_outputs == 1 else 0
        return ids if num_outputs == begins else NO_IDS

    return mask


OF_LENGTH = ("min_tokens", "min_new_tokens", "min_length")  # structured.py applies these where there is a form
MASKS: dict[str, Callable[[SamplingParams, Int64], Mask]] = {  # field of SamplingParams -> function that makes its mask
    "min_tokens": _min_tokens,
    "min_new_tokens": _min_tokens,
    "min_length": _min_length,
    "bad_words_token_ids": _bad_words,
    "bad_words_ids": _bad_words_ids,
    "no_repeat_ngram_size": _no_repeat_ngram,
    "suppress_tokens": _suppress,
    "begin_suppress_tokens": _begin_suppress,
}
AFTER_FORCED = ("suppress_tokens", "begin_suppress_tokens")  # these apply to forced tokens, too
