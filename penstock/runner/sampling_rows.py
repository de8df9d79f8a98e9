"""SamplingRows: the sampling parameters of every row of the InputBatch. No torch here.

LogitAdjustments are the masks, bias and penalties that one request's parameters and history ask for. A row has them
only if its parameters set any of: min_tokens, bad words, logit_bias, penalties. Token counts grow by one token at a
time and are never rebuilt. The arithmetic and its order are in `kernels/sampling.py` and the backends.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import EngineError
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import NewRequest

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

NOT_ASKED = -1  # in the arrays of logprobs counts
SPARE_IDS = 64  # room for new ids before a TokenCounts has to grow


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

    @property
    def ids(self) -> Int64:
        """[P] int64 distinct ids, a view that the next `add` may change."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> Float32:
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
        token_ids: Int32,
        num_prompt_tokens: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        """token_ids: the history [num_tokens] int32, outputs so far included."""
        self.params = params
        end_ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids)}
        self._end_ids: Int64 = np.array(sorted(end_ids), dtype=np.int64)
        words = params.bad_words_token_ids
        self._bad_ids: Int64 = np.array([word[0] for word in words if len(word) == 1], dtype=np.int64)
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

    def masked_ids(self, token_ids: Int32, num_outputs: int) -> list[Int64]:
        """Return the ids that may not come next, after the history [num_tokens] int32 with that many outputs."""
        masked = [self._bad_ids] if self._bad_ids.size else []
        if num_outputs < self.params.min_tokens:
            masked.append(self._end_ids)
        if self._bad_words:
            masked.append(np.array(self._completions(token_ids), dtype=np.int64))
        return masked

    def _completions(self, token_ids: Int32) -> list[int]:
        """Return the last id of every bad word whose other ids end the history."""
        longest = max(len(start) for start, _ in self._bad_words)
        end = token_ids[-longest:].tolist()
        return [last for start, last in self._bad_words if end[-len(start) :] == start]


class SamplingRows:
    """The sampling parameters of rows; the values of free rows mean nothing.

    Attributes (by row):
        temperature, top_p, min_p: [max_num_seqs] float32.    top_k: int64, 0 keeps all.
        noise_key: [max_num_seqs, 2] int64, the seed's 64 bits and the choice index.
        num_logprobs, num_prompt_logprobs: [max_num_seqs] int64, -1 where not asked for.
        adjustments: masks, bias and penalties; None for most rows.
        custom_processors: the arguments of custom logits processors, by name.
        version: incremented by every `set`; a row's parameters do not change in between.

    For greedy rows top_k, top_p and min_p are off: they cannot change the most likely token.
    """

    def __init__(self, max_num_seqs: int, eos_token_ids: Sequence[int]) -> None:
        self.temperature: Float32 = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_p: Float32 = np.ones(max_num_seqs, dtype=np.float32)
        self.min_p: Float32 = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k: Int64 = np.zeros(max_num_seqs, dtype=np.int64)
        self.noise_key: Int64 = np.zeros((max_num_seqs, 2), dtype=np.int64)
        self.num_logprobs: Int64 = np.full(max_num_seqs, NOT_ASKED, dtype=np.int64)
        self.num_prompt_logprobs: Int64 = np.full(max_num_seqs, NOT_ASKED, dtype=np.int64)
        self.adjustments: list[LogitAdjustments | None] = [None] * max_num_seqs
        self.custom_processors: list[dict[str, Any]] = [{} for _ in range(max_num_seqs)]
        self.version = 0
        self._eos_token_ids = tuple(eos_token_ids)

    def set(self, row: int, request: NewRequest, token_ids: Int32) -> None:
        """Take the parameters of a request with the history token_ids [num_tokens] int32.

        Raises:
            EngineError: the request is sampled and has no seed.
        """
        params = request.params
        if params.seed is None and not params.greedy:
            raise EngineError("seed: not resolved before the request reached the runner")
        self.version += 1
        self.noise_key[row] = np.uint64((params.seed or 0) % 2**64).astype(np.int64), request.choice
        self.temperature[row] = params.temperature
        self.top_k[row] = 0 if params.greedy else max(0, params.top_k)
        self.top_p[row] = 1.0 if params.greedy else params.top_p
        self.min_p[row] = 0.0 if params.greedy else params.min_p
        self.num_logprobs[row] = NOT_ASKED if params.logprobs is None else params.logprobs
        self.num_prompt_logprobs[row] = NOT_ASKED if params.prompt_logprobs is None else params.prompt_logprobs
        custom = params.logits_processors
        self.custom_processors[row] = custom if isinstance(custom, dict) else {}
        self.adjustments[row] = None
        if LogitAdjustments.needed(params):
            self.adjustments[row] = LogitAdjustments(params, token_ids, request.num_prompt_tokens, self._eos_token_ids)

    def append(self, row: int, token_id: int) -> None:
        """Count a new output token of a row."""
        adjustments = self.adjustments[row]
        if adjustments is not None:
            adjustments.append(token_id)
