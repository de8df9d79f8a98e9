"""The argument list of Huawei's IncreFlashAttention operator, computed in plain torch (kernels/reference/attention.py).

One new token of each of B sequences attends to the keys of its own sequence:

    softmax((q k + pse) * scale, hidden where the mask is true) v

Every argument is checked. A combination that the operator's document leaves undefined, or that is not built, is an
error that names the argument. The engine itself uses Ops.attend.

Arguments of `incre_flash_attention`:
    query: [B, N, 1, D] (layout BNSD), [B, 1, N D] (BSH) or [B, 1, N, D] (BSND); the output likewise.
    key, value: the same with Nkv heads and S slots; or a list of such tensors, one per sequence, each with its own S;
        or, with a block_table, blocks instead of sequences, with block_size slots each.
    num_key_value_heads: 0 means num_heads.
    actual_seq_lengths: tokens per sequence, or one number for all; later slots may hold anything. None means S.
    atten_mask: bool [B, ..., S], true hides. A row that sees nothing is zeros, and its lse is -inf.
    pse_shift: [B or 1, N, 1, S], added before scaling as in the document, or after it if pse_before_scale is false.
    pre_tokens: how many tokens before the new token (the last of its sequence) it sees; None means all.
    block_table: [B, blocks], with block_size, a multiple of 16 (of 32 for int8). Only the ids of blocks that hold a
        sequence's tokens are read.
    kv_padding_size: free slots after every sequence, which ends at S - kv_padding_size.
    key_antiquant, value_antiquant: scales and offsets of int8 keys and int8 values.
    quant_scale2, quant_offset2: for an int8 output, round(out * scale + offset); one number or N * D numbers.
    key_shared_prefix, value_shared_prefix: one sequence, of the query's type, that precedes every sequence.
    inner_precise: 0 precise, 1 fast: a row that is multiplied with int8 becomes 3 or 2 int8 rows.
    softmax_lse_flag: also return the logarithm of the sum of e^score, [B, N, 1, 1] float32.

Letters: B sequences, N query heads, Nkv kv heads, D head dim, S slots per sequence (paged: blocks * block_size).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from penstock import InvalidRequestError, NotSupportedError
from penstock.kernels.reference import attention as parts
from penstock.kernels.reference import quantized_kv as kv
from penstock.kernels.reference.attention import Part, Scoring
from penstock_lab.conventions.tiled_attention import attend_tiles, combine

SLICES = {0: 3, 1: 2}  # inner_precise -> the number of int8 rows that represent a row multiplied with int8
QUERY_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # the operator has only the first two
LAYOUTS = ("BNSD", "BSH", "BSND")
MODES = ("tensor", "channel", "token")
MAX_BATCH, MAX_GROUP, MAX_HEAD_DIM, MAX_BLOCK_SIZE = 65536, 64, 512, 512

KeyValue = Tensor | Sequence[Tensor]
Lengths = Sequence[int] | None
Form = tuple[str, int, int]  # layout, kv heads, head dim
Prefix = tuple[Tensor, Tensor] | None  # keys and values, [1, S, Nkv, D]


@dataclass(frozen=True, slots=True, eq=False)
class Antiquant:
    """Scales and offsets of int8 keys or values: an integer x represents (x + offset) * scale.

    Attributes:
        mode: which elements share a scale and an offset.
        scale, offset: in mode "tensor" one number, "channel" [Nkv, D], "token" [B, S] or [num_blocks, block_size].
            The offset None means 0.
    """

    mode: Literal["tensor", "channel", "token"]
    scale: Tensor
    offset: Tensor | None = None


def incre_flash_attention(
    query: Tensor,
    key: KeyValue,
    value: KeyValue,
    *,
    num_heads: int,
    num_key_value_heads: int = 0,
    scale_value: float = 1.0,
    input_layout: str = "BSH",
    actual_seq_lengths: Sequence[int] | None = None,
    atten_mask: Tensor | None = None,
    pse_shift: Tensor | None = None,
    pse_before_scale: bool = True,
    pre_tokens: int | None = None,
    block_table: Tensor | None = None,
    block_size: int = 0,
    kv_padding_size: int | None = None,
    key_antiquant: Antiquant | None = None,
    value_antiquant: Antiquant | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    key_shared_prefix: Tensor | None = None,
    value_shared_prefix: Tensor | None = None,
    inner_precise: int = 0,
    softmax_lse_flag: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the output, or (output, lse) with softmax_lse_flag. The module's docstring explains the arguments.

    Raises:
        NotSupportedError: the operator does not allow this combination, or it is not built; `param` names the argument.
        InvalidRequestError: an argument is wrong; `param` names it.
    """
    num_kv_heads = num_key_value_heads or num_heads
    q = _read_query(query, num_heads, num_kv_heads, input_layout)
    form = input_layout, num_kv_heads, q.shape[2]
    keys, values = _read_tokens("key", key, form), _read_tokens("value", value, form)
    _check_types(q, keys, values, inner_precise)
    slots = _read_slots(keys, len(q), actual_seq_lengths, block_table, block_size, kv_padding_size)
    k = _read_antiquant("key_antiquant", key_antiquant, keys, form)
    v = _read_antiquant("value_antiquant", value_antiquant, values, form)
    visible = _read_visible(atten_mask, pre_tokens, slots)
    scoring = Scoring(scale_value, None, _read_pse(pse_shift, q, slots.count), pse_before_scale)
    alone: dict[str, object] = {"atten_mask": atten_mask, "pse_shift": pse_shift, "pre_tokens": pre_tokens}
    alone |= {"key_antiquant": key_antiquant, "value_antiquant": value_antiquant}
    prefix = _read_prefix(key_shared_prefix, value_shared_prefix, form, q.dtype, alone)
    out, lse = _attend(q, k, v, slots, visible, scoring, SLICES[inner_precise], prefix)
    out = _deliver(out, q.dtype, quant_scale2, quant_offset2).reshape(query.shape)
    return (out, lse.float()[:, :, None, None]) if softmax_lse_flag else out


