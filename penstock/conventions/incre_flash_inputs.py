"""Arguments of the IncreFlashAttention operator: layouts, where tokens lie, and what is refused."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock.errors import InvalidRequestError, NotSupportedError

QUERY_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # the first two are the operator's
LAYOUTS = ("BNSD", "BSH", "BSND")
MAX_BATCH, MAX_GROUP, MAX_HEAD_DIM, MAX_BLOCK_SIZE = 65536, 64, 512, 512

KeyValue = Tensor | Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Slots:
    """Where the tokens of each sequence lie: slots starts[b] .. stops[b] - 1 of its own, or through a block table."""

    starts: Sequence[int]
    stops: Sequence[int]
    block_table: Tensor | None = None
    block_size: int = 0

    def take(self, x: KeyValue, b: int) -> Tensor:
        """Sequence b's part of x [B, S, ...], of a list of [S, ...], or of blocks [num_blocks, block_size, ...].

        Contiguous, so that torch adds in the same order wherever the tokens were."""
        here = slice(self.starts[b], self.stops[b])
        if self.block_table is None:
            return x[b][here].contiguous()
        assert isinstance(x, Tensor)
        blocks = self.block_table[b, : -(-here.stop // self.block_size)].long()
        return x[blocks].flatten(0, 1)[here].contiguous()


@dataclass(frozen=True, slots=True, eq=False)
class Antiquant:
    """An integer B stands for (B + offset) * scale.

    Attributes:
        scale, offset: "tensor": one number. "channel": [Hkv, D]. "token": as the slots of the cache, [B, S] or
            [num_blocks, block_size]. No offset is 0.
    """

    mode: Literal["tensor", "channel", "token"]
    scale: Tensor
    offset: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Integers:
    """What the integers of int8 keys or values stand for, as read_antiquant reads it.

    Attributes:
        by_token: scale and offset are [*slots]; else [Nkv, D].
    """

    by_token: bool
    scale: Tensor
    offset: Tensor

    def of_sequence(self, slots: Slots, b: int) -> "Integers":
        """Those of tokens: sequence b's, [S, 1, 1]."""
        if not self.by_token:
            return self
        return Integers(True, slots.take(self.scale, b)[:, None, None], slots.take(self.offset, b)[:, None, None])


