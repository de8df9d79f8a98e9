"""What a form costs: the contest of `penstock bench offline --json-schema-file FILE --rounds N`."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from penstock import InvalidRequestError, StructuredOutputsParams
from penstock_lab.bench.forms import FormContest, measure_forms

LONG = StructuredOutputsParams(regex="the house [0-9]{20}")
SHORT = StructuredOutputsParams(json='{"type": "integer", "const": 7}')


@contextlib.contextmanager
def silent(name: str, total: int) -> Iterator[Callable[[int], None]]:
    yield lambda count: None


def measure(form: StructuredOutputsParams) -> dict[str, object]:
    contest = FormContest(2, 4, 6, form, rounds=1)
    return measure_forms({"model": "demo", "threads": 1}, contest, announce=lambda info: None, progress=silent)


def test_a_contest_of_a_form() -> None:
    """Guards against a contest whose answers do not follow the form: its words are forced, which saves steps."""
    result = measure(LONG)
    assert result["plain_steps"] == 6
    assert result["formed_steps"] < 6  # type: ignore[operator]
    assert result["throughput_low"] == result["throughput"] == result["throughput_high"]


def test_an_answer_that_ends_early_is_refused() -> None:
    """Guards against runs of different lengths that are compared."""
    with pytest.raises(InvalidRequestError, match="require longer answers"):
        measure(SHORT)
