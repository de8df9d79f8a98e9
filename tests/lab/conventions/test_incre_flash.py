"""The IncreFlashAttention operator, argument by argument, against its formula in float64."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BloomConfig, BloomForCausalLM, FalconConfig, FalconForCausalLM

from penstock import InvalidRequestError, NotSupportedError
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, CacheSpec, KVScales
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.reference.quantized_kv import quantize_tokens
from penstock_lab.conventions.incre_flash import Antiquant, incre_flash_attention, incre_flash_tiling
from penstock_lab.conventions.incre_flash_arithmetic import native_ops
from penstock_lab.planner.operator import Tiling, decode_tiling_key
from tests.kernels.packed import levels

torch.set_num_threads(1)
B, N, NKV, S, D = 4, 6, 2, 96, 16
SCALE = D**-0.5
LENGTHS = [1, 33, 96, 64]
NAN, INF = float("nan"), float("inf")
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
EXACT: dict[str, Any] = {"atol": 1e-12, "rtol": 1e-10}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """In BNSD: q [B, N, 1, D], k and v [B, Nkv, S, D]."""
    return draw(B, N, 1, D, seed=1, dtype=dtype), *(draw(B, NKV, S, D, seed=seed, dtype=dtype) for seed in (2, 3))


def attend(q: Tensor, k: Any, v: Any, **options: Any) -> Any:
    heads = {"num_heads": N, "num_key_value_heads": NKV, "scale_value": SCALE, "input_layout": "BNSD"}
    return incre_flash_attention(q, k, v, **heads | options)


def tiling(q: Tensor, k: Any, v: Any, **options: Any) -> Tiling:
    heads = {"num_heads": N, "num_key_value_heads": NKV, "scale_value": SCALE, "input_layout": "BNSD"}
    return incre_flash_tiling(q, k, v, **heads | options)


def formula(
    q: Tensor, k: Tensor, v: Tensor, *, hidden: Tensor | None = None, pse: Tensor | None = None, before: bool = True
) -> tuple[Tensor, Tensor]:
    """BNSD in float64; hidden [B, S] -> rows [B, N, 1, D], lse [B, N, 1, 1]."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = q.double() @ k.transpose(2, 3)
    bias = 0.0 if pse is None else pse.double()
    s = (s + bias) * SCALE if before else s * SCALE + bias
    if hidden is not None:
        s = s.masked_fill(hidden[:, None, None], -INF)
        v = v.masked_fill(hidden[:, None, :, None], 0.0)
    return s.softmax(-1).nan_to_num(0.0) @ v, s.logsumexp(-1, keepdim=True)


def behind(lengths: list[int]) -> Tensor:
    """Slots that no sequence uses, [B, S]."""
    return torch.arange(S) >= torch.tensor(lengths)[:, None]


# --- the formula -----------------------------------------------------------------------------------------------------


@pytest.mark.covers("A1")
@pytest.mark.parametrize("garbage", [NAN, INF, 1e30])
def test_what_lies_behind_the_lengths_does_not_matter(garbage: float) -> None:
    """Guards against padding that takes part: memory behind each length may hold anything, and not one bit changes."""
    q, k, v = qkv()
    out = attend(q, k, v, actual_seq_lengths=LENGTHS)
    torch.testing.assert_close(out, formula(q, k, v, hidden=behind(LENGTHS))[0], **EXACT)
    for x in (k, v):
        x.masked_fill_(behind(LENGTHS)[:, None, :, None], garbage)
    assert torch.equal(attend(q, k, v, actual_seq_lengths=LENGTHS), out)
    assert torch.equal(attend(q[:1], k[:1], v[:1], actual_seq_lengths=[1]), out[:1])
    q, k, v = qkv()
    torch.testing.assert_close(attend(q, k, v), formula(q, k, v)[0], **EXACT)
    torch.testing.assert_close(
        attend(q, k, v, actual_seq_lengths=[5]), formula(q, k, v, hidden=behind([5] * B))[0], **EXACT
    )


@pytest.mark.covers("A1", "A3")
def test_a_sequence_of_no_tokens_is_zeros() -> None:
    """Guards against 0 / 0 where a length is 0."""
    q, k, v = qkv()
    out, lse = attend(q, k, v, actual_seq_lengths=[3, 0, 9, 0], softmax_lse_flag=True)
    assert bool((out[[1, 3]] == 0).all() and (lse[[1, 3]] == -INF).all())
    torch.testing.assert_close(out[[0, 2]], formula(q, k, v, hidden=behind([3, 0, 9, 0]))[0][[0, 2]], **EXACT)


@pytest.mark.covers("A2")
@pytest.mark.parametrize("batch", [1, B])
def test_the_bias_before_and_after_scaling(batch: int) -> None:
    """Guards against the order of other attention operators, which add the bias after scaling."""
    q, k, v = qkv()
    pse = draw(batch, N, 1, S, seed=7) * 3
    outs = {}
    for before in (True, False):
        outs[before] = attend(q, k, v, pse_shift=pse, pse_before_scale=before)
        torch.testing.assert_close(outs[before], formula(q, k, v, pse=pse, before=before)[0], **EXACT)
    assert torch.equal(attend(q, k, v, pse_shift=pse), outs[True])
    assert (outs[True] - outs[False]).abs().max() > 0.01


@pytest.mark.covers("A3")
@pytest.mark.parametrize("shape", [(B, S), (B, 1, S), (B, 1, 1, S)])
def test_a_true_mask_hides(shape: tuple[int, ...]) -> None:
    """Guards against a mask read the other way round, against hidden memory that counts, and against NaN where all is
    hidden: that row is zeros, its lse -inf."""
    q, k, v = qkv()
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.5
    mask[2] = True
    hidden = mask.view(B, S) | behind(LENGTHS)
    hidden[0, 0] = mask.view(B, S)[0, 0] = False
    expected = formula(q, k, v, hidden=hidden)
    for x in (k, v):
        x.masked_fill_(hidden[:, None, :, None], NAN)
    out, lse = attend(q, k, v, atten_mask=mask, actual_seq_lengths=LENGTHS, softmax_lse_flag=True)
    torch.testing.assert_close(out, expected[0], **EXACT)
    torch.testing.assert_close(lse.double(), expected[1], atol=1e-5, rtol=1e-6)
    assert bool((out[2] == 0).all() and (lse[2] == -INF).all())


# --- ALiBi in real models --------------------------------------------------------------------------------------------

SLOPES = 2.0 ** -torch.arange(1, 9)  # of 8 heads


def falcon() -> Any:
    config = FalconConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=8, alibi=True, multi_query=True,
        new_decoder_architecture=False, parallel_attn=True, bias=True,
    )  # fmt: skip
    return FalconForCausalLM(config), True, lambda module, fused: module._split_heads(fused)


def bloom() -> Any:
    config = BloomConfig(vocab_size=64, hidden_size=64, n_layer=2, n_head=8)
    return BloomForCausalLM(config), False, lambda module, fused: [x.transpose(1, 2) for x in module._reshape(fused)]


