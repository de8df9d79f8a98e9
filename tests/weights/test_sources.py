"""Rows of parameters: joined, converted, random; any slice is a slice of the whole."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.ops import RowSource, TensorRows
from penstock.kernels.tensors import as_torch
from penstock.weights import rows as row_sources
from penstock.weights.rows import JoinedRows, RoundedRows
from penstock.weights.sources import DUMMY_BLOCK, DummyRows


class InTorch:
    """A source whose rows are torch's tensors."""

    def __init__(self, source: RowSource) -> None:
        self.source, self.shape = source, source.shape

    def read(self, start: int, stop: int) -> Tensor:
        rows: Tensor = as_torch(self.source.read(start, stop))
        return rows


def check_slices(source: RowSource, whole: Tensor) -> None:
    """Every way to cut the rows gives the rows."""
    n = source.shape[0]
    assert source.shape == tuple(whole.shape)
    for start in range(n):
        for stop in range(start + 1, n + 1):
            rows = as_torch(source.read(start, stop))
            assert torch.equal(rows, whole[start:stop])
            assert rows.is_contiguous()


@pytest.mark.parametrize("axis", [0, 1])
def test_joined_rows(axis: int) -> None:
    """Guards against rows of q under the name of k where a slice crosses their border."""
    parts = [torch.randn(*(size, 4) if axis == 0 else (6, size)) for size in (3, 1, 2)]
    check_slices(JoinedRows([TensorRows(part) for part in parts], axis), torch.cat(parts, dim=axis))


def test_joined_vectors() -> None:
    """Guards against biases, which have one axis only."""
    parts = [torch.randn(3), torch.randn(2)]
    check_slices(JoinedRows([TensorRows(part) for part in parts]), torch.cat(parts))


@pytest.mark.parametrize("stored", [torch.float16, torch.float32, torch.float64, torch.bfloat16])
def test_rounded_rows(stored: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a piece that is lost at a border, and against a second rounding on the way."""
    monkeypatch.setattr(row_sources, "PIECE_BYTES", 3 * 4 * 5)  # three rows
    whole = torch.randn(10, 5, dtype=torch.float64).to(stored)
    check_slices(RoundedRows(TensorRows(whole), torch.bfloat16), whole.bfloat16())


def test_dummy_rows_are_a_function_of_name_and_place() -> None:
    """Guards against values that depend on how the rows were cut, and against two parameters that are alike."""
    source = InTorch(DummyRows("a.weight", (40, DUMMY_BLOCK // 11)))
    whole = source.read(0, 40)
    assert torch.equal(torch.cat([source.read(at, at + 1) for at in range(40)]), whole)
    assert torch.equal(source.read(3, 29), whole[3:29])
    assert torch.equal(InTorch(DummyRows("a.weight", source.shape)).read(0, 40), whole)
    assert not torch.equal(InTorch(DummyRows("b.weight", source.shape)).read(0, 40), whole)
    assert len(whole.unique(dim=0)) == 40


def test_dummy_values_keep_the_size_of_a_product() -> None:
    """Guards against activations that vanish or explode in a deep dummy model."""
    weight = InTorch(DummyRows("a.weight", (500, 900))).read(0, 500)
    assert abs(weight.std() * 900**0.5 - 1) < 0.01
    assert abs(weight.mean()) < 1e-3
    assert torch.equal(InTorch(DummyRows("model.norm.weight", (7,))).read(0, 7), torch.ones(7))
    assert 0.01 < InTorch(DummyRows("a.bias", (1000,))).read(0, 1000).std() < 0.03


def test_dummy_values_never_change() -> None:
    """Guards against another stream of random numbers, which would make measurements of two versions differ."""
    values = InTorch(DummyRows("a.weight", (2, 4))).read(0, 2) * 2
    expected = torch.tensor([[-124.5, -49.5, 47.5, -5.5], [121.5, 42.5, -97.5, -124.5]])
    torch.testing.assert_close(values * 256 / 12**0.5, expected, atol=1e-3, rtol=0)
