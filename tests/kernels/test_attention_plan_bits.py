"""Whatever the plan, the same bits: any number of cores, spans split or not, prefixes shared or repeated."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.attention.items import SPAN, AttentionShape
from penstock.kernels.attention.plan import AttentionPlan, Planner
from penstock.kernels.cpu.library import load_library
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, CacheSpec, KVCache

pytestmark = pytest.mark.skipif(load_library() is None, reason="no native library was built")

HEADS, KV_HEADS, DIM, BLOCK = 8, 2, 32, 16
SHAPE = AttentionShape(HEADS, KV_HEADS, DIM, "bfloat16")


class Crowd:
    """Sequences that begin with the same tokens, in blocks of their own or in shared ones."""

    def __init__(self, lengths: list[tuple[int, int]], prefix: int, *, shared: bool) -> None:
        self.lengths, self.ops = lengths, CpuOps(torch.bfloat16, threads=2)
        columns = -(-max(map(sum, lengths)) // BLOCK)
        self.table = torch.arange(len(lengths) * columns, dtype=torch.int32).view(len(lengths), columns)
        if shared:
            self.table[:, : prefix // BLOCK] = self.table[0, : prefix // BLOCK]
        self.cache: KVCache = self.ops.new_kv_cache(CacheSpec(self.table.numel(), BLOCK, KV_HEADS, DIM, torch.bfloat16))
        common = _random(prefix, 0)
        for row, (cached, _) in enumerate(lengths):
            k, v = (torch.cat([x[:cached], y])[:cached] for x, y in zip(common, _random(cached, row + 1), strict=True))
            self.ops.store_kv(self.cache, k, v, self._slots(row, 0, cached))

    def _slots(self, row: int, begin: int, end: int) -> Tensor:
        positions = torch.arange(begin, end)
        return self.table[row].long()[positions // BLOCK] * BLOCK + positions % BLOCK

    def metadata(self, cores: int) -> AttentionMetadata:
        """Planned for so many cores, and dealt to two threads."""
        starts = torch.tensor([0, *(new for _, new in self.lengths)]).cumsum(0).int()
        lengths = torch.tensor([cached + new for cached, new in self.lengths], dtype=torch.int32)
        slots = torch.cat([self._slots(row, *(c, c + n)) for row, (c, n) in enumerate(self.lengths)])
        tables = [x.numpy() for x in (starts, lengths, self.table)]
        plan = Planner(SHAPE, BLOCK, num_cores=cores).plan(*tables)
        count = len(plan.items)
        plan = replace(plan, starts=np.array([0, count // 2, count], dtype=np.int64))
        return AttentionMetadata(starts, lengths, self.table, slots, BLOCK, None, plan=plan)

    def attend(self, cores: int) -> tuple[Tensor, AttentionPlan]:
        meta = self.metadata(cores)
        assert meta.plan is not None
        tokens = len(meta.slot_mapping)
        q = torch.randn((tokens, HEADS, DIM), generator=torch.Generator().manual_seed(7)).bfloat16()
        k, v = _random(tokens, 8)
        return self.ops.attend(q, k, v, self.cache, meta, AttentionParams(scale=DIM**-0.5)), meta.plan


def _random(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn((2, tokens, KV_HEADS, DIM), generator=generator).bfloat16()
    return k, v


@pytest.mark.covers("A9", "A10")
@pytest.mark.parametrize("new", [1, 3, 60])
def test_the_number_of_splits_changes_no_bit(new: int) -> None:
    """Guards against: partial results that fold in another order than one core folds them."""
    crowd = Crowd([(5 * SPAN + 3, new), (100, new), (2 * SPAN - 1, new)], 0, shared=False)
    whole, plan = crowd.attend(1)
    assert plan.partial_rows == 0
    for cores in (2, 3, 64):
        split, plan = crowd.attend(cores)
        assert torch.equal(whole, split)
    assert plan.partial_rows > 0  # at the latest with 64 cores


@pytest.mark.covers("A23")
@pytest.mark.parametrize("cores", [1, 2, 64])
@pytest.mark.parametrize("new", [1, 7])
def test_a_shared_prefix_is_as_if_each_had_its_own(cores: int, new: int) -> None:
    """Guards against: a shared prefix that is merged in another order, or that some sequence misses."""
    lengths = [(2 * SPAN + 5, new), (3 * SPAN, new), (2 * SPAN + 700, new), (2 * SPAN, 1)]
    repeated, apart = Crowd(lengths, 2 * SPAN, shared=False).attend(cores)
    shared, together = Crowd(lengths, 2 * SPAN, shared=True).attend(cores)
    assert torch.equal(repeated, shared)
    assert together.loads.sum() < 0.8 * apart.loads.sum()
