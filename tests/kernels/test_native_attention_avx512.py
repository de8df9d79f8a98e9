"""Strips of query rows: every number of rows has kernels of its own, on AVX-512 also every remainder of a head."""

import pytest
import torch

from .attention import Attention, Rules, Run, Sequences, Shape, oracle
from .packed import levels

LENGTH, MOST = 150, 25  # a tile seen whole, one in part; two strips of 12 rows and one row


@pytest.fixture(params=levels(), scope="module")
def native(request: pytest.FixtureRequest) -> Attention:
    return Attention(request.param)


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("head_dim", [32, 90])  # 2 registers of outputs, and 4 + 2
def test_rows_of_a_strip_of_any_height(native: Attention, kind: str, head_dim: int) -> None:
    """Guards against a kernel for some number of rows that mixes up rows, positions or elements, or sums otherwise."""
    shape, rules = Shape(1, 1, head_dim, kind), Rules(scale=head_dim**-0.5)
    sequences = Sequences([LENGTH], shape, seed=head_dim)
    expected, expected_lse = oracle(sequences, rules, 0, slice(LENGTH - MOST, LENGTH))
    one_by_one = Run(native, sequences, rules)
    one_by_one.put(0, LENGTH - MOST)
    alone, alone_lse = one_by_one.finish({0: [1] * MOST})[0]
    tolerance = (2e-6 if kind == "f32" else 2.0**-8) * float(sequences.v[0].abs().max())
    torch.testing.assert_close(alone.double(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(alone_lse.double(), expected_lse, rtol=0, atol=2e-5)
    for rows in range(2, MOST + 1):
        together = Run(native, sequences, rules)
        together.put(0, LENGTH - rows)
        out, lse = together.step({0: rows})[0]
        assert torch.equal(out, alone[-rows:])
        assert torch.equal(lse, alone_lse[-rows:])
