"""Certificate: the result of a passed `penstock check`, kept where the engine finds it. No torch.

It is a file in the user's cache directory, named by a hash of everything that the proof depends on: the parameter
table, the code that computes the model, the numerics version and config.json. If any of these changes, the file is no
longer found, so it cannot be stale. It records which weights, kernels and types were checked. A check of random weights
has a separate file, which is used if there is no file for real weights.
"""

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from penstock.models.registry import find_architecture

RANDOM_TINY = "random tiny"  # replaces the fingerprint if the weights are those of a small model made for the check
# Code that every model depends on, relative to the package's root. find_basis adds the architecture's own code. The
# families' config.py import from each other, so all of them are listed.
SHARED_CODE = (
    "layers/*.py",
    "models/*/config.py",
    "models/transformers/*.py",
    "models/config_json.py",
    "spec/*.py",
    "spec/*.toml",
)


@dataclass(frozen=True, slots=True)
class Basis:
    """Hashes of everything that a proof depends on.

    Attributes:
        table: hash of the family's parameter table.
        code: hash of the model's module, of the module that reads its config.json, and of SHARED_CODE.
        numerics: kernels.ops.NUMERICS_VERSION.
        config: hash of config.json.
        id: hash of the attributes above; the name of the certificate's file.
    """

    table: str
    code: str
    numerics: int
    config: str

    @property
    def id(self) -> str:
        return _digest([self.table.encode(), self.code.encode(), str(self.numerics).encode(), self.config.encode()])


@dataclass(frozen=True, slots=True)
class Certificate(Basis):
    """One passed check.

    Attributes:
        weights: the fingerprint of the weights (weights/safetensors.py), or RANDOM_TINY.
        kernels: "reference", "cpu" and the level, or "triton" and the architecture.
        dtypes: the types that were checked.
        proofs: the largest error by name of the proof; 0.0 if all bits were equal.
    """

    architecture: str
    weights: str
    kernels: str
    dtypes: tuple[str, ...]
    date: str
    penstock: str
    transformers: str
    proofs: dict[str, float]


def find_basis(architecture: str, model_file: Path, table_file: Path, config_file: Path, numerics: int) -> Basis:
    """Hash everything on which a certificate depends, for the model whose class is defined in `model_file`.

    Raises:
        OSError: a file cannot be read.
    """
    root = Path(__file__).parent.parent
    code = [model_file, _file_of(find_architecture(architecture).read_config)]
    code += [path for pattern in SHARED_CODE for path in sorted(root.glob(pattern))]
    return Basis(_hash_files([table_file]), _hash_files(code), numerics, _hash_files([config_file]))


def certificate_file(certificate_id: str, weights: str) -> Path:
    """Name the file of a certificate, below $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = f"{certificate_id}-tiny.json" if weights == RANDOM_TINY else f"{certificate_id}.json"
    return Path(base) / "penstock" / "certificates" / name


def read_certificate(basis: Basis) -> dict[str, Any] | None:
    """Read the certificate for a basis, preferably of real weights; None if no intact one exists."""
    files = (certificate_file(basis.id, weights) for weights in ("", RANDOM_TINY))
    return next((found for file in files if (found := _read_file(file, basis)) is not None), None)


def _read_file(file: Path, basis: Basis) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    expected = {"id": basis.id, **asdict(basis)}
    names = {"id", *(item.name for item in fields(Certificate))}
    if not isinstance(found, dict) or set(found) != names or any(found[key] != expected[key] for key in expected):
        return None
    return found


def _file_of(read: Callable[..., Any]) -> Path:
    """Find the file that defines a function, or the function inside a partial."""
    return Path(inspect.getfile(inspect.unwrap(getattr(read, "func", read))))


def _hash_files(files: Iterable[Path]) -> str:
    return _digest([file.read_bytes() for file in files])


def _digest(parts: list[bytes]) -> str:
    """Hash the parts and their lengths."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]
