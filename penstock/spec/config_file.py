"""Find and read the JSON files of a model directory that describe its architecture."""

import json
from pathlib import Path
from typing import Any

from penstock.errors import ModelLoadError, one_line, shown
from penstock.spec import params_json
from penstock.spec.refined_web import modern_falcon
from penstock.spec.unsupported import SUPPORTED

CONFIG = "config.json"
MAX_BYTES = 2**27  # size limit of a file; the largest files, indexes of many shards, have a few million bytes
# Files that other kinds of directories have instead of config.json.
OTHER_KINDS = {
    "model_index.json": f"a diffusion pipeline; {SUPPORTED}",
    "adapter_config.json": "a LoRA adapter; give the base model's directory; adapters are not supported yet",
}


def has_config(directory: Path) -> bool:
    """Return whether a directory holds a config.json, or Mistral's params.json."""
    return any((directory / name).exists() for name in (CONFIG, params_json.NAME))


def read_config(directory: Path) -> dict[str, Any]:
    """Return config.json, or else Mistral's params.json with Transformers' keys.

    Raises:
        ModelLoadError: there is neither file, or the file cannot be read.
    """
    config, params = directory / CONFIG, directory / params_json.NAME
    for name, kind in OTHER_KINDS.items():
        if (directory / name).is_file() and not has_config(directory):
            raise ModelLoadError(f"{directory}: {name} makes it {kind}")
    is_params = params.is_file() and not config.exists()
    values = read_json(params if is_params else config)
    try:
        return params_json.config_of(values) if is_params else modern_falcon(values)
    except ModelLoadError as error:
        raise ModelLoadError(f"{directory}: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise ModelLoadError if there is none."""
    if path.exists() and not path.is_file():
        raise ModelLoadError(f"{path}: is not a file")  # reading a pipe would never end
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelLoadError(f"{path}: has {path.stat().st_size} bytes; at most {MAX_BYTES} are allowed")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: no such file; a model directory needs it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read as JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: holds {shown(value)}; it must be an object")
    return value
