"""The sparse feed-forward branch, a mixture of experts (Shazeer et al., 2017): of many gated branches a token goes
through a few, which a router picks.

    p = softmax(y router^T);   out = sum over the k largest p_e of p_e * down_e(activation(gate_e(y)) * up_e(y))

Only the chosen experts are computed. Where weights are renormalised they sum to 1, which is the same as a softmax over
the logits of the chosen.
"""

import torch
from torch import Tensor, nn

from penstock.kernels.ops import PackedLinear
from penstock.layers.factory import LayerFactory
from penstock.layers.mlp import GatedMLP
from penstock.spec.model_config import ModelConfig


class MoE(nn.Module):
    """A router, and experts that are packed one by one: what knows weights (loader, quantiser, planner) needs to know
    nothing of mixtures."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        super().__init__()
        self.ops = make.ops
        self.activation = cfg.hidden_act
        self.top_k = cfg.num_experts_per_tok
        self.renormalize = cfg.norm_topk_prob
        self.gate = make.linear("gate")
        experts = [GatedMLP(make.at(f"experts.{index}"), cfg.hidden_act) for index in range(cfg.num_experts)]
        self.experts = nn.ModuleList(experts)
        self._gate_up, self._down = [item.gate_up_proj for item in experts], [item.down_proj for item in experts]
        self.ids = make.slot("chosen", (self.top_k,), torch.int64)
        self.weights = make.slot("chosen_weights", (self.top_k,), torch.float32)
        self.out = make.slot("mixture", (cfg.hidden_size,), torch.float32)
        self._packed: tuple[tuple[PackedLinear, ...], tuple[PackedLinear, ...]] | None = None

    def forward(self, y: Tensor) -> Tensor:
        """y [T, hidden] dtype -> [T, hidden] float32."""
        tokens = y.shape[0]
        chosen = self.ids(tokens), self.weights(tokens)
        ids, weights = self.ops.route(self.gate(y), self.top_k, renormalize=self.renormalize, out=chosen)
        gate_up, down = self._experts()
        return self.ops.experts(y, gate_up, down, ids, weights, self.activation, out=self.out(tokens))

    def _experts(self) -> tuple[tuple[PackedLinear, ...], tuple[PackedLinear, ...]]:
        """The gated and the plain weight of every expert: gathered in the first pass, when all are packed."""
        if self._packed is None:
            self._packed = tuple(item.packed for item in self._gate_up), tuple(item.packed for item in self._down)
        return self._packed
