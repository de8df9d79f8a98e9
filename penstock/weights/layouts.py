"""Layouts as rows: a parameter out of the tensors that hold it, and those tensors out of the parameter.

Both ways are RowSources, so whoever reads or writes a model holds no more of it than the rows in his hands.
"""

import itertools
from collections.abc import Callable

from penstock.kernels.ops import RowSource
from penstock.spec.param_table import Layout
from penstock.weights.sources import CutRows, HalvedRows, JoinedRows, MovedRows, TransposedRows

FindRows = Callable[[str, int | None], RowSource]  # a checkpoint tensor, or one of those that it stacks


def parameter_rows(layout: Layout, find: FindRows) -> RowSource:
    """The parameter that a checkpoint holds in this layout."""
    parts = [_upright(find(name, layout.index), layout) for name in layout.sources]
    if layout.paired_head:
        parts = _halved(parts, layout, back=False)
    whole = parts[0] if len(parts) == 1 else JoinedRows(parts, layout.join_axis)
    return MovedRows(whole, joined_runs(layout.pieces, layout.groups)) if layout.groups > 1 else whole


def tensor_rows(layout: Layout, whole: RowSource) -> dict[str, RowSource]:
    """The checkpoint tensors, by name, that hold a parameter in this layout; of a stack, the parameter's slice."""
    if layout.groups > 1:
        whole = MovedRows(whole, grouped_runs(layout.pieces, layout.groups))
    parts = [whole]
    if len(layout.sources) > 1:
        ends = itertools.accumulate(layout.pieces)
        parts = [
            CutRows(whole, end - size, end, layout.join_axis) for size, end in zip(layout.pieces, ends, strict=True)
        ]
    if layout.paired_head:
        parts = _halved(parts, layout, back=True)
    return {name: _upright(part, layout) for name, part in zip(layout.sources, parts, strict=True)}


def joined_runs(pieces: tuple[int, ...], groups: int) -> list[tuple[int, int]]:
    """Where the rows of one piece after the other are in a tensor that has, group by group, a share of every piece."""
    shares = [size // groups for size in pieces]
    before = itertools.accumulate(shares, initial=0)
    whole = sum(shares)
    return [(group * whole + at, share) for share, at in zip(shares, before, strict=False) for group in range(groups)]


def grouped_runs(pieces: tuple[int, ...], groups: int) -> list[tuple[int, int]]:
    """The other way: where a tensor that goes group by group finds its rows in one piece after the other."""
    shares = [size // groups for size in pieces]
    before = list(itertools.accumulate(pieces, initial=0))
    return [(before[piece] + group * share, share) for group in range(groups) for piece, share in enumerate(shares)]


def _upright(rows: RowSource, layout: Layout) -> RowSource:
    return TransposedRows(rows) if layout.transposed else rows


def _halved(parts: list[RowSource], layout: Layout, *, back: bool) -> list[RowSource]:
    """Queries and keys are rotated; values, the last of the pieces, are not."""
    *rotated, values = parts
    return [*(HalvedRows(part, layout.paired_head, back) for part in rotated), values]
