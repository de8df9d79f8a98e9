"""The argument list of Huawei's IncreFlashAttention operator, on the engine's operator where that has the feature.

One new token of each of B sequences attends to the keys of its own sequence:

    softmax((q k + pse) * scale, hidden where the mask is true) v

`incre_flash_attention` computes it, `incre_flash_tiling` decides beforehand what the operator's document has decided on
the host: template, split, cores, workspace and tiling key (planner/operator.py). Importing this module registers
`torch.ops.penstock.incre_flash_attention`, which takes the same arguments under the names and numbers of that
operator's PyTorch binding. The engine itself uses Ops.attend.

Every argument is checked. A combination that the operator's document leaves undefined, or that is not built, is an
error that names the argument, and so is an argument that would have no effect.

Letters: B sequences, N query heads, Nkv kv heads, D head dim, S slots per sequence (paged: blocks * block_size).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor

from penstock import NotSupportedError
from penstock.errors import check_int, invalid, unsupported
from penstock.kernels.reference.attention import Scoring
from penstock_lab.conventions.incre_flash_arithmetic import (
    Band,
    IntegerQuery,
    KeyValue,
    Prefix,
    Slots,
    Stored,
    Work,
    attend,
    attend_native,
    native_obstacle,
)
from penstock_lab.planner.operator import SLICES, SPLIT_BELOW, OperatorCall, Tiling, num_splits, plan_call

# The operator has the first three only.
QUERY_TYPES = (torch.float16, torch.bfloat16, torch.int8, torch.float32, torch.float64)
LAYOUTS = ("BNSD", "BSH", "BSND")
MODES = ("tensor", "channel", "token", "head", "token_head")
BACKENDS = ("auto", "native", "torch")
MAX_BATCH, MAX_GROUP, MAX_HEAD_DIM, MAX_BLOCK_SIZE = 65536, 64, 512, 512
PACKED = 8  # int4 numbers in an int32
COMPRESSED = 2048  # rows and columns of the triangle that sparse modes 2 to 4 take as a mask
NO_LIMIT = 2**31 - 1  # of pre_tokens and next_tokens, in the operator's binding

Lengths = Sequence[int] | None
Form = tuple[str, int, int]  # layout, kv heads, head dim


@dataclass(frozen=True, slots=True, eq=False)
class Antiquant:
    """Scales and offsets of int8 or int4 keys or values: an integer x represents (x + offset) * scale.

    Attributes:
        mode: which elements share a scale and an offset.
        scale, offset: in mode "tensor" one number, "head" [Nkv], "channel" [Nkv, D]; "token" [B, S] or
            [num_blocks, block_size]; "token_head" [B, Nkv, S] or [num_blocks, Nkv, block_size]. The offset None means
            0.
    """

    mode: Literal["tensor", "channel", "token", "head", "token_head"]
    scale: Tensor
    offset: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Arguments:
    """The arguments beside query, key and value.

    query: [B, N, 1, D] (layout BNSD), [B, 1, N D] (BSH) or [B, 1, N, D] (BSND); the output likewise.
    key, value: the same with Nkv heads and S slots; or a list of such tensors, one per sequence, each with its own S;
        or, with a block_table, blocks instead of sequences, with block_size slots each. int4 comes as int32, with 8
        neighbours along the last axis in each number, the first in its lowest bits.

    Attributes:
        num_key_value_heads: 0 means num_heads.
        actual_seq_lengths: tokens per sequence, or one number for all; later slots may hold anything. None means S.
        atten_mask: bool [B, ..., S], true hides. A row that sees nothing is zeros, and its lse is -inf. In sparse modes
            2 to 4, the triangle [..., 2048, 2048], true above the diagonal.
        sparse_mode: how the mask and the tokens around are read, with the new token as the only row of the mask:
            0  the mask, if any; with it, the tokens between pre_tokens before and next_tokens after the first token
            1  the mask alone
            2  causal from the upper left corner: the first token
            3  causal from the lower right corner: all tokens, as the new token is the last of its sequence
            4  a band: from pre_tokens before to next_tokens after the last token
        pre_tokens, next_tokens: None, and 2^31 - 1, mean all. A negative number moves that edge of the band the other
            way. They are errors where they would have no effect.
        pse_shift: [B or 1, N, 1, S], added before scaling as in the document, or after it if pse_before_scale is false.
        block_table: [B, blocks], with block_size, a multiple of 16 (of 32 for int8 and int4). Only the ids of blocks
            that hold a sequence's tokens are read.
        kv_padding_size: free slots after every sequence, which ends at S - kv_padding_size.
        key_antiquant, value_antiquant: scales and offsets of int8 and int4 keys and values.
        dequant_scale_query: [B, N], the value of a unit of an int8 query; key and value are int8, with one scale each.
        dequant_scale1, quant_scale1, dequant_scale2: one number each, for int8 query, key and value without other
            scales: of the scores, of the probabilities before they are rounded to int8, and of the result.
        quant_scale2, quant_offset2: for an int8 output, round(out * scale + offset); one number or N * D numbers.
        key_shared_prefix, value_shared_prefix: one sequence, of the query's type, that precedes every sequence, or its
            first actual_shared_prefix_len tokens.
        inner_precise: 0 precise, 1 fast: a row that is multiplied with int8 becomes 3 or 2 int8 rows, and bfloat16 is
            computed in float32 or as in a bfloat16 model.
        softmax_lse_flag: also return the logarithm of the sum of e^score, [B, N, 1, 1] float32.
        num_cores: split sequences as the document does for this number of cores, if there are fewer than split_below of
            it pairs of a sequence and a kv head; None: a sequence is one part (the native operator splits by load, with
            the same bits).
        backend: "native" for the engine's operator, "torch", or "auto" for the first that has what a call needs.
    """

    num_heads: int
    num_key_value_heads: int = 0
    scale_value: float = 1.0
    input_layout: str = "BSH"
    actual_seq_lengths: Sequence[int] | None = None
    atten_mask: Tensor | None = None
    sparse_mode: int = 0
    pre_tokens: int | None = None
    next_tokens: int | None = None
    pse_shift: Tensor | None = None
    pse_before_scale: bool = True
    block_table: Tensor | None = None
    block_size: int = 0
    kv_padding_size: int | None = None
    key_antiquant: Antiquant | None = None
    value_antiquant: Antiquant | None = None
    dequant_scale_query: Tensor | None = None
    dequant_scale1: Tensor | None = None
    quant_scale1: Tensor | None = None
    dequant_scale2: Tensor | None = None
    quant_scale2: Tensor | None = None
    quant_offset2: Tensor | None = None
    key_shared_prefix: Tensor | None = None
    value_shared_prefix: Tensor | None = None
    actual_shared_prefix_len: int | None = None
    inner_precise: int = 0
    softmax_lse_flag: bool = False
    num_cores: int | None = None
    split_below: float = SPLIT_BELOW
    backend: str = "auto"

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_heads


def incre_flash_attention(
    query: Tensor, key: KeyValue, value: KeyValue, **arguments: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the output, or (output, lse) with softmax_lse_flag. `Arguments` lists and explains the arguments.

    Raises:
        NotSupportedError: the operator does not allow this combination, or it is not built; `param` names the argument.
        InvalidRequestError: an argument is wrong; `param` names it.
    """
    given = Arguments(**arguments)
    work = _read(query, key, value, given)
    _support(given.backend in BACKENDS, "backend", f"one of {', '.join(BACKENDS)}, not {given.backend!r}")
    obstacle = None if given.backend == "torch" else native_obstacle(work)
    if obstacle is not None and given.backend == "native":
        raise NotSupportedError(f"{obstacle[0]}: the native operator takes {obstacle[1]}", param=obstacle[0])
    if given.backend == "torch" or obstacle is not None:
        out, lse = attend(work)
    else:
        out, lse = attend_native(work, fast=given.inner_precise == 1)
    out = _deliver(out, _output_type(work.q), given.quant_scale2, given.quant_offset2).reshape(query.shape)
    return (out, lse.float()[:, :, None, None]) if given.softmax_lse_flag else out


