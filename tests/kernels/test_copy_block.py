"""A block of a cache copied to another one, in both backends and every form of a cache."""

from typing import Any

import pytest
import torch

from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.metadata import CacheSpec, KVScales
from penstock.kernels.reference import ReferenceOps
from tests.kernels.packed import levels

BACKENDS: list[Any] = [ReferenceOps(torch.float32), *([CpuOps(torch.float32)] if levels() else [])]
SCALES = KVScales(*(torch.rand(2, 8) + 0.01 for _ in range(4)))
FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8 per token": {"dtype": torch.int8, "slices": 2},
    "int8 per channel": {"dtype": torch.int8, "slices": 2, "scales": SCALES},
}


@pytest.mark.covers("C6")
@pytest.mark.parametrize("ops", BACKENDS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("form", FORMS)
def test_a_copy_reads_as_its_source(ops: Any, form: str) -> None:
    """Guards against a copy without its scales, of half a block, or to the wrong place."""
    cache = ops.new_kv_cache(CacheSpec(3, 16, 2, 8, **FORMS[form]))
    k, v = torch.randn(48, 2, 8), torch.randn(48, 2, 8)
    ops.store_kv(cache, k, v, torch.arange(48))
    before = [x.clone() for x in ops.load_kv(cache, torch.arange(48))]
    ops.copy_block(cache, 0, 2)
    for found, x in zip(ops.load_kv(cache, torch.arange(48)), before, strict=True):
        assert torch.equal(found[:32], x[:32])
        assert torch.equal(found[32:], x[:16])
        assert not torch.equal(x[32:], x[:16])
    for source, target in ((3, 0), (0, 3), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="blocks 0 to 2"):
            ops.copy_block(cache, source, target)
