"""Feed-forward branches: plain, gated and sparse.

    plain    out = down(activation(up(y)))
    gated    out = down(activation(gate(y)) * up(y))
    sparse   p = softmax(y router^T);   out = sum over the k largest p_e of p_e * gated_e(y)

In a sparse branch, a router chooses a few of many gated branches, the experts, for each token (Shazeer et al.,
"Outrageously Large Neural Networks", 2017). Only these are computed. Renormalised weights sum to 1, which equals a
softmax over the chosen logits.
"""

from penstock.kernels.ops import PackedLinear
from penstock.kernels.tensors import Tensor
from penstock.layers.factory import LayerFactory
from penstock.layers.module import Module
from penstock.spec.model_config import ModelConfig


class MLP(Module):
    """Up with the activation in the same call, then down."""

    def __init__(self, make: LayerFactory, activation: str) -> None:
        self.up_proj = make.activated_linear("up_proj", activation)
        self.down_proj = make.linear("down_proj")

    def forward(self, y: Tensor) -> Tensor:
        """Map y [T, hidden] dtype to [T, hidden] float32."""
        return self.down_proj(self.up_proj(y))


class GatedMLP(Module):
    """Gate and up as one product with the activation in the same call, then down."""

    def __init__(self, make: LayerFactory, activation: str) -> None:
        self.gate_up_proj = make.gated_linear("gate_up_proj", activation)
        self.down_proj = make.linear("down_proj")

    def forward(self, y: Tensor) -> Tensor:
        """Map y [T, hidden] dtype to [T, hidden] float32."""
        return self.down_proj(self.gate_up_proj(y))


class MoE(Module):
    """A router and its experts. Experts are packed one by one, so that loader, quantiser and planner need no special
    code for them."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        self.ops = make.ops
        self.activation = cfg.hidden_act
        self.top_k = cfg.num_experts_per_tok
        self.renormalize = cfg.norm_topk_prob
        self.gate = make.linear("gate")
        experts = [GatedMLP(make.at(f"experts.{index}"), cfg.hidden_act) for index in range(make.num_experts(cfg))]
        self.experts = experts
        self._gate_up, self._down = [item.gate_up_proj for item in experts], [item.down_proj for item in experts]
        self._mixture = make.mixture(cfg, self._down)
        self.ids = make.slot("chosen", (self.top_k,), "int64")
        self.weights = make.slot("chosen_weights", (self.top_k,), "float32")
        self.out = make.slot("mixture", (cfg.hidden_size,), "float32")
        self._packed: tuple[tuple[PackedLinear, ...], tuple[PackedLinear, ...]] | None = None

    def forward(self, y: Tensor) -> Tensor:
        """Map y [T, hidden] dtype to [T, hidden] float32."""
        tokens = y.shape[0]
        chosen = self.ids(tokens), self.weights(tokens)
        ids, weights = self.ops.route(self.gate(y), self.top_k, renormalize=self.renormalize, out=chosen)
        gate_up, down = self._experts()
        out = self.out(tokens)
        return self._mixture(y, gate_up, down, ids, weights, self.activation, out=out)

    def _experts(self) -> tuple[tuple[PackedLinear, ...], tuple[PackedLinear, ...]]:
        """Return the packed weights of all experts, gated and down. They are collected in the first pass, when all are
        packed; layers are never loaded again after that."""
        if self._packed is None:
            self._packed = tuple(item.packed for item in self._gate_up), tuple(item.packed for item in self._down)
        return self._packed
