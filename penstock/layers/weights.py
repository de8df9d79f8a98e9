"""WeightLayer: a module that owns parameters, on the meta device until its weights arrive.

Parameters exist so that a model's state_dict has the names of its parameter table. What a layer does with their values
is its own business: a product hands them to the backend, which packs them, and keeps nothing.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from penstock.kernels.ops import RowSource


class WeightLayer(nn.Module):
    """Base of all layers with parameters."""

    def declare(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Own a parameter of this name, without memory behind it."""
        self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False))

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        """Take the values of all own parameters, by the names they were declared under, of any float type.

        Called once, before the first forward pass.
        """
        raise NotImplementedError


def whole(value: Tensor | RowSource) -> Tensor:
    """All of a parameter's value at once."""
    return value if isinstance(value, Tensor) else value.read(0, value.shape[0])