@pytest.mark.covers("A2", "A4")
@pytest.mark.parametrize("make", [falcon, bloom])
def test_alibi_of_real_models(make: Any) -> None:
    """Guards against wrong slopes, distances or the wrong order: Falcon adds the bias before it scales, BLOOM after.
    What Transformers hands to each layer's last product is what we compute from its q, k and v: as one prefill of the
    paged operation, and token by token with pse_shift."""
    torch.manual_seed(0)
    model, before, split = make()
    model = model.double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    seen: list[tuple[Any, Tensor, Tensor]] = []
    for layer in model.transformer.h:
        attention = layer.self_attention
        fused: list[Tensor] = []
        attention.query_key_value.register_forward_hook(lambda _m, _i, out, fused=fused: fused.append(out))
        attention.dense.register_forward_pre_hook(
            lambda _m, args, attention=attention, fused=fused: seen.append((attention, fused[-1], args[0]))
        )
    tokens = 12
    with torch.no_grad():
        model(torch.randint(0, 64, (1, tokens), generator=torch.Generator().manual_seed(1)), use_cache=False)
    assert len(seen) == 2
    for attention, fused_qkv, expected in seen:
        q, k, v = (x[0] for x in split(attention, fused_qkv))  # [T, heads, D]
        torch.testing.assert_close(prefill(q, k, v, before), expected[0], atol=1e-6, rtol=1e-5)
        for t in range(tokens):
            pse = (SLOPES.double()[:, None] * torch.arange(t + 1)).view(1, 8, 1, t + 1)
            out = incre_flash_attention(
                q[t][None, None], k[None, : t + 1], v[None, : t + 1], num_heads=8, num_key_value_heads=k.shape[1],
                scale_value=q.shape[2] ** -0.5, input_layout="BSND", pse_shift=pse, pse_before_scale=before,
            )  # fmt: skip
            assert isinstance(out, Tensor)
            torch.testing.assert_close(out.flatten(), expected[0, t], atol=1e-6, rtol=1e-5)