def incre_flash_tiling(
    query: Tensor,
    key: KeyValue,
    value: KeyValue,
    *,
    num_cores: int,
    perf_mode: str | None = None,
    vectors_only: bool = False,
    **arguments: Any,
) -> Tiling:
    """Decide, without computing, how a number of cores compute a call: the first stage of the operator's two.

    perf_mode, vectors_only: as in planner/operator.plan_call. The other arguments are those of
    incre_flash_attention.

    Raises:
        NotSupportedError, InvalidRequestError: as in incre_flash_attention; also a type that the tiling key has no
            digit for.
    """
    given = Arguments(num_cores=num_cores, **arguments)
    work = _read(query, key, value, given)
    stored = key if isinstance(key, Tensor) else key[0]
    query_type, cache_type = (str(x.dtype).removeprefix("torch.") for x in (query, stored))
    call = OperatorCall(
        lengths=work.slots.lengths,
        num_heads=given.num_heads,
        num_kv_heads=given.num_kv_heads,
        head_dim=work.q.shape[2],
        layout=given.input_layout,
        query=query_type,
        cache="int4" if stored.dtype == torch.int32 else cache_type,
        output="int8" if given.quant_scale2 is not None else query_type,
        block_size=given.block_size,
        per_token=work.k.by_token,
        prefix=work.prefix is not None,
        inner_precise=given.inner_precise,
    )
    return plan_call(call, num_cores, split_below=given.split_below, perf_mode=perf_mode, vectors_only=vectors_only)


