"""Costs of steps as numbers that add up, fitted to measured steps.

    seconds = step + sequence x decoding sequences + prompt_token x tokens of prompts
                   + cached_token x tokens that decoding sequences attend to
                   + pair x pairs of a prompt's token and one that it attends to

The time to read the weights once is part of `step`. A model whose steps are fitted needs no formula for its kernels.
The fit is good for steps like the measured ones, with as many sequences and contexts as long.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.engine.policies import is_stream
from penstock.errors import check_float, invalid, one_line
from penstock.interface.step import ScheduledRequest, SchedulerOutput

Floats = npt.NDArray[np.float64]
MIN_STEPS = 20  # steps that a fit needs
ROBUST_ROUNDS, OUTLIER = 5, 3.0  # a step whose error is more than OUTLIER times the median error counts less
PARTS = ("step", "sequence", "prompt_token", "cached_token", "pair")


@dataclass(frozen=True, slots=True)
class Shape:
    """The features that a step's time depends on, in the order of LinearCosts' fields."""

    steps: float
    sequences: float
    prompt_tokens: float
    cached_tokens: float
    pairs: float

    @classmethod
    def of(cls, scheduled: Sequence[ScheduledRequest]) -> "Shape":
        sequences = prompt_tokens = cached = 0
        pairs = 0.0
        for item in scheduled:
            if is_stream(item):
                sequences += 1
                cached += item.num_computed_tokens
            else:
                prompt_tokens += item.num_new_tokens
                pairs += item.num_new_tokens * (item.num_computed_tokens + item.num_new_tokens / 2)
        return cls(1.0, sequences, prompt_tokens, cached, pairs)

    @property
    def row(self) -> list[float]:
        return [self.steps, self.sequences, self.prompt_tokens, self.cached_tokens, self.pairs]


@dataclass(frozen=True, slots=True)
class LinearCosts:
    """Seconds for each part of a step. A StepCosts.

    Attributes:
        request: seconds of a request's way to the engine and of its first token's way back.
    """

    step: float
    sequence: float
    prompt_token: float
    cached_token: float
    pair: float
    request: float = 0.0

    def __post_init__(self) -> None:
        for name in (*PARTS, "request"):
            check_float(name, getattr(self, name), 0.0, 1e6)
        if not any(getattr(self, name) for name in PARTS):
            raise invalid("costs", "all of them are 0")

    def step_seconds(self, step: SchedulerOutput) -> float:
        return self.seconds(Shape.of(step.scheduled))

    def seconds(self, shape: Shape) -> float:
        return (
            self.step
            + self.sequence * shape.sequences
            + self.prompt_token * shape.prompt_tokens
            + self.cached_token * shape.cached_tokens
            + self.pair * shape.pairs
        )

    def decode_seconds(self, sequences: int, cached_tokens: int) -> float:
        """Compute the seconds of a step without prompts, bit for bit those of `seconds`."""
        return self.step + self.sequence * sequences + 0.0 + self.cached_token * cached_tokens + 0.0

    def as_json(self) -> dict[str, str | float]:
        return asdict(self)

    def write(self, path: Path) -> None:
        """Write the costs as JSON that `read_costs` reads."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step, and the seconds until the next step could be planned."""

    shape: Shape
    seconds: float


def read_costs(path: Path) -> LinearCosts:
    """Read the costs in a JSON file.

    Raises:
        InvalidRequestError: the file cannot be read, or its names are not those of LinearCosts.
    """
    if path.exists() and not path.is_file():
        raise invalid("costs", f"{str(path)!r} is not a file")  # a device may have no end
    try:
        found = json.loads(path.read_bytes())
        return LinearCosts(**found)
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except (ValueError, TypeError, RecursionError) as error:
        reason = f"must be a record of steps, or JSON with the seconds {', '.join(PARTS)}: {one_line(error)}"
    raise invalid("costs", f"{str(path)!r} {reason}")


def fit_costs(steps: Sequence[MeasuredStep]) -> LinearCosts:
    """Find the costs that explain the measured steps best, by relative error. No cost is negative.

    A step that another process delayed counts less the larger its error is.

    Raises:
        InvalidRequestError: there are fewer than MIN_STEPS.
    """
    if len(steps) < MIN_STEPS:
        raise invalid("costs", f"{len(steps)} measured steps are too few; at least {MIN_STEPS} are needed")
    rows = np.array([step.shape.row for step in steps])
    seconds = np.maximum(np.array([step.seconds for step in steps]), 1e-9)
    weights = 1 / seconds
    for _ in range(ROBUST_ROUNDS):
        found = _non_negative(rows * weights[:, None], seconds * weights)
        off = np.abs(rows @ found - seconds) / seconds
        limit = OUTLIER * max(float(np.median(off)), 1e-6)
        weights = np.minimum(1.0, np.sqrt(limit / np.maximum(off, 1e-12))) / seconds
    return LinearCosts(*(float(value) for value in found))


def _non_negative(rows: Floats, wanted: Floats) -> Floats:
    """Find x >= 0 that fits rows x = wanted by least squares, dropping negative numbers one at a time."""
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    used = np.flatnonzero(np.abs(rows).max(axis=0) > 0)
    found = np.zeros(rows.shape[1])
    while len(used):
        part = np.linalg.lstsq(rows[:, used] / scale[used], wanted, rcond=None)[0]
        if part.min() >= 0:
            found[used] = part / scale[used]
            break
        used = np.delete(used, part.argmin())
    return found
