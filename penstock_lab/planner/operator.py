"""On-chip budgets of an attention operator: Huawei's IncreFlashAttention, whose buffer is cut into fixed blocks.

One core has a matrix unit and vector units. The keys of a sequence go through it in tiles:

    mm1   scores = query x keys      matrix unit, or vector units     G x S x D multiply-adds
    vec1  scale, softmax             vector units                     G x S elements
    mm2   result = scores x values   matrix unit, or vector units     G x S x D multiply-adds
    vec2  rescale, add               vector units                     G x D elements

Tiles are as long as the blocks allow; the vector units take at most one block at once, and as many rows as the blocks
for maxima and sums hold. No torch.
"""

from dataclasses import dataclass

from penstock import InvalidRequestError
from penstock.errors import check_choice, check_int
from penstock_lab.planner.machines import OnChip

KIB = 1024
UNIFIED_BUFFER = {  # bytes of each block, as the operator's document lists them
    "inputQue1": 32 * KIB,
    "inputQue2": 16 * KIB,
    "outputQue1": 16 * KIB,
    "outputQue2": 8 * KIB,
    "tmpBuff1": 32 * KIB,
    "tmpBuff2": 32 * KIB,
    "tmpBuff3": 2 * KIB,
    "antiqScaleBuff": 2 * KIB,
    "antiqOffsetBuff": 2 * KIB,
    "qAmaxBuff": 2 * KIB + 256,
    "softmaxResAmaxBuff": 2 * KIB + 256,
    "qRowSumBuff": 2 * KIB + 256,
    "softmaxResRowSumBuff": 2 * KIB + 256,
    "softmaxMaxBuff": 2 * KIB,
    "softmaxExpBuff": 2 * KIB,
    "softmaxSumBuff": 2 * KIB,
    "bmm1PageAttentionDataBuff": 64,
    "bmm2PageAttentionDataBuff": 64,
}
TILE_UNIT = 128  # the number of keys in a tile is a multiple of this
MAX_TILE = 8192
FLOAT_BYTES = 4
STATISTIC_BYTES = 32  # of a row's maximum or sum, which take a unit of the vector units
SOFTMAX_OPERATIONS = 8  # per score: scale, mask, maximum, difference, exponential, sum, two roundings
UPDATE_OPERATIONS = 2  # per element of a result: rescale, add
MODES = {"C1_V2": (1, 2), "all-vector": (0, 2), "C1_V1": (1, 1)}  # number of matrix and of vector units in use


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles into which a group of query rows is cut.

    Attributes:
        keys: number of keys in a tile (SInner).
        rows: query rows that the vector units take at once; they take the group in `portions` passes.
    """

    keys: int
    rows: int
    portions: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The times in which one core computes one head of a sequence."""

    mode: str
    tiles: int
    matrix_seconds: float
    vector_seconds: float
    seconds: float


def check_buffers(buffer_bytes: int) -> int:
    """Sum up the bytes of all blocks of the unified buffer.

    Raises:
        InvalidRequestError: the buffer is smaller; the message names the first block that does not fit.
    """
    used = 0
    for name, size in UNIFIED_BUFFER.items():
        used += size
        if used > buffer_bytes:
            message = f"on_chip.buffer_bytes: {name} ends at {used}, {used - buffer_bytes} bytes beyond {buffer_bytes}"
            raise InvalidRequestError(message, param="hardware")
    return used


def tiles(group: int, head_dim: int, block_bytes: int = UNIFIED_BUFFER["tmpBuff1"]) -> Tiles:
    """Cut a group of query rows into tiles whose float32 scores and results stay within a block.

    Raises:
        InvalidRequestError: a block cannot hold one row of the shortest tile, or one row of the result.
    """
    check_int("group", group, 1, 2**20)
    check_int("head_dim", head_dim, 1, 2**20)
    columns = block_bytes // FLOAT_BYTES
    if columns < max(TILE_UNIT, head_dim):
        needed = FLOAT_BYTES * max(TILE_UNIT, head_dim)
        raise InvalidRequestError(
            f"block_bytes: {block_bytes} bytes cannot hold a row, which takes {needed}", param="hardware"
        )
    keys = min(max(columns // group // TILE_UNIT, 1) * TILE_UNIT, MAX_TILE)
    rows = min(columns // max(keys, head_dim), UNIFIED_BUFFER["softmaxMaxBuff"] // STATISTIC_BYTES, group)
    return Tiles(keys, rows, -(-group // rows))


def schedule(chip: OnChip, group: int, head_dim: int, context: int, mode: str) -> Schedule:
    """Compute the time in which one core goes through the keys of one head, tile by tile.

    The matrix unit works on the next tile while the vector units work on this one, so after the first tile only the
    longer of the two times counts. Without a matrix unit, the vector units do both parts one after the other.
    """
    check_choice("mode", mode, tuple(MODES))
    matrix_units, vectors = MODES[mode]
    keys = tiles(group, head_dim).keys
    count = -(-context // keys)
    multiply = 2.0 * 2.0 * group * keys * head_dim
    work = float(SOFTMAX_OPERATIONS * group * keys + UPDATE_OPERATIONS * group * head_dim)
    vectors = min(vectors, chip.vectors_per_matrix)
    vector = work / (vectors * chip.vector_flops)
    if not matrix_units:
        vector += multiply / (vectors * chip.vector_flops)
        return Schedule(mode, count, 0.0, count * vector, count * vector)
    matrix = multiply / chip.matrix_flops
    seconds = matrix + vector + (count - 1) * max(matrix, vector)
    return Schedule(mode, count, count * matrix, count * vector, seconds)
