"""Find the place of a model: the bundled demo, a path, or a name on the Hugging Face hub.

A place is a directory, or the first of the GGUF files that hold a model. Such a file is given by its path, by a
directory that holds no other model, or by the end of its name after a colon: owner/model:Q4_K_M.
"""

import os
import re
from pathlib import Path

from penstock.errors import ModelLoadError, listed, shown
from penstock.spec.config_file import has_config
from penstock.spec.gguf import SPLIT_NAME, SUFFIX, is_gguf

# What is fetched from the hub: no pickles, no code, and no folders, which hold the weights in other formats.
LIGHT_FILES = ["*.json", "*.jinja", "tokenizer.model*"]
WEIGHTS = ["model*.safetensors", "penstock.safetensors"]  # Transformers' and packed ones
OTHER_WEIGHTS = ["*.safetensors"]  # only without WEIGHTS: Mistral's repositories hold all weights in both formats
FOLDERS = ["*/*"]
MODEL_DIR: Path = Path(__file__).parent.parent / "demo" / "model"  # the bundled model, in Hugging Face's format
DRAFT_DIR: Path = MODEL_DIR.parent / "draft"  # a smaller draft model for it, without a tokenizer


def resolve_model(name: str, *, weights: bool = True) -> Path:
    """Return the place of "demo" or "demo-draft", a path, or a hub name such as "owner/model", which is downloaded.

    weights: whether to download the weights too; a GGUF file always is, because all the rest is in it.

    Raises:
        ModelLoadError: there is no such model, or the download fails.
    """
    found = find_local(name)
    if found is not None:
        return found
    repository, _, wanted = name.partition(":")
    if wanted:
        return find_gguf(_download(repository, gguf_patterns(wanted), folders=True), wanted)
    directory = _download(name, LIGHT_FILES + WEIGHTS if weights else LIGHT_FILES)
    if weights and not any(directory.glob("*.safetensors")):
        directory = _download(name, LIGHT_FILES + OTHER_WEIGHTS)
    if not has_config(directory):
        raise ModelLoadError(
            f"model: {name} has no config.json; if it has GGUF files, say which one, for instance {name}:Q4_K_M"
        )
    return directory


def find_local(name: str) -> Path | None:
    """Return the place of "demo", "demo-draft" or a path, without downloading; None for a hub name.

    Raises:
        ModelLoadError: the name is none of these.
    """
    if name in ("demo", "demo-draft"):
        return MODEL_DIR if name == "demo" else DRAFT_DIR
    path = Path(os.path.expanduser(name))  # Path.expanduser raises for an unknown user
    if path.is_dir():
        holds_only_gguf = not has_config(path) and not any(path.glob("*.safetensors")) and any(path.glob(f"*{SUFFIX}"))
        return find_gguf(path) if holds_only_gguf else path
    if path.is_file() and is_gguf(path):
        return path
    if path.exists():
        raise ModelLoadError(f"model: {shown(name)} is a file; allowed are a directory, {SUFFIX}, a hub name, demo")
    before, _, wanted = str(path).rpartition(":")
    if before and os.path.isdir(before):
        return find_gguf(Path(before), wanted)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelLoadError(f"model: there is no directory {shown(name)}, and it is not a hub name (owner/model)")
    return None


def find_gguf(directory: Path, wanted: str = "") -> Path:
    """Return the GGUF file of a directory, or the one whose name is `wanted` or ends with it: Q4_K_M.

    Raises:
        ModelLoadError: there is none, or several could be meant.
    """
    files = sorted(file for pattern in ("*", "*/*") for file in directory.glob(pattern + SUFFIX))
    parts = {file: SPLIT_NAME.fullmatch(file.name) for file in files}
    files = [file for file in files if (part := parts[file]) is None or part[2] == "00001"]  # only first parts
    files = [file for file in files if not file.name.startswith("mmproj")]  # the images' part of another model
    if wanted:
        ending = re.compile(rf"(?i)(.*[-._/])?{re.escape(wanted)}(-00001-of-\d{{5}})?{re.escape(SUFFIX)}")
        found = [file for file in files if wanted == file.name or ending.fullmatch(file.name)]
    else:
        found = files
    if len(found) == 1:
        return found[0]
    names = listed([file.name for file in found or files]) or "none"
    what = "several could be meant: " if found else f"no GGUF file is called {shown(wanted)}; there are "
    raise ModelLoadError(f"model: {directory}: {what}{names}; give the path of one")


def gguf_patterns(wanted: str) -> list[str]:
    """Return the patterns of the files that find_gguf could choose for `wanted`."""
    if wanted.lower().endswith(SUFFIX):
        pattern = re.sub(r"-\d{5}-of-", "-?????-of-", wanted)
        return [pattern, f"*/{pattern}"]
    spellings = dict.fromkeys((wanted, wanted.upper(), wanted.lower()))
    return [f"*[-._/]{name}{part}{SUFFIX}" for name in spellings for part in ("", "-?????-of-?????")]


def _download(name: str, patterns: list[str], *, folders: bool = False) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=None if folders else FOLDERS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())  # in one line
        raise ModelLoadError(
            f"model: there is no directory {shown(name)}, and the hub download failed: {reason}"
        ) from None