def _read(query: Tensor, key: KeyValue, value: KeyValue, given: Arguments) -> Work:
    """Check all arguments, and bring them into the form of the arithmetic."""
    q = _read_query(query, given.num_heads, given.num_kv_heads, given.input_layout)
    form = given.input_layout, given.num_kv_heads, q.shape[2]
    keys, values = _read_tokens("key", key, form), _read_tokens("value", value, form)
    _check_types(q, keys, values, given.inner_precise)
    padding = given.kv_padding_size
    slots = _read_slots(keys, len(q), given.actual_seq_lengths, given.block_table, given.block_size, padding)
    whole = given.dequant_scale1 is not None
    k = _read_antiquant("key_antiquant", given.key_antiquant, keys, form, whole=whole)
    v = _read_antiquant("value_antiquant", given.value_antiquant, values, form, whole=whole)
    band, mask = _read_sparse(given, slots)
    pse = _read_pse(given.pse_shift, q, slots.count)
    check_int("num_cores", given.num_cores, 1, 2**16, optional=True)
    longest = max(slots.lengths, default=0)
    splits = 1 if given.num_cores is None else num_splits(len(q) * form[1], given.num_cores, given.split_below)
    return Work(
        q=q,
        k=k,
        v=v,
        slots=slots,
        band=band,
        visible=mask,
        scoring=Scoring(given.scale_value, None, pse, given.pse_before_scale),
        slices=SLICES[given.inner_precise],
        prefix=_read_prefix(given, form, q.dtype),
        split_size=-(-longest // splits) if splits > 1 else 0,
        integers=_read_integers(given, q, k),
    )


def _output_type(q: Tensor) -> torch.dtype:
    return torch.float16 if q.dtype == torch.int8 else q.dtype


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
        raise invalid(param, needed)


def _support(built: bool, param: str, limit: str) -> None:
    if not built:
        raise unsupported(param, limit)


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
    """View one tensor as [B, S, Nkv, D]: nothing has to be contiguous, and only int4 is copied, to int8."""
    layout, *heads = form
    if x.dtype == torch.int32:
        _require(heads[1] % PACKED == 0, name, f"of a head dim that is a multiple of {PACKED}, for int4 in int32")
        x = unpack_int4(x)
    sizes = {"N": heads[0], "D": heads[1], "H": heads[0] * heads[1]}
    right = x.ndim == len(layout) and all(n == sizes.get(axis, n) for axis, n in zip(layout, x.shape, strict=True))
    _require(right, name, f"laid out as {layout}, {heads[0]} heads of {heads[1]}, not {tuple(x.shape)}")
    return x.transpose(1, 2) if layout == "BNSD" else x.view(*x.shape[:2], *heads)


def unpack_int4(x: Tensor) -> Tensor:
    """Unpack the int4 numbers of x [..., n] int32: [..., 8 n] int8, from -8 to 7."""
    shifts = torch.arange(0, 4 * PACKED, 4, dtype=torch.int32)
    low = (x[..., None] >> shifts) & 15
    return torch.where(low > 7, low - 16, low).to(torch.int8).flatten(-2)


def _check_types(q: Tensor, keys: KeyValue, values: KeyValue, inner_precise: int) -> None:
    for name, x in (("key", keys), ("value", values)):
        types = {item.dtype for item in x}
        _support(types in ({q.dtype}, {torch.int8}), name, f"all {q.dtype}, as the query, or all int8, not {types}")
    alike = [(item.dtype, item.shape) for item in keys] == [(item.dtype, item.shape) for item in values]
    _support(alike, "value", "of the key's type and shape")
    _support(inner_precise in SLICES, "inner_precise", f"0 or 1, not {inner_precise}")


def _read_slots(
    keys: KeyValue, num_seqs: int, lengths: Lengths, block_table: Tensor | None, block_size: int, padding: int | None
) -> Slots:
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
        return Slots([0] * num_seqs, counts, count, block_table, block_size)
    end = count - max(0, padding)
    starts = [end - own for own in counts]
    # A sequence that does not fit before the padding has no tokens.
    return Slots([max(0, start) for start in starts], [end if start >= 0 else 0 for start in starts], count)


def _read_antiquant(name: str, given: Antiquant | None, tokens: KeyValue, form: Form, *, whole: bool) -> Stored:
    """Add scales and offsets to keys or values; they are 1 and 0 if the tokens are not int8.

    whole: scores and results have scales instead.
    """
    channels, is_int8 = form[1:], any(item.dtype == torch.int8 for item in tokens)
    if whole:
        _support(given is None, name, "not supported with dequant_scale1")
    else:
        _support((given is not None) == is_int8, name, "required for int8, and only for int8")
    if given is None:
        return Stored(tokens, torch.ones(channels), torch.zeros(channels))
    _support(given.mode in MODES, name, f"mode {' or '.join(map(repr, MODES))}, not {given.mode!r}")
    scale = given.scale.float()
    offset = torch.zeros_like(scale) if given.offset is None else given.offset.float()
    shape = tuple(scale.shape)
    _require(offset.shape == scale.shape, name, f"an offset of the scale's shape {shape}, not {tuple(offset.shape)}")
    if given.mode in ("token", "token_head"):
        _support(isinstance(tokens, Tensor), name, f"mode {given.mode!r} is not supported with a list of tensors")
        slots: tuple[int, ...] = len(tokens), len(tokens[0])
        if given.mode == "token_head":
            slots = slots[0], channels[0], slots[1]
        _require(shape == slots, name, f"one scale per token{' and head' * len(slots[2:])}, {slots}, not {shape}")
        if given.mode == "token_head":
            scale, offset = scale.transpose(1, 2), offset.transpose(1, 2)
        return Stored(tokens, scale, offset, by_token=True)
    size = {"tensor": 1, "head": channels[0], "channel": channels[0] * channels[1]}[given.mode]
    _require(scale.numel() == size, name, f"{size} scales in mode {given.mode!r}, not {shape}")
    if given.mode == "head":
        scale, offset = (x.reshape(-1, 1).expand(channels) for x in (scale, offset))
    scale, offset = (x.flatten().expand(channels[0] * channels[1]).reshape(channels) for x in (scale, offset))
    return Stored(tokens, scale, offset)


def _read_integers(given: Arguments, q: Tensor, k: Stored) -> IntegerQuery | None:
    """Read the scales of an int8 query: of its rows, or three numbers for scores, probabilities and results."""
    three = {name: getattr(given, name) for name in ("dequant_scale1", "quant_scale1", "dequant_scale2")}
    is_int8, rows = q.dtype == torch.int8, given.dequant_scale_query
    for name, x in {"dequant_scale_query": rows, **three}.items():
        _support(x is None or is_int8, name, "only for an int8 query")
    if not is_int8:
        return None
    shape = tuple(q.shape[:2])
    if rows is not None:
        for name, x in three.items():
            _support(x is None, name, "not supported with dequant_scale_query")
        _require(tuple(rows.shape) == shape, "dequant_scale_query", f"{shape}, not {tuple(rows.shape)}")
        for name, of in (("key_antiquant", given.key_antiquant), ("value_antiquant", given.value_antiquant)):
            plain = of is not None and of.mode == "tensor" and of.offset is None
            _support(plain, name, "mode 'tensor' without an offset, with an int8 query")
        return IntegerQuery(rows.float() * k.scale[0, 0])
    for name, x in three.items():
        _require(x is not None and x.numel() == 1, name, "one number, for an int8 query without dequant_scale_query")
    unit, weights, result = (x.float().flatten() for x in three.values())
    return IntegerQuery(unit.expand(shape), weights, result)


def _read_sparse(given: Arguments, slots: Slots) -> tuple[Band, Tensor | None]:
    """Read mask and sparse mode: the tokens in sight, and the mask by slot [B, S] if any, true where it does not
    hide."""
    mode, mask = given.sparse_mode, given.atten_mask
    _support(mode in range(5), "sparse_mode", f"0 to 4, not {mode}")
    _require(mode == 0 or mask is not None, "atten_mask", f"required in sparse_mode {mode}")
    pre, following = (None if x == NO_LIMIT else x for x in (given.pre_tokens, given.next_tokens))
    takes_band = mode == 4 or (mode == 0 and mask is not None)
    for name, x in (("pre_tokens", pre), ("next_tokens", following)):
        text = f"has no effect in sparse_mode {mode}{'' if mode else ' without atten_mask'}"
        _support(x is None or takes_band, name, text)
    if pre is not None and following is not None:
        _require(pre + following >= 0, "pre_tokens", f"at least {-following}, as next_tokens is {following}, not {pre}")
    bands = {
        0: Band(pre, following, from_end=False),
        1: Band(),
        2: Band(next=0, from_end=False),
        3: Band(next=0),
        4: Band(pre, following),
    }
    if mask is None:
        return bands[mode], None
    _require(mask.dtype == torch.bool, "atten_mask", f"bool, not {mask.dtype}")
    if mode >= 2:
        triangle = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1)
        right = mask.shape[-2:] == triangle.shape and bool((mask == triangle).all())
        text = f"in sparse_mode {mode} the triangle [{COMPRESSED}, {COMPRESSED}], true above the diagonal"
        _require(right, "atten_mask", text)
        return bands[mode], None
    shape = len(slots.stops), slots.count
    right = mask.ndim >= 2 and (len(mask), mask.shape[-1]) == shape and mask.numel() == shape[0] * shape[1]
    _require(right, "atten_mask", f"[{shape[0]}, ..., {shape[1]}], not {tuple(mask.shape)}")
    return bands[mode], ~mask.reshape(shape)


