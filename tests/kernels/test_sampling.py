"""The reference sampler: order of its steps, ties, parity with Transformers, and the distribution it draws from."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from penstock.kernels.reference import ReferenceOps
from penstock.kernels.reference.sampling import gumbel_noise, truncate
from penstock.kernels.sampling import NO_TOKEN, SamplingTensors, adjust

NEVER = float("-inf")
torch.set_num_threads(1)
OPS = ReferenceOps(torch.float32)


def params(rows: int, **fields: Any) -> SamplingTensors:
    """SamplingTensors of greedy rows, with other fields where a test sets them."""
    values: dict[str, Any] = dict.fromkeys(SamplingTensors.__dataclass_fields__)
    return SamplingTensors(**values | {"temperature": torch.zeros(rows)} | fields)


def draws(logits: Tensor, count: int, **fields: Any) -> Tensor:
    """That many samples of one row, at output positions 0, 1, 2 ..: how often each id came."""
    keys = torch.stack([torch.full((count,), 1234), torch.zeros(count).long(), torch.arange(count)], dim=1)
    repeated = {name: value.expand(count) for name, value in fields.items()}
    ids = OPS.choose(logits.expand(count, -1), params(count, noise_key=keys, **repeated))[0]
    return torch.bincount(ids, minlength=logits.shape[-1])


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("plain", {"temperature": torch.tensor(1.0)}),
        ("hot", {"temperature": torch.tensor(1.7)}),
        ("top_k", {"temperature": torch.tensor(0.8), "top_k": torch.tensor(12)}),
        ("top_p", {"temperature": torch.tensor(1.0), "top_p": torch.tensor(0.8)}),
        pytest.param(
            "top_k and top_p",
            {"temperature": torch.tensor(1.0), "top_k": torch.tensor(5), "top_p": torch.tensor(0.9)},
            marks=pytest.mark.covers("F12"),
        ),
        ("min_p", {"temperature": torch.tensor(1.3), "min_p": torch.tensor(0.2)}),
    ],
)
def test_draws_follow_the_distribution(name: str, fields: dict[str, Tensor]) -> None:
    """Guards against noise that is not Gumbel's, or neighbours that share it. Chi-square of 20,000 draws against the
    exact probabilities; the noise is counter-based, so the statistic is a constant and the test cannot flake. A right
    sampler has p below 0.001 for one seed in a thousand; here p lies above 0.05."""
    count = 20_000
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(5))
    scaled = logits / fields["temperature"]
    kept = truncate(scaled, *(fields[key][None] if key in fields else None for key in ("top_k", "top_p", "min_p")))
    expected = kept.double().softmax(-1)[0] * count
    seen = draws(logits, count, **fields)
    assert seen[expected == 0].sum() == 0, "a token that was cut off"
    alive = expected > 0
    statistic = ((seen[alive] - expected[alive]) ** 2 / expected[alive]).sum()
    freedom = (alive.sum() - 1) / 2
    p_value = torch.special.gammaincc(freedom.double(), statistic / 2)
    assert p_value > 0.001, f"{name}: p = {p_value:.2e}"


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    temperature=st.floats(0.1, 3.0),
    top_k=st.integers(1, 50),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
)
def test_each_cut_keeps_what_transformers_keeps(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Guards against cutting one token too many or too few. Random logits have no ties. A row whose sum meets the
    limit within float32 rounding may fall on either side and is left out; every other row is equal to the last id."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(seed)) * 3
    ids: Any = torch.zeros(3, 1, dtype=torch.long)
    scaled = logits / temperature
    torch.testing.assert_close(TemperatureLogitsWarper(temperature)(ids, logits), scaled)

    def filled(value: float) -> Tensor:
        return torch.full((3,), value)

    by_k = truncate(scaled, torch.full((3,), top_k), None, None)
    assert torch.equal(by_k, TopKLogitsWarper(top_k)(ids, scaled))
    by_min_p = truncate(scaled, None, None, filled(min_p))
    assert torch.equal(by_min_p, MinPLogitsWarper(min_p)(ids, scaled))
    for before, k in ((scaled, None), (by_k, torch.full((3,), top_k))):
        clear = margin(before, top_p) > 1e-5
        ours = truncate(scaled, k, filled(top_p), None)
        assert torch.equal(ours[clear], TopPLogitsWarper(top_p)(ids, before)[clear])


def margin(logits: Tensor, top_p: float) -> Tensor:
    """How near a sum of the largest probabilities comes to top_p, for each row; far where nothing can be cut."""
    ordered = logits.double().softmax(-1).sort(descending=True).values
    return (ordered.cumsum(-1) - top_p).abs().amin(-1) if top_p < 1 else torch.ones(len(logits))


def test_ties_go_to_the_lowest_id() -> None:
    """Guards against a cut through equal logits that depends on the sort; exactly k stay."""
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 2.0]])
    assert truncate(logits, torch.tensor([2]), None, None).isfinite().tolist() == [
        [False, True, True, False, False, False]
    ]
    nucleus = truncate(logits, None, torch.tensor([0.3]), None)
    assert nucleus.isfinite().tolist() == [[False, True, True, False, False, False]]
    assert OPS.choose(logits, params(1))[0].tolist() == [1]


def test_the_best_token_always_stays() -> None:
    """Guards against a row without any token: limits so tight that rounding could cut all."""
    logits = torch.tensor([[0.0, 5.0, 1.0], [0.0, 0.0, 0.0]])
    tight = truncate(logits, torch.tensor([1, 1]), torch.tensor([1e-9, 1e-9]), torch.tensor([1.0, 1.0]))
    assert tight.isfinite().tolist() == [[False, True, False], [True, False, False]]


def test_cuts_come_after_each_other_and_after_the_temperature() -> None:
    """Guards against another order: min_p, then top_k, then top_p over what is left."""
    logits = torch.tensor([[0.50, 0.25, 0.15, 0.10]]).log()
    after_k = truncate(logits, torch.tensor([2]), torch.tensor([0.6]), None)  # of 2/3 and 1/3 the first reaches 0.6
    assert after_k.isfinite().tolist() == [[True, False, False, False]]
    after_min_p = truncate(logits, None, torch.tensor([0.7]), torch.tensor([0.5]))  # the same two are left
    assert after_min_p.isfinite().tolist() == [[True, True, False, False]]
    cold = draws(logits, 200, temperature=torch.tensor(0.01), top_p=torch.tensor(0.9))
    assert cold.tolist() == [200, 0, 0, 0]


def test_adjustments_by_hand() -> None:
    """Guards against another order of mask, bias and penalties, and against a penalty that lifts a negative logit."""
    logits = torch.tensor([[2.0, -2.0, 1.0, 3.0], [2.0, -2.0, 1.0, 3.0]])
    given_params = params(
        2,
        masked=torch.tensor([[0, 3]]),
        bias=(torch.tensor([[0, 0], [0, 3]]), torch.tensor([2.0, 50.0])),
        repetition=(torch.tensor([2.0, 1.0]), torch.tensor([[0, 0], [0, 1], [1, 1]])),
        counts=(
            torch.tensor([0.5, 0.0]),
            torch.tensor([0.25, 0.0]),
            torch.tensor([[0, 0], [0, 2]]),
            torch.tensor([2.0, 1.0]),
        ),
    )
    before = logits.clone()
    expected = torch.tensor([[(2 + 2) / 2 - 2 * 0.5 - 0.25, -4.0, 1 - 0.5 - 0.25, NEVER], [2.0, -2.0, 1.0, 3.0]])
    torch.testing.assert_close(adjust(logits.clone(), given_params), expected)
    assert OPS.choose(logits, given_params)[0].tolist() == [0, 3]
    assert torch.equal(logits, before), "the caller's logits were changed"


def test_greedy_and_random_rows_share_a_step() -> None:
    """Guards against a temperature of zero that divides, and against noise taken from another row of the step."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    keys = torch.tensor([[7, 0, 3], [7, 0, 3], [8, 1, 0], [7, 0, 4]])
    temperature = torch.tensor([1.0, 0.0, 0.5, 1.0])
    ids = OPS.choose(logits, params(4, temperature=temperature, noise_key=keys))[0]
    assert ids[1] == logits[1].argmax()
    for row in (0, 2, 3):
        alone = OPS.choose(logits[[row]], params(1, temperature=temperature[[row]], noise_key=keys[[row]]))[0]
        assert alone[0] == ids[row]
        assert ids[row] == (logits[row] / temperature[row] + gumbel_noise(keys[[row]], 50)[0]).argmax()


