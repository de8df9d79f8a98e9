"""Layouts: whatever way a checkpoint holds a parameter, the rows are the parameter's; and back."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.ops import TensorRows
from penstock.kernels.tensors import as_torch
from penstock.spec.param_table import Layout
from penstock.weights import rows as row_sources
from penstock.weights.rows import parameter_rows, tensor_rows

Tensors = dict[str, Tensor]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...]]:
    """A layout and the shape of its parameter."""
    groups, stacked = draw(st.integers(1, 3)), draw(st.booleans())
    pieces = tuple(groups * 2 * draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 3))))
    columns = draw(st.sampled_from([(), (3,), (4,)]))
    shape = (sum(pieces), *columns)
    parts = len(pieces) if groups == 1 and draw(st.booleans()) else 1
    transposed = len(shape) == 2 and draw(st.booleans())
    axis = 1 if len(shape) == 2 and groups == 1 and draw(st.booleans()) else 0
    paired = not transposed and groups == 1 and (axis == 0 or parts == 1) and draw(st.booleans())
    head = 0 if not paired else shape[0] if axis == 1 else draw(st.sampled_from([2, shape[0] if parts == 1 else 2]))
    whole = shape if axis == 0 else shape[::-1]
    sizes = pieces if parts > 1 else [sum(pieces)]
    shapes = [(*whole[:axis], size, *whole[axis + 1 :]) for size in sizes]
    stored = [(5, *(part[::-1] if transposed else part)) for part in shapes]
    layout = Layout(
        {f"t{index}": part if stacked else part[1:] for index, part in enumerate(stored)},
        axis,
        pieces,
        groups,
        transposed,
        head,
        draw(st.sampled_from(range(2, head + 1, 2))) if paired else 0,
        axis if paired else 0,
        draw(st.integers(0, 4)) if stacked else None,
    )
    return layout, whole


def stored_as(layout: Layout, whole: Tensor) -> Tensors:
    """The tensors of a checkpoint, made in the plainest way."""
    if layout.groups > 1:
        shares = [piece.unflatten(0, (layout.groups, -1)) for piece in whole.split(layout.pieces)]
        whole = torch.cat(shares, dim=1).flatten(0, 1)
    parts = whole.split(layout.pieces, dim=layout.join_axis) if len(layout.sources) > 1 else (whole,)
    if layout.paired_head:
        half, axis = layout.rotated // 2, layout.paired_axis
        order = torch.arange(layout.rotated).view(2, half).t().flatten().tolist()  # 0, half, 1, half + 1, ...
        order += range(layout.rotated, layout.paired_head)
        rotated = parts[:-1] if len(parts) > 1 else parts
        pairs = [
            part.unflatten(axis, (-1, layout.paired_head)).index_select(axis + 1, torch.tensor(order)).view_as(part)
            for part in rotated
        ]
        parts = (*pairs, *parts[len(pairs) :])
    return {name: part.t() if layout.transposed else part for name, part in zip(layout.sources, parts, strict=True)}


@settings(max_examples=300)
@given(layouts(), st.data())
def test_any_rows_of_any_layout_are_those_of_the_parameter(
    made: tuple[Layout, tuple[int, ...]], data: st.DataObject
) -> None:
    """Guards against rows of q under the name of k, whatever the order, the axis and the cut; and against a way back
    that is not the way there."""
    layout, shape = made
    whole = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    stored = stored_as(layout, whole)
    rows = parameter_rows(layout, lambda name, _: TensorRows(stored[name].contiguous()))
    assert rows.shape == shape
    for _ in range(3):
        start = data.draw(st.integers(0, shape[0] - 1))
        stop = data.draw(st.integers(start + 1, shape[0]))
        assert torch.equal(as_torch(rows.read(start, stop)), whole[start:stop])
    back = tensor_rows(layout, TensorRows(whole))
    assert list(back) == list(stored)
    for name, tensor in stored.items():
        start = data.draw(st.integers(0, len(tensor) - 1))
        stop = data.draw(st.integers(start + 1, len(tensor)))
        assert back[name].shape == tuple(tensor.shape)
        assert torch.equal(as_torch(back[name].read(start, stop)), tensor[start:stop])


def test_a_transposed_tensor_is_read_once_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a matrix on its side that is read again for every row, or is there twice."""
    monkeypatch.setattr(row_sources, "PIECE_BYTES", 2 * 4 * 5)  # two rows
    reads = []

    class Noting(TensorRows):
        def read(self, start: int, stop: int) -> Tensor:
            reads.append((start, stop))
            return super().read(start, stop)

    stored = torch.randn(7, 5, dtype=torch.float16)
    rows = row_sources.TransposedRows(Noting(stored))
    assert all(torch.equal(as_torch(rows.read(at, at + 1)), stored.t()[at : at + 1]) for at in range(5))
    assert reads == [(0, 2), (2, 4), (4, 6), (6, 7)]


def test_the_expert_is_the_layouts_own() -> None:
    """Guards against the first expert's weights in every place: the index reaches whoever finds the tensor."""
    layout = Layout({"experts": (4, 3, 2)}, 0, (3,))
    asked = []
    for index in range(4):
        parameter_rows(
            replace(layout, index=index), lambda name, at: asked.append((name, at)) or TensorRows(torch.ones(3, 2))
        )
    assert asked == [("experts", index) for index in range(4)]
