"""The native kernels beside the reference, layer by layer."""

from pathlib import Path

import pytest

from penstock.layers.module import get_submodule
from penstock_lab.check.ours import OurModel
from penstock_lab.check.parity import compare_kernels, compare_traces
from tests.families.case import Case, all_cases
from tests.hf_models import make_qwen3, random_ids
from tests.kernels.packed import levels

pytestmark = [pytest.mark.skipif(not levels(), reason="no native library"), pytest.mark.covers("F32")]
CASES = [case for case in all_cases() if not getattr(case, "shape", False)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_agree(case: Case, tmp_path: Path) -> None:
    """Guards against a kernel that is wrong for a shape or switch of one family only."""
    _, directory = case.make(tmp_path)
    for dtype in ("float32", "bfloat16"):
        rows = compare_kernels(directory, dtype, random_ids(37))
        assert all(row.passed for row in rows), next(row for row in rows if not row.passed)
        assert len(rows) > 6 * sum(row.name.endswith("residual stream") for row in rows) > 0


@pytest.mark.parametrize(
    "layer", ["model.layers.0.input_layernorm", "model.layers.1.self_attn.k_norm", "model.norm", "model.embed_tokens"]
)
def test_the_first_mismatch_is_named(layer: str, tmp_path: Path) -> None:
    """Guards against a comparison that finds nothing, or finds it too late."""
    _, directory = make_qwen3(tmp_path)
    native, reference = (
        OurModel.load(directory, dtype="float32", kernels=kernels, tokens=20) for kernels in ("cpu", "reference")
    )
    get_submodule(native.model, layer).weight.mul_(1.01)
    found, _ = native.run(random_ids(20))
    expected, _ = reference.run(random_ids(20), follow=found)
    rows = compare_traces(native, found, expected, "float32")
    failed = [row.name for row in rows if not row.passed]
    assert failed[0] == layer
    # Nothing is carried on, but by the norms of q and k, which are part of their attention.
    assert len(failed) == (3 if "self_attn" in layer else 1)
