"""Runs a loaded model over a paged cache with shuffled blocks, without engine or runner.

It writes the contract down once more: metadata from the lengths alone, a table per cache group, NaN in every slot
that nobody has written.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.backends import load_ops
from penstock.kernels.cpu.ops import CpuKVCache
from penstock.kernels.metadata import AttentionMetadata, CacheSpec, Heads
from penstock.kernels.scheme import Scheme
from penstock.layers.module import ForwardContext
from penstock.models.config_json import load_model_config
from penstock.runner.model_runner import RecordedModel
from penstock.weights.loader import load_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
SLICES = {"float32": 3, "bfloat16": 2}  # of an int8 cache, by the model's type


class PagedModel:
    """A model, its caches full of NaN, and a block table for each sequence.

    `recorded`: steps of few tokens are recorded as programs, as the engine does with native kernels.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: str = "float32",
        kernels: str = "reference",
        scheme: Scheme | None = None,
        cache_dtype: str | None = None,
        recorded: bool = False,
        num_seqs: int = 1,
        max_len: int = 256,
        block_size: int = 16,
        load_format: str = "auto",
        model_impl: str = "auto",
        slices: int = 2,
    ) -> None:
        self.config = replace(load_model_config(directory), model_impl=model_impl)
        self.ops = load_ops(kernels, DTYPES[dtype], threads=1 if kernels == "reference" else 2)
        self.model = load_model(directory, self.config, self.ops, load_format, scheme=scheme, slices=slices)
        if recorded:
            self.model = RecordedModel(self.model, self.ops)
        self.block_size = block_size
        self.lengths = [0] * num_seqs
        blocks_each = -(-max_len // block_size)
        num_blocks = num_seqs * blocks_each + 3
        ids = list(range(num_blocks))
        random.Random(0).shuffle(ids)
        self.tables = torch.tensor(ids[: num_seqs * blocks_each], dtype=torch.int32).view(num_seqs, blocks_each)
        stored = cache_dtype or dtype
        slices = SLICES[dtype] if stored == "int8" else 0
        layers = map(self.config.at, range(self.config.num_hidden_layers))
        shapes = [(layer.num_key_value_heads, layer.head_dim) for layer in layers]
        self.caches = tuple(
            self.ops.new_kv_cache(CacheSpec(num_blocks, block_size, *shape, DTYPES[stored], slices=slices))
            for shape in shapes
        )
        for cache in self.caches:
            spoil(cache)

    def step(self, work: dict[int, list[int]]) -> dict[int, Tensor]:
        """Compute these new tokens of these sequences in one packed step -> log-probabilities after each, [n, V]."""
        ids, ctx = self.begin(work)
        with torch.no_grad():
            logits = self.model.compute_logits(self.model(ids, ctx))
        assert logits.dtype == torch.float32
        counts = [len(tokens) for tokens in work.values()]
        return dict(zip(work, self.ops.log_softmax(logits).split(counts), strict=True))

    def begin(self, work: dict[int, list[int]]) -> tuple[Tensor, ForwardContext]:
        """What the model is called with for such a step; the sequences have these tokens from now on."""
        rows = list(work)
        counts = [len(work[row]) for row in rows]
        positions = torch.cat([torch.arange(self.lengths[row], self.lengths[row] + len(work[row])) for row in rows])
        for row in rows:
            self.lengths[row] += len(work[row])
        owner = torch.repeat_interleave(torch.tensor(rows), torch.tensor(counts))
        blocks = self.tables[owner, positions // self.block_size].long()
        slots = blocks * self.block_size + positions % self.block_size
        groups = self.config.cache_groups()
        attention = tuple(self._metadata(rows, counts, slots, *group) for group in groups)
        layer_group = tuple(
            next(index for index, (layers, _) in enumerate(groups) if layer in layers)
            for layer in range(self.config.num_hidden_layers)
        )
        ctx = ForwardContext(positions, self.caches, attention, layer_group)
        return torch.tensor([token for row in rows for token in work[row]]), ctx

    def _metadata(
        self, rows: list[int], counts: list[int], slots: Tensor, layers: tuple[int, ...], window: int | None
    ) -> AttentionMetadata:
        tables, chunked = self.tables[rows].clone(), self.config.chunked_windows
        if window is not None:  # blocks that no later token will see are released
            for row, count, table in zip(rows, counts, tables, strict=True):
                first = self.lengths[row] - count
                hidden = first // window * window if chunked else max(0, first - window + 1)
                table[: hidden // self.block_size] = -1
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        lengths = torch.tensor([self.lengths[row] for row in rows], dtype=torch.int32)
        meta = AttentionMetadata(starts, lengths, tables, slots, self.block_size, window, chunked=chunked)
        layer = self.config.at(layers[0])
        heads = Heads(layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim)
        return self.ops.plan(meta, heads, self.caches[layers[0]])


def spoil(cache: Any) -> None:
    """Fill a cache of any backend with NaN."""
    if isinstance(cache, CpuKVCache):
        cache.memory.fill_(0xFF)  # which is NaN in float32 and in bfloat16, as are the scales of an int8 cache
    else:
        cache.keys.fill_(float("nan"))
        cache.values.fill_(float("nan"))