def wrong(param: str, needed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {needed}", param=param)


def unsupported(param: str, why: str) -> NotSupportedError:
    return NotSupportedError(f"{param}: {why}", param=param)


def read_query(query: Tensor, num_heads: int, layout: str) -> Tensor:
    """-> [B, N, D]."""
    if layout not in LAYOUTS:
        raise unsupported("input_layout", f"{layout!r}; one of {', '.join(LAYOUTS)}")
    if query.dtype not in QUERY_TYPES:
        raise unsupported("query", f"type {query.dtype}")
    if query.ndim != len(layout) or query.shape[layout.index("S")] != 1:
        raise wrong("query", f"one new token a sequence, laid out as {layout}, not {tuple(query.shape)}")
    if layout == "BSH" and query.shape[2] % num_heads:
        raise wrong("num_heads", f"{num_heads} does not divide H = {query.shape[2]}")
    rows = query.reshape(len(query), -1, query.shape[-1] // num_heads if layout == "BSH" else query.shape[-1])
    if rows.shape[1] != num_heads:
        raise wrong("num_heads", f"{num_heads}, but the query has {rows.shape[1]}")
    if len(rows) > MAX_BATCH or rows.shape[2] > MAX_HEAD_DIM:
        raise unsupported("query", f"up to {MAX_BATCH} sequences and head dim {MAX_HEAD_DIM}, not {tuple(rows.shape)}")
    return rows


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise wrong("num_key_value_heads", f"{num_kv_heads} does not divide num_heads = {num_heads}")
    if num_heads // num_kv_heads > MAX_GROUP:
        raise unsupported("num_key_value_heads", f"a group of up to {MAX_GROUP} query heads")


def read_tokens(name: str, x: KeyValue, num_kv_heads: int, head_dim: int, layout: str) -> KeyValue:
    """Keys or values as [B, S, Nkv, D], a list of [S, Nkv, D], or (blocks are laid out as sequences) [num_blocks,
    block_size, Nkv, D]. Views: nothing is copied, nothing has to be contiguous."""
    if not isinstance(x, Tensor):
        if any(len(item) != 1 for item in x):
            raise wrong(name, "tensors of one sequence each, [1, ...]")
        return [read_tokens(name, item, num_kv_heads, head_dim, layout)[0] for item in x]
    if x.ndim != len(layout):
        raise wrong(name, f"laid out as {layout}, not {tuple(x.shape)}")
    if layout == "BSH":
        if x.shape[2] != num_kv_heads * head_dim:
            raise wrong(name, f"{num_kv_heads} heads of {head_dim}, not H = {x.shape[2]}")
        return x.unflatten(2, (num_kv_heads, head_dim))  # type: ignore[no-untyped-call,no-any-return]
    tokens = x.transpose(1, 2) if layout == "BNSD" else x
    if tokens.shape[2:] != (num_kv_heads, head_dim):
        raise wrong(name, f"{num_kv_heads} heads of {head_dim}, not {tuple(tokens.shape[2:])}")
    return tokens


def read_slots(
    keys: KeyValue,
    num_seqs: int,
    lengths: Sequence[int] | None,
    block_table: Tensor | None,
    block_size: int,
    left_padding: int | None,
) -> Slots:
    """Where each sequence's keys are, keys as read_tokens returns them."""
    if block_table is not None:
        return _paged_slots(keys, num_seqs, lengths, block_table, block_size, left_padding)
    if block_size:
        raise wrong("block_size", "goes with a block_table")
    if len(keys) != num_seqs:
        raise wrong("key", f"{num_seqs} sequences, as the query has, not {len(keys)}")
    rooms = [item.shape[0] for item in keys] if num_seqs else []
    counts = _lengths(lengths, num_seqs, rooms)
    if left_padding is None:
        return Slots([0] * num_seqs, counts)
    if lengths is None:
        raise wrong("actual_seq_lengths", "needed with kv_padding_size")
    if not isinstance(keys, Tensor):
        raise unsupported("kv_padding_size", "not with a list of tensors")
    padding = max(0, left_padding)
    starts = [room - padding - count for room, count in zip(rooms, counts, strict=True)]
    # Where the padding leaves no room for a sequence, it has no tokens.
    stops = [room - padding if start >= 0 else 0 for start, room in zip(starts, rooms, strict=True)]
    return Slots([max(0, start) for start in starts], stops)


def _paged_slots(
    keys: KeyValue,
    num_seqs: int,
    lengths: Sequence[int] | None,
    block_table: Tensor,
    block_size: int,
    left_padding: int | None,
) -> Slots:
    if not isinstance(keys, Tensor):
        raise unsupported("block_table", "not with a list of tensors")
    if left_padding is not None:
        raise unsupported("kv_padding_size", "not with a block_table")
    if lengths is None:
        raise wrong("actual_seq_lengths", "needed with a block_table")
    unit = 32 if keys.dtype == torch.int8 else 16
    if not 0 < block_size <= MAX_BLOCK_SIZE or block_size % unit or keys.shape[1] != block_size:
        raise wrong(
            "block_size",
            f"a multiple of {unit} up to {MAX_BLOCK_SIZE}, as the cache has ({keys.shape[1]}): {block_size}",
        )
    if block_table.ndim != 2 or len(block_table) != num_seqs:
        raise wrong("block_table", f"[{num_seqs}, blocks of a sequence], not {tuple(block_table.shape)}")
    counts = _lengths(lengths, num_seqs, [block_table.shape[1] * block_size] * num_seqs)
    return Slots([0] * num_seqs, counts, block_table, block_size)


def _lengths(lengths: Sequence[int] | None, num_seqs: int, rooms: Sequence[int]) -> list[int]:
    if lengths is None:
        return list(rooms)
    counts = list(lengths) * num_seqs if len(lengths) == 1 else list(lengths)
    if len(counts) != num_seqs or any(not 0 <= count <= room for count, room in zip(counts, rooms, strict=False)):
        raise wrong("actual_seq_lengths", f"one a sequence, 0 to {list(rooms)}, not {list(lengths)}")
    return counts


def read_antiquant(name: str, of: Antiquant | None, x: KeyValue, num_kv_heads: int, head_dim: int) -> Integers | None:
    """None for keys or values that are no integers."""
    stored = x.dtype if isinstance(x, Tensor) else x[0].dtype
    if (of is not None) != (stored == torch.int8):
        raise unsupported(name, "needed for int8, and only for int8")
    if of is None:
        return None
    scale = of.scale.float()
    offset = torch.zeros_like(scale) if of.offset is None else of.offset.float()
    if offset.shape != scale.shape:
        raise wrong(name, f"offset {tuple(offset.shape)} is not as scale, {tuple(scale.shape)}")
    if of.mode == "token":
        if not isinstance(x, Tensor):
            raise unsupported(name, "of tokens, not with a list of tensors")
        if scale.shape != x.shape[:2]:
            raise wrong(name, f"of tokens {tuple(x.shape[:2])}, not {tuple(scale.shape)}")
        return Integers(True, scale, offset)
    channels = (num_kv_heads, head_dim)
    if scale.numel() != (1 if of.mode == "tensor" else num_kv_heads * head_dim):
        raise wrong(name, f"of the {of.mode}, heads and head dim {channels}, not {tuple(scale.shape)}")
    if of.mode == "tensor":
        return Integers(False, scale.flatten().expand(channels), offset.flatten().expand(channels))
    return Integers(False, scale.reshape(channels), offset.reshape(channels))
