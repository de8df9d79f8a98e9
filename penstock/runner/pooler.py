"""Pooler: turns the final hidden states of prompts into vectors, chunk by chunk (interface/pooling.py).

The bits depend on the hidden states alone, never on where a prompt was cut: MEAN adds the states one after the other,
in float64, and the length of a vector is an exact sum, rounded once. A preempted request starts again from the
beginning.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.errors import EngineError
from penstock.interface.pooling import PoolingParams
from penstock.interface.step import NewRequest, ScheduledRequest
from penstock.kernels.tensors import FLOAT32, FLOAT64, LOGITS_ROWS, Float32, Float64, Tensor, as_array

ROWS_AT_ONCE = 64  # rows copied at once; a copy of a whole chunk would take megabytes


@dataclass(slots=True)
class _Pooled:
    """The state of a pooling request.

    Attributes:
        num_tokens: the length of its prompt.
        kept: rows of hidden states [n, hidden], in order, or what the head makes of them; of MEAN, only at the end.
        total: the sum of the rows so far, [hidden]; for MEAN only.
    """

    params: PoolingParams
    num_tokens: int
    head: "Head"
    kept: list[npt.NDArray[np.floating]] = field(default_factory=list)
    total: Float64 | None = None

    def add(self, rows: Tensor, start: int) -> None:
        """Add the hidden states [n, hidden] of the tokens from position `start` on."""
        kind, is_last = self.params.pooling_type, start + rows.shape[0] == self.num_tokens
        if self.params.needs_whole_prompt and start > 0 and not self.kept and self.total is None:
            raise EngineError("a request was pooled that found its prefix in the cache")
        if kind == "MEAN":
            total = np.zeros(rows.shape[1], FLOAT64) if self.total is None else self.total
            for first in range(0, rows.shape[0], ROWS_AT_ONCE):
                for row in _copy(rows[first : first + ROWS_AT_ONCE]):  # numpy's own sum may use another order
                    total += row
            self.total = total
        elif kind == "ALL":
            self.kept += self._read(rows)
        elif (kind == "LAST" and is_last) or (kind == "CLS" and start == 0):
            self.kept = self._read(rows[-1:] if kind == "LAST" else rows[:1])
        if self.total is not None and is_last:
            mean = (self.total / self.num_tokens)[None]
            self.kept = self._read(self.head.round(mean)) if self.params.is_classified else [mean]

    def _read(self, rows: Tensor) -> list[Float32]:
        """Copy hidden states, or apply the head to them."""
        if not self.params.is_classified:
            return [_copy(rows)]
        pieces = (rows[first : first + LOGITS_ROWS] for first in range(0, rows.shape[0], LOGITS_ROWS))
        return [_copy(self.head.compute_logits(piece))[:, : self.head.num_labels] for piece in pieces]

    def result(self) -> bytes | None:
        """Finish the vectors, as bytes; None if any number is not finite."""
        found = np.concatenate(self.kept)
        if not np.isfinite(found).all():
            return None
        if self.params.is_classified and self.params.use_activation is not False:
            found = activated(found, self.head.activation)
        vectors = found[:, : self.params.dimensions]
        if self.params.normalize:
            vectors = np.stack([normalized(vector) for vector in vectors])
        return np.ascontiguousarray(vectors, dtype="<f4").tobytes()


def normalized(vector: npt.NDArray[np.floating]) -> Float64:
    """Divide a vector [n] by its length; a zero vector stays zero."""
    numbers = vector.astype(FLOAT64)
    length = math.sqrt(math.fsum((numbers * numbers).tolist()))
    return numbers / length if length else numbers


def activated(logits: npt.NDArray[np.floating], activation: str) -> Float64:
    """Make scores of logits [n, labels], each row by itself: a softmax, or the sigmoid of each, in float64."""
    numbers = logits.astype(FLOAT64)
    if activation == "softmax":
        powers = [[math.exp(item) for item in row] for row in numbers - numbers.max(axis=1, keepdims=True)]
        return np.array([[item / math.fsum(row) for item in row] for row in powers])
    if activation == "sigmoid":
        return np.array([[0.5 * (1.0 + math.tanh(0.5 * item)) for item in row] for row in numbers])
    return numbers


@dataclass(frozen=True, slots=True)
class Head:
    """A classifier's head: what maps hidden states [M, hidden] to logits, whose first `num_labels` columns count, the
    activation of the logits (ModelConfig.label_activation), and what makes hidden states of numbers."""

    compute_logits: Callable[[Tensor], Tensor]
    num_labels: int
    activation: str
    round: Callable[[Float64], Tensor]


class Pooler:
    """The pooling requests of a runner by id, from the step that brings them until they are removed."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.requests: dict[str, _Pooled] = {}

    def add(self, request: NewRequest) -> None:
        params = request.params.pooling
        if params is None or params.pooling_type is None:
            raise EngineError("a pooling request is settled before it is computed")
        self.requests[request.request_id] = _Pooled(params, request.num_prompt_tokens, self.head)

    def remove(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def pool(
        self, hidden: Tensor, starts: npt.NDArray[np.int32], scheduled: Sequence[ScheduledRequest]
    ) -> dict[int, bytes | None]:
        """Pool a step's hidden states [T, hidden]. Return the vectors of prompts that end in it, by index in the step.

        starts: where each request's rows begin. A vector with numbers that are not finite is None.
        """
        found = {}
        for index, item in enumerate(scheduled):
            pooled = self.requests.get(item.request_id)
            if pooled is None:
                continue
            start = int(starts[index])
            rows = hidden[start : start + item.num_new_tokens]
            pooled.add(rows, item.num_computed_tokens)
            if item.num_computed_tokens + item.num_new_tokens == pooled.num_tokens:
                found[index] = pooled.result()
        return found


def _copy(rows: Tensor) -> Float32:
    """Copy hidden states, which the next step overwrites."""
    return np.array(as_array(rows), dtype=FLOAT32)
