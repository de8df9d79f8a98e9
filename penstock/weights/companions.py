"""The files beside the weights that make a directory a model: tokenizer, chat template, defaults and config.json."""

import json
from pathlib import Path

from penstock.errors import ModelLoadError
from penstock.spec.config_file import read_config
from penstock.weights.destination import Destination

CONFIG = "config.json"
COPIED = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json",
          "merges.txt", "chat_template*", "*.jinja")  # fmt: skip


def copy_companions(source: Path, directory: Destination) -> None:
    """All of them; config.json at the very end, also where the source has a params.json in its place.

    Raises:
        ModelLoadError: one cannot be read.
    """
    files = {file for pattern in COPIED for file in source.glob(pattern) if file.is_file()}
    for file in sorted(files):
        copy(file, directory)
    if (source / CONFIG).exists():
        copy(source / CONFIG, directory)
        return
    with directory.file(CONFIG) as stream:
        stream.write(json.dumps(read_config(source), indent=2).encode() + b"\n")


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
