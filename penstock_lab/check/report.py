"""The results of a check, as plain values."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """The comparison of one output of two models.

    Attributes:
        block: number of the decoder block; None outside the blocks.
        name: our layer, and which of its outputs.
        theirs: their module, or the other backend.
        max_error: largest absolute difference; infinite for NaN.
        relative_error: RMS of the difference over the RMS of their output.
        allowed: bound of the relative error, or of max_error if `absolute`.
    """

    block: int | None
    name: str
    theirs: str
    max_error: float
    relative_error: float
    allowed: float
    absolute: bool = False

    @property
    def passed(self) -> bool:
        return (self.max_error if self.absolute else self.relative_error) <= self.allowed


@dataclass(frozen=True, slots=True)
class Proof:
    """The test of one guarantee of the engine.

    Attributes:
        error, allowed: the largest error and its bound; 0 means bit for bit.
        meaning: how the error is measured.
        wrong: the error from which on it must be a mistake. Between `allowed` and this, an option that rounds costs
            this model more than others, which is a reason not to use it.
    """

    name: str
    error: float
    allowed: float
    meaning: str
    wrong: float = 0.0

    @property
    def passed(self) -> bool:
        return self.error <= max(self.allowed, self.wrong)

    @property
    def verdict(self) -> str:
        return "ok" if self.error <= self.allowed else "costly" if self.passed else "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All findings of one check.

    Attributes:
        against: what the model is compared with.
        weights: the fingerprint of the weights, or a note that they are random.
        rows: the comparisons, in the order of computation.
        cause: the likely cause of the first failing row.
        certificate: the certificate's file; None if no certificate was written.
        remarks: what this check did not cover.
    """

    model: str
    architecture: str
    against: str = ""
    weights: str
    kernels: str
    dtype: str
    prompt_len: int
    rows: tuple[Row, ...] = ()
    proofs: tuple[Proof, ...] = ()
    cause: str | None = None
    certificate: str | None = None
    remarks: tuple[str, ...] = ()

    @property
    def first_difference(self) -> Row | None:
        return next((row for row in self.rows if not row.passed), None)

    @property
    def passed(self) -> bool:
        return self.first_difference is None and all(proof.passed for proof in self.proofs)

    def as_dict(self) -> dict[str, Any]:
        first = self.first_difference
        return asdict(self) | {
            "passed": self.passed,
            "first_difference": None if first is None else asdict(first),
            "rows": [asdict(row) | {"passed": row.passed} for row in self.rows],
            "proofs": [asdict(proof) | {"passed": proof.passed, "verdict": proof.verdict} for proof in self.proofs],
        }
