"""Every family's checkpoint in every form: same bits there, same bits back."""

from pathlib import Path

import pytest
import torch

from penstock.models.config_json import load_model_config
from penstock.models.registry import find_model
from penstock.weights.safetensors import Checkpoint
from penstock_lab.convert.rewrite import rewrite_model
from tests.families.case import Case, all_cases, for_cases
from tests.families.conftest import MakeModel
from tests.hf_models import random_ids
from tests.lab.convert.test_rewrite import same_checkpoint
from tests.paged import PagedModel

LIMIT = 10**9


@for_cases(all_cases(shapes=False))
@pytest.mark.covers("F21", "F33", "J19")
def test_the_way_through_every_form_ends_where_it_began(case: Case, make_model: MakeModel, tmp_path: Path) -> None:
    """Guards against a family whose pieces or experts come back in another order, or whose forms do not load."""
    _, start = make_model(case, dtype=torch.bfloat16)
    config = load_model_config(start)
    parameters = find_model(config.architecture).read_table().parameters(config)
    at, ids = start, random_ids(10)
    expected = PagedModel(start).step({0: ids})[0]
    for form in ("merged", "separate", "transformers"):
        rewrite_model(str(at), tmp_path / form, form, LIMIT)
        at = tmp_path / form
        assert torch.equal(PagedModel(at).step({0: ids})[0], expected)
    same_checkpoint(start, at)
    untied = {name for name, item in parameters.items() if item.tied_to is None}
    assert Checkpoint(tmp_path / "merged").entries.keys() == untied
    fused = [name for name in Checkpoint(tmp_path / "separate").entries if "qkv" in name or "gate_up" in name]
    assert not fused
