"""Layers: what they own, how they take their weights, and how the factory names them."""

import pytest
import torch

from penstock.errors import ModelLoadError
from penstock.kernels.arena import Slot
from penstock.kernels.reference import ReferenceOps
from penstock.layers.factory import LayerFactory
from penstock.layers.linear import Linear
from penstock.layers.norm import RMSNorm
from penstock.models.param_table import Parameter


def slot(columns: tuple[int, ...], dtype: torch.dtype) -> Slot:
    return Slot(columns, dtype, torch.device("cpu"))


def parameter(name: str, shape: tuple[int, ...]) -> Parameter:
    return Parameter(name, shape, {name: shape}, 0, None, None, False, 1, None)


def factory(dtype: torch.dtype = torch.float32) -> LayerFactory:
    names = {"block.proj.weight": (6, 4), "block.proj.bias": (6,), "block.other.weight": (2, 4)}
    return LayerFactory.single_device(ReferenceOps(dtype), {name: parameter(name, at) for name, at in names.items()})


def test_the_factory_finds_parameters_under_its_prefix() -> None:
    """Guards against a layer that is made with another layer's shape, or without its bias."""
    make = factory().at("block")
    assert set(make.linear("proj").state_dict()) == {"weight", "bias"}
    assert set(make.linear("other").state_dict()) == {"weight"}
    assert make.linear("other").weight.shape == (2, 4)
    with pytest.raises(ModelLoadError, match=r"block\.missing\.weight"):
        make.linear("missing")


def test_a_linear_keeps_no_second_copy_of_its_weight() -> None:
    """Guards against a model that is in memory twice, packed and raw."""
    layer = factory().at("block").linear("proj")
    assert isinstance(layer, Linear)
    layer.load({"weight": torch.ones(6, 4), "bias": torch.ones(6)})
    assert layer.weight.device.type == "meta"
    assert layer(torch.ones(1, 4)).tolist() == [[5.0] * 6]


def test_the_first_norm_has_no_branch_to_add() -> None:
    """Guards against a first block that needs a branch of zeros, and against norm and sum that disagree."""
    norm = RMSNorm(ReferenceOps(torch.float32), (4,), 1e-5, slot((4,), torch.float32))
    norm.load({"weight": torch.tensor([1.0, 2.0, 3.0, 4.0])})
    x, h = torch.randn(3, 4), torch.randn(3, 4)
    same, alone = norm.add(x, None)
    assert same is x
    alone = alone.clone()  # the next result takes its place
    assert torch.equal(alone, norm(x))
    total = x + h
    stream, normed = norm.add(x, h)
    assert torch.equal(stream, total)
    assert torch.equal(normed.clone(), norm(total))


def test_norm_weights_are_rounded_to_the_models_type() -> None:
    """Guards against a float32 checkpoint served in bfloat16 with norms of another type than Transformers'."""
    norm = RMSNorm(ReferenceOps(torch.bfloat16), (1,), 1e-5, slot((1,), torch.bfloat16))
    norm.load({"weight": torch.tensor([1.001])})
    assert norm.weight.tolist() == [1.0]
    assert norm.weight.dtype == torch.float32