# --- arithmetic ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Slots:
    """The slots of each sequence b: starts[b] .. stops[b] - 1 of `count`, addressed by the block table if any."""

    starts: Sequence[int]
    stops: Sequence[int]
    count: int
    block_table: Tensor | None = None
    block_size: int = 0

    def of_sequence(self, b: int) -> slice:
        return slice(self.starts[b], self.stops[b])

    def tokens_of(self, x: KeyValue, b: int) -> Tensor:
        """Take sequence b's part of x [B, S, ...], of a list of [S, ...], or of blocks [num_blocks, block_size, ...].

        The result is contiguous, so that torch adds in the same order wherever the tokens were.
        """
        here = self.of_sequence(b)
        if self.block_table is None:
            return x[b][here].contiguous()
        assert isinstance(x, Tensor)
        blocks = self.block_table[b, : -(-here.stop // self.block_size)].long()
        return x[blocks].flatten(0, 1)[here].contiguous()


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    """Keys or values as they are stored: an element x represents (x + offset) * scale.

    Attributes:
        tokens: as _read_tokens returns them; for one sequence, [1, S, Nkv, D].
        scale, offset: float32, [Nkv, D]; with by_token, of the shape of the cache's slots, and for one sequence
            [S, 1, 1].
    """

    tokens: KeyValue
    scale: Tensor
    offset: Tensor
    by_token: bool = False

    def of_sequence(self, slots: _Slots, b: int) -> "_Stored":
        scale, offset = self.scale, self.offset
        if self.by_token:
            scale, offset = (slots.tokens_of(x, b)[:, None, None] for x in (scale, offset))
        return _Stored(slots.tokens_of(self.tokens, b)[None], scale, offset, self.by_token)

    def scales(self, num_heads: int) -> tuple[Tensor, Tensor]:
        """Shape the scales of tokens as [S or 1, 1, 1] and of query heads as [N or 1, D or 1]. One of the two is 1."""
        one = self.scale.new_ones(1, 1, 1)
        if self.by_token:
            return self.scale, one[0]
        return one, self.scale.repeat_interleave(num_heads // len(self.scale), dim=0)


def _attend(
    q: Tensor, k: _Stored, v: _Stored, slots: _Slots, visible: Tensor, scoring: Scoring, slices: int, prefix: Prefix
) -> tuple[Tensor, Tensor]:
    """Compute rows [B, N, D] and lse [B, N] for q [B, N, D]. visible: [B, S]; scoring.bias: [B or 1, N, 1, S]."""
    q = q.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    done = []
    for b in range(len(q)):
        here, bias = slots.of_sequence(b), scoring.bias
        if bias is not None:
            bias = bias[b % len(bias), None, :, :, here].to(q.dtype)
        own_k, own_v = (x.of_sequence(slots, b) for x in (k, v))
        seen = visible[b, None, None, None, here]
        done.append(parts.finish(_part(q[b, None, None], own_k, own_v, seen, replace(scoring, bias=bias), slices)))
    out, lse = (torch.cat(items).squeeze(1) for items in zip(*done, strict=True))
    if prefix is not None:  # all rows attend to it as one sequence, so it is read once and not B times
        keys, values = (x.to(q.dtype) for x in prefix)
        before, before_lse = parts.finish(parts.attend_part(q[None], keys, values, None, Scoring(scoring.scale)))
        out, lse = combine(torch.stack([before[0], out]), torch.stack([before_lse[0], lse]))
    return out, lse


def _part(q: Tensor, k: _Stored, v: _Stored, visible: Tensor, scoring: Scoring, slices: int) -> Part:
    """Compute one sequence's part for q [1, 1, N, D].

    int8 keys and values are not dequantised. The few rows multiplied with them are rewritten instead (the document's
    AntiQuant): scales of channels go into the query or the result, scales of tokens into the scores or the
    probabilities, and the query and the probabilities become int8 slices.
    """
    keys, values = k.tokens, v.tokens
    assert isinstance(keys, Tensor)
    assert isinstance(values, Tensor)
    if keys.shape[1] == 0:
        return Part.nothing(q)
    if keys.dtype != torch.int8:
        return attend_tiles(q, keys.to(q.dtype), values.to(q.dtype), visible, scoring)
    per_token, per_head = k.scales(q.shape[2])
    rows = kv.slices(q.float() * per_head, slices)
    p, greatest = parts.probabilities(parts.scores(rows, (keys.float() + k.offset) * per_token, visible, scoring))
    per_token, per_head = v.scales(q.shape[2])
    weights = torch.where(visible, p * per_token.flatten(), 0.0)  # the scales of hidden tokens may be anything
    offset = v.offset.where(v.offset.isfinite(), 0.0)
    mixed = parts.mix(kv.slices(weights, slices), values.float() + offset, visible) * per_head
    return Part(greatest.transpose(1, 2), p.sum(dim=-1).transpose(1, 2), mixed)


def _deliver(out: Tensor, dtype: torch.dtype, scale: Tensor | None, offset: Tensor | None) -> Tensor:
    """Convert the output [B, N, D] to the query's type, or quantise it to int8."""
    if scale is None:
        _require(offset is None, "quant_offset2", "requires quant_scale2")
        return out.to(dtype)
    steps = out * _per_element("quant_scale2", scale, out)
    if offset is not None:
        steps = steps + _per_element("quant_offset2", offset, out)
    return steps.round().clamp(-128, 127).to(torch.int8)


def _per_element(name: str, x: Tensor, out: Tensor) -> Tensor:
    """Reshape x, which has one number or one per element of a row of out [B, N, D], so that it fits out."""
    _require(x.numel() in (1, out[0].numel()), name, f"one number or {out[0].numel()}, not {tuple(x.shape)}")
    return x.to(out.dtype).reshape(1 if x.numel() == 1 else out.shape[1:])


# --- arguments -------------------------------------------------------------------------------------------------------


def _require(right: bool, param: str, needed: str) -> None:
    if not right:
        raise InvalidRequestError(f"{param}: {needed}", param=param)


def _support(built: bool, param: str, limit: str) -> None:
    if not built:
        raise NotSupportedError(f"{param}: {limit}", param=param)


def _read_query(query: Tensor, num_heads: int, num_kv_heads: int, layout: str) -> Tensor:
    """Reshape the query to [B, N, D]."""
    name = "num_key_value_heads"
    _require(num_heads % num_kv_heads == 0, name, f"a divisor of num_heads = {num_heads}, not {num_kv_heads}")
    _support(num_heads <= MAX_GROUP * num_kv_heads, name, f"at most {MAX_GROUP} query heads per kv head")
    _support(layout in LAYOUTS, "input_layout", f"one of {', '.join(LAYOUTS)}, not {layout!r}")
    _support(query.dtype in QUERY_TYPES, "query", f"a float type, not {query.dtype}")
    shape = tuple(query.shape)
    one_token = query.ndim == len(layout) and shape[layout.index("S")] == 1
    _require(one_token, "query", f"one new token per sequence, laid out as {layout}, not {shape}")
    if layout == "BSH":
        _require(shape[2] % num_heads == 0, "num_heads", f"a divisor of H = {shape[2]}, not {num_heads}")
    rows = query.reshape(len(query), -1, shape[-1] // num_heads if layout == "BSH" else shape[-1])
    _require(rows.shape[1] == num_heads, "num_heads", f"{rows.shape[1]}, as the query has, not {num_heads}")
    fits = len(rows) <= MAX_BATCH and rows.shape[2] <= MAX_HEAD_DIM
    _support(fits, "query", f"at most {MAX_BATCH} sequences and head dim {MAX_HEAD_DIM}, not {shape}")
    return rows


def _read_tokens(name: str, x: KeyValue, form: Form) -> KeyValue:
    """Reshape keys or values to [B, S, Nkv, D], a list of [S, Nkv, D], or [num_blocks, block_size, Nkv, D]."""
    if isinstance(x, Tensor):
        return _tokens(name, x, form)
    _require(all(len(item) == 1 for item in x), name, "a list of tensors of one sequence each, [1, ...]")
    return [_tokens(name, item, form)[0] for item in x]


def _tokens(name: str, x: Tensor, form: Form) -> Tensor:
    """View one tensor as [B, S, Nkv, D]: nothing is copied, and nothing has to be contiguous."""
    layout, *heads = form
    sizes = {"N": heads[0], "D": heads[1], "H": heads[0] * heads[1]}
    right = x.ndim == len(layout) and all(n == sizes.get(axis, n) for axis, n in zip(layout, x.shape, strict=True))
    _require(right, name, f"laid out as {layout}, {heads[0]} heads of {heads[1]}, not {tuple(x.shape)}")
    return x.transpose(1, 2) if layout == "BNSD" else x.view(*x.shape[:2], *heads)


def _check_types(q: Tensor, keys: KeyValue, values: KeyValue, inner_precise: int) -> None:
    for name, x in (("key", keys), ("value", values)):
        types = {item.dtype for item in x}
        _support(types in ({q.dtype}, {torch.int8}), name, f"all {q.dtype}, as the query, or all int8, not {types}")
    alike = [(item.dtype, item.shape) for item in keys] == [(item.dtype, item.shape) for item in values]
    _support(alike, "value", "of the key's type and shape")
    _support(inner_precise in SLICES, "inner_precise", f"0 or 1, not {inner_precise}")


def _read_slots(
    keys: KeyValue, num_seqs: int, lengths: Lengths, block_table: Tensor | None, block_size: int, padding: int | None
) -> _Slots:
    """Find the slots of each sequence's keys. keys: as _read_tokens returns them."""
    given, listed = lengths is not None, not isinstance(keys, Tensor)
    if block_table is not None:
        _support(padding is None, "kv_padding_size", "not supported with a block_table")
        _support(not listed, "block_table", "not supported with a list of tensors")
        _require(given, "actual_seq_lengths", "required with a block_table")
        unit, stored = (32 if keys[0].dtype == torch.int8 else 16), len(keys[0])
        right = 0 < block_size <= MAX_BLOCK_SIZE and block_size % unit == 0 and block_size == stored
        allowed = f"a multiple of {unit} up to {MAX_BLOCK_SIZE}, as the cache has ({stored}), not {block_size}"
        _require(right, "block_size", allowed)
        right = block_table.ndim == 2 and len(block_table) == num_seqs
        _require(right, "block_table", f"[{num_seqs}, blocks per sequence], not {tuple(block_table.shape)}")
        rooms = [block_table.shape[1] * block_size] * num_seqs
    else:
        _require(block_size == 0, "block_size", "requires a block_table")
        _require(len(keys) == num_seqs, "key", f"{num_seqs} sequences, as the query has, not {len(keys)}")
        _require(given or padding is None, "actual_seq_lengths", "required with kv_padding_size")
        _support(not listed or padding is None, "kv_padding_size", "not supported with a list of tensors")
        rooms = [len(item) for item in keys]
    count, counts = max(rooms, default=0), rooms
    if lengths is not None:
        counts = list(lengths) * num_seqs if len(lengths) == 1 else list(lengths)
        right = len(counts) == num_seqs and all(0 <= own <= room for own, room in zip(counts, rooms, strict=True))
        _require(right, "actual_seq_lengths", f"one per sequence, 0 to {rooms}, not {list(lengths)}")
    if block_table is not None:
        used = [row[: -(-own // block_size)] for row, own in zip(block_table.tolist(), counts, strict=True)]
        bad = [block for row in used for block in row if not 0 <= block < len(keys)]
        _require(not bad, "block_table", f"ids 0 to {len(keys) - 1} in the blocks that sequences use, not {bad[:5]}")
    if padding is None:
        return _Slots([0] * num_seqs, counts, count, block_table, block_size)
    end = count - max(0, padding)
    starts = [end - own for own in counts]
    # A sequence that does not fit before the padding has no tokens.
    return _Slots([max(0, start) for start in starts], [end if start >= 0 else 0 for start in starts], count)


def _read_antiquant(name: str, given: Antiquant | None, tokens: KeyValue, form: Form) -> _Stored:
    """Add scales and offsets to keys or values; they are 1 and 0 if the tokens are not int8."""
    channels, is_int8 = form[1:], any(item.dtype == torch.int8 for item in tokens)
    _support((given is not None) == is_int8, name, "required for int8, and only for int8")
    if given is None:
        return _Stored(tokens, torch.ones(channels), torch.zeros(channels))
    _support(given.mode in MODES, name, f"mode {' or '.join(map(repr, MODES))}, not {given.mode!r}")
    scale = given.scale.float()
    offset = torch.zeros_like(scale) if given.offset is None else given.offset.float()
    shape = tuple(scale.shape)
    _require(offset.shape == scale.shape, name, f"an offset of the scale's shape {shape}, not {tuple(offset.shape)}")
    if given.mode == "token":
        _support(isinstance(tokens, Tensor), name, "mode 'token' is not supported with a list of tensors")
        slots = len(tokens), len(tokens[0])
        _require(shape == slots, name, f"one scale per token, {slots}, not {shape}")
        return _Stored(tokens, scale, offset, by_token=True)
    size = 1 if given.mode == "tensor" else channels[0] * channels[1]
    _require(scale.numel() == size, name, f"{size} scales in mode {given.mode!r}, not {shape}")
    scale, offset = (x.flatten().expand(channels[0] * channels[1]).reshape(channels) for x in (scale, offset))
    return _Stored(tokens, scale, offset)


def _read_visible(mask: Tensor | None, pre_tokens: int | None, slots: _Slots) -> Tensor:
    """Decide which slots the new token (the last token) of each sequence sees: [B, S] bool."""
    shape = len(slots.stops), slots.count
    first = torch.zeros(shape[0], 1, dtype=torch.int64)
    if pre_tokens is not None:
        _require(pre_tokens >= 0, "pre_tokens", f"0 or more, not {pre_tokens}")
        first = torch.tensor(slots.stops)[:, None] - 1 - pre_tokens
    visible = torch.arange(shape[1]) >= first
    if mask is None:
        return visible
    _require(mask.dtype == torch.bool, "atten_mask", f"bool, not {mask.dtype}")
    right = mask.ndim >= 2 and (len(mask), mask.shape[-1]) == shape and mask.numel() == visible.numel()
    _require(right, "atten_mask", f"[{shape[0]}, ..., {shape[1]}], not {tuple(mask.shape)}")
    return visible & ~mask.reshape(shape)


def _read_pse(pse: Tensor | None, q: Tensor, count: int) -> Tensor | None:
    """Reshape the bias to [B or 1, N, 1, S]."""
    if pse is not None:
        shapes = [(batch, q.shape[1], 1, count) for batch in (1, len(q))]
        _require(tuple(pse.shape) in shapes, "pse_shift", f"{shapes[0]} or {shapes[1]}, not {tuple(pse.shape)}")
    return pse


def _read_prefix(
    key: Tensor | None, value: Tensor | None, form: Form, dtype: torch.dtype, alone: Mapping[str, object]
) -> Prefix:
    """Read keys and values [1, S, Nkv, D] of the shared prefix. alone: arguments that are not allowed beside it."""
    if key is None and value is None:
        return None
    if key is None or value is None:
        raise InvalidRequestError(
            "key_shared_prefix: requires value_shared_prefix, and the reverse", param="key_shared_prefix"
        )
    for name, given in alone.items():
        _support(given is None, name, "not supported with a shared prefix")
    _require(
        len(key) == 1 and key.shape == value.shape, "key_shared_prefix", "a batch of one, and values of the same shape"
    )
    for name, x in (("key_shared_prefix", key), ("value_shared_prefix", value)):
        _support(x.dtype == dtype, name, f"the query's type, {dtype}, not {x.dtype}: a shared prefix is not quantised")
    return _tokens("key_shared_prefix", key, form), _tokens("value_shared_prefix", value, form)
