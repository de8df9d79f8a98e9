"""Several models of `penstock serve`: their names, places and options, from flags or a file to a ModelPool."""

import argparse
import os
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import settings
from penstock.cli.options import UNSET, add_engine_options, add_model, engine_options, parse_object
from penstock.errors import InvalidRequestError, check_float, fail, pop_options, shown
from penstock.interface.lora import LoRAConfig
from penstock.kernels.cpu.host import usable_memory_bytes
from penstock.spec.config_file import has_config
from penstock.spec.gguf import SUFFIX
from penstock.weights.hub import find_local

if TYPE_CHECKING:
    from penstock.client.model_pool import ModelPool, ServedModel
    from penstock.client.process import ProcessClient

IDLE_S = 300.0  # as Ollama's keep_alive
MAX_IDLE_S = 1e9
NOT_FOR_SEVERAL = {  # options that are about one model -> what does it for several
    "served_model_name": "each has the name that --model NAME=PATH or --models gives it",
    "kv_role": "prefill and decoding on different engines is for one model",
}


def add_pool_options(parser: argparse.ArgumentParser) -> None:
    """Add --models and --model-idle-s."""
    group = parser.add_argument_group("several models (also --model NAME=PATH,NAME=PATH, or a directory of models)")
    help_text = "name -> MODEL, or an object of options named like the flags, with model, pinned and idle_s"
    group.add_argument("--models", type=parse_object, default=UNSET, metavar="JSON", help=help_text)
    help_text = f"seconds without a request after which a model is put to sleep; 0: none is (default: {IDLE_S:g})"
    group.add_argument("--model-idle-s", type=float, default=UNSET, metavar="S", help=help_text)


def named_models(args: argparse.Namespace) -> dict[str, Any] | None:
    """Find the names of the models and the place or the options of each; None if one model is served as itself.

    Raises:
        InvalidRequestError: a name is empty or given twice, or there is none.
    """
    if "models" in args:
        if not args.models or "" in args.models:
            raise fail("models", args.models, "an object with at least one name -> MODEL, and no empty name")
        if "given_model" in args or "model" in args.sources:
            raise InvalidRequestError(f"model: {args.model} is not among models; name it there", param="model")
        return dict(args.models)
    if "=" in args.model and not os.path.exists(args.model):
        pairs = [part.partition("=")[::2] for part in args.model.split(",")]
        names = [name for name, _ in pairs]
        if not all(all(pair) for pair in pairs) or len(set(names)) < len(names):
            message = f"model: {shown(args.model)} must be NAME=PATH,NAME=PATH, with each name once"
            raise InvalidRequestError(message, param="model")
        return dict(pairs)
    folder = Path(args.model).expanduser()
    if folder.is_dir() and not has_config(folder) and not any(folder.glob("*.safetensors")):
        found = {path.name: str(path) for path in sorted(folder.iterdir()) if _is_model(path)}
        if found:
            return found
    return {args.model: args.model} if "model_idle_s" in args else None


def _is_model(path: Path) -> bool:
    return path.is_dir() and (has_config(path) or any(path.glob(f"*{SUFFIX}")))


def make_pool(args: argparse.Namespace, models: Mapping[str, Any], common: Mapping[str, Any]) -> "ModelPool":
    """Make the pool of the models, none of which is started yet.

    Args:
        models: name -> place, or an object of options.
        common: options that all of them share; `memory` is the budget of all.

    Raises:
        InvalidRequestError: an option is wrong, or not for several models.
        ModelLoadError: there is no such model.
    """
    from penstock.client.model_pool import ModelPool

    for name, instead in NOT_FOR_SEVERAL.items():
        if name in args or name in common:
            raise InvalidRequestError(f"{name}: not allowed with several models; {instead}", param=name)
    budget = common.get("memory") or usable_memory_bytes()
    idle_s = getattr(args, "model_idle_s", IDLE_S)
    shared = {key: value for key, value in common.items() if key not in ("memory", "model")}
    place = getattr(args, "sources", {}).get("models", "models")
    found = [_served(name, given, shared, idle_s, f"{place}.{name}") for name, given in models.items()]
    named = [(name, model.name) for model in found for name in (model.name, *model.adapters)]
    for given, count in Counter(name for name, _ in named).items():
        if count > 1:
            of = " and ".join(str(owner) for name, owner in named if name == given)
            message = f"lora_modules: {shown(given)} names a model or an adapter of {of}; it can stand for one only"
            raise InvalidRequestError(message, param="lora_modules")
    pinned = sum(model.need for model in found if model.pinned)
    if pinned > budget:
        message = f"memory: {budget >> 20} MiB are too little for the pinned models, which need {pinned >> 20} MiB"
        raise InvalidRequestError(message, param="memory")
    return ModelPool(found, budget, max_wait_s=args.max_queue_wait)


def _served(name: str, given: Any, shared: Mapping[str, Any], idle_s: float, place: str) -> "ServedModel":
    from penstock.cli.main import Parser
    from penstock.client.model_pool import ServedModel

    parser = Parser(add_help=False)
    add_model(parser)
    add_engine_options(parser)
    parser.add_argument("--standby", action="store_true", default=UNSET)
    parser.add_argument("--data-parallel-size", type=int, default=UNSET)
    parser.add_argument("--pinned", action="store_true")
    parser.add_argument("--idle-s", type=float, default=idle_s)
    table = given if isinstance(given, dict) else {"model": given}
    own = settings.parse_table(parser, table, place)
    check_float(f"{place}.idle_s", own.idle_s, 0.0, MAX_IDLE_S)
    find_local(own.model)
    options = {**shared, **engine_options(own), "model": own.model}
    options |= {key: getattr(own, key) for key in ("standby", "data_parallel_size") if key in own}
    copies = 2 if options.get("standby") else 1
    num_engines = copies * options.get("data_parallel_size", 1)
    memory = options.pop("memory", None)
    return ServedModel(
        name,
        partial(_client, options, num_engines),
        memory=None if memory is None else memory * num_engines,
        idle_s=own.idle_s or None,
        pinned=own.pinned,
        copies=copies,
        adapters=tuple(pop_options(LoRAConfig, dict(options)).modules),
    )


def _client(options: dict[str, Any], num_engines: int, memory: int | None) -> "ProcessClient":
    from penstock.client.async_llm import AsyncLLM

    limit: dict[str, Any] = {"memory": memory // num_engines} if memory else {}
    return AsyncLLM(**options, **limit).client
