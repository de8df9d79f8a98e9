"""How far information travels through windows."""

from pathlib import Path

import pytest

from penstock_lab.planner.explain import receptive_field
from tests.hf_models import make_mistral, random_ids
from tests.paged import PagedModel


@pytest.mark.covers("M6")
@pytest.mark.parametrize(("window", "num_layers"), [(3, 4), (4, 5), (1, 2)])
def test_reach_is_layers_times_window_minus_one_plus_one(window: int, num_layers: int, tmp_path: Path) -> None:
    """Guards against a window that is one off, which the reach multiplies: after N layers of windows W a token sees
    N (W - 1) + 1 tokens, itself included. A changed token further back changes nothing, one within reach does."""
    _, directory = make_mistral(tmp_path, sliding_window=window, num_hidden_layers=num_layers)
    reach = num_layers * (window - 1) + 1
    assert receptive_field([window] * num_layers)[-1].reach == reach  # as `penstock explain` prints it
    ids = random_ids(reach + 4)
    paged = PagedModel(directory, num_seqs=2 * len(ids), max_len=32)
    base = paged.step({0: ids})[0][-1]
    for distance in range(len(ids)):
        changed = list(ids)
        changed[-1 - distance] = (changed[-1 - distance] + 1) % 199
        last = paged.step({1 + distance: changed})[1 + distance][-1]
        differs = bool((last - base).abs().max() > 1e-6)
        assert differs == (distance < reach), distance