def test_log_softmax() -> None:
    """Guards against probabilities that do not sum to one for large logits."""
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(2)) * 50
    torch.testing.assert_close(OPS.log_softmax(logits).double().exp().sum(-1), torch.ones(3).double())


def test_log_softmax_fills_its_buffer() -> None:
    """Guards against a buffer that is ignored."""
    logits, out = torch.randn(2, 9, generator=torch.Generator().manual_seed(3)), torch.empty(2, 9)
    assert OPS.log_softmax(logits, out=out) is out
    assert torch.equal(out, OPS.log_softmax(logits))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_nothing_is_chosen_where_every_id_is_masked(temperature: float) -> None:
    """Guards against id 0, masked itself, where nothing is left; a bias does not bring a masked id back, and what
    min_p, top_k and top_p would cut does not matter."""
    pairs = torch.tensor([[1, 0], [1, 1], [1, 2]])
    fields = {
        "temperature": torch.full((3,), temperature),
        "noise_key": torch.tensor([[7, 0, 3]] * 3) if temperature else None,
        "top_k": torch.full((3,), 2),
        "top_p": torch.full((3,), 0.5),
        "min_p": torch.full((3,), 0.1),
        "bias": (torch.tensor([[1, 1]]), torch.tensor([100.0])),
    }
    logits = torch.tensor([[0.0, 9.0, 1.0]] * 3)
    assert OPS.choose(logits, params(3, masked=pairs, **fields))[0].tolist() == [1, NO_TOKEN, 1]
    assert OPS.choose(logits, params(3, masked=pairs[:2], **fields))[0].tolist() == [1, 2, 1]
