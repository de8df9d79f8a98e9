"""ReplayedModel: a model whose steps of few tokens are recorded once for each number of tokens, and then done again
without its Python. Other engines do the same with CUDA graphs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from penstock.kernels.arena import FEW_ROWS
from penstock.kernels.ops import KVCache, RecordedForward, RecordingOps
from penstock.layers.causal_lm import CausalLM
from penstock.layers.context import ForwardContext


@dataclass(slots=True, eq=False)
class _Recording:
    """The inputs that a recorded forward pass reads, [tokens] int64 each, and the pass."""

    input_ids: Tensor
    positions: Tensor
    kv_caches: Sequence[KVCache]
    forward: RecordedForward


class ReplayedModel:
    """Computes what its model computes. A model that does more than call operations always runs itself."""

    def __init__(self, model: CausalLM, ops: RecordingOps) -> None:
        self._model = model
        self._ops = ops
        self._recordings: dict[tuple[int, bool], _Recording] = {}
        self._recordable = True

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """As CausalLM. The result is overwritten by the next call."""
        return self._run(input_ids, ctx, head=False)

    def logits(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Of every token, [T, V] float32: a decode step in one go. Overwritten by the next call."""
        return self._run(input_ids, ctx, head=True)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """As CausalLM."""
        return self._model.compute_logits(hidden)

    def _run(self, input_ids: Tensor, ctx: ForwardContext, *, head: bool) -> Tensor:
        tokens = input_ids.shape[0]
        if tokens > FEW_ROWS or not self._recordable:
            return self._forward(input_ids, ctx, head)
        recording = self._recordings.get((tokens, head))
        if recording is None or recording.kv_caches is not ctx.kv_caches:
            return self._record(input_ids, ctx, head)
        recording.input_ids.copy_(input_ids)
        recording.positions.copy_(ctx.positions)
        return recording.forward.run(ctx.attention)

    def _forward(self, input_ids: Tensor, ctx: ForwardContext, head: bool) -> Tensor:
        hidden = self._model(input_ids, ctx)
        return self._model.compute_logits(hidden) if head else hidden

    def _record(self, input_ids: Tensor, ctx: ForwardContext, head: bool) -> Tensor:
        """The first step of so many tokens."""
        input_ids, ctx = input_ids.clone(), replace(ctx, positions=ctx.positions.clone())
        result, forward = self._ops.record(lambda: self._forward(input_ids, ctx, head), ctx.attention)
        if forward is None:
            self._recordable = False
        else:
            self._recordings[input_ids.shape[0], head] = _Recording(input_ids, ctx.positions, ctx.kv_caches, forward)
        return result
