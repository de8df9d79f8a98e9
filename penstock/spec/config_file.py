"""Finds and reads the JSON files of a model directory that describe its architecture."""

import json
from pathlib import Path
from typing import Any

from penstock.errors import ModelLoadError
from penstock.spec import params_json
from penstock.spec.unsupported import SUPPORTED
from penstock.validation import shown

CONFIG = "config.json"
PIPELINE = "model_index.json"  # what a diffusion pipeline has instead of config.json


def has_config(directory: Path) -> bool:
    """Return whether a directory holds a config.json, or Mistral's params.json."""
    return any((directory / name).exists() for name in (CONFIG, params_json.NAME))


def read_config(directory: Path) -> dict[str, Any]:
    """Return what config.json holds; without one, Mistral's params.json translated into its keys.

    Raises:
        ModelLoadError: there is neither, or it cannot be read.
    """
    config, params = directory / CONFIG, directory / params_json.NAME
    if params.is_file() and not config.exists():
        try:
            return params_json.config_of(read_json(params))
        except ModelLoadError as error:
            raise ModelLoadError(f"{directory}: {error}") from None
    if (directory / PIPELINE).is_file() and not config.exists():
        raise ModelLoadError(f"{directory}: {PIPELINE} makes it a diffusion pipeline; {SUPPORTED}")
    return read_json(config)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Raises:
        ModelLoadError: there is no such file, or it holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: no such file; a model directory needs it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: holds {shown(value)}; it must be an object")
    return value