def _read_pse(pse: Tensor | None, q: Tensor, count: int) -> Tensor | None:
    """Reshape the bias to [B or 1, N, 1, S]."""
    if pse is not None:
        shapes = [(batch, q.shape[1], 1, count) for batch in (1, len(q))]
        _require(tuple(pse.shape) in shapes, "pse_shift", f"{shapes[0]} or {shapes[1]}, not {tuple(pse.shape)}")
    return pse


def _read_prefix(given: Arguments, form: Form, dtype: torch.dtype) -> Prefix:
    """Read keys and values [1, S, Nkv, D] of the shared prefix."""
    key, value, length = given.key_shared_prefix, given.value_shared_prefix, given.actual_shared_prefix_len
    if key is None and value is None:
        _support(length is None, "actual_shared_prefix_len", "requires key_shared_prefix")
        return None
    if key is None or value is None:
        raise invalid("key_shared_prefix", "requires value_shared_prefix, and the reverse")
    for name in ("atten_mask", "pse_shift", "key_antiquant", "value_antiquant", "dequant_scale1"):
        _support(getattr(given, name) is None, name, "not supported with a shared prefix")
    _require(
        len(key) == 1 and key.shape == value.shape, "key_shared_prefix", "a batch of one, and values of the same shape"
    )
    for name, x in (("key_shared_prefix", key), ("value_shared_prefix", value)):
        _support(x.dtype == dtype, name, f"the query's type, {dtype}, not {x.dtype}: a shared prefix is not quantised")
    keys, values = _tokens("key_shared_prefix", key, form), _tokens("value_shared_prefix", value, form)
    if length is not None:
        right = 0 <= length <= keys.shape[1]
        _require(right, "actual_shared_prefix_len", f"0 to {keys.shape[1]}, the prefix's length, not {length}")
        keys, values = keys[:, :length], values[:, :length]
    return keys, values


