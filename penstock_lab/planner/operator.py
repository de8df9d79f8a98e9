"""Huawei's IncreFlashAttention operator, by the text of its document: its on-chip buffers, its times and its tiling.

One core has a matrix unit and vector units. The keys of a sequence go through it in tiles:

    mm1   scores = query x keys      matrix unit, or vector units     G x S x D multiply-adds
    vec1  scale, softmax             vector units                     G x S elements
    mm2   result = scores x values   matrix unit, or vector units     G x S x D multiply-adds
    vec2  rescale, add               vector units                     G x D elements

Tiles are as long as the blocks of the buffer allow; the vector units take at most one block at once, and as many rows
as the blocks for maxima and sums hold.

What is decided before the operator runs (`plan_call`) follows from the shape of a call and a number of cores: the
template, whether sequences are split (flash decoding), where each core begins, the sizes of the workspace, and the
tiling key. The key is 64 bits wide; most parameters of a template have a decimal digit of their own:

    digit 0    layout: 0 BNSD, 1 BSH or BSND
    digit 1    type of the query: 0 float16, 2 bfloat16
    digit 2    type of the cache: 0 float16, 2 bfloat16, 3 int8
    digit 3    type of the output: 0 float16, 2 bfloat16, 3 int8
    digit 4    as digit 1
    digit 5    bit 0: split; bit 1: paged; bit 2: int8 with scales per token
    digit 15   ratio of matrix and vector units: 0 1:2, 1 vector units only, 2 1:1
    digit 16   1: no shared prefix, 2: shared prefix

The engine's own plans have another key (kernels/attention/plan.py). No torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from penstock import InvalidRequestError
from penstock.errors import check_choice, check_int, invalid, unsupported
from penstock.kernels.attention.items import partition
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
SPLIT_BELOW = 0.4  # sequences are split if there are fewer (sequence, kv head) pairs than this share of the cores
SLICES = {0: 3, 1: 2}  # inner_precise -> the number of int8 rows that represent a row multiplied with int8
HALF_BYTES, INT8_BYTES = 2, 1
LSE_FLOATS = 8  # of each row, so that a row is a unit of 32 bytes
CALLBACK_BYTES = 64
ADVISED_BLOCK_SIZE = 128
BOTH, VECTORS_ONLY, ONE_VECTOR = MODES  # the perf modes 0, 1 and 2

LAYOUTS = {"BNSD": 0, "BSH": 1, "BSND": 1}
TYPES = {"float16": 0, "bfloat16": 2, "int8": 3}
FLOATS = ("float16", "bfloat16")
SPLIT, PAGED, PER_TOKEN = 1, 2, 4
PERF_UNIT, PREFIX_UNIT = 10**15, 10**16


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


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """The shape of a call and the kinds of its tensors.

    Attributes:
        lengths: tokens of each sequence.
        query, cache, output: names of types.
        block_size: 0: not paged.
        per_token: an int8 cache has a scale per token.
        prefix: all sequences share a prefix.
        inner_precise: 0 high precision, 1 high performance.
    """

    lengths: Sequence[int]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layout: str = "BSH"
    query: str = "float16"
    cache: str = "float16"
    output: str = "float16"
    block_size: int = 0
    per_token: bool = False
    prefix: bool = False
    inner_precise: int = 0

    def __post_init__(self) -> None:
        check_choice("input_layout", self.layout, tuple(LAYOUTS))
        check_choice("query", self.query, FLOATS)
        check_choice("key", self.cache, tuple(TYPES))
        check_choice("output", self.output, tuple(TYPES))
        check_choice("inner_precise", self.inner_precise, tuple(SLICES))

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """The number of int8 rows that represent a query row; 1 for other caches."""
        return SLICES[self.inner_precise] if self.cache == "int8" else 1


@dataclass(frozen=True, slots=True)
class Tiling:
    """What is decided before the operator runs.

    Attributes:
        key: the tiling key.
        perf_mode: the units in use, one of operator.MODES.
        splits: parts into which the longest sequence is cut; 1: no flash decoding.
        split_size: tokens of each part but the last of a sequence.
        keys: keys of an inner tile (SinnerSize).
        starts: the first block of each core, then the number of blocks: (sequence, kv head, part), the last varying
            fastest.
        workspace: bytes by the name of the buffer, as the document lists them.
        advice: what the document advises against, one sentence; "" if nothing.
    """

    key: int
    perf_mode: str
    splits: int
    split_size: int
    keys: int
    starts: Sequence[int]
    workspace: dict[str, int]
    advice: str

    @property
    def workspace_bytes(self) -> int:
        return sum(self.workspace.values())

    def parts(self, length: int) -> list[tuple[int, int]]:
        """List the parts of a sequence that have tokens, as (first, last + 1): short sequences have fewer."""
        return [(first, min(first + self.split_size, length)) for first in range(0, length, self.split_size)]


def plan_call(
    call: OperatorCall,
    num_cores: int,
    *,
    split_below: float = SPLIT_BELOW,
    perf_mode: str | None = None,
    vectors_only: bool = False,
) -> Tiling:
    """Decide how a number of cores compute a call.

    perf_mode: None: by the rule of `template`, which never chooses "C1_V1": the document has no rule for it.
    vectors_only: the device multiplies with its vector units only.

    Raises:
        InvalidRequestError: an argument is out of range, or the device cannot do what perf_mode says.
    """
    check_int("num_cores", num_cores, 1, 2**16)
    chosen = template(call, vectors_only=vectors_only)
    if perf_mode is not None:
        check_choice("perf_mode", perf_mode, tuple(MODES))
        if vectors_only and perf_mode != VECTORS_ONLY:
            raise invalid("perf_mode", f"this device has {VECTORS_ONLY} only")
        chosen = perf_mode
    pairs, longest = len(call.lengths) * call.num_kv_heads, max(call.lengths, default=0)
    splits = num_splits(pairs, num_cores, split_below)
    size = max(-(-longest // splits), 1)
    keys = tiles(call.group, call.head_dim).keys
    loads = [
        min(max(length - first, 0), size)
        for length in call.lengths
        for _ in range(call.num_kv_heads)
        for first in range(0, splits * size, size)
    ]
    key = encode_tiling_key(
        call.layout, (call.query, call.cache, call.output), perf_mode=chosen, split=splits > 1,
        paged=call.block_size > 0, per_token=call.per_token, prefix=call.prefix,
    )  # fmt: skip
    advice = ""
    if call.block_size not in (0, ADVISED_BLOCK_SIZE):
        advice = f"block_size {call.block_size}: {ADVISED_BLOCK_SIZE} is advised"
    starts = partition(loads, num_cores)
    return Tiling(key, chosen, splits, size, keys, starts, workspace(call, num_cores, keys, splits), advice)


def num_splits(pairs: int, num_cores: int, split_below: float = SPLIT_BELOW) -> int:
    """Count the parts of a sequence for a number of (sequence, kv head) pairs: 1, or as many as give each core one."""
    few = 0 < pairs < Fraction(str(split_below)) * num_cores
    return max(num_cores // pairs, 1) if few else 1


def template(call: OperatorCall, *, vectors_only: bool = False) -> str:
    """Choose the perf mode: vector units only on a device that uses no others, and for float16 throughout, without
    blocks and groups; matrix units beside two vector units otherwise."""
    plain = {call.query, call.cache, call.output} == {"float16"}
    alone = vectors_only or (plain and call.block_size == 0 and call.group == 1)
    return VECTORS_ONLY if alone else BOTH


def workspace(call: OperatorCall, num_cores: int, keys: int, splits: int) -> dict[str, int]:
    """Compute the bytes of each buffer of the workspace by the document's formulae; 0 if a call does not use it."""
    rows, group, dim = call.rows, call.group, call.head_dim
    parts = len(call.lengths) * call.num_kv_heads * group * splits if splits > 1 else 0
    query_rows = rows * group * dim * INT8_BYTES * num_cores if call.cache == "int8" else 0
    callback = CALLBACK_BYTES if call.block_size else 0
    return {
        "mm1ResGm": rows * group * keys * FLOAT_BYTES * num_cores,
        "vec1ResGm": rows * group * keys * HALF_BYTES * num_cores,
        "mm2ResGm": rows * group * dim * FLOAT_BYTES * num_cores,
        "vec2ResGm": rows * group * dim * FLOAT_BYTES * num_cores,
        "queryPreProcessResGm": query_rows,
        "accumOutGm": parts * dim * FLOAT_BYTES,
        "logSumExpGm": parts * LSE_FLOATS * FLOAT_BYTES,
        "bmm1CallBackDataGm": callback,
        "bmm2CallBackDataGm": callback,
    }


