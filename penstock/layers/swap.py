"""Replaces nn.Linear by the backend's packed product, so that a model written with torch's layers can be quantised."""

from torch import Tensor, nn

from penstock.layers.factory import LayerFactory
from penstock.layers.weights import Linear


class SwappedLinear(Linear, nn.Module):
    """Computes as nn.Linear does: x [..., K] dtype -> [..., N] dtype, a new tensor. It is also a torch.nn.Module, so
    that it can replace one."""

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = super().forward(x.reshape(-1, x.shape[-1]).contiguous())
        return rows.to(self.ops.dtype, copy=True).view(*x.shape[:-1], -1)


def swap_linears(model: nn.Module, make: LayerFactory) -> None:
    """Replace every nn.Linear in a model by a product that is quantised as the parameter table allows.

    Call it at the end of the model's __init__, with the LayerFactory that __init__ received.

    Raises:
        ModelLoadError: a weight is not in the table.
    """
    linears = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    for name, _ in linears:
        parent, _, leaf = name.rpartition(".")
        made = make.linear(name)
        setattr(model.get_submodule(parent), leaf, SwappedLinear(make.ops, made.spec, made.out))
