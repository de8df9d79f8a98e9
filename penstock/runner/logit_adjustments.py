"""LogitAdjustments: the masks, bias and penalties that one request's parameters and history ask for.

A row has them only if its parameters set any of: min_tokens, bad words, logit_bias, penalties. Token counts grow by one
token at a time and are never rebuilt. The arithmetic and its order are in `kernels/sampling.py` and the backends. No
torch here.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.interface.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

SPARE_IDS = 64  # room for new ids before a TokenCounts has to grow


class TokenCounts:
    """The distinct ids of a growing sequence and how often each occurred. Adding an id takes constant time."""

    def __init__(self, token_ids: npt.NDArray[np.int32]) -> None:
        ids, counts = np.unique(token_ids, return_counts=True)
        self._index: dict[int, int] = {token_id: index for index, token_id in enumerate(ids.tolist())}
        self._ids: IntArray = np.concatenate([ids.astype(np.int64), np.zeros(SPARE_IDS, np.int64)])
        self._counts: FloatArray = np.concatenate([counts.astype(np.float32), np.zeros(SPARE_IDS, np.float32)])

    def add(self, token_id: int) -> None:
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token_id
        self._counts[index] += 1

    @property
    def ids(self) -> IntArray:
        """[P] int64 distinct ids, a view that the next `add` may change."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> FloatArray:
        """[P] float32, how often each of `ids` occurred; a view too."""
        return self._counts[: len(self._index)]


class LogitAdjustments:
    """One row's masks, bias and penalties.

    Attributes:
        bias: ids [P] int64 and values [P] float32, or None.
        seen: distinct ids of prompt and output, for the repetition penalty; None if that is off.
        generated: distinct ids of the output with their counts, for the other penalties; None if both are off.
    """

    def __init__(
        self,
        params: SamplingParams,
        token_ids: npt.NDArray[np.int32],
        num_prompt_tokens: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        """token_ids: the history [num_tokens] int32, outputs so far included."""
        self.params = params
        end_ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids)}
        self._end_ids: IntArray = np.array(sorted(end_ids), dtype=np.int64)
        words = params.bad_words_token_ids
        self._bad_ids: IntArray = np.array([word[0] for word in words if len(word) == 1], dtype=np.int64)
        self._bad_words = [(list(word[:-1]), word[-1]) for word in words if len(word) > 1]
        bias = params.logit_bias
        self.bias = (np.array([*bias], np.int64), np.array([*bias.values()], np.float32)) if bias else None
        self.seen = TokenCounts(token_ids) if params.repetition_penalty != 1.0 else None
        counted = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        self.generated = TokenCounts(token_ids[num_prompt_tokens:]) if counted else None

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Return whether the parameters ask for any adjustment."""
        return bool(
            params.min_tokens
            or params.bad_words_token_ids
            or params.logit_bias
            or params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )

    def append(self, token_id: int) -> None:
        """Count a new output token."""
        if self.seen is not None:
            self.seen.add(token_id)
        if self.generated is not None:
            self.generated.add(token_id)

    def masked_ids(self, token_ids: npt.NDArray[np.int32], num_outputs: int) -> list[IntArray]:
        """Return the ids that may not come next, after the history [num_tokens] int32 with that many outputs."""
        masked = [self._bad_ids] if self._bad_ids.size else []
        if num_outputs < self.params.min_tokens:
            masked.append(self._end_ids)
        if self._bad_words:
            masked.append(np.array(self._completions(token_ids), dtype=np.int64))
        return masked

    def _completions(self, token_ids: npt.NDArray[np.int32]) -> list[int]:
        """Return the last id of every bad word whose other ids end the history."""
        longest = max(len(start) for start, _ in self._bad_words)
        end = token_ids[-longest:].tolist()
        return [last for start, last in self._bad_words if end[-len(start) :] == start]
