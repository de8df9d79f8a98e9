"""Hand-written attention over every kind of cache, and in the engine: the same answers as the attention operator."""

import ast
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import LLM, InvalidRequestError, SamplingParams, models
from penstock.kernels.metadata import AttentionMetadata, CacheSpec
from penstock.kernels.ops import Ops
from penstock.kernels.reference import ReferenceOps
from penstock.models.registry import find_model
from penstock_lab.conventions.caches import (
    ABSENT,
    CacheInterface,
    ContiguousCache,
    Int8Cache,
    PagedCacheView,
    PlainCache,
    PrefillOnlyCache,
    RingCache,
    visible,
)
from tests.hf_models import MAKERS, random_ids
from tests.kernels.packed import levels
from tests.lab.compat.user_file import imported

LAYERS, HEADS, HKV, D, VOCAB, MAX_LEN = 2, 4, 2, 16, 60, 64
PROMPTS = [random_ids(length, seed, VOCAB) for seed, length in enumerate((11, 1, 30))]
WINDOW = 7


class TinyModel(nn.Module):
    """Hand-written attention in JetStream's calling convention; knows nothing of where keys are kept."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

        hidden = HEADS * D
        self.embedding = 2 * weight(VOCAB, hidden)
        self.position = weight(MAX_LEN, hidden)
        self.qkv = [weight((HEADS + 2 * HKV) * D, hidden) for _ in range(LAYERS)]
        self.out = [weight(hidden, hidden) for _ in range(LAYERS)]

    def forward(self, tokens: Tensor, input_pos: Tensor, caches: Sequence[CacheInterface], mask: Tensor) -> Tensor:
        """tokens and input_pos [B, S] -> logits [B, S, V]."""
        x = self.embedding[tokens] + self.position[input_pos.clamp(min=0)]
        for qkv, out, cache in zip(self.qkv, self.out, caches, strict=True):
            q, k, v = (x @ qkv.T).unflatten(2, (-1, D)).transpose(1, 2).split([HEADS, HKV, HKV], dim=1)
            keys, values = (item.repeat_interleave(HEADS // HKV, dim=1) for item in cache.update(k, v))
            scores = (q @ keys.transpose(2, 3) * D**-0.5).masked_fill(~mask, float("-inf"))
            mixed = scores.softmax(dim=-1).nan_to_num() @ values  # rows of padding see nothing
            x = x + torch.tanh(mixed.transpose(1, 2).flatten(2) @ out.T)
        return x @ self.embedding.T


class Plain:
    """One plain cache a layer."""

    def __init__(self, make: Callable[[], PlainCache], window: int | None) -> None:
        self.caches, self.window = [make() for _ in range(LAYERS)], window
        self.keeps = not isinstance(self.caches[0], PrefillOnlyCache)

    def begin(self, positions: Tensor) -> tuple[Sequence[CacheInterface], Tensor]:
        for cache in self.caches:
            if isinstance(cache, RingCache):
                cache.finalize()  # the step before, if it is lazy
            cache.begin(positions)
        return self.caches, visible(positions, self.caches[0].key_positions, self.window)


class Paged:
    """The engine's cache in shuffled blocks full of NaN."""

    keeps = True

    def __init__(self, ops: Ops, dtype: torch.dtype, window: int | None, *, ring: int = 0) -> None:
        self.ops, self.window, self.block_size = ops, window, ring or 16
        blocks = len(PROMPTS) * (1 if ring else MAX_LEN // 16)
        ids = list(range(blocks))
        random.Random(2).shuffle(ids)
        table = torch.tensor(ids, dtype=torch.int32).view(len(PROMPTS), -1)
        self.table = table.expand(-1, -(-MAX_LEN // ring)) if ring else table
        self.ring = bool(ring)
        slices = 3 if dtype == torch.int8 else 0
        self.caches = [
            ops.new_kv_cache(CacheSpec(blocks, self.block_size, HKV, D, dtype, slices=slices)) for _ in range(LAYERS)
        ]
        if dtype != torch.int8:
            nan = torch.full((blocks * self.block_size, HKV, D), float("nan"))
            for cache in self.caches:
                ops.store_kv(cache, nan, nan, torch.arange(len(nan)))

    def begin(self, positions: Tensor) -> tuple[Sequence[CacheInterface], Tensor]:
        new = positions >= 0
        rows, columns = new.nonzero(as_tuple=True)
        at, lengths = positions[rows, columns], positions.amax(dim=1) + 1
        slots = self.table[rows, at // self.block_size].long() * self.block_size + at % self.block_size
        if self.ring:
            slots = slots.where(lengths[rows] - at <= self.block_size, -1)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), new.sum(dim=1).cumsum(0)])
        meta = AttentionMetadata(
            starts.int(), lengths.int(), self.table.contiguous(), slots, self.block_size, self.window
        )
        views = [PagedCacheView(self.ops, cache, meta) for cache in self.caches]
        assert torch.equal(views[0].positions, positions)
        return views, views[0].mask


def generate(
    caches: Any, count: int, chunk: int, forced: Sequence[list[int]] = (), model: Any = None
) -> tuple[list[list[int]], Tensor]:
    """`count` greedy tokens after each prompt, or the forced ones, and the logits they come from, [B, count, V]."""
    model, texts = model or TinyModel(), [list(prompt) for prompt in PROMPTS]
    done, logits = [0] * len(texts), []
    while len(logits) < count:
        counts = [min(chunk, len(text) - start) for text, start in zip(texts, done, strict=True)]
        if any(start + n < len(text) for text, start, n in zip(texts, done, counts, strict=True)):
            # Sequences that are ahead wait, so that all sample together.
            counts = [n if start + n < len(text) else n - 1 for text, start, n in zip(texts, done, counts, strict=True)]
        if not caches.keeps:
            done, counts = [0] * len(texts), [len(text) for text in texts]
        new = torch.arange(max(counts))
        begin, size = torch.tensor(done)[:, None], torch.tensor(counts)[:, None]
        positions = (begin + new).where(new < size, ABSENT)
        tokens = torch.tensor(
            [[text[p] if p >= 0 else 0 for p in row] for text, row in zip(texts, positions.tolist(), strict=True)]
        )
        views, mask = caches.begin(positions)
        result = model(tokens, positions, views, mask)
        done = [start + n for start, n in zip(done, counts, strict=True)]
        if all(start == len(text) for text, start in zip(texts, done, strict=True)):
            last = result[torch.arange(len(texts)), torch.tensor(counts) - 1]
            logits.append(last)
            for b, text in enumerate(texts):
                text.append(forced[b][len(logits) - 1] if forced else int(last[b].argmax()))
    return [text[-count:] for text in texts], torch.stack(logits, dim=1)


B = len(PROMPTS)
KEPT: dict[str, Callable[[int | None], Any]] = {
    "contiguous": lambda window: Plain(lambda: ContiguousCache(B, HKV, MAX_LEN, D), window),
    "prefill only": lambda window: Plain(PrefillOnlyCache, window),
    "ring": lambda window: Plain(lambda: RingCache(B, HKV, window or MAX_LEN, D), window),
    "lazy ring": lambda window: Plain(lambda: RingCache(B, HKV, window or MAX_LEN, D, lazy=True), window),
    "rolling": lambda window: Plain(lambda: RingCache(B, HKV, window or MAX_LEN, D, unroll=True), window),
    "paged": lambda window: Paged(ReferenceOps(torch.float32), torch.float32, window),
    "paged ring": lambda window: Paged(ReferenceOps(torch.float32), torch.float32, window, ring=16 if window else 64),
}
ROUNDED: dict[str, Callable[[int | None], Any]] = {
    "int8": lambda window: Plain(lambda: Int8Cache(B, HKV, MAX_LEN, D), window),
    "paged int8": lambda window: Paged(ReferenceOps(torch.float32), torch.int8, window),
}


@pytest.mark.covers("J2", "J3", "M9", "J22")
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("kind", [*KEPT, *ROUNDED])
def test_any_cache_under_a_hand_written_model(kind: str, window: int | None) -> None:
    """Guards against keys in the wrong order, of the wrong sequence or written over too early: prompts of 1, 11 and 30
    tokens in one batch, in chunks shorter and longer than the window."""
    tokens, logits = generate(KEPT["prefill only"](window), 24, MAX_LEN)
    assert len({tuple(row) for row in tokens}) == B
    for chunk in (1, 5, 13, MAX_LEN):
        if kind in KEPT:
            found, found_logits = generate(KEPT[kind](window), 24, chunk)
            assert found == tokens, f"chunks of {chunk}"
            torch.testing.assert_close(found_logits, logits, atol=2e-5, rtol=0)
        else:
            _, found_logits = generate(ROUNDED[kind](window), 24, chunk, forced=tokens)
            error = (found_logits - logits).abs().max() / logits.abs().max()
            assert 1e-5 < error < 0.01, f"chunks of {chunk}: {error}"


@pytest.mark.covers("J22")
def test_a_lazy_ring_is_written_at_the_end_of_a_step() -> None:
    """Guards against a lazy update that writes at once, that loses a step without `finalize`, or whose next step sees
    something else than that of a ring that is written at once."""
    eager, lazy = (RingCache(1, 1, 3, 4, lazy=is_lazy) for is_lazy in (False, True))
    for step in range(5):
        before = lazy._kept.clone()
        new = torch.full((1, 1, 1, 4), float(step + 1))
        for ring in (eager, lazy):
            ring.begin(torch.tensor([[step]]))
        assert torch.equal(lazy.key_positions, eager.key_positions)
        assert all(map(torch.equal, lazy.update(new, -new), eager.update(new, -new)))
        assert torch.equal(lazy._kept, before)
        assert not torch.equal(lazy._kept, eager._kept)
        with pytest.raises(InvalidRequestError, match="finalize"):
            lazy.begin(torch.tensor([[step + 1]]))
        lazy.finalize()
        assert torch.equal(lazy._kept, eager._kept)


@pytest.mark.covers("M15")
def test_a_cache_that_keeps_nothing_wants_whole_sequences() -> None:
    """Guards against a decode step that silently attends to its own token alone."""
    with pytest.raises(InvalidRequestError, match="from its start"):
        PrefillOnlyCache().begin(torch.tensor([[0, 1, 2], [4, 5, ABSENT]]))


@pytest.mark.covers("C23")
def test_sinks_stay_visible() -> None:
    """Guards against kept first tokens that a hand-written model loses, or sees twice."""
    ops, (num_cached, num_new, window, sinks) = ReferenceOps(torch.float32), (9, 2, 3, 2)
    k = torch.randn(num_cached + num_new, 1, D)
    cache = ops.new_kv_cache(CacheSpec(1, 16, 1, D, torch.float32))
    ops.store_kv(cache, k[:num_cached], k[:num_cached], torch.arange(num_cached))
    starts, lengths = torch.tensor([0, num_new], dtype=torch.int32), torch.tensor([len(k)], dtype=torch.int32)
    table, slots = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([9, 10])
    view = PagedCacheView(ops, cache, AttentionMetadata(starts, lengths, table, slots, 16, window, sinks))
    assert view.key_positions.tolist() == [[0, 1, 7, 8, 9, 10]]
    assert view.mask[0, 0].tolist() == [[True] * 5 + [False], [True, True, False, True, True, True]]
    keys, _ = view.update(*[view.unpack(k[num_cached:])] * 2)
    assert torch.equal(keys[0, 0], k[view.key_positions[0], 0])


# --- in the engine ---------------------------------------------------------------------------------------------------

HAND_WRITTEN = '''
from penstock.layers.decoder import Attention
from penstock_lab.conventions.caches import PagedCacheView
from penstock.models.llama.model import LlamaForCausalLM
from penstock.models.registry import register_model


class HandWritten(Attention):
    """softmax(q k^T / sqrt(D)) v, as one would write it."""

    def forward(self, y, ctx):
        q, k, v = self.ops.rotary_qkv(self.qkv_proj(y), ctx.positions, self.rotary_params)
        view = PagedCacheView(self.ops, *ctx.layer(self.layer))
        q, k, v = view.unpack(q), view.unpack(k), view.unpack(v)
        k, v = (item.repeat_interleave(q.shape[1] // item.shape[1], dim=1) for item in view.update(k, v))
        scores = (q.float() @ k.transpose(2, 3) * q.shape[3] ** -0.5).masked_fill(~view.mask, float("-inf"))
        return self.o_proj(view.pack(scores.softmax(dim=-1) @ v).to(y.dtype))


@register_model("HandForCausalLM", table="hand.yaml", config="MistralForCausalLM")
class HandForCausalLM(LlamaForCausalLM):
    def __init__(self, cfg, make):
        super().__init__(cfg, make)
        for index, block in enumerate(self.model.layers):
            rotary = block.self_attn.rotary
            block.self_attn = HandWritten(cfg, make.at(f"model.layers.{index}.self_attn"), index, rotary)
'''


@pytest.fixture
def hand_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a model's directory into one whose attention is the hand-written one."""
    (tmp_path / "hand.yaml").write_text(find_model("LlamaForCausalLM").table_file.read_text())
    (tmp_path / "hand.py").write_text(HAND_WRITTEN)

    def convert(directory: Path) -> None:
        file = directory / "config.json"
        config = json.loads(file.read_text()) | {"architectures": ["HandForCausalLM"], "model_type": "hand"}
        file.write_text(json.dumps(config))

    with imported(tmp_path / "hand.py", monkeypatch):
        yield convert


@pytest.mark.covers("J6")
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_hand_written_attention_in_the_engine(kernels: str, family: str, tmp_path: Path, hand_written: Any) -> None:
    """Guards against a view that reads other keys than `attend`: in a crowd, in chunks, in blocks and in rings."""
    if kernels == "cpu" and not levels():
        pytest.skip("no native library")
    _, directory = MAKERS[family](tmp_path, seed=4)
    prompts = [{"prompt_token_ids": random_ids(length, length)} for length in (3, 40, 17, 64, 1)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
    options = {"kernels": kernels, "dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 24}

    def answers(**more: Any) -> list[tuple[list[int], list[float]]]:
        with LLM(model=str(directory), **{**options, **more}) as llm:
            choices = [output.outputs[0] for output in llm.generate(prompts, params)]
        return [
            (c.token_ids, [entry[t].logprob for t, entry in zip(c.token_ids, c.logprobs, strict=True)]) for c in choices
        ]

    expected = answers()
    hand_written(directory)
    for more in ({}, {"block_size": 128}):
        for found, (ids, logprobs) in zip(answers(**more), expected, strict=True):
            assert found[0] == ids
            assert found[1] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.covers("J4")
def test_model_files_know_no_cache() -> None:
    """Guards against a model written for one kind of cache."""
    for file in Path(models.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = node.module if isinstance(node, ast.ImportFrom) else ""
            if module == "functools":
                continue
            assert not any("cache" in name.lower() or "runner" in name for name in [*names, module or ""]), file
