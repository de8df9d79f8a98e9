"""ModelRunner: one step on one device, from a SchedulerOutput to a StepOutput.

    scheduler_output -> InputBatch.update, pack -> model(input_ids, ctx) -> hidden [T, hidden]
      -> logits at the M sampled positions -> Sampler -> ids, log-probabilities
      -> logits at the P prompt positions, a slice at a time -> prompt log-probabilities

A row whose logits are not finite, or that may choose nothing, costs its own request an error; the others go on. It
decides nothing about scheduling or blocks, and knows no text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.config import EngineConfig
from penstock.errors import EngineError
from penstock.interface.step import CacheGroup, RequestStepOutput, SchedulerOutput, StepOutput, TokenLogprobs
from penstock.kernels.arena import FEW_ROWS
from penstock.kernels.ops import AttentionMetadata, Heads, KVCache, Ops, RecordingOps
from penstock.kernels.sampling import NO_TOKEN
from penstock.layers.causal_lm import CausalLM
from penstock.layers.context import ForwardContext
from penstock.runner.custom_logits import process
from penstock.runner.graphs import ReplayedModel
from penstock.runner.input_batch import InputBatch, PackedStep, PromptPiece
from penstock.runner.kv_cache import layer_groups
from penstock.runner.sampler import Sampler, token_logprobs
from penstock.runner.sampling_tensors import on_device

PROMPT_LOGPROB_ROWS = 128  # prompt positions whose logits exist at once: 64 MiB for a vocabulary of 128k
NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
ALL_MASKED = "no token may be chosen: min_tokens and bad words mask all that the model allows"


@dataclass(slots=True)
class _Result:
    """One request's RequestStepOutput in the making."""

    new_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None

    def finish(self) -> RequestStepOutput:
        if self.error is not None:
            return RequestStepOutput([], error=self.error)
        return RequestStepOutput(self.new_token_ids, self.logprobs, self.prompt_logprobs)


