"""Every test of this folder that takes a `case` runs once for each tiny model of each family."""

from collections.abc import Callable

import pytest
import torch

from tests.families.case import Case, all_cases
from tests.hf_models import Made

MakeModel = Callable[..., Made]


@pytest.fixture(scope="module", params=all_cases(), ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """The model of a case, made once."""
    made: dict[tuple[str, int, torch.dtype], Made] = {}

    def make(case: Case, seed: int = 0, dtype: torch.dtype = torch.float32) -> Made:
        key = case.name, seed, dtype
        if key not in made:
            made[key] = case.make(tmp_path_factory.mktemp(case.name), seed=seed, dtype=dtype)
        return made[key]

    return make


@pytest.fixture(scope="module")
def made(case: Case, make_model: MakeModel) -> Made:
    """The case's model in float32 and its directory."""
    return make_model(case)
