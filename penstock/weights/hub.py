"""Find the place of a model: the bundled demo, a path, or a name on the Hugging Face hub.

A place is a directory, or the first of the GGUF files that hold a model. Such a file is given by its path, by a
directory that holds no other model, or by the end of its name after a colon: owner/model:Q4_K_M. Well-known models of
the hub have short names, which short_names.toml lists.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from penstock.errors import ModelLoadError, listed, shown
from penstock.spec.config_file import has_config
from penstock.spec.gguf import SPLIT_NAME, SUFFIX, is_gguf
from penstock.weights.downloads import Repository, Watch, fetch, list_repository, snapshot

# What is fetched from the hub: no pickles, no code, and no folders, which hold the weights in other formats.
LIGHT_FILES = ["*.json", "*.jinja", "tokenizer.model*"]
WEIGHTS = ["model*.safetensors", "penstock.safetensors"]  # Transformers' and packed ones
OTHER_WEIGHTS = ["*.safetensors"]  # only without WEIGHTS: Mistral's repositories hold all weights in both formats
FOLDERS = ["*/*"]
MODEL_DIR: Path = Path(__file__).parent.parent / "demo" / "model"  # the bundled model, in Hugging Face's format
DRAFT_DIR: Path = MODEL_DIR.parent / "draft"  # a smaller draft model for it, without a tokenizer


SHORT_NAMES = Path(__file__).parent.parent / "short_names.toml"
PRECISION = re.compile(
    r"(?i)(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|MXFP4\w*))(?:-\d{5}-of-\d{5})?\.gguf$"
)
USUAL = "Q4_K_M"  # what llama.cpp and Ollama take unless told otherwise
WITHOUT_CODE = ("IQ1", "IQ2", "IQ3", "TQ", "NVFP4")  # beginnings of the names of codings that are not read
SMALL_CODES = ("Q", "I", "MXFP4")  # beginnings of the names of codings with at most 8 bits
ROOM = 2**29  # bytes that a GGUF model takes besides its file, at the least


def resolve_model(name: str, *, weights: bool = True, is_local: bool = False) -> Path:
    """Return the place of "demo" or "demo-draft", a path, or a name on the hub such as "owner/model".

    weights: whether to download the weights too; a GGUF file always is, because all the rest is in it.
    is_local: take what Hugging Face's cache has, without the network.

    Raises:
        ModelLoadError: there is no such model, or the download fails.
    """
    found = find_local(name)
    if found is not None:
        return found
    repository, _, wanted = full_name(name).partition(":")
    if wanted:
        return find_gguf(snapshot(repository, gguf_patterns(wanted), None, is_local=is_local), wanted)
    directory = snapshot(repository, LIGHT_FILES + WEIGHTS if weights else LIGHT_FILES, FOLDERS, is_local=is_local)
    if weights and not any(directory.glob("*.safetensors")):
        directory = snapshot(repository, LIGHT_FILES + OTHER_WEIGHTS, FOLDERS, is_local=is_local)
        if any(directory.glob(f"*{SUFFIX}")) and not any(directory.glob("*.safetensors")):
            return find_gguf(directory)  # it was pulled
    if not has_config(directory):
        raise ModelLoadError(
            f"model: {name} has no config.json; if it has GGUF files, say which one, for instance {name}:Q4_K_M"
        )
    return directory


def pull_model(name: str, free_bytes: int, watch: Watch) -> tuple[str, Path]:
    """Download a model as far as Hugging Face's cache lacks it; return the name and the place of what was chosen.

    If the repository has GGUF files and no others, and the name has no file, USUAL is chosen if it fits into
    `free_bytes` of memory, otherwise the largest that does. `watch` is as in downloads.fetch.

    Raises:
        ModelLoadError: there is no such model, or the download fails.
    """
    found = find_local(name)
    if found is not None:
        return name, found
    owner, _, wanted = full_name(name).partition(":")
    repository = list_repository(owner)
    names = [file.name for file in repository.files]
    if not wanted and not any(file.endswith(".safetensors") and "/" not in file for file in names):
        wanted = _choose_file(repository, free_bytes)
    if wanted:
        patterns, ignored = gguf_patterns(wanted), None
    else:
        others = not any(file.startswith("model") and file.endswith(".safetensors") for file in names)
        patterns, ignored = LIGHT_FILES + WEIGHTS + (OTHER_WEIGHTS if others else []), FOLDERS
    fetch(repository, repository.chosen(patterns, ignored), watch)
    full = f"{owner}:{wanted}" if wanted else owner
    return full, resolve_model(full)


def _choose_file(repository: Repository, free_bytes: int) -> str:
    """Choose a GGUF file of a repository, by what comes after the colon of its name."""
    sizes: dict[str, int] = {}
    for file in repository.files:
        if file.name.lower().endswith(SUFFIX) and not Path(file.name).name.startswith("mmproj"):
            first = re.sub(r"-\d{5}-of-", "-00001-of-", file.name)
            sizes[first] = sizes.get(first, 0) + file.size
    if not sizes:
        raise ModelLoadError(f"model: {repository.name} has neither safetensors nor GGUF files")
    return choose_gguf(sizes, free_bytes)


def choose_gguf(sizes: Mapping[str, int], free_bytes: int) -> str:
    """Choose one of several GGUF files with these sizes, for that much memory; the smallest if none fits."""
    labels = gguf_labels(sizes)
    usable = {labels[name]: size for name, size in sizes.items() if not labels[name].startswith(WITHOUT_CODE)}
    if not usable:
        names = listed(sorted(labels.values()))
        raise ModelLoadError(f"model: none of its GGUF files is in a coding that is read; there are {names}")
    fitting = {name: size for name, size in usable.items() if size + ROOM <= free_bytes}
    coded = {name: size for name, size in fitting.items() if name.startswith(SMALL_CODES)} or fitting
    if USUAL in coded:
        return USUAL
    return max(coded, key=coded.__getitem__) if coded else min(usable, key=usable.__getitem__)


def gguf_labels(names: Iterable[str]) -> dict[str, str]:
    """Give each GGUF file the shortest text that names it after a colon: its precision, or its name without .gguf."""
    files = list(names)
    precisions = {name: match[1].upper() for name in files if (match := PRECISION.search(name))}
    counts = list(precisions.values())
    stems = {name: re.sub(r"(?i)(-\d{5}-of-\d{5})?\.gguf$", "", Path(name).name) for name in files}
    return {name: precisions[name] if counts.count(precisions.get(name, "")) == 1 else stems[name] for name in files}


@cache
def short_names() -> dict[str, str]:
    """Read the short names: {"qwen3:0.6b": "Qwen/Qwen3-0.6B"}."""
    return tomllib.loads(SHORT_NAMES.read_text(encoding="utf-8"))


def full_name(name: str) -> str:
    """Return the name on the hub of a short name; any other name is returned as it is."""
    return short_names().get(name.lower(), name)


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
    if full_name(name) != name:
        return None
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        near = difflib.get_close_matches(name.lower(), short_names(), 1)
        advice = f"; is {near[0]} meant?" if near else ""
        raise ModelLoadError(
            f"model: there is no {'file' if name.endswith(SUFFIX) else 'directory'} {shown(name)}, and it is not a hub "
            f"name (owner/model){advice}"
        )
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
