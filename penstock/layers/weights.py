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

    def state(self) -> dict[str, Tensor]:
        """What `load` made of the values: all that computing needs, by name."""
        return {name: value.data for name, value in self.named_parameters(recurse=False)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Instead of `load`: take what `state` of the same layer was, and keep these tensors.

        Raises:
            ValueError: it is not of this layer.
        """
        declared = {name: tuple(value.shape) for name, value in self.named_parameters(recurse=False)}
        if declared != {name: tuple(value.shape) for name, value in state.items()}:
            raise ValueError(f"its parameters are {declared}")
        for name, value in state.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def forget(self) -> None:
        """Let go of what `load` made."""
        for name, value in self.named_parameters(recurse=False):
            self.register_parameter(name, nn.Parameter(value.to("meta"), requires_grad=False))


def whole(value: Tensor | RowSource) -> Tensor:
    """All of a parameter's value at once."""
    return value if isinstance(value, Tensor) else value.read(0, value.shape[0])
