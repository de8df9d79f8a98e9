"""FollowingRunner: the ModelRunner of a rank that computes its part and leaves sampling to another rank."""

from penstock.interface.step import RequestStepOutput
from penstock.kernels.arena import LOGITS_ROWS
from penstock.kernels.tensors import Tensor
from penstock.runner.model_runner import ModelRunner
from penstock.runner.packed_step import PackedStep, PromptPiece


class FollowingRunner(ModelRunner):
    """Computes the same hidden states and its part of the same logits, in the same order, as the rank that samples."""

    def _sample(self, logits: Tensor, step: PackedStep, results: list[RequestStepOutput]) -> None:
        """Sample nothing, because this rank has only some columns of the logits."""

    def _score_prompts(self, hidden: Tensor, pieces: list[PromptPiece], results: list[RequestStepOutput]) -> None:
        """Compute this rank's part of the logits of each slice."""
        start = 0
        for piece in pieces:
            end = start + len(piece.targets)
            for first in range(start, end, LOGITS_ROWS):
                self.model.compute_logits(hidden[first : min(first + LOGITS_ROWS, end)])
            start = end
