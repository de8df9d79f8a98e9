"""The check of a model's files: each is read as a server reads it, and the data are compared with their checksums.

Nothing is computed with the weights, and the tokenizer is loaded in a process with limits, so files of unknown origin
may be checked. Imports no torch.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock import PenstockError
from penstock.client.text import TextWorker
from penstock.models.config_json import load_model_config
from penstock.spec.config_file import CONFIG
from penstock.tokenizer.hf import has_tokenizer
from penstock.weights.hub import resolve_model
from penstock.weights.packed import find_packed, read_info
from penstock.weights.safetensors import find_files, read_entries, verify_checksums
from penstock.weights.sources import open_checkpoint, open_source


@dataclass(frozen=True, slots=True)
class FileFinding:
    """The finding about a file, or about several files that belong together.

    Attributes:
        what: the result in a few words, or the error.
    """

    name: str
    what: str
    passed: bool = True


@dataclass(frozen=True, slots=True)
class FilesReport:
    """All findings in one directory, which has the name that the user gave."""

    model: str
    findings: tuple[FileFinding, ...]

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


def check_files(model: str) -> FilesReport:
    """Check the files of a model: a directory, a hub name or "demo".

    Raises:
        ModelLoadError: there is no such directory.
    """
    folder = resolve_model(model)
    parts: tuple[tuple[str, Callable[[Path], str]], ...] = (
        (CONFIG, _config),
        ("weights", _structure),
        ("weights, their data", verify_checksums),
        ("tokenizer and chat template", _tokenizer),
    )
    return FilesReport(model, tuple(_finding(name, read, folder) for name, read in parts))


def _finding(name: str, read: Callable[[Path], str], folder: Path) -> FileFinding:
    try:
        return FileFinding(name, read(folder))
    except PenstockError as error:
        return FileFinding(name, str(error), passed=False)


def _config(folder: Path) -> str:
    config = load_model_config(folder)
    return f"{config.architecture}, {config.num_hidden_layers} layers of {config.hidden_size}"


def _structure(folder: Path) -> str:
    """Check sizes, offsets and keys in each file's header and, for a checkpoint, that its tensors fit the config."""
    files, packed = find_files(folder), find_packed(folder)
    if packed is None:
        config = load_model_config(folder)
        checkpoint = open_checkpoint(folder, config.quantization)
        open_source(checkpoint, config, "auto")
        return f"{len(checkpoint.entries)} tensors in {len(files)} files"
    return f"{len(read_entries(packed))} tensors in {len(files)} files, packed: {read_info(packed)}"


def _tokenizer(folder: Path) -> str:
    if not has_tokenizer(folder):
        return "none: prompts must be token ids"
    worker = TextWorker(folder)
    try:
        worker.load()
    finally:
        worker.close()
    return "loaded within the limits of time and memory"
