"""WeightLayer: a module that owns parameters, on the meta device until its weights arrive.

Parameters exist so that a model's state_dict has the names of its parameter table. A layer need not keep their values:
a product passes them to the backend, which packs them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from penstock.kernels.ops import RowSource


class WeightLayer(nn.Module):
    """Base of all layers with parameters."""

    def declare(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Register a parameter of this name, without memory."""
        self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False))

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        """Take the values of all declared parameters, by name, of any float type. Called once, at first."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """Return what `load` made of the values: all tensors that computing needs, by name."""
        return {name: value.data for name, value in self.named_parameters(recurse=False)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` of the same layer returned, instead of `load`, and keep these tensors.

        Raises:
            ValueError: the state is another layer's.
        """
        declared = {name: tuple(value.shape) for name, value in self.named_parameters(recurse=False)}
        if declared != {name: tuple(value.shape) for name, value in state.items()}:
            raise ValueError(f"its parameters are {declared}")
        for name, value in state.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def forget(self) -> None:
        """Free what `load` made."""
        for name, value in self.named_parameters(recurse=False):
            self.register_parameter(name, nn.Parameter(value.to("meta"), requires_grad=False))


def whole(value: Tensor | RowSource) -> Tensor:
    """Return a parameter's value as one tensor."""
    return value if isinstance(value, Tensor) else value.read(0, value.shape[0])
