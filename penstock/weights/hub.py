"""Find the directory of a model: the bundled demo, a path, or a name on the Hugging Face hub."""

import os
from pathlib import Path

from penstock.errors import ModelLoadError, shown

# What is fetched from the hub: no pickles, no code, and no folders, which hold the weights in other formats.
LIGHT_FILES = ["*.json", "*.jinja"]
WEIGHTS = ["model*.safetensors", "penstock.safetensors"]  # Transformers' and packed ones
OTHER_WEIGHTS = ["*.safetensors"]  # only without WEIGHTS: Mistral's repositories hold all weights in both formats
FOLDERS = ["*/*"]
MODEL_DIR: Path = Path(__file__).parent.parent / "demo" / "model"  # the bundled model, in Hugging Face's format
DRAFT_DIR: Path = MODEL_DIR.parent / "draft"  # a smaller draft model for it, without a tokenizer


def resolve_model(name: str, *, weights: bool = True) -> Path:
    """Find the directory of "demo" or "demo-draft", a path, or a hub name such as "owner/model", which is downloaded.

    weights: whether to download the weights too.

    Raises:
        ModelLoadError: there is no such directory, or the download fails.
    """
    found = find_local(name)
    if found is not None:
        return found
    directory = _download(name, LIGHT_FILES + WEIGHTS if weights else LIGHT_FILES)
    if weights and not any(directory.glob("*.safetensors")):
        directory = _download(name, LIGHT_FILES + OTHER_WEIGHTS)
    return directory


def find_local(name: str) -> Path | None:
    """Find the directory of "demo", "demo-draft" or a path, without downloading; None for a hub name.

    Raises:
        ModelLoadError: the name is none of these.
    """
    if name in ("demo", "demo-draft"):
        return MODEL_DIR if name == "demo" else DRAFT_DIR
    path = Path(os.path.expanduser(name))  # Path.expanduser raises for an unknown user
    if path.is_dir():
        return path
    if path.exists():
        raise ModelLoadError(f"model: {shown(name)} is a file; it must be a directory, a hub name or demo")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelLoadError(f"model: there is no directory {shown(name)}, and it is not a hub name (owner/model)")
    return None


def _download(name: str, patterns: list[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise ModelLoadError(
            f"model: there is no directory {shown(name)}; to download from the hub, install penstock[hub]"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=FOLDERS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())  # in one line
        raise ModelLoadError(
            f"model: there is no directory {shown(name)}, and the hub download failed: {reason}"
        ) from None