def prefill(q: Tensor, k: Tensor, v: Tensor, before: bool) -> Tensor:
    ops, tokens = ReferenceOps(torch.float64), len(q)
    cache = ops.new_kv_cache(CacheSpec(1, 16, k.shape[1], k.shape[2], torch.float64))
    meta = AttentionMetadata(
        torch.tensor([0, tokens], dtype=torch.int32),
        torch.tensor([tokens], dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.arange(tokens),
        16,
        None,
    )
    params = AttentionParams(q.shape[2] ** -0.5, alibi_slopes=SLOPES, bias_before_scale=before)
    return ops.attend(q, k, v, cache, meta, params)


# --- int8 keys and values --------------------------------------------------------------------------------------------

MODES = ("tensor", "channel", "token")


def integers(mode: Any, offset: bool, seed: int) -> tuple[Tensor, Antiquant, Tensor]:
    """Random int8 [B, Nkv, S, D], what they stand for, and that in float64."""
    generator = torch.Generator().manual_seed(seed)
    stored = torch.randint(-127, 128, (B, NKV, S, D), generator=generator, dtype=torch.int8)
    shape = {"tensor": (1,), "channel": (NKV, D), "token": (B, S)}[mode]
    scale = 0.01 + 0.02 * torch.rand(shape, generator=generator)
    shift = 30 * torch.randn(shape, generator=generator) if offset else None
    wide = {"tensor": (1, 1, 1, 1), "channel": (1, NKV, 1, D), "token": (B, 1, S, 1)}[mode]
    whole = (stored.double() + (0 if shift is None else shift.double().view(wide))) * scale.double().view(wide)
    return stored, Antiquant(mode, scale, shift), whole


@pytest.mark.covers("A17")
@pytest.mark.parametrize(("key_mode", "value_mode"), list(itertools.product(MODES, MODES)))
@pytest.mark.parametrize(("inner_precise", "bound"), [(0, 2e-5), (1, 1e-3)])
def test_granularity_of_scales(key_mode: str, value_mode: str, inner_precise: int, bound: float) -> None:
    """Guards against scales and offsets of the wrong token, channel or head, keys' taken for values', and a missing
    offset: every combination against keys and values that are scaled back first. What slots behind the lengths stand
    for may be NaN."""
    q = qkv(torch.float32)[0]
    for offsets in itertools.product((False, True), repeat=2):
        k, of_keys, whole_k = integers(key_mode, offsets[0], seed=5)
        v, of_values, whole_v = integers(value_mode, offsets[1], seed=6)
        expected, lse = formula(q, whole_k, whole_v, hidden=behind(LENGTHS))
        for of in (of_keys, of_values):
            if of.mode == "token":
                of.scale.masked_fill_(behind(LENGTHS), NAN)
        out, found = attend(
            q, k, v, key_antiquant=of_keys, value_antiquant=of_values, actual_seq_lengths=LENGTHS,
            inner_precise=inner_precise, softmax_lse_flag=True,
        )  # fmt: skip
        largest = whole_v.abs().max().item()
        torch.testing.assert_close(out.double() / largest, expected / largest, atol=bound, rtol=0)
        torch.testing.assert_close(found.double(), lse, atol=20 * bound, rtol=1e-5)


@pytest.mark.covers("A18")
@pytest.mark.parametrize("mode", MODES)
def test_high_precision_is_more_precise(mode: str) -> None:
    """Guards against values of inner_precise that are exchanged, or that choose nothing."""
    q = qkv(torch.float32)[0]
    k, of_keys, whole_k = integers(mode, True, seed=5)
    v, of_values, whole_v = integers(mode, True, seed=6)
    expected, _ = formula(q, whole_k, whole_v, hidden=behind(LENGTHS))
    errors = []
    for inner_precise in (0, 1):
        out, _ = attend(
            q, k, v, key_antiquant=of_keys, value_antiquant=of_values, actual_seq_lengths=LENGTHS,
            inner_precise=inner_precise, softmax_lse_flag=True,
        )  # fmt: skip
        errors.append((out.double() - expected).abs().max().item())
    assert 10 * errors[0] < errors[1]


@pytest.mark.covers("A17", "A3")
def test_hidden_integers_may_stand_for_anything() -> None:
    """Guards against 0 * NaN in the scales of hidden tokens, which meet the probabilities."""
    q = qkv(torch.float32)[0]
    k, of_keys, whole_k = integers("token", True, seed=5)
    v, of_values, whole_v = integers("token", True, seed=6)
    mask = torch.rand(B, S, generator=torch.Generator().manual_seed(4)) < 0.5
    for of in (of_keys, of_values):
        assert of.offset is not None
        of.scale.masked_fill_(mask, NAN)
        of.offset.masked_fill_(mask, INF)
    out = attend(q, k, v, key_antiquant=of_keys, value_antiquant=of_values, atten_mask=mask)
    expected = formula(q, whole_k, whole_v, hidden=mask)[0]
    torch.testing.assert_close(out.double(), expected, atol=2e-4, rtol=1e-4)


# --- where keys and values lie ---------------------------------------------------------------------------------------


def lay_out(x: Tensor, layout: str) -> Tensor:
    """[B, heads, S, D] in another layout, contiguous."""
    tokens = x.transpose(1, 2).contiguous()
    return {"BNSD": x, "BSND": tokens, "BSH": tokens.flatten(2)}[layout]


@pytest.mark.covers("A21")
@pytest.mark.parametrize("layout", ["BNSD", "BSH", "BSND"])
def test_layouts(layout: str) -> None:
    """Guards against heads and tokens that change places: every layout, non-contiguous tensors, and a list of one
    tensor a sequence, each of its own length, give the same output in the query's layout."""
    q, k, v = qkv()
    expected = lay_out(attend(q, k, v, actual_seq_lengths=LENGTHS), layout)
    query, key, value = (lay_out(x, layout) for x in (q, k, v))
    assert torch.equal(attend(query, key, value, input_layout=layout, actual_seq_lengths=LENGTHS), expected)

    strided_k, strided_v = (torch.stack([x, x + 1], dim=-1)[..., 0] for x in (key, value))
    assert not strided_k.is_contiguous()
    assert torch.equal(attend(query, strided_k, strided_v, input_layout=layout, actual_seq_lengths=LENGTHS), expected)

    lists = [[lay_out(x[b : b + 1, :, :n], layout) for b, n in enumerate(LENGTHS)] for x in (k, v)]
    assert torch.equal(attend(query, *lists, input_layout=layout), expected)
    shorter = [max(1, n - 5) for n in LENGTHS]
    assert torch.equal(
        attend(query, *lists, input_layout=layout, actual_seq_lengths=shorter),
        attend(query, key, value, input_layout=layout, actual_seq_lengths=shorter),
    )


def into_blocks(x: Tensor, block_size: int, table: Tensor, fill: float) -> Tensor:
    """[B, S, ...] -> [num_blocks, block_size, ...] through a table, everything else `fill`."""
    blocks = torch.full((int(table.max()) + 3, block_size, *x.shape[2:]), fill).to(x.dtype)
    for b, i in itertools.product(range(B), range(S // block_size)):
        blocks[table[b, i]] = x[b, i * block_size : (i + 1) * block_size]
    return blocks


def shuffled_table(block_size: int) -> Tensor:
    count = B * (S // block_size)
    ids = 1 + torch.randperm(count, generator=torch.Generator().manual_seed(8)).int()
    table = torch.cat([ids.view(B, -1), torch.full((B, 1), -1, dtype=torch.int32)], dim=1)
    assert not torch.equal(ids.sort().values, ids)
    return table


@pytest.mark.covers("A19")
@pytest.mark.parametrize("layout", ["BNSD", "BSH", "BSND"])
@pytest.mark.parametrize("block_size", [16, 48, 96])
def test_shuffled_blocks_are_contiguous_ones(layout: str, block_size: int) -> None:
    """Guards against the wrong block and against reading one that no sequence has: bit-equal, the rest NaN."""
    q, k, v = qkv(torch.bfloat16)
    expected = lay_out(attend(q, k, v, actual_seq_lengths=LENGTHS), layout)
    table = shuffled_table(block_size)
    tokens = (into_blocks(x.transpose(1, 2), block_size, table, NAN) for x in (k, v))
    key, value = (lay_out(x.transpose(1, 2), layout) for x in tokens)
    out = attend(
        lay_out(q, layout), key, value, input_layout=layout, actual_seq_lengths=LENGTHS,
        block_table=table, block_size=block_size,
    )  # fmt: skip
    assert torch.equal(out, expected)


@pytest.mark.covers("A17", "A19")
def test_shuffled_int8_blocks_with_scales_of_tokens() -> None:
    """Guards against scales that are not looked up through the table."""
    q, k, v = qkv(torch.bfloat16)
    table, paged, plain = shuffled_table(32), {}, {}
    for name, x in (("key", k), ("value", v)):
        stored, scale, offset = quantize_tokens(x.transpose(1, 2).flatten(2))  # one scale for the heads of a token
        plain[name] = stored, Antiquant("token", scale, offset)
        paged[name] = (
            into_blocks(stored, 32, table, 77),
            Antiquant("token", into_blocks(scale, 32, table, NAN), into_blocks(offset, 32, table, NAN)),
        )
    outs = []
    for of, where in ((plain, {}), (paged, {"block_table": table, "block_size": 32})):
        outs.append(
            attend(
                lay_out(q, "BSH"), of["key"][0], of["value"][0], input_layout="BSH", actual_seq_lengths=LENGTHS,
                key_antiquant=of["key"][1], value_antiquant=of["value"][1], **where,
            )
        )  # fmt: skip
    assert torch.equal(outs[0], outs[1])
    expected = lay_out(formula(q, k, v, hidden=behind(LENGTHS))[0], "BSH")
    torch.testing.assert_close(outs[0].double(), expected, atol=0.03, rtol=0.02)


@pytest.mark.covers("A29")
def test_left_padding() -> None:
    """Guards against sequences that are read from the left: they end at S - kv_padding_size, and everything else is
    NaN. Masks and biases belong to slots. A sequence that the padding leaves no room for is zeros."""
    q, k, v = qkv()
    pse, mask = draw(1, N, 1, S, seed=7), torch.rand(B, S, generator=torch.Generator().manual_seed(4)) < 0.2
    for padding in (0, 7, -3):
        end = S - max(0, padding)
        slot, count = torch.arange(S), torch.tensor([1, 33, 80, 64])[:, None]
        outside = (slot >= end) | (slot < end - count)
        key, value = (x.masked_fill(outside[:, None, :, None], NAN) for x in (k, v))
        mask[:, end - 1] = False
        out = attend(
            q, key, value, actual_seq_lengths=count.flatten().tolist(), kv_padding_size=padding,
            atten_mask=mask, pse_shift=pse,
        )  # fmt: skip
        torch.testing.assert_close(out, formula(q, k, v, hidden=outside | mask, pse=pse)[0], **EXACT)
    out, lse = attend(q, k, v, actual_seq_lengths=LENGTHS, kv_padding_size=7, softmax_lse_flag=True)
    assert bool((out[2] == 0).all() and (lse[2] == -INF).all())  # 96 tokens in 89 slots
    assert bool(lse[[0, 1, 3]].isfinite().all())


@pytest.mark.covers("A29")
def test_lse_and_band() -> None:
    """Guards against an lse without its maximum, and a band that is one too wide: pre_tokens = W - 1 is a window of
    W tokens."""
    q, k, v = qkv()
    q = q * 100  # e^s overflows float32
    for pre_tokens in (0, 3, 40, S, None):
        at, lengths = torch.arange(S), torch.tensor(LENGTHS)[:, None]
        hidden = at >= lengths
        if pre_tokens is not None:
            hidden = hidden | (at <= lengths - 1 - (pre_tokens + 1))
        out, lse = attend(
            q, k, v, actual_seq_lengths=LENGTHS, sparse_mode=4, pre_tokens=pre_tokens, atten_mask=TRIANGLE,
            softmax_lse_flag=True,
        )  # fmt: skip
        expected, expected_lse = formula(q, k, v, hidden=hidden)
        torch.testing.assert_close(out, expected, **EXACT)
        assert (lse.dtype, lse.shape) == (torch.float32, (B, N, 1, 1))
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-6)


@pytest.mark.covers("A29")
@pytest.mark.parametrize(
    ("batch", "head_dim", "refused"),
    [(65536, 4, "key"), (65537, 4, "query"), (1, 512, "key"), (1, 513, "query")],  # the key is wrong in all of them
)
def test_the_largest_batch_and_head(batch: int, head_dim: int, refused: str) -> None:
    """Guards against a limit that is one off, or not there: the greatest query goes on to the check of its key."""
    q, other = torch.zeros(1, 1, 1, head_dim).expand(batch, -1, -1, -1), torch.zeros(1, 1, 1, 3)
    with pytest.raises(InvalidRequestError) as caught:
        attend(q, other, other, num_heads=1, num_key_value_heads=1)
    assert caught.value.param == refused
    assert ("at most 65536 sequences and head dim 512" in str(caught.value)) == (refused == "query")


@pytest.mark.covers("A19")
@pytest.mark.parametrize(("dtype", "unit"), [(torch.float16, 16), (torch.bfloat16, 16), (torch.int8, 32)])
def test_block_sizes(dtype: torch.dtype, unit: int) -> None:
    """Guards against a block that the operator's document forbids, and one that it allows and we refuse: multiples of
    16 up to 512, of 32 for int8, each size held against the rule; 128 is advised."""
    query = draw(1, 1, 1, D, dtype=torch.float16 if dtype == torch.int8 else dtype)
    scales = Antiquant("tensor", torch.ones(1)) if dtype == torch.int8 else None
    for block_size in range(0, 545, 8):
        tokens = torch.ones(1, 1, max(block_size, 1), D, dtype=dtype)
        options: dict[str, Any] = {
            "num_heads": 1, "num_key_value_heads": 1, "actual_seq_lengths": [1], "block_size": block_size,
            "block_table": torch.zeros(1, 1, dtype=torch.int32), "key_antiquant": scales, "value_antiquant": scales,
        }  # fmt: skip
        if block_size % unit == 0 and 0 < block_size <= 512:
            assert torch.equal(attend(query, tokens, tokens, **options), torch.ones_like(query))
            advice = tiling(query, tokens, tokens, num_cores=2, **options).advice
            assert advice == ("" if block_size == 128 else f"block_size {block_size}: 128 is advised")
            continue
        with pytest.raises(InvalidRequestError, match=f"block_size: a multiple of {unit} up to 512") as caught:
            attend(query, tokens, tokens, **options)
        assert caught.value.param == "block_size"


# --- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.covers("A20")
def test_every_group_size() -> None:
    """Guards against query heads that read another group's keys: G = 1 .. 64; 65 is refused by name."""
    k, v = (draw(2, 2, 5, 4, seed=seed) for seed in (2, 3))
    for group in range(1, 65):
        q = draw(2, 2 * group, 1, 4, seed=group)
        out = attend(q, k, v, num_heads=2 * group, num_key_value_heads=2)
        torch.testing.assert_close(out, formula(q, k, v)[0], **EXACT)
    with pytest.raises(NotSupportedError, match="num_key_value_heads"):
        attend(draw(1, 65, 1, 4), k[:1, :1], v[:1, :1], num_heads=65, num_key_value_heads=1)


# --- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.covers("A22")
@pytest.mark.parametrize("out_type", ["as the query", torch.int8])
@pytest.mark.parametrize("kv_type", ["as the query", torch.int8])
@pytest.mark.parametrize("q_type", [torch.float16, torch.bfloat16])
def test_types(q_type: torch.dtype, kv_type: Any, out_type: Any) -> None:
    """Guards against an output rounded twice, or rounded before it is quantised: q float16 or bfloat16, keys and values
    the same or int8, output the same or int8 with scale and offset of the whole or of each element."""
    q, k, v = qkv(q_type)
    options: dict[str, Any] = {"actual_seq_lengths": LENGTHS}
    wide_k, wide_v = k.double(), v.double()
    if kv_type == torch.int8:
        k, options["key_antiquant"], wide_k = integers("channel", True, seed=5)
        v, options["value_antiquant"], wide_v = integers("tensor", False, seed=6)
    expected = formula(q, wide_k, wide_v, hidden=behind(LENGTHS))[0]
    if out_type != torch.int8:
        out = attend(q, k, v, **options)
        assert out.dtype == q_type
        # Within float32's noise of the edge between two values either is right.
        wrong = (out != expected.to(q_type)).double().mean().item()
        assert wrong < 0.01, f"{wrong:.2%} are not the exact value rounded once"
        return
    for shape in ((1,), (N, D)):
        scale, offset = 30 + 20 * draw(*shape, seed=9).abs(), 5 * draw(*shape, seed=10)
        for options["quant_offset2"] in (None, offset):
            out = attend(q, k, v, quant_scale2=scale, **options)
            steps = expected * scale[:, None] + (0 if options["quant_offset2"] is None else offset[:, None])
            exact = steps.round().clamp(-128, 127)
            assert out.dtype == torch.int8
            assert (out != exact).double().mean().item() < 0.01
            assert (out - exact).abs().max().item() <= 1


ONE = Antiquant("tensor", torch.ones(1))
INTEGERS: dict[str, Any] = {"key": torch.int8, "value": torch.int8}
ALL_INTEGERS: dict[str, Any] = {"query": torch.int8, **INTEGERS, "key_antiquant": ONE, "value_antiquant": ONE}
PAGED: dict[str, Any] = {"block_table": torch.zeros(B, 1).int(), "block_size": S, "actual_seq_lengths": [1]}


def prefix(key: torch.dtype, value: torch.dtype, batch: int = 1) -> dict[str, Any]:
    """A shared prefix of three tokens."""
    shape = (batch, NKV, 3, D)
    return {"key_shared_prefix": torch.ones(shape, dtype=key), "value_shared_prefix": torch.ones(shape, dtype=value)}


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "float16 beside bfloat16": ("key", {"key": torch.bfloat16, "value": torch.bfloat16}),
    "keys and values of two types": ("value", {"value": torch.int8}),
    "int8 without scales": ("key_antiquant", INTEGERS),
    "scales without int8": ("value_antiquant", {"value_antiquant": ONE}),
    "an integer query beside floats": ("key", {"query": torch.int8}),
    "an integer query without scales": ("dequant_scale1", ALL_INTEGERS),
    "an integer query with scales of channels": ("key_antiquant", ALL_INTEGERS | {
        "dequant_scale_query": torch.ones(B, N), "key_antiquant": Antiquant("channel", torch.ones(NKV, D)),
    }),
    "scales of a float query": ("dequant_scale_query", {"dequant_scale_query": torch.ones(B, N)}),
    "scores without int8": ("dequant_scale1", {"dequant_scale1": torch.ones(1)}),
    "another sparse mode": ("sparse_mode", {"sparse_mode": 5, "atten_mask": TRIANGLE}),
    "a band without its mask": ("atten_mask", {"sparse_mode": 4, "pre_tokens": 3}),
    "a band that nothing shows": ("pre_tokens", {"pre_tokens": 3}),
    "tokens after a causal mask": ("next_tokens", {"sparse_mode": 3, "next_tokens": 3, "atten_mask": TRIANGLE}),
    "a triangle the other way": ("atten_mask", {"sparse_mode": 3, "atten_mask": ~TRIANGLE}),
    "a whole mask for a triangle": ("atten_mask", {"sparse_mode": 4, "atten_mask": torch.zeros(B, S).bool()}),
    "a length of no prefix": ("actual_shared_prefix_len", {"actual_shared_prefix_len": 3}),
    "another backend": ("backend", {"backend": "npu"}),
    "no cores": ("num_cores", {"num_cores": 0}),
    "a mask on the native operator": ("atten_mask", {"backend": "native", "atten_mask": torch.zeros(B, S).bool()}),
    "a bias on the native operator": ("pse_shift", {"backend": "native", "pse_shift": torch.zeros(1, N, 1, S)}),
    "a split on the native operator": ("num_cores", {"backend": "native", "num_cores": 64}),
    "an unknown layout": ("input_layout", {"input_layout": "SBH"}),
    "another precision": ("inner_precise", {"inner_precise": 2}),
    "heads that do not divide": ("num_key_value_heads", {"num_key_value_heads": 4}),
    "other heads": ("num_heads", {"num_heads": 12}),
    "an offset without a scale": ("quant_offset2", {"quant_offset2": torch.ones(1)}),
    "a scale of no shape": ("quant_scale2", {"quant_scale2": torch.ones(5)}),
    "a float mask": ("atten_mask", {"atten_mask": torch.zeros(B, S)}),
    "a short mask": ("atten_mask", {"atten_mask": torch.zeros(B, S - 1, dtype=torch.bool)}),
    "a bias of other heads": ("pse_shift", {"pse_shift": torch.zeros(1, NKV, 1, S)}),
    "a longer bias": ("pse_shift", {"pse_shift": torch.zeros(1, N, 1, S + 1)}),
    "a shorter bias": ("pse_shift", {"pse_shift": torch.zeros(B, N, 1, S - 1)}),
    "a bias of one slot": ("pse_shift", {"pse_shift": torch.zeros(1, N, 1, 1)}),
    "a bias without an axis": ("pse_shift", {"pse_shift": torch.zeros(N, 1, S)}),
    "an empty band": (
        "pre_tokens", {"sparse_mode": 4, "pre_tokens": -2, "next_tokens": 1, "atten_mask": TRIANGLE}
    ),
    "scales of groups": ("key_antiquant", INTEGERS | {
        "key_antiquant": Antiquant("group", torch.ones(NKV, D)), "value_antiquant": ONE,  # type: ignore[arg-type]
    }),
    "too long": ("actual_seq_lengths", {"actual_seq_lengths": [S + 1]}),
    "half a batch of lengths": ("actual_seq_lengths", {"actual_seq_lengths": [1, 2]}),
    "padding without lengths": ("actual_seq_lengths", {"kv_padding_size": 3}),
    "a block size without a table": ("block_size", {"block_size": 16}),
    "blocks without lengths": ("actual_seq_lengths", PAGED | {"actual_seq_lengths": None}),
    "another block size": ("block_size", PAGED | {"block_size": 64}),
    "padding in blocks": ("kv_padding_size", PAGED | {"kv_padding_size": 1}),
    "half a prefix": ("key_shared_prefix", {"key_shared_prefix": torch.zeros(1, NKV, 3, D)}),
    "a prefix beside a mask": ("atten_mask", {
        **prefix(torch.float16, torch.float16), "atten_mask": torch.zeros(B, S, dtype=torch.bool),
    }),
    "an int8 prefix": ("key_shared_prefix", prefix(torch.int8, torch.int8)),
    "int8 values of a prefix": ("value_shared_prefix", prefix(torch.float16, torch.int8)),
    "a prefix for each": ("key_shared_prefix", prefix(torch.float16, torch.float16, B)),
}  # fmt: skip


@pytest.mark.covers("A22")
@pytest.mark.parametrize("name", ["pse_shift", "atten_mask"])
@pytest.mark.parametrize("size", [1, S - 1, S + 1, 2 * S])
def test_a_bias_or_mask_of_other_blocks_is_refused(name: str, size: int) -> None:
    """Guards against columns that are cut off or repeated in silence: S is blocks * block_size in a paged cache."""
    q, k, v = qkv(torch.float16)
    options = {"block_table": torch.arange(B).view(B, 1), "block_size": S, "actual_seq_lengths": LENGTHS}
    right, wrong = (
        torch.zeros(B, N, 1, n) if name == "pse_shift" else torch.zeros(B, n, dtype=torch.bool) for n in (S, size)
    )
    assert torch.equal(attend(q, k, v, **options, **{name: right}), attend(q, k, v, actual_seq_lengths=LENGTHS))
    with pytest.raises(InvalidRequestError, match=rf"{name}: .*{S}.*, not .*{size}\b") as caught:
        attend(q, k, v, **options, **{name: wrong})
    assert caught.value.param == name


@pytest.mark.covers("A19", "A22")
@pytest.mark.parametrize("wrong", [-1, B, 10**6])
@pytest.mark.parametrize("used", [True, False])
def test_a_block_that_does_not_exist_is_refused(wrong: int, used: bool) -> None:
    """Guards against -1 that reads the last block of the cache, and against torch's IndexError: an id outside the cache
    is refused where a sequence uses it, and not read where none does."""
    q, k, v = qkv(torch.float16)
    key, value = (x.unflatten(2, (2, S // 2)).transpose(1, 2).flatten(0, 1) for x in (k, v))  # two blocks per sequence
    table = torch.tensor([[2 * b, 2 * b + 1] for b in range(B)])
    lengths = [S, S, S, S // 2 + used]
    options: dict[str, Any] = {"block_size": S // 2, "actual_seq_lengths": lengths}
    expected = attend(q, key, value, block_table=table, **options)
    assert torch.equal(expected, attend(q, k, v, actual_seq_lengths=lengths))
    table[3, 1] = 2 * wrong if wrong > 0 else wrong  # B sequences have 2 * B blocks
    if not used:
        assert torch.equal(attend(q, key, value, block_table=table, **options), expected)
        return
    with pytest.raises(InvalidRequestError, match=r"^block_table: ids 0 to 7 .*, not \[") as caught:
        attend(q, key, value, block_table=table, **options)
    assert caught.value.param == "block_table"


@pytest.mark.covers("A22")
def test_a_list_of_two_types_is_refused() -> None:
    """Guards against a sequence whose numbers are read as another one's integers."""
    q, k, v = qkv(torch.float16)
    lists = [[x[b : b + 1].to(torch.int8 if b else torch.float16) for b in range(B)] for x in (k, v)]
    scales = Antiquant("tensor", torch.ones(1))
    with pytest.raises(NotSupportedError, match=r"^key: all torch.float16") as caught:
        attend(q, *lists, key_antiquant=scales, value_antiquant=scales)
    assert caught.value.param == "key"


@pytest.mark.covers("A22")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    """Guards against a combination that is silently computed as another one."""
    param, options = REFUSED[name]
    tensors = dict(zip(("query", "key", "value"), qkv(torch.float16), strict=True))
    tensors = {key: x.to(options.get(key, x.dtype)) for key, x in tensors.items()}
    options = {key: value for key, value in options.items() if key not in tensors}
    with pytest.raises(InvalidRequestError) as caught:
        attend(tensors["query"], tensors["key"], tensors["value"], **options)
    assert caught.value.param == param
    assert param in str(caught.value)


# --- system prefix ---------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result._is_view():
            self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        return result


@pytest.mark.covers("A23")
@pytest.mark.parametrize("layout", ["BNSD", "BSH", "BSND"])
def test_a_shared_prefix_is_a_repeated_one(layout: str) -> None:
    """Guards against a prefix that replaces a sequence's own tokens, and against parts averaged without their lse; a
    sequence of no tokens sees the prefix alone."""
    q, k, v = qkv()
    lengths, size = [1, 33, 0, 64], 50
    prefix = [draw(1, NKV, size, D, seed=seed) for seed in (11, 12)]
    whole = [torch.cat([p.expand(B, -1, -1, -1), x], dim=2) for p, x in zip(prefix, (k, v), strict=True)]
    repeated = attend(
        lay_out(q, layout), *(lay_out(x, layout) for x in whole), input_layout=layout,
        actual_seq_lengths=[size + n for n in lengths], softmax_lse_flag=True,
    )  # fmt: skip
    shared = attend(
        *(lay_out(x, layout) for x in (q, k, v)), input_layout=layout, actual_seq_lengths=lengths,
        key_shared_prefix=lay_out(prefix[0], layout), value_shared_prefix=lay_out(prefix[1], layout),
        softmax_lse_flag=True,
    )  # fmt: skip
    torch.testing.assert_close(shared[0], repeated[0], **EXACT)
    torch.testing.assert_close(shared[1], repeated[1], atol=1e-5, rtol=1e-6)


@pytest.mark.covers("A23")
def test_a_shared_prefix_is_not_copied() -> None:
    """Guards against a prefix repeated for every sequence: no tensor on the way is as large as B prefixes."""
    many, size = 32, 200
    q, own = draw(many, 1, 1, D, seed=1), draw(many, 1, 2, D, seed=2)
    prefix = draw(1, 1, size, D, seed=3)
    with Largest() as watched:
        attend(q, own, own, num_heads=1, num_key_value_heads=1, key_shared_prefix=prefix, value_shared_prefix=prefix)
    assert watched.elements < many * size * D // 4
    assert watched.elements >= many * size  # the scores, at least: it does look


# --- bands, splits, integers -----------------------------------------------------------------------------------------


@pytest.mark.covers("A29")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])  # in torch, and on the native operator if it is there
def test_sparse_modes(dtype: torch.dtype) -> None:
    """Guards against a band that is counted from the other end, or an edge that is one off: every mode against its
    table in the document, with negative edges and edges beyond the sequence. What is out of sight may be anything."""
    at, lengths = torch.arange(S)[None], torch.tensor(LENGTHS)[:, None]
    mask = torch.rand(B, S, generator=torch.Generator().manual_seed(4)) < 0.3
    cases: list[tuple[dict[str, Any], Tensor]] = [
        ({"sparse_mode": 0}, at < lengths),
        ({"sparse_mode": 0, "atten_mask": mask}, ~mask),
        ({"sparse_mode": 0, "atten_mask": mask, "pre_tokens": -3, "next_tokens": 20}, ~mask & (at >= 3) & (at <= 20)),
        ({"sparse_mode": 1, "atten_mask": mask}, ~mask),
        ({"sparse_mode": 2, "atten_mask": TRIANGLE}, at == 0),
        ({"sparse_mode": 3, "atten_mask": TRIANGLE, "pre_tokens": 2**31 - 1}, at < lengths),
    ]
    for pre, following in itertools.product((None, 0, 5, 40, 200, -2), (None, 0, 3, -1, -5, -300)):
        if pre is None or following is None or pre + following >= 0:
            last = lengths - 1
            seen = (at >= last - (S if pre is None else pre)) & (at <= last + (S if following is None else following))
            band = {"sparse_mode": 4, "pre_tokens": pre, "next_tokens": following, "atten_mask": TRIANGLE}
            cases.append((band, seen))
    q, k, v = qkv(dtype)
    for options, seen in cases:
        hidden = ~seen | behind(LENGTHS)
        key, value = (x.masked_fill(hidden[:, None, :, None], NAN) for x in (k, v))
        out, lse = attend(q, key, value, actual_seq_lengths=LENGTHS, softmax_lse_flag=True, **options)
        expected, expected_lse = formula(q, k, v, hidden=hidden)
        tolerance = EXACT if dtype == torch.float64 else {"atol": 3e-6, "rtol": 1e-5}
        torch.testing.assert_close(out.double(), expected, **tolerance, msg=lambda text, o=options: f"{o}: {text}")
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.covers("A9", "A10")
def test_the_result_does_not_depend_on_the_number_of_splits() -> None:
    """Guards against a split that is lost, counted twice, or combined without its lse: sequences cut for 1 to 200
    cores by the document's rule, with short ones that have fewer parts, a mask, a bias, and int8."""
    q, k, v = qkv()
    lengths = [1, 0, 96, 64]
    pse, mask = draw(1, N, 1, S, seed=7), torch.rand(B, S, generator=torch.Generator().manual_seed(4)) < 0.2
    mask[2, :40] = True  # whole parts in which nothing is seen
    options: dict[str, Any] = {"actual_seq_lengths": lengths, "pse_shift": pse, "atten_mask": mask}
    options["softmax_lse_flag"] = True
    expected, expected_lse = formula(q, k, v, hidden=behind(lengths) | mask, pse=pse)
    counts = set()
    for cores in (1, 20, 21, 40, 200):
        counts.add(tiling(*qkv(torch.float16), num_cores=cores, actual_seq_lengths=lengths).splits)
        out, lse = attend(q, k, v, num_cores=cores, **options)
        torch.testing.assert_close(out, expected, **EXACT)
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-6)
    assert counts == {1, 2, 5, 25}  # 8 pairs: split below 0.4 * cores
    assert torch.equal(attend(q, k, v, num_cores=20, **options)[0], attend(q, k, v, **options)[0])
    for mode in MODES:
        (k8, of_keys, whole_k), (v8, of_values, whole_v) = (integers(mode, True, seed=seed) for seed in (5, 6))
        query = qkv(torch.float32)[0]
        out = attend(query, k8, v8, key_antiquant=of_keys, value_antiquant=of_values, num_cores=40,
                     actual_seq_lengths=lengths)  # fmt: skip
        found = formula(query, whole_k, whole_v, hidden=behind(lengths))[0]
        torch.testing.assert_close(out.double(), found, atol=2e-4, rtol=1e-4)


@pytest.mark.covers("A29", "A17")
@pytest.mark.parametrize("layout", ["BNSD", "BSH", "BSND"])
@pytest.mark.parametrize("mode", ["tensor", "channel", "token", "head", "token_head"])
def test_int4_keys_and_values(layout: str, mode: Any) -> None:
    """Guards against the order of the eight numbers in an int32, a sign that is lost, and scales of another head or
    token: int4 is int8 with the same numbers, bit for bit, and close to what the numbers stand for; paged, too."""
    generator = torch.Generator().manual_seed(3)
    numbers = [torch.randint(-8, 8, (B, NKV, S, D), generator=generator, dtype=torch.int8) for _ in range(2)]
    shape = {"tensor": (1,), "channel": (NKV, D), "head": (NKV,), "token": (B, S), "token_head": (B, NKV, S)}[mode]
    wide = {"tensor": (1, 1, 1, 1), "channel": (1, NKV, 1, D), "head": (1, NKV, 1, 1), "token": (B, 1, S, 1),
            "token_head": (B, NKV, S, 1)}[mode]  # fmt: skip
    scales = [Antiquant(mode, 0.1 + torch.rand(shape, generator=generator), torch.randn(shape)) for _ in range(2)]
    whole = [
        (x.double() + of.offset.double().view(wide)) * of.scale.double().view(wide)  # type: ignore[union-attr]
        for x, of in zip(numbers, scales, strict=True)
    ]
    weights = 16 ** torch.arange(8, dtype=torch.int64)
    packed = [((x.long() & 15).unflatten(3, (-1, 8)) * weights).sum(-1) for x in numbers]
    packed = [torch.where(x >= 2**31, x - 2**32, x).int() for x in packed]
    q = qkv(torch.float16)[0]
    options: dict[str, Any] = {"key_antiquant": scales[0], "value_antiquant": scales[1], "input_layout": layout}
    options["actual_seq_lengths"] = LENGTHS
    query, plain, small = lay_out(q, layout), *([lay_out(x, layout) for x in xs] for xs in (numbers, packed))
    out = attend(query, *small, **options)
    assert torch.equal(out, attend(query, *plain, **options))
    expected = lay_out(formula(q, *whole, hidden=behind(LENGTHS))[0], layout)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    if mode in ("tensor", "channel", "head") and layout == "BSH":
        table = shuffled_table(32)
        paged = [into_blocks(x, 32, table, 7) for x in small]
        assert torch.equal(attend(query, *paged, block_table=table, block_size=32, **options), out)


@pytest.mark.covers("A29")
def test_an_int8_query() -> None:
    """Guards against a scale of the query that reaches another row or head, a product that is not exact, and a bias
    that is scaled with the product: the scales of rows, and the three numbers, against float64."""
    generator = torch.Generator().manual_seed(3)
    q8 = torch.randint(-128, 128, (B, N, 1, D), generator=generator, dtype=torch.int8)
    k8, v8 = (torch.randint(-128, 128, (B, NKV, S, D), generator=generator, dtype=torch.int8) for _ in range(2))
    rows = 0.001 + 0.01 * torch.rand(B, N, generator=generator)
    of_k, of_v = Antiquant("tensor", torch.tensor([0.02])), Antiquant("tensor", torch.tensor([0.01]))
    pse = draw(1, N, 1, S, seed=7)
    q, k, v = q8 * rows.double()[..., None, None], k8 * 0.02, v8 * 0.01
    options: dict[str, Any] = {"actual_seq_lengths": LENGTHS, "softmax_lse_flag": True}
    for bias in (None, pse):
        found, lse = attend(q8, k8, v8, dequant_scale_query=rows, key_antiquant=of_k, value_antiquant=of_v,
                            pse_shift=bias, **options)  # fmt: skip
        expected, expected_lse = formula(q, k, v, hidden=behind(LENGTHS), pse=bias)
        assert found.dtype == torch.float16
        torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=2e-3)
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)
    three = {"dequant_scale1": torch.tensor([1e-4]), "quant_scale1": torch.tensor([127.0])}
    found, lse = attend(q8, k8, v8, dequant_scale2=torch.tensor([0.01 / 127]), **three, **options)
    expected, expected_lse = formula(q8 * 1e-4, k8.double(), v, hidden=behind(LENGTHS))
    torch.testing.assert_close(found.double(), expected, atol=0.01, rtol=0.01)  # probabilities have 7 bits
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)


# --- the engine's operator -------------------------------------------------------------------------------------------


def decoded(compute: torch.dtype, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], **options: Any) -> Any:
    """What the engine computes for the last token of each sequence: a prompt in one step, in shuffled blocks of 32,
    then one step of decoding. options: of CacheSpec, and the sliding window. -> rows [B, N, D], lse [B, N]."""
    window = options.pop("window", None)
    ops, table = CpuOps(compute, threads=2), shuffled_table(32)[:, :-1]
    cache = ops.new_kv_cache(CacheSpec(B * S // 32 + 1, 32, NKV, D, **{"dtype": compute} | options))
    out, lse = torch.zeros(B, N, D), torch.full((B, N), -INF)
    for last in (False, True):
        rows = [b for b in range(B) if lengths[b] > (0 if last else 1)]
        spans = [slice(lengths[b] - 1, lengths[b]) if last else slice(0, lengths[b] - 1) for b in rows]
        new = [torch.cat([x[b, :, s].transpose(0, 1) for b, s in zip(rows, spans, strict=True)]).to(compute)
               for x in (k, v)]  # fmt: skip
        counts = [s.stop - s.start for s in spans]
        slots = [int(table[b, i // 32]) * 32 + i % 32 for b, s in zip(rows, spans, strict=True)
                 for i in range(s.start, s.stop)]  # fmt: skip
        meta = AttentionMetadata(
            torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
            torch.tensor([s.stop for s in spans], dtype=torch.int32),
            table[rows].contiguous(), torch.tensor(slots), 32, window,
        )  # fmt: skip
        queries = torch.cat([q[b, :, 0].expand(n, -1, -1) for b, n in zip(rows, counts, strict=True)]).to(compute)
        sums = torch.empty(len(slots), N)
        found = ops.attend(queries.contiguous(), new[0].contiguous(), new[1].contiguous(), cache, meta,
                           AttentionParams(SCALE), lse=sums)  # fmt: skip
    out[rows], lse[rows] = found.view(-1, N, D).float(), sums
    return out, lse


@pytest.mark.skipif(not levels(), reason="no native library")
@pytest.mark.covers("A1", "A14", "A19", "A29")
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "bfloat16 fast", "int8", "int8 fast"])
def test_it_is_the_engines_operator_bit_for_bit(kind: str) -> None:
    """Guards against a convention that has drifted from what the engine computes: the last token of each sequence,
    decoded by the engine through its own paged cache, has the bits of the convention over padding, blocks, lists and
    layouts, alone or as `auto`, with window and lse."""
    lengths, fast = [1, 33, 96, 0], kind.endswith("fast")
    dtype = {"int8": torch.float32, "int8 fast": torch.float32}.get(kind) or getattr(torch, kind.split()[0])
    compute = torch.bfloat16 if kind == "bfloat16 fast" else torch.float32
    q, k, v = qkv(dtype)
    spec: dict[str, Any] = {}
    options: dict[str, Any] = {"inner_precise": int(fast), "softmax_lse_flag": True}
    key, value = k, v
    if kind.startswith("int8"):
        (key, of_k, k), (value, of_v, v) = integers("channel", True, seed=5), integers("channel", False, seed=6)
        key, value = (x.clamp(min=-127) for x in (key, value))
        options |= {"key_antiquant": of_k, "value_antiquant": of_v}
        zeros = torch.zeros(NKV, D)
        spec = {"dtype": torch.int8, "slices": 2 if fast else 3,
                "scales": KVScales(of_k.scale, of_k.offset, of_v.scale, zeros)}  # fmt: skip
        k, v = (of.scale.view(1, NKV, 1, D) * (x.float() + (0 if of.offset is None else of.offset.view(1, NKV, 1, D)))
                for x, of in ((key, of_k), (value, of_v)))  # fmt: skip
    for window in (None, 20):
        expected, expected_lse = decoded(compute, q, k, v, lengths, **spec, window=window)
        band = {} if window is None else {"sparse_mode": 4, "pre_tokens": window - 1, "atten_mask": TRIANGLE}
        for backend in ("native", "auto"):
            plans = native_ops(compute).plan_counts
            before = plans.total()
            out, lse = attend(q, key, value, actual_seq_lengths=lengths, backend=backend, **band, **options)
            assert plans.total() == before + 1  # computed by these kernels, in this type
            assert torch.equal(out[:, :, 0], expected.to(dtype))
            assert torch.equal(lse[..., 0, 0], expected_lse)
        table = shuffled_table(32)
        blocks = [lay_out(into_blocks(x.transpose(1, 2), 32, table, 7).transpose(1, 2), "BSH") for x in (key, value)]
        paged = attend(lay_out(q, "BSH"), *blocks, input_layout="BSH", block_table=table, block_size=32,
                       actual_seq_lengths=lengths, **band, **options)  # fmt: skip
        assert torch.equal(paged[0].view_as(out), out)
        padded = [torch.cat([torch.stack([x[b].roll(S - n, dims=1) for b, n in enumerate(lengths)]), x[:, :, :9]], 2)
                  for x in (key, value)]  # fmt: skip
        right = attend(q, *padded, actual_seq_lengths=lengths, kv_padding_size=9, **band, **options)
        assert torch.equal(right[0], out)


@pytest.mark.skipif(not levels(), reason="no native library")
@pytest.mark.covers("A23")
@pytest.mark.parametrize("size", [5, 16, 50])
def test_a_shared_prefix_on_the_engines_operator(size: int) -> None:
    """Guards against a prefix whose last block is another sequence's, and one that a sequence of no tokens does not
    see: bit for bit what repeating it gives."""
    q, k, v = qkv(torch.float32)
    lengths = [1, 33, 0, 64]
    prefix = [draw(1, NKV, size + 3, D, seed=seed, dtype=torch.float32) for seed in (11, 12)]
    whole = [torch.cat([p[:, :, :size].expand(B, -1, -1, -1), x], dim=2) for p, x in zip(prefix, (k, v), strict=True)]
    options: dict[str, Any] = {"softmax_lse_flag": True, "backend": "native"}
    repeated = attend(q, *whole, actual_seq_lengths=[size + n for n in lengths], **options)
    shared = attend(q, k, v, actual_seq_lengths=lengths, key_shared_prefix=prefix[0], value_shared_prefix=prefix[1],
                    actual_shared_prefix_len=size, **options)  # fmt: skip
    assert torch.equal(shared[0], repeated[0])
    assert torch.equal(shared[1], repeated[1])


@pytest.mark.covers("A24", "A29")
def test_the_registered_operator() -> None:
    """Guards against an argument of the operator's binding that does not arrive, or arrives as another one; and against
    shapes that torch.compile would be told wrongly."""
    operator = torch.ops.penstock.incre_flash_attention
    q, k, v = qkv(torch.float16)
    same = {"num_heads": N, "num_key_value_heads": NKV, "scale_value": SCALE, "input_layout": "BNSD"}
    same |= {"actual_seq_lengths": LENGTHS}
    out, lse = operator(q, [k], [v], **same, softmax_lse_flag=True, sparse_mode=4, pre_tokens=9, atten_mask=TRIANGLE)
    expected = attend(q, k, v, actual_seq_lengths=LENGTHS, softmax_lse_flag=True, sparse_mode=4, pre_tokens=9,
                      atten_mask=TRIANGLE)  # fmt: skip
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    lists = [[x[b : b + 1, :, :n] for b, n in enumerate(LENGTHS)] for x in (k, v)]
    plain = attend(q, k, v, actual_seq_lengths=LENGTHS)
    assert torch.equal(operator(q, *lists, **same)[0], plain)
    padding = attend(q, k, v, actual_seq_lengths=[1, 33, 80, 64], kv_padding_size=7)
    given = same | {"actual_seq_lengths": [1, 33, 80, 64], "kv_padding_size": torch.tensor([7])}
    assert torch.equal(operator(q, [k], [v], **given)[0], padding)
    assert operator(q, [k], [v], **same)[1].tolist() == [0.0]

    for numbers, mode in ((0, "tensor"), (0, "channel"), (1, "token")):
        (k8, of_k, _), (v8, of_v, _) = integers(mode, True, seed=5), integers(mode, True, seed=6)
        assert of_k.offset is not None
        assert of_v.offset is not None
        scales, offsets = torch.stack([of_k.scale, of_v.scale]), torch.stack([of_k.offset, of_v.offset])
        expected = attend(q, k8, v8, actual_seq_lengths=LENGTHS, key_antiquant=of_k, value_antiquant=of_v)
        together = {"antiquant_scale": scales, "antiquant_offset": offsets, "antiquant_mode": numbers}
        apart = {
            "key_antiquant_scale": of_k.scale, "key_antiquant_offset": of_k.offset, "key_antiquant_mode": numbers,
            "value_antiquant_scale": of_v.scale, "value_antiquant_offset": of_v.offset, "value_antiquant_mode": numbers,
        }  # fmt: skip
        for arguments in (together, apart):
            assert torch.equal(operator(q, [k8], [v8], **same, **arguments)[0], expected)
    post = {"quant_scale2": torch.full((1,), 30.0), "quant_offset2": torch.full((1,), 3.0)}
    assert torch.equal(operator(q, [k], [v], **same, **post)[0], attend(q, k, v, actual_seq_lengths=LENGTHS, **post))
    with pytest.raises(InvalidRequestError, match="value_antiquant_mode: 0 to 5, not 6"):
        operator(q, [k], [v], **same, value_antiquant_mode=6)
    with pytest.raises(InvalidRequestError, match="key_antiquant_mode: 4 or 5 for scales of tokens"):
        operator(q, [k], [v], **same, key_antiquant_mode=4, key_antiquant_scale=torch.ones(B, S))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator, (q, [k], [v]), same | {"softmax_lse_flag": True}, test_utils=tests)
    torch.library.opcheck(operator, (q, [k], [v]), same | post, test_utils=tests)


@pytest.mark.covers("A24", "A25", "A28")
def test_the_tiling_of_a_call() -> None:
    """Guards against a first stage that is told another call than the second: each parameter of the key from the
    tensors themselves."""
    q, k, v = qkv(torch.bfloat16)
    heads = {"layout": "BNSD", "query": "bfloat16", "cache": "bfloat16", "output": "bfloat16", "split": False,
             "paged": False, "per_token": False, "perf_mode": "C1_V2", "prefix": False}  # fmt: skip
    k8, of_k, _ = integers("token", True, seed=5)
    prefix = {"key_shared_prefix": k[:1], "value_shared_prefix": v[:1]}
    table = {"block_table": torch.arange(B)[:, None], "block_size": S, "actual_seq_lengths": LENGTHS}
    scales = {"key_antiquant": of_k, "value_antiquant": of_k}
    cases: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        ((q, k, v), {}, {}),
        ((q, k, v), {"num_cores": 21}, {"split": True}),
        ((q, k, v), {"num_cores": 21, "split_below": 0.1}, {}),
        ((q, k, v), prefix, {"prefix": True}),
        ((q, k, v), table, {"paged": True}),
        ((q, k8, k8), scales, {"cache": "int8", "per_token": True}),
        ((q, k, v), {"quant_scale2": torch.ones(1)}, {"output": "int8"}),
        ((q, k, v), {"perf_mode": "C1_V1"}, {"perf_mode": "C1_V1"}),
        (qkv(torch.float16), {}, {"query": "float16", "cache": "float16", "output": "float16"}),
    ]
    for tensors, options, differs in cases:
        found = tiling(*tensors, **{"num_cores": 2} | options)
        assert decode_tiling_key(found.key) == heads | differs
    assert tiling(q, k, v, num_cores=21).workspace["accumOutGm"] == B * NKV * (N // NKV) * 2 * D * 4
    with pytest.raises(InvalidRequestError, match="query: 'float64'"):
        tiling(*qkv(), num_cores=2)
