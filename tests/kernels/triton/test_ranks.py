"""Parts of a model on one device, and in two processes: the bits of the whole."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="an extra")

from penstock.kernels.ops import Packing, SplittingOps, TensorRows
from penstock.kernels.scheme import Scheme
from penstock.kernels.triton.ops import TritonOps
from tests.kernels.triton import ranks
from tests.kernels.triton.compare import DEVICE, bits, draw

K, N, LEAF = 256, 12, 32


def cut(ends: Sequence[int], scheme: Scheme | None) -> Packing:
    return Packing(tuple(ends), scheme)


@pytest.mark.parametrize(("rows", "scheme"), [(3, None), (30, None), (3, "int8"), (3, "int4")])
def test_parts_have_the_bits_of_the_whole(rows: int, scheme: str | None) -> None:
    """Guards against parts that are added in another order than leaves, scales of a part instead of the whole weight's,
    and a bias that every rank adds."""
    ops, packing = TritonOps(torch.bfloat16, DEVICE), Scheme.parse(scheme, 32 if scheme == "int4" else None)
    assert isinstance(ops, SplittingOps)
    x, weight, bias = draw(rows, K, dtype=torch.bfloat16), draw(N, K).bfloat16() / 16, draw(N).bfloat16()
    leaves = range(LEAF, K + 1, LEAF)
    whole = ops.linear(x, ops.pack_linear(weight, bias, cut(leaves, packing)))
    magnitudes = weight.float().abs().amax(dim=1).cpu().numpy() if scheme == "int8" else None
    for degree in (2, 4, 8):
        size, parts, scales = K // degree, [], None
        for start in range(0, K, size):
            own = TensorRows(weight[:, start : start + size].contiguous())
            part, scales = ops.pack_part(own, magnitudes, cut(range(LEAF, size + 1, LEAF), packing))
            parts.append(ops.linear(x[:, start : start + size].contiguous(), part))
        assert (scales is None) == (scheme != "int8")
        total = ops.add_parts(parts, scales, bias.float().cpu().numpy(), out=torch.empty_like(whole))
        assert torch.equal(bits(total), bits(whole)), degree


@pytest.mark.skipif(DEVICE != "cpu", reason="processes of an interpreter each")
def test_two_processes_have_the_bits_of_one(tmp_path: Path) -> None:
    """Guards against a rank's part of a model that is another one's, an array that is sent before it is there, and a
    recorded pass that leaves out what ranks exchange."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.kernels.triton.ranks"]
    started = [
        subprocess.Popen([*command, str(rank), "2", tmp_path / "store"], stdout=subprocess.PIPE, env=environment)
        for rank in range(2)
    ]
    whole = ranks.checksums(None, 0, 1)
    first, second = (json.loads(process.communicate(timeout=300)[0]) for process in started)
    assert first == whole
    assert [tokens for _, *tokens in second] == [tokens for _, *tokens in whole]
