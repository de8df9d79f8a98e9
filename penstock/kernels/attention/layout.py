"""Sizes of attention: tiles and spans, and what a cached token takes. No torch.

A tile is 64 positions at multiples of 64, a span 32 tiles. Both are constants of the numerics version: they decide the
order of sums, and neither the block size nor the load has a say in them.
"""

TILE = 64  # L: positions jL .. (j+1)L-1 make a tile
SPAN_TILES = 32  # C: tiles folded in ascending order before spans are folded
SPAN = TILE * SPAN_TILES
GRANULE = 16  # positions that lie together in memory; a block is a multiple of it
DIM_UNIT = 32  # the native kernels pad a head's elements to a multiple of this
MAX_HEAD_DIM = 256  # of the native kernels
ROW_CAPACITY = 48  # operands of native kernels have room for a multiple of so many rows
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}  # by kv_cache_dtype
TOKEN_SCALE_BYTES = 16  # int8: scale and offset of key and value of one head of a token, float32


def padded_head_dim(head_dim: int) -> int:
    """Elements of a head as the native cache stores them."""
    return -(-head_dim // DIM_UNIT) * DIM_UNIT


def cache_token_bytes(
    num_kv_heads: int, head_dim: int, kv_cache_dtype: str, *, padded: bool = True, token_scales: bool = True
) -> int:
    """Bytes of one token's keys and values in one layer.

    padded: as the native cache stores them; the reference stores head_dim elements.
    token_scales: int8 scales belong to tokens, not to channels.
    """
    elements = padded_head_dim(head_dim) if padded else head_dim
    scales = TOKEN_SCALE_BYTES if kv_cache_dtype == "int8" and token_scales else 0
    return num_kv_heads * (2 * elements * ELEMENT_BYTES[kv_cache_dtype] + scales)
