"""SamplingRows: the sampling parameters of every row of the InputBatch. No torch here.

A row has LogitAdjustments (logit_adjustments.py) only if its parameters ask for any: masks, biases, penalties, and
options that the kernels do not have. The arithmetic and its order are in `kernels/sampling.py` and the backends.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.errors import EngineError
from penstock.interface.step import NewRequest, SamplerState
from penstock.kernels.tensors import Bools, Float32, Int32, Int64
from penstock.runner.logit_adjustments import LogitAdjustments
from penstock.runner.truncations import first_state

NOT_ASKED = -1  # in num_logprobs and num_prompt_logprobs


class SamplingRows:
    """The sampling parameters of rows; the values of free rows mean nothing.

    Attributes (by row):
        temperature, top_p, min_p: [max_num_seqs] float32.    top_k: int64, 0 keeps all.
        noise_key: [max_num_seqs, 2] int64, the seed's 64 bits and the choice index.
        num_logprobs, num_prompt_logprobs: [max_num_seqs] int64, -1 where not asked for.
        adjustments: masks, bias and penalties; None for most rows.
        searches: [max_num_seqs] bool, whether it is a beam, which continues only with tokens that are not masked.
        sampler_state: what the next draw needs of those before; None where it needs nothing.
        custom_processors: the arguments of custom logits processors, by name, for the rows that have any.
        version: incremented by every `set`; parameters do not change otherwise.

    For greedy rows top_k, top_p and min_p are off: they cannot change the most likely token.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, eos_token_ids: Sequence[int]) -> None:
        self.temperature: Float32 = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_p: Float32 = np.ones(max_num_seqs, dtype=np.float32)
        self.min_p: Float32 = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k: Int64 = np.zeros(max_num_seqs, dtype=np.int64)
        self.noise_key: Int64 = np.zeros((max_num_seqs, 2), dtype=np.int64)
        self.num_logprobs: Int64 = np.full(max_num_seqs, NOT_ASKED, dtype=np.int64)
        self.num_prompt_logprobs: Int64 = np.full(max_num_seqs, NOT_ASKED, dtype=np.int64)
        self.searches: Bools = np.zeros(max_num_seqs, dtype=np.bool_)
        self.adjustments: list[LogitAdjustments | None] = [None] * max_num_seqs
        self.custom_processors: dict[int, dict[str, Any]] = {}
        self.sampler_state: list[SamplerState | None] = [None] * max_num_seqs
        self.version = 0
        self._max_model_len = max_model_len
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
        self.searches[row] = params.use_beam_search
        if params.use_beam_search:
            num_candidates = params.num_candidates(len(self._eos_token_ids))
            self.num_logprobs[row] = max(num_candidates, params.logprobs or 0)
        self.num_prompt_logprobs[row] = NOT_ASKED if params.prompt_logprobs is None else params.prompt_logprobs
        custom = params.logits_processors
        self.custom_processors.pop(row, None)
        if custom and isinstance(custom, dict):
            self.custom_processors[row] = custom
        self.adjustments[row] = None
        if LogitAdjustments.needed(params):
            limits = (request.num_prompt_tokens, self._max_model_len)
            self.adjustments[row] = LogitAdjustments(params, token_ids, *limits, self._eos_token_ids)
        self.sampler_state[row] = first_state(params) if request.sampler_state is None else request.sampler_state

    def append(self, row: int, token_id: int) -> None:
        """Count a new output token of a row."""
        adjustments = self.adjustments[row]
        if adjustments is not None:
            adjustments.append(token_id)
