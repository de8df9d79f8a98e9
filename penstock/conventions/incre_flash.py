"""The IncreFlashAttention operator as its document describes it, made of parts (parts.py): one new token a sequence.

It is an edge: whoever thinks in that operator's arguments finds here what each of them means. The engine's own
operation is Ops.attend.

Letters: B sequences, N query heads, Nkv kv heads, G = N / Nkv, D head dim, S slots of a sequence.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.conventions.incre_flash_inputs import (
    Antiquant,
    Integers,
    KeyValue,
    check_heads,
    read_antiquant,
    read_query,
    read_slots,
    read_tokens,
    unsupported,
    wrong,
)
from penstock.kernels.reference.parts import (
    Part,
    Scoring,
    attend_part,
    attend_tiles,
    combine,
    finish,
    mix,
    probabilities,
    scores,
)
from penstock.quant import kv

SLICES = {0: 3, 1: 2}  # inner_precise: int8 rows that stand for a row that meets int8


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
    """softmax((q k + pse) * scale, hidden where the mask is true) v, of one token in each of B sequences.

    Args:
        query: [B, N, 1, D] (BNSD), [B, 1, N D] (BSH) or [B, 1, N, D] (BSND).
        key, value: the same with Nkv heads and S slots; a list of one such tensor a sequence, each of its own S; or,
            with a block_table, blocks in place of sequences and block_size slots.
        num_key_value_heads: 0 is num_heads.
        actual_seq_lengths: tokens of each sequence, or of all; the slots behind them may hold anything. None: S.
        atten_mask: bool, true hides; B * S elements. A row that sees nothing is zeros, its lse -inf.
        pse_shift: [B or 1, N, 1, S], added before scaling, as the document has it, or after.
        pre_tokens: tokens before the new one (which is the last of its sequence) that it sees; None: all.
        block_table: [B, blocks], with block_size.
        kv_padding_size: free slots behind every sequence, which ends at S - kv_padding_size.
        key_antiquant, value_antiquant: for int8 keys, int8 values.
        quant_scale2, quant_offset2: int8 output round(out * scale + offset); one number or N * D.
        key_shared_prefix, value_shared_prefix: a batch of one, that comes before every sequence.
        inner_precise: 0 precise, 1 fast: how rows are written that meet int8.
        softmax_lse_flag: return the lse, [B, N, 1, 1] float32, as well.

    Raises:
        NotSupportedError: a combination that the operator, or this edge, does not have; `param` names the argument.
        InvalidRequestError: an argument is wrong; likewise.
    """
    num_kv_heads = num_key_value_heads or num_heads
    check_heads(num_heads, num_kv_heads)
    q = read_query(query, num_heads, input_layout)
    heads = num_kv_heads, q.shape[2]
    keys, values = (read_tokens(name, x, *heads, input_layout) for name, x in (("key", key), ("value", value)))
    _check_types(q, keys, values, inner_precise)
    slots = read_slots(keys, len(q), actual_seq_lengths, block_table, block_size, kv_padding_size)
    integers = (
        read_antiquant("key_antiquant", key_antiquant, keys, *heads),
        read_antiquant("value_antiquant", value_antiquant, values, *heads),
    )
    mask, pse = _read_mask(atten_mask, q, keys, slots.block_table is not None), _read_pse(pse_shift, q)
    alone: dict[str, object] = {"atten_mask": mask, "pse_shift": pse, "pre_tokens": pre_tokens}
    alone |= {"key_antiquant": key_antiquant, "value_antiquant": value_antiquant}
    prefix = _read_prefix(key_shared_prefix, value_shared_prefix, heads, input_layout, alone)
    rows = q.to(torch.float64 if q.dtype == torch.float64 else torch.float32)

    done = []
    for b in range(len(q)):
        here = slice(slots.starts[b], slots.stops[b])
        bias = None if pse is None else pse[b % len(pse), :, here].to(rows.dtype)[None, :, None]
        part = _part(
            rows[b, None, None],
            slots.take(keys, b)[None],
            slots.take(values, b)[None],
            _visible(here, None if mask is None else mask[b], pre_tokens)[None, None, None],
            Scoring(scale_value, None, bias, pse_before_scale),
            *(None if of is None else of.of_sequence(slots, b) for of in integers),
            slices=SLICES[inner_precise],
        )
        done.append(finish(part))
    out, lse = (torch.cat(items).squeeze(1) for items in zip(*done, strict=True))  # [B, N, D], [B, N]

    if prefix is not None:
        before, before_lse = _attend_prefix(rows, *prefix, scale_value)
        out, lse = combine(torch.stack([before, out]), torch.stack([before_lse, lse]))
    out = _lay_out(_deliver(out, q.dtype, quant_scale2, quant_offset2), input_layout)
    return (out, lse.float()[:, :, None, None]) if softmax_lse_flag else out


def _attend_prefix(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [B, N, D], k and v [1, S, Nkv, D] -> rows [B, N, D], lse [B, N]. The prefix is one sequence and every row a
    query of it: it is read once, whatever B is."""
    out, lse = finish(attend_part(q[None], k.to(q.dtype), v.to(q.dtype), None, Scoring(scale)))
    return out[0], lse[0]


