"""Read how a model's embeddings are computed, from the files that sentence-transformers writes. No torch.

    modules.json             a list of steps: Transformer, Pooling, perhaps Normalize, perhaps more
    1_Pooling/config.json    which tokens count (the path is in modules.json)
    config.json              is_matryoshka, matryoshka_dimensions
    tokenizer_config.json    add_eos_token: such models were trained on texts that end with EOS
    config_sentence_transformers.json    prompts, and the name of the default one

Without modules.json, a decoder's embedding is the normalised hidden state of the last token, and an encoder's the mean
of its states, as sentence-transformers takes them, or what its GGUF file says, normalised, as llama.cpp takes it.
"""

import json
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from penstock.errors import ModelLoadError, one_line, shown
from penstock.interface.pooling import MAX_DIMENSIONS, PoolerConfig
from penstock.spec.config_file import CONFIG
from penstock.spec.config_reader import read_json
from penstock.spec.model_config import ModelConfig

MODULES, TOKENIZER, PROMPTS = "modules.json", "tokenizer_config.json", "config_sentence_transformers.json"
MAX_BYTES = 2**20
MODES = {"lasttoken": "LAST", "mean_tokens": "MEAN", "cls_token": "CLS"}  # pooling_mode_* -> pooling_type
PART_OF_IT = ("Transformer", "Pooling", "Normalize")


def usual_pooler(model: ModelConfig) -> PoolerConfig:
    """Return what a model's numbers say: an encoder's say which state it classifies by, decoders take the last one."""
    kind, normalize = "LAST", True
    if model.bidirectional:
        stated = model.extra["label_pooling"] if model.labels else model.extra["pooling"]
        kind, normalize = stated or "MEAN", stated is not None
    return PoolerConfig(
        pooling_type=kind,
        normalize=normalize,
        hidden_size=model.hidden_size,
        labels=model.labels,
        num_token_types=model.num_token_types,
    )


def read_pooler(directory: Path, usual: PoolerConfig) -> PoolerConfig:
    """Read the pooler that a model directory describes. A classifier's is not described.

    usual: what holds for the model if the directory says nothing.

    Raises:
        ModelLoadError: a file cannot be read, or does not have the format that sentence-transformers writes.
    """
    if usual.labels:
        return usual
    more = _dimensions(directory / CONFIG)
    tokenizer = directory / TOKENIZER
    more["add_eos_token"] = tokenizer.is_file() and read_json(tokenizer).get("add_eos_token") is True
    more |= _prompts(directory / PROMPTS)
    if not (directory / MODULES).exists():
        return replace(usual, **more)
    names: list[str] = []
    kind, problem = "LAST", None
    for module in _read_modules(directory / MODULES):
        name = str(module.get("type", "")).rpartition(".")[2]
        names.append(name)
        if name not in PART_OF_IT:
            problem = f"{MODULES}: {shown(name)} is not supported; embeddings are pooled, and perhaps normalised"
        elif name == "Pooling":
            kind, why_not = _pooling_type(_inside(directory, module.get("path")))
            problem = problem or why_not
    return replace(usual, pooling_type=kind, normalize="Normalize" in names, unsupported=problem, **more)


def _prompts(file: Path) -> dict[str, Any]:
    """Read the prompts. Raise ModelLoadError if they are not texts by name, or the default is none of them."""
    config = read_json(file) if file.is_file() else {}
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelLoadError(f"{file}: prompts = {shown(prompts)} is not allowed; it must map names to texts")
    if default is not None and default not in prompts:
        raise ModelLoadError(f"{file}: default_prompt_name = {shown(default)} is not allowed; it must name a prompt")
    return {"prompts": prompts, "default_prompt": default}


def _dimensions(file: Path) -> dict[str, Any]:
    """Read what config.json, if it exists, says about shorter embeddings. Raise ModelLoadError if it is invalid."""
    config = read_json(file) if file.is_file() else {}
    ids = config.get("matryoshka_dimensions") or ()
    if not isinstance(ids, list | tuple) or any(type(item) is not int or not 0 < item < MAX_DIMENSIONS for item in ids):
        raise ModelLoadError(f"{file}: matryoshka_dimensions = {shown(ids)} is not allowed; it must be a list of sizes")
    return {"is_matryoshka": config.get("is_matryoshka") is True, "matryoshka_dimensions": tuple(ids)}


def _read_modules(file: Path) -> list[dict[str, Any]]:
    try:
        if not file.is_file() or file.stat().st_size > MAX_BYTES:
            raise ModelLoadError(f"{file}: must be a file of at most {MAX_BYTES} bytes")
        modules = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file}: cannot be read as JSON: {one_line(error)}") from None
    if not isinstance(modules, list) or not all(isinstance(item, dict) for item in modules):
        raise ModelLoadError(f"{file}: holds {shown(modules)}; it must be a list of objects")
    return modules


def _inside(directory: Path, path: Any) -> Path:
    """Find the config.json of a module. Raise ModelLoadError if it would be outside the directory."""
    parts = PurePosixPath(path if isinstance(path, str) else "")
    if not parts.parts or parts.is_absolute() or ".." in parts.parts:
        raise ModelLoadError(f"{directory / MODULES}: path = {shown(path)} is not allowed; it must be a folder in here")
    return directory / parts / CONFIG


def _pooling_type(file: Path) -> tuple[str, str | None]:
    """Read the pooling type, and the reason if the file's type is not supported."""
    config = read_json(file)
    prefix = "pooling_mode_"
    asked = [name.removeprefix(prefix) for name, value in config.items() if name.startswith(prefix) and value is True]
    asked = asked or [str(config.get("pooling_mode", "")).replace("mean", "mean_tokens").replace("cls", "cls_token")]
    if config.get("include_prompt") is False:
        return "LAST", f"{file.parent.name}/{CONFIG}: include_prompt = false is not supported"
    if len(asked) == 1 and asked[0] in MODES:
        return MODES[asked[0]], None
    return "LAST", f"{file.parent.name}/{CONFIG}: pooling by {shown(', '.join(asked))} is not supported"
