"""What is particular to Mistral: by what its scores are divided."""

from pathlib import Path

import pytest
import torch

from tests.hf_models import hf_logprobs, make_mistral, random_ids
from tests.kernels.packed import levels
from tests.paged import PagedModel

TOLERANCE = 1e-4


@pytest.mark.covers("M3")
@pytest.mark.parametrize("kernels", ["reference", *(["cpu"] if levels() else [])])
def test_scores_are_divided_by_the_root_of_the_head(kernels: str, tmp_path: Path) -> None:
    """Guards against a division by the root of the hidden size, as the slides print it: 96 here, with heads of 32, of
    which there are not as many as would fill it."""
    hf_model, directory = make_mistral(tmp_path, hidden_size=96, head_dim=32, num_attention_heads=4)
    ids = random_ids(40)
    expected = hf_logprobs(hf_model, ids)
    found = PagedModel(directory, kernels=kernels).step({0: ids})[0]
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    for layer in hf_model.model.layers:
        layer.self_attn.scaling = 96**-0.5
    assert (hf_logprobs(hf_model, ids) - expected).abs().max() > 100 * TOLERANCE
