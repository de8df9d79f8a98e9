"""The configurations of kernels, one table per architecture: nothing is tuned on a user's machine.

A configuration is chosen by the kernel's name, the number of rows and that of columns; that of attention, by the
elements of a head. No configuration may change a bit of a result (tests/kernels/triton/test_products.py computes with
all of them), so a table is only about speed. The one of sm_90 has the best of those that tools/gpu_tune.py measured on
an H200; the others follow it as far as their shared memory and registers allow, and have not been measured.
"""

from dataclasses import dataclass
from functools import cache

from penstock.errors import NotSupportedError
from penstock.kernels.triton.launch import INTERPRETER, architecture
from penstock.kernels.triton.sizes import PROGRAM_ROWS


@dataclass(frozen=True, slots=True)
class Tile:
    """Size one step of a program: `rows` rows of x times `columns` outputs, `depth` elements of K per step.

    In attention: query rows, positions, and elements of a head. blocks: a product reads both operands as blocks, which
    not every weight allows (products.many_rows).
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    blocks: bool = False


Choices = tuple[tuple[int, int, Tile], ...]  # tiles for up to so many rows and columns; the first that fits is taken

FEW, MANY = PROGRAM_ROWS[-1], 2**31
SMALL, SMALL_BLOCKS = Tile(16, 16, 32, 4, 1), Tile(16, 16, 32, 4, 1, blocks=True)


def any_columns(*choices: tuple[int, Tile]) -> Choices:
    """Choose by rows alone."""
    return tuple((rows, MANY, tile) for rows, tile in choices)


HOPPER: dict[str, Choices] = {
    "product": (
        (16, 6144, Tile(16, 64, 256, 4, 5)),
        (16, MANY, Tile(16, 64, 128, 4, 3)),
        (32, 4096, Tile(32, 32, 512, 4, 3)),
        (32, 6144, Tile(32, 64, 128, 4, 5)),
        (32, MANY, Tile(32, 64, 128, 4, 3)),
        (64, 6144, Tile(64, 64, 128, 4, 6, blocks=True)),
        (64, MANY, Tile(64, 128, 128, 4, 4, blocks=True)),
        (128, 4096, Tile(64, 64, 128, 4, 6, blocks=True)),
        (128, 6144, Tile(64, 128, 128, 4, 4, blocks=True)),
        (128, MANY, Tile(128, 256, 64, 8, 4, blocks=True)),
        (256, 2048, Tile(64, 64, 128, 4, 6, blocks=True)),
        (256, 4096, Tile(64, 128, 128, 4, 4, blocks=True)),
        (256, MANY, Tile(128, 128, 64, 8, 6, blocks=True)),
        (512, 2048, Tile(64, 128, 128, 4, 4, blocks=True)),
        (512, 4096, Tile(128, 128, 64, 8, 6, blocks=True)),
        (512, MANY, Tile(128, 256, 64, 8, 4, blocks=True)),
        (MANY, MANY, Tile(128, 256, 64, 8, 3, blocks=True)),
        (MANY, MANY, Tile(64, 64, 128, 4, 4)),
    ),
    "product gated": (
        (16, MANY, Tile(16, 64, 128, 4, 3)),
        (32, MANY, Tile(32, 128, 128, 8, 3)),
        (64, MANY, Tile(64, 128, 64, 4, 4, blocks=True)),
        (256, MANY, Tile(128, 128, 64, 8, 4, blocks=True)),
        (512, MANY, Tile(128, 64, 64, 4, 6, blocks=True)),
        (MANY, MANY, Tile(128, 128, 64, 8, 4, blocks=True)),
        (MANY, MANY, Tile(64, 64, 64, 4, 4)),
    ),
    "product leaves": (
        (16, MANY, Tile(16, 32, 256, 4, 5)),
        (32, MANY, Tile(32, 32, 256, 4, 5)),
        (64, MANY, Tile(64, 32, 256, 4, 3)),
        (128, MANY, Tile(64, 64, 128, 4, 6, blocks=True)),
        (256, MANY, Tile(64, 128, 128, 4, 4, blocks=True)),
        (MANY, MANY, Tile(128, 128, 64, 8, 6, blocks=True)),
        (MANY, MANY, Tile(64, 64, 64, 8, 4)),
    ),
    "product float32": any_columns((MANY, Tile(16, 32, 32, 4, 3))),
    "product int8": (
        (16, 4096, Tile(16, 32, 512, 2, 5)),
        (16, 6144, Tile(16, 64, 256, 4, 5)),
        (16, MANY, Tile(16, 64, 256, 4, 3)),
        (32, 4096, Tile(32, 32, 512, 4, 5)),
        (32, 6144, Tile(32, 64, 512, 4, 3)),
        (32, MANY, Tile(32, 128, 256, 8, 3)),
        (64, MANY, Tile(64, 64, 256, 4, 6, blocks=True)),
        (128, 4096, Tile(64, 64, 256, 4, 6, blocks=True)),
        (128, MANY, Tile(64, 128, 256, 4, 4, blocks=True)),
        (512, 4096, Tile(128, 128, 128, 8, 6, blocks=True)),
        (MANY, MANY, Tile(128, 256, 128, 8, 4, blocks=True)),
        (MANY, MANY, Tile(64, 64, 128, 4, 4)),
    ),
    "product int8 gated": any_columns(
        (16, Tile(16, 64, 256, 4, 3)),
        (32, Tile(32, 128, 256, 8, 3)),
        (64, Tile(64, 128, 128, 8, 5)),
        (128, Tile(128, 64, 128, 4, 3)),
        (MANY, Tile(128, 128, 128, 8, 3, blocks=True)),
        (MANY, Tile(64, 64, 128, 4, 4)),
    ),
    "int4": any_columns((16, Tile(16, 64, 256, 4, 4)), (32, Tile(32, 64, 256, 4, 2)), (MANY, Tile(64, 64, 256, 4, 2))),
    "int4 a16": any_columns(
        (16, Tile(16, 64, 256, 4, 4)), (32, Tile(32, 64, 256, 4, 2)), (MANY, Tile(64, 64, 256, 8, 2))
    ),
    "lora_shrink": any_columns((FEW, Tile(16, 16, 256, 4, 4)), (MANY, Tile(64, 16, 128, 4, 4))),
    "lora_shrink float32": any_columns((FEW, Tile(16, 16, 32, 4, 3)), (MANY, Tile(64, 16, 32, 4, 3))),
    "lora_expand": any_columns((FEW, Tile(16, 32, 16, 4, 2)), (MANY, Tile(64, 32, 16, 4, 2))),
    "lora_expand float32": any_columns((FEW, Tile(16, 32, 16, 4, 2)), (MANY, Tile(64, 32, 16, 4, 2))),
    "attend_span": any_columns((128, Tile(16, 128, 128, 4, 4)), (MANY, Tile(16, 128, 256, 8, 1))),
    "attend_span wide": any_columns((128, Tile(64, 128, 128, 4, 3)), (MANY, Tile(32, 128, 256, 8, 1))),
    "attend_span int8": any_columns((128, Tile(16, 128, 128, 4, 2)), (MANY, Tile(16, 128, 256, 8, 2))),
    "attend_span wide int8": any_columns((MANY, Tile(32, 128, 128, 4, 2))),
    "attend_span float32": any_columns((MANY, Tile(16, 128, 256, 16, 1))),
    "attend_rows": any_columns((128, Tile(128, 128, 128, 8, 3)), (MANY, Tile(32, 128, 256, 8, 1))),
    "attend_rows int8": any_columns((128, Tile(32, 128, 128, 4, 2)), (MANY, Tile(16, 128, 256, 8, 1))),
    "attend_rows float32": any_columns((MANY, Tile(16, 128, 256, 16, 1))),
}
# mma.sync from registers, and 164 KiB of shared memory
AMPERE: dict[str, Choices] = HOPPER | {
    "product": any_columns(
        (16, Tile(16, 64, 128, 4, 4)),
        (32, Tile(32, 64, 128, 4, 4)),
        (64, Tile(64, 64, 128, 4, 4)),
        (128, Tile(128, 64, 64, 8, 4)),
        (MANY, Tile(128, 128, 64, 8, 3, blocks=True)),
    ),
    "product leaves": any_columns(
        (16, Tile(16, 64, 128, 4, 4)),
        (32, Tile(32, 64, 128, 4, 4)),
        (128, Tile(64, 64, 64, 8, 4)),
        (MANY, Tile(128, 64, 64, 8, 3, blocks=True)),
    ),
    "product gated": any_columns(
        (16, Tile(16, 64, 128, 4, 4)),
        (32, Tile(32, 64, 128, 4, 3)),
        (128, Tile(64, 64, 64, 4, 4)),
        (MANY, Tile(128, 64, 64, 8, 3, blocks=True)),
    ),
    "product int8": any_columns(
        (16, Tile(16, 64, 256, 4, 4)),
        (32, Tile(32, 64, 128, 4, 4)),
        (128, Tile(64, 64, 128, 4, 4)),
        (MANY, Tile(128, 128, 128, 8, 4, blocks=True)),
    ),
    "product int8 gated": any_columns(
        (16, Tile(16, 64, 256, 4, 3)),
        (32, Tile(32, 64, 128, 4, 4)),
        (128, Tile(64, 64, 128, 4, 3)),
        (MANY, Tile(128, 64, 64, 8, 4, blocks=True)),
    ),
    "int4": any_columns((16, Tile(16, 64, 256, 4, 4)), (MANY, Tile(32, 64, 256, 4, 3))),
    "int4 a16": any_columns((16, Tile(16, 64, 256, 4, 4)), (MANY, Tile(32, 64, 256, 4, 3))),
    "attend_span": any_columns((128, Tile(16, 128, 128, 4, 2)), (MANY, Tile(16, 128, 256, 8, 1))),
    "attend_span wide": any_columns((128, Tile(64, 128, 128, 8, 2)), (MANY, Tile(32, 128, 256, 8, 1))),
    "attend_rows": any_columns((128, Tile(64, 128, 128, 8, 2)), (MANY, Tile(32, 128, 256, 8, 1))),
}
# 99 KiB of shared memory
SMALLER: dict[str, Choices] = AMPERE | {
    "product": any_columns(
        (16, Tile(16, 64, 128, 4, 4)),
        (32, Tile(32, 64, 128, 4, 3)),
        (64, Tile(64, 64, 64, 4, 4)),
        (128, Tile(128, 64, 64, 8, 3)),
        (MANY, Tile(128, 128, 32, 8, 3, blocks=True)),
    ),
    "product leaves": any_columns(
        (16, Tile(16, 64, 128, 4, 4)),
        (32, Tile(32, 64, 128, 4, 3)),
        (128, Tile(64, 64, 64, 8, 3)),
        (MANY, Tile(128, 64, 32, 8, 3, blocks=True)),
    ),
    "product gated": any_columns(
        (16, Tile(16, 64, 64, 4, 4)), (128, Tile(64, 64, 64, 4, 3)), (MANY, Tile(128, 64, 32, 8, 3, blocks=True))
    ),
    "product int8": any_columns(
        (16, Tile(16, 64, 256, 4, 3)),
        (32, Tile(32, 64, 128, 4, 4)),
        (128, Tile(64, 64, 128, 4, 3)),
        (MANY, Tile(128, 128, 64, 8, 3, blocks=True)),
    ),
    "product int8 gated": any_columns(
        (16, Tile(16, 64, 128, 4, 4)),
        (32, Tile(32, 64, 128, 4, 4)),
        (128, Tile(64, 64, 128, 4, 3)),
        (MANY, Tile(128, 64, 64, 8, 3, blocks=True)),
    ),
    "int4": any_columns((16, Tile(16, 64, 256, 4, 3)), (MANY, Tile(32, 64, 256, 4, 3))),
    "int4 a16": any_columns((16, Tile(16, 64, 256, 4, 3)), (MANY, Tile(32, 64, 256, 4, 3))),
}
WIDER: Choices = any_columns((MANY, Tile(32, 128, 256, 4, 1)))
INTERPRETED: dict[str, Choices] = {
    # in float32, items have 16 rows there, too: there is no wide attend_span for it
    name: WIDER if name in ("attend_rows", "attend_rows int8") else any_columns((24, SMALL), (MANY, SMALL_BLOCKS))
    for name in HOPPER
}
TABLES: dict[int, dict[str, Choices]] = {
    INTERPRETER: INTERPRETED,
    80: AMPERE,
    86: SMALLER,
    89: SMALLER,
    90: HOPPER,
    # items of so few rows that all of attention is computed by mma.sync: nobody has compared its bits with tcgen05's
    100: HOPPER
    | {name: AMPERE[name] for name in ("int4", "int4 a16")}
    | {"attend_rows": any_columns((128, Tile(32, 128, 128, 8, 3)), (MANY, Tile(32, 128, 256, 8, 1)))},
    120: SMALLER,
}


def tile(kernel: str, rows: int, columns: int = 1, *, blocks: bool = False) -> Tile:
    """Choose the configuration of a kernel for a number of rows and columns, or for the elements of a head.

    blocks: tiles whose operands are read as blocks are allowed.

    Raises:
        NotSupportedError: the device is older than every table.
    """
    allowed = [choice for choice in table_of(architecture())[kernel] if blocks or not choice[2].blocks]
    return next((found for most, widest, found in allowed if rows <= most and columns <= widest), allowed[-1][2])


@cache
def table_of(architecture: int) -> dict[str, Choices]:
    """Find the table of an architecture: that of the newest one which is not newer."""
    known = [number for number in TABLES if number != INTERPRETER and number <= architecture]
    if architecture != INTERPRETER and not known:
        raise NotSupportedError(
            f"device: compute capability {architecture / 10}; 8.0 or more is needed", param="device"
        )
    return TABLES[max(known, default=INTERPRETER)]
