"""Layers: what they own, how they take their weights, and how the factory names them."""

from dataclasses import replace

import pytest
import torch

from penstock.errors import ModelLoadError, NotSupportedError
from penstock.kernels.backends import load_ops
from penstock.kernels.ops import TensorRows
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.scheme import Scheme
from penstock.kernels.tensors import Slot
from penstock.layers.factory import LayerFactory
from penstock.layers.weights import Linear, RMSNorm
from penstock.spec.param_table import Layout, Parameter
from tests.kernels.packed import levels


def slot(columns: tuple[int, ...], dtype: str) -> Slot:
    return Slot(columns, dtype, ReferenceOps(torch.float32).empty, 1)


def parameter(name: str, shape: tuple[int, ...]) -> Parameter:
    return Parameter(name, shape, (Layout({name: shape}),), None, None, False, 1, None)


def factory(dtype: torch.dtype = torch.float32) -> LayerFactory:
    names = {"block.proj.weight": (6, 4), "block.proj.bias": (6,), "block.other.weight": (2, 4)}
    return LayerFactory.single_device(ReferenceOps(dtype), {name: parameter(name, at) for name, at in names.items()})


def test_the_factory_finds_parameters_under_its_prefix() -> None:
    """Guards against a layer that is made with another layer's shape, or without its bias."""
    make = factory().at("block")
    assert make.linear("proj").shapes == {"weight": (6, 4), "bias": (6,)}
    assert make.linear("other").shapes == {"weight": (2, 4)}
    with pytest.raises(ModelLoadError, match=r"block\.missing\.weight"):
        make.linear("missing")


def test_a_linear_keeps_no_second_copy_of_its_weight() -> None:
    """Guards against a model that is in memory twice, packed and raw."""
    layer = factory().at("block").linear("proj")
    assert isinstance(layer, Linear)
    layer.load({"weight": torch.ones(6, 4), "bias": torch.ones(6)})
    assert not hasattr(layer, "weight")
    assert layer(torch.ones(1, 4)).tolist() == [[5.0] * 6]


def test_layers_of_the_same_name_share_a_buffer() -> None:
    """Guards against results that are allocated anew, against buffers of which there is one a layer, and against two
    kinds of result in one."""
    names = {f"blocks.{layer}.{name}.weight": (6, 4) for layer in range(2) for name in ("up", "down")}
    make = LayerFactory.single_device(
        ReferenceOps(torch.float32), {name: parameter(name, shape) for name, shape in names.items()}
    )
    up, down = ([make.at(f"blocks.{layer}").linear(name) for layer in range(2)] for name in ("up", "down"))
    for layer in (*up, *down):
        layer.load({"weight": torch.ones(6, 4)})
    results = [layer(torch.ones(3, 4)) for layer in (*up, *down)]
    assert results[0] is results[1]
    assert results[2] is results[3]
    assert results[0].data_ptr() != results[2].data_ptr()


@pytest.mark.parametrize(
    ("scheme", "quant", "expected"),
    [
        ("int4", True, "int4"),
        ("int4", "int8", "int8"),
        ("int4", False, None),
        ("int4-a16", "int8", "int8-x2"),
        ("int8-x2", "int8", "int8-x2"),
        ("int8", True, "int8"),
        (None, True, None),
    ],
)
def test_the_table_says_what_is_quantised(scheme: str | None, quant: bool | str, expected: str | None) -> None:
    """Guards against a head in int4, a weight that may not be quantised, and one that is forgotten."""
    table = {"a.weight": replace(parameter("a.weight", (6, 4)), quant=quant)}
    make = LayerFactory.single_device(ReferenceOps(torch.float32), table, scheme=Scheme.parse(scheme))
    found = make.linear("a").spec.packing.scheme
    assert (None if found is None else found.name) == expected


def test_leaves_are_cut_between_units() -> None:
    """Guards against leaves that depend on more than the table: tensor parallelism must find the same ones."""
    table = {"a.weight": replace(parameter("a.weight", (6, 60)), leaves=8, unit_size=20)}
    spec = LayerFactory.single_device(ReferenceOps(torch.float32), table).linear("a").spec
    assert spec.packing.leaf_ends == (0, 0, 20, 20, 20, 40, 40, 60)
    assert (
        LayerFactory.single_device(ReferenceOps(torch.float32), {"a.weight": parameter("a", (6, 60))})
        .linear("a")
        .spec.packing.leaf_ends
        == ()
    )


class Source:
    """Rows that count how often they are read."""

    shape = (6, 4)

    def __init__(self) -> None:
        self.reads = 0

    def read(self, start: int, stop: int) -> torch.Tensor:
        self.reads += 1
        return torch.ones(stop - start, 4)


def test_layers_take_rows_from_a_source() -> None:
    """Guards against a loader that must read whole tensors."""
    layer, source = factory().at("block").linear("proj"), Source()
    layer.load({"weight": source, "bias": TensorRows(torch.ones(6))})
    assert source.reads == 1
    assert layer(torch.ones(1, 4)).tolist() == [[5.0] * 6]
    with pytest.raises(NotSupportedError):
        layer.restore({})


def test_the_first_norm_has_no_branch_to_add() -> None:
    """Guards against a first block that needs a branch of zeros, and against norm and sum that disagree."""
    norm = RMSNorm(ReferenceOps(torch.float32), (4,), 1e-5, slot((4,), "float32"))
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
    norm = RMSNorm(ReferenceOps(torch.bfloat16), (1,), 1e-5, slot((1,), "bfloat16"))
    norm.load({"weight": torch.tensor([1.001])})
    assert norm.weight.tolist() == [1.0]
    assert norm.weight.dtype == torch.float32


@pytest.mark.parametrize("kernels", ["reference", *(["cpu"] if levels() else [])])
def test_an_exact_weight_is_not_rounded(kernels: str) -> None:
    """Guards against a router that chooses other experts than the weights of its checkpoint do, against a weight of the
    model's own type that gets other bits or more products, and against packed weights that lose a part."""
    parameters = {"gate.weight": parameter("gate.weight", (6, 64))}
    make = LayerFactory.single_device(load_ops(kernels, torch.bfloat16), parameters)
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(shape, generator=generator) for shape in ((6, 64), (3, 64)))
    x = x.bfloat16()
    plain, exact = make.linear("gate"), make.linear("gate", is_exact=True)
    for layer in (plain, exact):
        layer.load({"weight": weight})
    expected = x.double() @ weight.double().T
    rounded, found = (layer(x).clone() for layer in (plain, exact))
    assert (found - expected).abs().max() < 1e-5
    assert (rounded - expected).abs().max() > 1e-3
    if kernels == "cpu":
        again = make.linear("gate", is_exact=True)
        again.restore(exact.state())
        assert torch.equal(again(x), found)
    for layer in (plain, exact):
        layer.forget()
        layer.load({"weight": weight.bfloat16()})
    assert not exact._rests
    assert torch.equal(plain(x).clone(), exact(x))
