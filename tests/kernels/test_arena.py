"""Buffers: one place for few rows, growth for many, and no slot for two kinds of result."""

from penstock.kernels.tensors import (
    BFLOAT16,
    FIXED_ROWS,
    NAMES,
    OWN_PAGES,
    UINT8,
    Arena,
    Array,
    Buffers,
    address_of,
    empty,
)


def allocate(shape: tuple[int, ...], dtype: str) -> Array:
    array: Array = empty(shape, NAMES[dtype])
    return array


def test_few_rows_never_move() -> None:
    """Guards against a recorded program whose buffers are moved by a longer step."""
    slot = Arena(allocate).slot("a", (3, 2), "bfloat16")
    first = slot(2)
    assert (first.shape, first.dtype) == ((2, 3, 2), BFLOAT16)
    addresses = {address_of(slot(rows)) for rows in (1, FIXED_ROWS, 7)}
    assert slot(FIXED_ROWS + 1).shape == (FIXED_ROWS + 1, 3, 2)
    assert slot(5).shape == (5, 3, 2)
    assert addresses | {address_of(slot(2))} == {address_of(first)}


def test_many_rows_are_allocated_once() -> None:
    """Guards against memory that is asked for in every step."""
    slot = Arena(allocate).slot("a", (4,), "float32")
    big = slot(500)
    assert slot(500) is big
    slot(3)
    assert address_of(slot(400)) == address_of(big)
    assert slot(501).shape == (501, 4)


def test_a_slot_has_one_kind_of_rows() -> None:
    """Guards against layers of different widths that write to one buffer."""
    arena = Arena(allocate)
    assert arena.slot("a", (4,), "float32") is arena.slot("a", (4,), "float32")
    assert arena.slot("b", (4,), "float32") is not arena.slot("a", (4,), "float32")
    for columns, dtype in (((5,), "float32"), ((4,), "bfloat16")):
        other = arena.slot("a", columns, dtype)
        assert address_of(other(1)) != address_of(arena.slot("a", (4,), "float32")(1))
        assert other is arena.slot("a", columns, dtype)
        assert other in arena.slots


def test_buffers_use_pages_again_but_only_freed_ones() -> None:
    """Guards against rows that change when others are read, as long as any view of them is used, and against new pages
    for each read."""
    buffers = Buffers()
    first = buffers.empty((4, OWN_PAGES), UINT8)
    first[:] = 1
    part, where = first[1:3, 5:].view(), address_of(first)
    del first
    second = buffers.empty((OWN_PAGES,), UINT8)
    second[:] = 2
    assert (part == 1).all()
    del part
    third = buffers.empty((OWN_PAGES // 4, 2), BFLOAT16)
    assert address_of(third) == where
    assert (second == 2).all()
    del third
    buffers.clear()
    assert buffers.empty((OWN_PAGES // 2,), UINT8).shape == (OWN_PAGES // 2,)
