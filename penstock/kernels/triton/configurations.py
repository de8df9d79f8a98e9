"""The configurations of kernels, one table per architecture: nothing is tuned on a user's machine.

A configuration is chosen by the kernel's name and the number of rows alone; that of attention, by the elements of a
head. No configuration may change a bit of a
result (tests/kernels/triton/test_products.py computes with all of them), so a table is only about speed. The one of
sm_90 has the best of those measured on an H200; the others follow it as far as their shared memory and registers allow,
and have not been measured.
"""

from dataclasses import dataclass
from functools import cache

from penstock.errors import NotSupportedError
from penstock.kernels.triton.launch import INTERPRETER, architecture


@dataclass(frozen=True, slots=True)
class Tile:
    """Size one step of a program: `rows` rows of x times `columns` outputs, `depth` elements of K per step.

    In attention: query rows, positions, and elements of a head.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


Choices = tuple[tuple[int, Tile], ...]  # tiles for up to so many rows, ascending; the last one is for any number

MANY = 2**31
SMALL = Tile(16, 16, 32, 4, 1)
HOPPER: dict[str, Choices] = {
    "few_rows": (
        (16, Tile(16, 64, 128, 4, 4)),
        (32, Tile(32, 64, 128, 4, 4)),
        (64, Tile(64, 64, 128, 4, 4)),
        (MANY, Tile(128, 64, 64, 8, 4)),
    ),
    "few_rows leaves": ((16, Tile(16, 64, 128, 4, 4)), (32, Tile(32, 64, 128, 4, 4)), (MANY, Tile(64, 64, 64, 8, 4))),
    "few_rows gated": (
        (16, Tile(16, 64, 128, 4, 4)),
        (32, Tile(32, 64, 128, 4, 3)),
        (MANY, Tile(64, 64, 64, 4, 4)),
    ),
    "few_rows float32": ((MANY, Tile(16, 32, 32, 4, 3)),),
    "few_rows int8": ((16, Tile(16, 64, 256, 4, 4)), (32, Tile(32, 64, 128, 4, 4)), (MANY, Tile(64, 64, 128, 4, 4))),
    "int4": ((16, Tile(16, 64, 256, 4, 4)), (32, Tile(32, 64, 256, 4, 3)), (MANY, Tile(64, 64, 256, 8, 3))),
    "many_rows": ((MANY, Tile(128, 256, 64, 8, 4)),),
    "many_rows gated": ((MANY, Tile(128, 128, 64, 8, 4)),),
    "many_rows leaves": ((MANY, Tile(128, 128, 64, 8, 4)),),
    "many_rows int8": ((MANY, Tile(128, 128, 128, 8, 4)),),
    "many_rows float32": ((MANY, Tile(16, 32, 32, 4, 3)),),
    "attend_span": ((128, Tile(16, 128, 128, 4, 3)), (MANY, Tile(16, 128, 256, 8, 1))),
    "attend_span wide": ((128, Tile(64, 128, 128, 4, 3)), (MANY, Tile(32, 128, 256, 8, 1))),
    "attend_span int8": ((128, Tile(16, 128, 128, 4, 3)), (MANY, Tile(16, 128, 256, 8, 2))),
    "attend_span wide int8": ((MANY, Tile(32, 128, 128, 4, 2)),),
    "attend_span float32": ((MANY, Tile(16, 128, 256, 16, 1)),),
    "attend_rows": ((128, Tile(128, 128, 128, 8, 3)), (MANY, Tile(32, 128, 256, 8, 1))),
    "attend_rows int8": ((128, Tile(32, 128, 128, 4, 2)), (MANY, Tile(16, 128, 256, 8, 1))),
    "attend_rows float32": ((MANY, Tile(16, 128, 256, 16, 1)),),
}
# mma.sync from registers, and 164 KiB of shared memory
AMPERE: dict[str, Choices] = HOPPER | {
    "int4": ((16, Tile(16, 64, 256, 4, 4)), (MANY, Tile(32, 64, 256, 4, 3))),
    "many_rows": ((MANY, Tile(128, 128, 64, 8, 3)),),
    "many_rows gated": ((MANY, Tile(128, 64, 64, 8, 3)),),
    "many_rows leaves": ((MANY, Tile(128, 64, 64, 8, 3)),),
    "attend_span": ((128, Tile(16, 128, 128, 4, 2)), (MANY, Tile(16, 128, 256, 8, 1))),
    "attend_span wide": ((128, Tile(64, 128, 128, 8, 2)), (MANY, Tile(32, 128, 256, 8, 1))),
    "attend_rows": ((128, Tile(64, 128, 128, 8, 2)), (MANY, Tile(32, 128, 256, 8, 1))),
}
# 99 KiB of shared memory
SMALLER: dict[str, Choices] = AMPERE | {
    "few_rows": (
        (16, Tile(16, 64, 128, 4, 4)),
        (32, Tile(32, 64, 128, 4, 3)),
        (64, Tile(64, 64, 64, 4, 4)),
        (MANY, Tile(128, 64, 64, 8, 3)),
    ),
    "few_rows leaves": ((16, Tile(16, 64, 128, 4, 4)), (32, Tile(32, 64, 128, 4, 3)), (MANY, Tile(64, 64, 64, 8, 3))),
    "few_rows gated": ((16, Tile(16, 64, 64, 4, 4)), (MANY, Tile(64, 64, 64, 4, 3))),
    "few_rows int8": ((16, Tile(16, 64, 256, 4, 3)), (32, Tile(32, 64, 128, 4, 4)), (MANY, Tile(64, 64, 128, 4, 3))),
    "int4": ((16, Tile(16, 64, 256, 4, 3)), (MANY, Tile(32, 64, 256, 4, 3))),
    "many_rows": ((MANY, Tile(128, 128, 32, 8, 3)),),
    "many_rows gated": ((MANY, Tile(128, 64, 32, 8, 3)),),
    "many_rows leaves": ((MANY, Tile(128, 64, 32, 8, 3)),),
    "many_rows int8": ((MANY, Tile(128, 128, 64, 8, 3)),),
}
WIDER: Choices = ((MANY, Tile(32, 128, 256, 4, 1)),)
INTERPRETED: dict[str, Choices] = {
    # in float32, items have 16 rows there, too: there is no wide attend_span for it
    name: WIDER if name in ("attend_rows", "attend_rows int8") else ((MANY, SMALL),)
    for name in HOPPER
}
TABLES: dict[int, dict[str, Choices]] = {
    INTERPRETER: INTERPRETED,
    80: AMPERE,
    86: SMALLER,
    89: SMALLER,
    90: HOPPER,
    # items of so few rows that all of attention is computed by mma.sync: nobody has compared its bits with tcgen05's
    100: HOPPER | {"attend_rows": ((128, Tile(32, 128, 128, 8, 3)), (MANY, Tile(32, 128, 256, 8, 1)))},
    120: SMALLER,
}


def few() -> int:
    """Return for how many rows, at most, a kernel for few rows is the faster one."""
    return 24 if architecture() == INTERPRETER else 128


def tile(kernel: str, rows: int) -> Tile:
    """Choose the configuration of a kernel for a number of rows, or for the elements of a head.

    Raises:
        NotSupportedError: the device is older than every table.
    """
    return next(found for most, found in table_of(architecture())[kernel] if rows <= most)


@cache
def table_of(architecture: int) -> dict[str, Choices]:
    """Find the table of an architecture: that of the newest one which is not newer."""
    known = [number for number in TABLES if number != INTERPRETER and number <= architecture]
    if architecture != INTERPRETER and not known:
        raise NotSupportedError(
            f"device: compute capability {architecture / 10}; 8.0 or more is needed", param="device"
        )
    return TABLES[max(known, default=INTERPRETER)]
