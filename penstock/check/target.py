"""What is checked: a checkpoint, or a tiny random model made after a config."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from penstock.check.tiny import make_tiny
from penstock.check.twin import find_class, one_line, read_config
from penstock.errors import ModelLoadError
from penstock.models.certificate import RANDOM_TINY
from penstock.models.registry import ARCHITECTURES, find_architecture
from penstock.weights.hub import resolve_model
from penstock.weights.safetensors import INDEX, PACKED, SINGLE, find_files, fingerprint

CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Target:
    """A model directory that both sides load.

    Attributes:
        directory: with a config.json and weights.
        weights: their fingerprint, or RANDOM_TINY.
        config_file: what a certificate is about; None where there was no config.json, so nobody can serve it.
    """

    directory: Path
    weights: str
    config_file: Path | None

    @property
    def is_tiny(self) -> bool:
        return self.weights == RANDOM_TINY


def find_target(model: str, scratch: Path, *, tiny: bool) -> Target:
    """The model of that name: a directory, a hub name, "demo", a config.json, or an architecture.

    scratch: where a tiny model is made, if `tiny` asks for one or there are no weights.

    Raises:
        ModelLoadError: there is no such model, or Transformers does not know it.
    """
    named = Path(model).expanduser()
    if model in ARCHITECTURES and not named.exists():
        config = find_class(model).config_class(architectures=[model])
        config.save_pretrained(scratch / "default")
        return Target(_make(scratch / "default", scratch), RANDOM_TINY, None)
    if named.suffix == ".json" and named.is_file():
        (scratch / "given").mkdir()
        shutil.copyfile(named, scratch / "given" / CONFIG)
        return Target(_make(scratch / "given", scratch), RANDOM_TINY, named)
    if not named.exists() and re.fullmatch(r"\w+(For[A-Z]\w+|LMHeadModel)", model):
        find_architecture(model)  # says why it is none of those that are served, and which one is meant
    directory = resolve_model(model)
    if not tiny and (directory / PACKED).is_file():
        raise ModelLoadError(
            f"{directory}: its weights are packed, and Transformers cannot read them; check the checkpoint that they "
            f"were made from, or use --tiny"
        )
    if not tiny and any(directory.glob("*.bin")):
        find_files(directory)  # refuses a pickle; random weights in its place would prove nothing about it
    if tiny or not any((directory / name).is_file() for name in (SINGLE, INDEX)):
        return Target(_make(directory, scratch), RANDOM_TINY, directory / CONFIG)
    return Target(directory, fingerprint(directory), directory / CONFIG)


def _make(source: Path, scratch: Path) -> Path:
    """A random model with the config of a directory, shrunk.

    Raises:
        ModelLoadError: Transformers cannot make it.
    """
    config = read_config(source)
    try:
        make_tiny(config, find_class(config.architectures[0]), scratch / "tiny")
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        raise ModelLoadError(f"{source}: Transformers cannot make a small model like it: {one_line(error)}") from error
    return scratch / "tiny"
