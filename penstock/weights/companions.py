"""The files beside the weights that make a directory a model: tokenizer, chat template, defaults and config.json."""

from pathlib import Path

from penstock.errors import ModelLoadError
from penstock.weights.destination import Destination

CONFIG = "config.json"
COPIED = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json",
          "merges.txt", "chat_template*", "*.jinja")  # fmt: skip


def companions(source: Path) -> list[Path]:
    """All of them; config.json at the very end."""
    files = {file for pattern in COPIED for file in source.glob(pattern) if file.is_file()}
    return [*sorted(files), source / CONFIG]


def copy(file: Path, directory: Destination) -> None:
    """One file into a directory that becomes a model.

    Raises:
        ModelLoadError: it cannot be read.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{file}: cannot be read: {error.strerror or error}") from None
    with directory.file(file.name) as stream:
        stream.write(content)
