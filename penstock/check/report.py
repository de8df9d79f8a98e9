"""What a check has found, as plain values."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One place where two models were compared.

    Attributes:
        block: number of the decoder block; None outside of them.
        name: our layer, and what of it.
        theirs: their module; of a comparison of kernels, the other backend.
        max_error: largest absolute difference; NaN counts as infinite.
        relative_error: RMS of the difference over the RMS of theirs.
        allowed: of the relative error; of the absolute one where `absolute`.
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
    """One promise of the engine, tried.

    Attributes:
        error, allowed: the worst one, and the bound: 0 means bit for bit. What it measures stands in `meaning`.
    """

    name: str
    error: float
    allowed: float
    meaning: str

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed


@dataclass(frozen=True, slots=True)
class Report:
    """All that one check found.

    Attributes:
        rows: in the order of computation.
        cause: what the first failing row points to.
        certificate: file of the certificate; None where none was written.
        remarks: what the user should know besides.
    """

    model: str
    architecture: str
    against: str
    weights: str
    kernels: str
    dtype: str
    prompt_len: int
    rows: tuple[Row, ...]
    proofs: tuple[Proof, ...] = ()
    cause: str | None = None
    certificate: str | None = None
    remarks: tuple[str, ...] = field(default=())

    @property
    def first_difference(self) -> Row | None:
        return next((row for row in self.rows if not row.passed), None)

    @property
    def passed(self) -> bool:
        return self.first_difference is None and all(proof.passed for proof in self.proofs)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        first = self.first_difference
        return asdict(self) | {
            "passed": self.passed,
            "first_difference": None if first is None else asdict(first),
            "rows": [asdict(row) | {"passed": row.passed} for row in self.rows],
            "proofs": [asdict(proof) | {"passed": proof.passed} for proof in self.proofs],
        }