def _part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scoring: Scoring,
    of_keys: Integers | None,
    of_values: Integers | None,
    *,
    slices: int,
) -> Part:
    """q [1, 1, N, D], k and v [1, S, Nkv, D] as they are stored -> one sequence's part.

    An int8 matrix stays as it is, and the few rows that meet it are rewritten (the multi-step decomposition): the
    scales of channels go into the query, those of tokens into the probabilities, and what is left is written as int8
    slices.
    """
    if k.shape[1] == 0:
        return Part.nothing(q)
    if of_keys is None and of_values is None:
        return attend_tiles(q, k.to(q.dtype), v.to(q.dtype), visible, scoring)
    p, greatest = probabilities(_scores(q, k, visible, scoring, of_keys, slices))
    mixed = _mixed(p, v, visible, of_values, slices)
    return Part(greatest.transpose(1, 2), p.sum(dim=-1).transpose(1, 2), mixed)


def _scores(q: Tensor, k: Tensor, visible: Tensor, scoring: Scoring, of: Integers | None, slices: int) -> Tensor:
    if of is None:
        return scores(q, k.to(q.dtype), visible, scoring)
    if of.by_token:
        keys = (k.float() + of.offset) * of.scale
        return scores(kv.slices(q.float(), slices), keys, visible, scoring)
    scales = of.scale.repeat_interleave(q.shape[2] // k.shape[2], dim=0)  # [N, D]
    return scores(kv.slices(q.float() * scales, slices), k.float() + of.offset, visible, scoring)


def _mixed(p: Tensor, v: Tensor, visible: Tensor, of: Integers | None, slices: int) -> Tensor:
    if of is None:
        return mix(p, v.to(p.dtype), visible)
    values = v.float() + of.offset.where(of.offset.isfinite(), 0.0)  # a hidden token's may be anything
    if of.by_token:
        weights = torch.where(visible, p * of.scale.flatten(), 0.0)
        return mix(kv.slices(weights, slices), values, visible)
    scales = of.scale.repeat_interleave(p.shape[1] // v.shape[2], dim=0)
    return mix(kv.slices(p.float(), slices), values, visible) * scales


def _visible(here: slice, mask: Tensor | None, pre_tokens: int | None) -> Tensor:
    """Which of the slots `here` the new token sees; it is the last of them."""
    at = torch.arange(here.start, here.stop)
    visible = torch.ones(len(at), dtype=torch.bool) if pre_tokens is None else at >= here.stop - 1 - pre_tokens
    return visible if mask is None else visible & ~mask[here]


def _read_prefix(
    key: Tensor | None, value: Tensor | None, heads: tuple[int, int], layout: str, others: dict[str, object]
) -> tuple[Tensor, Tensor] | None:
    """-> keys and values [1, S, Nkv, D] of the shared prefix; `others` are the arguments it does not go with."""
    if key is None and value is None:
        return None
    if key is None or value is None:
        raise wrong("key_shared_prefix", "goes with value_shared_prefix")
    for name, given in others.items():
        if given is not None:
            raise unsupported(name, "not with a shared prefix")
    k, v = (read_tokens(f"{name}_shared_prefix", x, *heads, layout) for name, x in (("key", key), ("value", value)))
    assert isinstance(k, Tensor)
    assert isinstance(v, Tensor)
    if len(k) != 1 or k.shape != v.shape:
        raise wrong("key_shared_prefix", f"a batch of one, and the values alike, not {tuple(k.shape)}")
    return k, v


def _check_types(q: Tensor, keys: KeyValue, values: KeyValue, inner_precise: int) -> None:
    for name, x in (("key", keys), ("value", values)):
        for item in [x] if isinstance(x, Tensor) else x:
            if item.dtype not in (q.dtype, torch.int8):
                raise unsupported(name, f"type {item.dtype} with queries of {q.dtype}")
    forms = [[(item.dtype, item.shape) for item in x] for x in (keys, values)]
    if forms[0] != forms[1]:
        raise unsupported("value", "of the key's type and shape")
    if inner_precise not in SLICES:
        raise unsupported("inner_precise", f"{inner_precise}; 0 or 1")


def _read_mask(mask: Tensor | None, q: Tensor, keys: KeyValue, paged: bool) -> Tensor | None:
    """-> [B, S]."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        raise wrong("atten_mask", f"bool, not {mask.dtype}")
    if mask.ndim < 2 or len(mask) != len(q) or mask[0].numel() != mask.shape[-1]:
        raise wrong("atten_mask", f"[{len(q)}, .., S], not {tuple(mask.shape)}")
    room = 0 if paged else max(len(item) for item in keys)
    if room not in (0, mask.shape[-1]):
        raise wrong("atten_mask", f"S = {room}, not {mask.shape[-1]}")
    return mask.reshape(len(q), -1)


def _read_pse(pse: Tensor | None, q: Tensor) -> Tensor | None:
    """-> [B or 1, N, S]."""
    if pse is None:
        return None
    if pse.ndim != 4 or pse.shape[0] not in (1, len(q)) or pse.shape[1:3] != (q.shape[1], 1):
        raise wrong("pse_shift", f"[{len(q)} or 1, {q.shape[1]}, 1, S], not {tuple(pse.shape)}")
    return pse[:, :, 0]


def _deliver(out: Tensor, dtype: torch.dtype, scale: Tensor | None, offset: Tensor | None) -> Tensor:
    """[B, N, D] in the query's type, or quantised once more."""
    if scale is None:
        if offset is not None:
            raise wrong("quant_offset2", "goes with quant_scale2")
        return out.to(dtype)
    steps = out * _per_element("quant_scale2", scale, out)
    if offset is not None:
        steps = steps + _per_element("quant_offset2", offset, out)
    return steps.round().clamp(-128, 127).to(torch.int8)


def _per_element(name: str, x: Tensor, out: Tensor) -> Tensor:
    """One number, or one for each element of a row of out [B, N, D]."""
    if x.numel() not in (1, out[0].numel()):
        raise wrong(name, f"one number or {out[0].numel()}, not {tuple(x.shape)}")
    return x.to(out.dtype).reshape(1 if x.numel() == 1 else out.shape[1:])


def _lay_out(out: Tensor, layout: str) -> Tensor:
    """[B, N, D] as the query was laid out."""
    if layout == "BNSD":
        return out[:, :, None]
    return out.flatten(1)[:, None] if layout == "BSH" else out[:, None]