# --- the operator in torch -------------------------------------------------------------------------------------------

BY_NUMBER = ("channel", "token", "head", "token_head", "token", "token_head")  # the modes 0 to 5; 4 and 5 are paged


def bound_operator(
    query: Tensor,
    key: Sequence[Tensor],
    value: Sequence[Tensor],
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    dequant_scale1: Tensor | None = None,
    quant_scale1: Tensor | None = None,
    dequant_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    block_table: Tensor | None = None,
    kv_padding_size: Tensor | None = None,
    key_antiquant_scale: Tensor | None = None,
    key_antiquant_offset: Tensor | None = None,
    value_antiquant_scale: Tensor | None = None,
    value_antiquant_offset: Tensor | None = None,
    key_shared_prefix: Tensor | None = None,
    value_shared_prefix: Tensor | None = None,
    actual_shared_prefix_len: int | None = None,
    dequant_scale_query: Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compute incre_flash_attention under the names of the operator's PyTorch binding: (output, lse).

    key, value: one tensor of all sequences (or blocks), or one for each sequence. antiquant_scale and antiquant_offset
    have the numbers of keys and of values, [2, ...], in antiquant_mode 0 (tensor or channel) or 1 (token); the
    arguments for keys and values alone have modes 0 to 5. kv_padding_size: one number. Without softmax_lse_flag, the
    lse is one zero.
    """
    given = dict(locals())
    arguments = {item.name: given[item.name] for item in fields(Arguments) if item.name in given}
    if kv_padding_size is not None:
        arguments["kv_padding_size"] = int(kv_padding_size.item())
    arguments |= {f"{name}_antiquant": _antiquant_of(name, index, given) for index, name in enumerate(("key", "value"))}
    keys, values = (x[0] if len(x) == 1 else x for x in (key, value))
    found = incre_flash_attention(query, keys, values, **arguments)
    return found if isinstance(found, tuple) else (found, torch.zeros(1))


def _antiquant_of(name: str, index: int, given: Mapping[str, Any]) -> Antiquant | None:
    """Read the scales and offsets of keys (index 0) or values (1) from the arguments of the registered operator."""
    together, offsets, paged = given["antiquant_scale"], given["antiquant_offset"], given["block_table"] is not None
    scale, offset, mode = (given[f"{name}_antiquant_{item}"] for item in ("scale", "offset", "mode"))
    _support(offsets is None or together is not None, "antiquant_offset", "requires antiquant_scale")
    if together is not None:
        alone = scale is None and offset is None and mode == 0
        _support(alone, f"{name}_antiquant_scale", "neither this nor its offset and mode beside antiquant_scale")
        _require(len(together) == 2, "antiquant_scale", "[2, ...], the scales of keys and of values")
        mode, scale = given["antiquant_mode"], together[index]
        offset = None if offsets is None else offsets[index]
    _support(offset is None or scale is not None, f"{name}_antiquant_offset", f"requires {name}_antiquant_scale")
    _support(mode in range(len(BY_NUMBER)), f"{name}_antiquant_mode", f"0 to {len(BY_NUMBER) - 1}, not {mode}")
    kind: Any = BY_NUMBER[mode]
    fits = not kind.startswith("token") or (mode >= 4) == paged
    _support(fits, f"{name}_antiquant_mode", "4 or 5 for scales of tokens with blocks, 1 or 3 without")
    if scale is None:
        return None
    return Antiquant("tensor" if mode == 0 and scale.numel() == 1 else kind, scale, offset)


registered_operator = torch.library.custom_op("penstock::incre_flash_attention", bound_operator, mutates_args=())


@registered_operator.register_fake
def _shapes(query: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """Give the shapes and types of the results, for torch.compile and torch.export."""
    bound = signature(bound_operator).bind(query, *others, **named)
    bound.apply_defaults()
    given = bound.arguments
    kind = _output_type(query) if given["quant_scale2"] is None else torch.int8
    shape = [len(query), given["num_heads"], 1, 1] if given["softmax_lse_flag"] else [1]
    return query.new_empty(query.shape, dtype=kind), query.new_empty(shape, dtype=torch.float32)
