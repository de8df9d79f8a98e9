"""The feed-forward branch: plain, down(activation(up(y))), or gated, down(activation(gate(y)) * up(y))."""

from torch import Tensor, nn

from penstock.layers.factory import LayerFactory


class MLP(nn.Module):
    """Up with the activation in the same call, then down."""

    def __init__(self, make: LayerFactory, activation: str) -> None:
        super().__init__()
        self.up_proj = make.activated_linear("up_proj", activation)
        self.down_proj = make.linear("down_proj")

    def forward(self, y: Tensor) -> Tensor:
        """Map y [T, hidden] dtype to [T, hidden] float32."""
        branch: Tensor = self.down_proj(self.up_proj(y))
        return branch


class GatedMLP(nn.Module):
    """Gate and up as one product with the activation in the same call, then down."""

    def __init__(self, make: LayerFactory, activation: str) -> None:
        super().__init__()
        self.gate_up_proj = make.gated_linear("gate_up_proj", activation)
        self.down_proj = make.linear("down_proj")

    def forward(self, y: Tensor) -> Tensor:
        """As MLP."""
        branch: Tensor = self.down_proj(self.gate_up_proj(y))
        return branch
