"""The models in Hugging Face's cache: their names, sizes and formats, and their removal."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ModelLoadError, shown
from penstock.spec.config_reader import read_json
from penstock.spec.gguf import SUFFIX
from penstock.weights.downloads import BROKEN
from penstock.weights.hub import full_name, gguf_labels

SPLIT = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model whose weights are in the cache.

    Attributes:
        name: as every command takes it: owner/model, or owner/model:Q4_K_M for one of several GGUF files.
        place: its directory, or its first GGUF file.
        files: its files in the cache, as links.
        num_bytes: of all its files.
        format: for instance "safetensors, bfloat16" or "GGUF, Q4_K_M".
    """

    name: str
    place: Path
    files: tuple[Path, ...]
    num_bytes: int
    format: str


def cached_models() -> list[CachedModel]:
    """List the models, sorted by name."""
    found = [model for revision in _revisions() for model in _models(*revision)]
    return sorted(found, key=lambda model: model.name.lower())


def remove_model(name: str) -> tuple[str, int]:
    """Delete a model from the cache; return its full name and the number of bytes that are free now.

    For owner/model:FILE only that GGUF file is deleted; for owner/model everything of the repository, including parts
    of broken downloads.

    Raises:
        ModelLoadError: the cache has no such model.
    """
    from huggingface_hub import scan_cache_dir

    full = full_name(name)
    owner, _, wanted = full.partition(":")
    cache = _scanned(scan_cache_dir)
    repository = next((item for item in _repositories(cache) if item.repo_id == owner), None)
    if wanted:
        model = next((item for item in cached_models() if _is_meant(item, full)), None)
        if model is None:
            raise _unknown(name)
        return model.name, sum(map(_unlink, model.files))
    if repository is None:
        raise _unknown(name)
    freed = sum(map(_remove, Path(repository.repo_path).glob(f"blobs/*{BROKEN}")))
    strategy = cache.delete_revisions(*(revision.commit_hash for revision in repository.revisions))
    freed += strategy.expected_freed_size
    strategy.execute()
    return owner, freed


def _is_meant(model: CachedModel, name: str) -> bool:
    """Tell whether a name with a colon means this GGUF file."""
    owner, _, wanted = name.partition(":")
    stem = SPLIT.sub("", model.place.name)
    ours, _, label = model.name.partition(":")
    return ours == owner and wanted.lower() in (label.lower(), stem.lower(), stem.lower().removesuffix(SUFFIX))


def _unknown(name: str) -> ModelLoadError:
    names = ", ".join(model.name for model in cached_models()) or "nothing"
    return ModelLoadError(f"model: the cache has no {shown(name)}; it holds {names}")


def _unlink(link: Path) -> int:
    """Delete a link of a snapshot, and its content unless another link names it."""
    blob = link.resolve()
    others = [other for other in link.parents[1].parent.glob("snapshots/**/*") if other != link]
    link.unlink()
    return 0 if blob == link or any(other.resolve() == blob for other in others) else _remove(blob)


def _remove(file: Path) -> int:
    size = file.stat().st_size
    file.unlink()
    return size


def _scanned(scan: Any) -> Any:
    """Scan the cache; None if there is none yet."""
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan()
    except CacheNotFound:
        return None


def _repositories(cache: Any) -> list[Any]:
    return [] if cache is None else [item for item in cache.repos if item.repo_type == "model"]


def _revisions() -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """Yield each repository's name, with the directory and the files of the revision that commands take."""
    from huggingface_hub import scan_cache_dir

    for repository in _repositories(_scanned(scan_cache_dir)):
        revisions = sorted(repository.revisions, key=lambda item: ("main" in item.refs, item.last_modified))
        if revisions:
            folder = Path(revisions[-1].snapshot_path)
            yield (
                repository.repo_id,
                folder,
                {str(Path(file.file_path).relative_to(folder)): file for file in revisions[-1].files},
            )


def _models(name: str, folder: Path, files: dict[str, Any]) -> Iterator[CachedModel]:
    """Yield the models of one revision: one of safetensors, and one for each GGUF file."""
    if any(file.endswith(".safetensors") and "/" not in file for file in files):
        parts = {file: item for file, item in files.items() if not file.lower().endswith(SUFFIX)}
        links = tuple(Path(item.file_path) for item in parts.values())
        size = sum(item.size_on_disk for item in parts.values())
        yield CachedModel(name, folder, links, size, f"safetensors, {_dtype(folder)}")
    firsts: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.lower().endswith(SUFFIX) and not Path(file).name.startswith("mmproj"):
            firsts.setdefault(SPLIT.sub("", file), []).append(file)
    labels = gguf_labels(firsts)
    for whole, parts_of in firsts.items():
        links = tuple(Path(files[part].file_path) for part in parts_of)
        size = sum(files[part].size_on_disk for part in parts_of)
        yield CachedModel(f"{name}:{labels[whole]}", links[0], links, size, f"GGUF, {labels[whole]}")


def _dtype(folder: Path) -> str:
    """Say in which type a checkpoint's weights are stored, by its config.json."""
    try:
        config = read_json(folder / "config.json")
    except ModelLoadError:
        return "without config.json"
    config = {**config, **(config.get("text_config") or {})}
    quantization = config.get("quantization_config") or {}
    return str(quantization.get("quant_method") or config.get("dtype") or config.get("torch_dtype") or "float32")