class ModelRunner:
    """Carries out steps, one after the other.

    Attributes:
        batch: the requests it knows.
    """

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        groups: Sequence[CacheGroup],
        config: EngineConfig,
        *,
        heads: Heads,
        kv_caches: Sequence[KVCache],
        eos_token_ids: Sequence[int] = (),
        vocab_size: int | None = None,
    ) -> None:
        """Take a resolved config and one cache a decoder layer.

        vocab_size: tokens, which come first in the logits; None: every logit is a token's.

        Raises:
            EngineError: groups and caches do not match, or the config is not resolved.
        """
        if config.scheduler.max_model_len is None:
            raise EngineError("the runner needs a resolved config")
        self._model = ReplayedModel(model, ops) if isinstance(ops, RecordingOps) else model
        self._vocab_size = vocab_size
        self._sampler = Sampler(ops)
        self._ops = ops
        self._groups = tuple(groups)
        self._layer_group = layer_groups(groups)
        self._heads = heads
        self._kv_caches = tuple(kv_caches)
        if len(self._kv_caches) != len(self._layer_group):
            raise EngineError(f"{len(self._kv_caches)} caches for {len(self._layer_group)} layers")
        max_num_seqs, max_model_len = config.scheduler.max_num_seqs, config.scheduler.max_model_len
        self.batch = InputBatch(groups, max_num_seqs, max_model_len, eos_token_ids)

    @torch.inference_mode()
    def execute(self, scheduler_output: SchedulerOutput) -> StepOutput:
        """Compute a step. A step without tokens only forgets.

        Raises:
            EngineError: scheduler and runner disagree. Whatever is raised, no token was appended, and later steps
                work once the requests of this one have been forgotten.
        """
        self.batch.update(scheduler_output)
        if not scheduler_output.scheduled:
            return StepOutput(scheduler_output.step_id, {})
        step = self.batch.pack(scheduler_output.scheduled)
        results = [_Result() for _ in scheduler_output.scheduled]
        input_ids, ctx = self._tensor(step.input_ids), self._context(step)
        # Where every token is sampled, none is followed by one of its prompt: nothing but logits is asked for.
        if isinstance(self._model, ReplayedModel) and len(step.sampled) == len(step.input_ids) <= FEW_ROWS:
            self._sample(self._model.logits(input_ids, ctx), step, results)
        else:
            self._finish(self._model(input_ids, ctx), step, results)
        ids = (item.request_id for item in scheduler_output.scheduled)
        finished = {request_id: result.finish() for request_id, result in zip(ids, results, strict=True)}
        return StepOutput(scheduler_output.step_id, finished)

    def _finish(self, hidden: Tensor, step: PackedStep, results: list[_Result]) -> None:
        """hidden [T, hidden]: logits where somebody looks, and what comes of them."""
        num_sampled = len(step.sampled)
        if step.prompt_pieces or num_sampled < len(step.input_ids):  # else every token is sampled after, in order
            hidden = hidden[self._tensor(step.logits_indices)]
        if step.prompt_pieces:
            self._score_prompts(hidden[num_sampled:], step.prompt_pieces, results)
            hidden = hidden[:num_sampled]
        if num_sampled:
            self._sample(self._model.compute_logits(hidden), step, results)

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return on_device(array, self._ops.device)

    def _context(self, step: PackedStep) -> ForwardContext:
        attention = tuple(self._attention(step, index) for index in range(len(self._groups)))
        return ForwardContext(self._tensor(step.positions), self._kv_caches, attention, self._layer_group)

    def _attention(self, step: PackedStep, index: int) -> AttentionMetadata:
        """The metadata of a cache group, planned for its layers."""
        group = self._groups[index]
        meta = AttentionMetadata(
            query_start_loc=torch.from_numpy(step.query_start_loc),
            seq_lens=torch.from_numpy(step.seq_lens),
            block_table=torch.from_numpy(step.block_tables[index]),
            slot_mapping=torch.from_numpy(step.slot_mappings[index]),
            block_size=group.block_size,
            sliding_window=group.sliding_window,
        )
        return self._ops.plan(meta, self._heads, self._kv_caches[group.layers[0]])

    def _sample(self, logits: Tensor, step: PackedStep, results: list[_Result]) -> None:
        """logits [M, V']: one new token for each sampled sequence that has no error."""
        logits = self._of_tokens(logits)
        for b, healthy in zip(step.sampled.tolist(), self._ops.finite_rows(logits).tolist(), strict=True):
            if not healthy:
                results[b].error = NOT_FINITE
        sequences = [b for b in step.sampled.tolist() if results[b].error is None]
        if not sequences:
            return
        if len(sequences) < len(step.sampled):
            logits = logits[self._tensor(np.isin(step.sampled, sequences))]
        rows = step.rows[sequences]
        processed, errors = process(logits, self.batch, rows, self._ops)
        sampled = self._sampler.sample(logits, self.batch, rows, processed)
        sampled.token_ids[list(errors)] = NO_TOKEN
        chosen = sampled.token_ids != NO_TOKEN
        self.batch.append(rows[chosen], sampled.token_ids[chosen])
        for b, token_id, entry in zip(sequences, sampled.token_ids.tolist(), sampled.logprobs, strict=True):
            results[b].new_token_ids = [token_id]
            results[b].logprobs = None if entry is None else [entry]
            results[b].error = ALL_MASKED if token_id == NO_TOKEN else None
        for index, error in errors.items():
            results[sequences[index]].error = error

    def _of_tokens(self, logits: Tensor) -> Tensor:
        """logits [M, V'] -> [M, V]. What fills up the head ends here, so it changes no sum over the vocabulary."""
        return logits if self._vocab_size is None else logits[:, : self._vocab_size].contiguous()

    def _score_prompts(self, hidden: Tensor, pieces: list[PromptPiece], results: list[_Result]) -> None:
        """hidden [P, hidden] of the prompt positions: their log-probabilities, a bounded slice at a time."""
        start = 0
        for piece in pieces:
            end = start + len(piece.targets)
            entries = list(self._scored(hidden[start:end], piece))
            if len(entries) < len(piece.targets):
                results[piece.sequence].error = NOT_FINITE
            results[piece.sequence].prompt_logprobs = entries
            start = end

    def _scored(self, hidden: Tensor, piece: PromptPiece) -> Iterator[TokenLogprobs]:
        """hidden [n, hidden] -> n entries; fewer where logits are not finite."""
        targets = self._tensor(piece.targets)
        for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            end = start + PROMPT_LOGPROB_ROWS
            logits = self._of_tokens(self._model.compute_logits(hidden[start:end]))
            if not bool(self._ops.finite_rows(logits).all()):
                return
            some = targets[start:end]
            yield from token_logprobs(self._ops.log_softmax(logits), some, [piece.num_top] * len(some))
