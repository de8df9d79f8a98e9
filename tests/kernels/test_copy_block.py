"""A block of a cache copied to another one, or to the host and back, in both backends and every form of a cache."""

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


@pytest.mark.covers("C6")
@pytest.mark.parametrize("ops", BACKENDS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("form", FORMS)
def test_a_written_block_reads_as_the_one_that_was_read(ops: Any, form: str) -> None:
    """Guards against a block on the host that changes with the cache, lacks its scales, or is written elsewhere."""
    one, other = (ops.new_kv_cache(CacheSpec(3, 16, 2, 8, **FORMS[form])) for _ in range(2))
    slots = torch.arange(48)
    for cache in (one, other):
        ops.store_kv(cache, torch.randn(48, 2, 8), torch.randn(48, 2, 8), slots)
    expected = [x[16:32].clone() for x in ops.load_kv(one, slots)]
    before = [x.clone() for x in ops.load_kv(other, slots)]
    content = ops.read_block(one, 1)
    assert len(content) == one.num_bytes // 3
    ops.store_kv(one, torch.randn(48, 2, 8), torch.randn(48, 2, 8), slots)
    ops.write_block(other, 2, content)
    for found, x, block in zip(ops.load_kv(other, slots), before, expected, strict=True):
        assert torch.equal(found[32:], block)
        assert torch.equal(found[:32], x[:32])
    for wrong in (content[1:], content + b"x"):
        with pytest.raises(ValueError, match="content: "):
            ops.write_block(other, 2, wrong)
    for call in (lambda: ops.read_block(one, 3), lambda: ops.write_block(one, -1, content)):
        with pytest.raises(ValueError, match="blocks 0 to 2"):
            call()
