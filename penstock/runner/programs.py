"""RecordedModel: a model whose forward pass over few tokens is recorded as a program, one per number of tokens. Later
passes run the program without the model's Python, as other engines do with CUDA graphs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.kernels.metadata import KVCache
from penstock.kernels.ops import Program, RecordingOps
from penstock.kernels.tensors import FIXED_ROWS, Array, Tensor, as_array
from penstock.layers.module import CausalLM, ForwardContext


@dataclass(slots=True, eq=False)
class _Recorded:
    """A program and the inputs that it reads, [tokens] int64 each."""

    input_ids: Tensor
    positions: Tensor
    kv_caches: Sequence[KVCache]
    program: Program


class RecordedModel:
    """A CausalLM that gives its model's results. It stops recording if a pass does more than call operations."""

    def __init__(self, model: CausalLM, ops: RecordingOps) -> None:
        self._model = model
        self._ops = ops
        self._recorded: dict[tuple[int, bool], _Recorded] = {}
        self._recordable = True

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Return hidden states as CausalLM does. The next call overwrites them."""
        return self._run(input_ids, ctx, head=False)

    def logits(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the logits of every token, [T, V] float32, as decode steps need. The next call overwrites them."""
        return self._run(input_ids, ctx, head=True)

    def decode(self, tokens: Array, ctx: ForwardContext, vocab_size: int) -> bool:
        """Compute several greedy decode steps with one token of each sequence, as `Program.decode` does.

        Returns:
            False if there is no program that can; then nothing was computed.
        """
        recorded = self._recorded.get((len(tokens), True))
        if recorded is None or recorded.kv_caches is not ctx.kv_caches:
            return False
        recorded.positions[:] = ctx.positions
        if not recorded.program.decode(ctx.attention, recorded.input_ids, recorded.positions, tokens, vocab_size):
            return False
        ctx.positions[:] = recorded.positions
        return True

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)

    def _run(self, input_ids: Tensor, ctx: ForwardContext, *, head: bool) -> Tensor:
        tokens = input_ids.shape[0]
        if tokens > FIXED_ROWS or not self._recordable:
            return self._forward(input_ids, ctx, head)
        recorded = self._recorded.get((tokens, head))
        if recorded is None or recorded.kv_caches is not ctx.kv_caches:
            return self._record(input_ids, ctx, head)
        recorded.input_ids[:] = input_ids
        recorded.positions[:] = ctx.positions
        return recorded.program.run(ctx.attention)

    def _forward(self, input_ids: Tensor, ctx: ForwardContext, head: bool) -> Tensor:
        hidden = self._model(input_ids, ctx)
        return self._model.compute_logits(hidden) if head else hidden

    def _record(self, input_ids: Tensor, ctx: ForwardContext, head: bool) -> Tensor:
        """Compute the first step with this number of tokens, and keep its program."""
        input_ids, ctx = self._copy(input_ids), replace(ctx, positions=self._copy(ctx.positions))
        result, program = self._ops.record(lambda: self._forward(input_ids, ctx, head), ctx.attention)
        if program is None:
            self._recordable = False
        else:
            self._recorded[input_ids.shape[0], head] = _Recorded(input_ids, ctx.positions, ctx.kv_caches, program)
        return result

    def _copy(self, tensor: Tensor) -> Tensor:
        return self._ops.tensor(as_array(tensor).copy())
