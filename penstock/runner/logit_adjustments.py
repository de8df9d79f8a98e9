"""What a request's parameters and history do to its logits, row by row, as the pairs a kernel reads.

A row has RowProcessors only if its parameters ask for any of: min_tokens, bad words, logit_bias, penalties. What
depends on the history (counts of tokens) grows by one token at a time and is never rebuilt. The arithmetic itself, and
the order in which it is applied, are in `kernels/sampling.py` and its backends. No torch here.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.interface.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

SPARE_IDS = 64  # room for new ids before a TokenCounts has to grow


class TokenCounts:
    """The distinct ids of a growing sequence and how often each came. Adding an id takes constant time."""

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
        """[P] float32, how often each of `ids` came; a view too."""
        return self._counts[: len(self._index)]


class RowProcessors:
    """One row's masks, bias and penalties.

    Attributes:
        bias: ids [P] int64 and values [P] float32, or None.
        seen: distinct ids of prompt and output, where the repetition penalty asks.
        generated: distinct ids of the output with their counts, where the other two penalties ask.
    """

    def __init__(
        self,
        params: SamplingParams,
        token_ids: npt.NDArray[np.int32],
        num_prompt_tokens: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        """Take the parameters and the history [num_tokens] int32, outputs so far included."""
        self.params = params
        end_ids = [*params.stop_token_ids] if params.stop_token_ids else []
        end_ids += [] if params.ignore_eos else eos_token_ids
        self._end_ids: IntArray = np.array(sorted(set(end_ids)), dtype=np.int64)
        words = params.bad_words_token_ids
        self._bad_ids: IntArray = np.array([word[0] for word in words if len(word) == 1], dtype=np.int64)
        self._bad_words = [(list(word[:-1]), word[-1]) for word in words if len(word) > 1]
        self.bias = _bias(params.logit_bias)
        self.seen = TokenCounts(token_ids) if params.repetition_penalty != 1.0 else None
        counted = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        self.generated = TokenCounts(token_ids[num_prompt_tokens:]) if counted else None

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether these parameters ask for anything that this class does."""
        return bool(
            params.min_tokens
            or params.bad_words_token_ids
            or params.logit_bias
            or params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )

    def append(self, token_id: int) -> None:
        """Note a new output token."""
        if self.seen is not None:
            self.seen.add(token_id)
        if self.generated is not None:
            self.generated.add(token_id)

    def masked_ids(self, token_ids: npt.NDArray[np.int32], num_outputs: int) -> list[IntArray]:
        """Ids that may not come next, after the history [num_tokens] int32 with that many outputs."""
        masked = [self._bad_ids] if self._bad_ids.size else []
        if num_outputs < self.params.min_tokens:
            masked.append(self._end_ids)
        if self._bad_words:
            masked.append(np.array(self._completions(token_ids), dtype=np.int64))
        return masked

    def _completions(self, token_ids: npt.NDArray[np.int32]) -> list[int]:
        """The last ids of those bad words that the history ends in."""
        longest = max(len(start) for start, _ in self._bad_words)
        end = token_ids[-longest:].tolist()
        return [last for start, last in self._bad_words if end[-len(start) :] == start]


def _bias(logit_bias: dict[int, float] | None) -> tuple[IntArray, FloatArray] | None:
    if not logit_bias:
        return None
    return np.array(list(logit_bias), dtype=np.int64), np.array(list(logit_bias.values()), dtype=np.float32)