def encode_tiling_key(
    layout: str, types: tuple[str, str, str], *, perf_mode: str, split: bool, paged: bool, per_token: bool, prefix: bool
) -> int:
    """Encode the parameters of a template. types: of query, cache and output.

    Raises:
        NotSupportedError: the document has no digit for a layout or a type.
    """
    query, cache, output = types
    for name, value, choices in (
        ("input_layout", layout, tuple(LAYOUTS)), ("query", query, FLOATS), ("key", cache, tuple(TYPES)),
        ("output", output, tuple(TYPES)), ("perf_mode", perf_mode, tuple(MODES)),
    ):  # fmt: skip
        if value not in choices:
            raise unsupported(name, f"the tiling key has no digit for {value}, only for {', '.join(choices)}")
    bits = SPLIT * split + PAGED * paged + PER_TOKEN * per_token
    digits = LAYOUTS[layout], TYPES[query], TYPES[cache], TYPES[output], TYPES[query], bits
    low: int = sum(digit * 10**place for place, digit in enumerate(digits))
    return low + list(MODES).index(perf_mode) * PERF_UNIT + (2 if prefix else 1) * PREFIX_UNIT


def decode_tiling_key(key: int) -> dict[str, str | bool]:
    """Decode a tiling key. BSH stands for BSH and BSND, which have one digit.

    Raises:
        ValueError: no call has this key.
    """
    digits = [int(digit) for digit in reversed(str(key))] if key > 0 else []
    types = {digit: name for name, digit in TYPES.items()}
    layouts = {0: "BNSD", 1: "BSH"}
    perf_modes = dict(enumerate(MODES))
    known = (
        len(digits) == 17
        and digits[0] in layouts
        and types.get(digits[1]) in FLOATS
        and digits[2] in types
        and digits[3] in types
        and digits[4] == digits[1]
        and digits[5] < 8
        and not any(digits[6:15])
        and digits[15] in perf_modes
        and digits[16] in (1, 2)
    )
    if not known:
        raise ValueError(f"{key} is not a tiling key of the operator")
    return {
        "layout": layouts[digits[0]],
        "query": types[digits[1]],
        "cache": types[digits[2]],
        "output": types[digits[3]],
        "split": bool(digits[5] & SPLIT),
        "paged": bool(digits[5] & PAGED),
        "per_token": bool(digits[5] & PER_TOKEN),
        "perf_mode": perf_modes[digits[15]],
        "prefix": digits[16] == 2,
    }
