"""The language-model head: the product over the vocabulary."""

from torch import Tensor

from penstock.kernels.arena import Buffer
from penstock.kernels.ops import Ops
from penstock.layers.linear import Linear, LinearSpec


class LMHead(Linear):
    """hidden [M, hidden] dtype -> logits [M, V] float32. A tied head packs the embedding's rows a second time."""

    def __init__(self, ops: Ops, spec: LinearSpec, out: Buffer, *, softcap: float | None = None) -> None:
        """softcap: a soft limit to the size of logits."""
        super().__init__(ops, spec, out)
        self.softcap = softcap

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits if self.softcap is None else self.ops.softcap(logits, self.softcap)
