"""Which class computes which architecture, and in which versions. `register` also works from a user's own file."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from torch import nn

from penstock.architecture import ARCHITECTURES, Architecture, ReadNumbers, find_architecture, known_architectures
from penstock.errors import InvalidRequestError
from penstock.layers import jetstream_model
from penstock.layers.causal_lm import CausalLM
from penstock.layers.factory import LayerFactory
from penstock.layers.jetstream import Environment
from penstock.model_config import ModelConfig
from penstock.models.param_table import ParamTable
from penstock.validation import check_choice, fail

__all__ = ["MODELS", "CausalLM", "RegisteredModel", "lookup", "register", "versions"]

CONVENTIONS = ("penstock", "jetstream")
DEFAULT_VERSION = "default"
BUILT_IN = "penstock.models"

ModelClass = TypeVar("ModelClass", bound=type[nn.Module])


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A model class, the file of its parameter table, and how it is called (CONVENTIONS)."""

    model_class: type[nn.Module]
    table_file: Path
    convention: str = "penstock"

    def read_table(self) -> ParamTable:
        return ParamTable.from_file(self.table_file)

    def build(self, config: ModelConfig, make: LayerFactory) -> nn.Module:
        """The model without weights, parameters under the table's names."""
        if self.convention == "jetstream":
            return jetstream_model.build(self.model_class, config, make)
        return self.model_class(config, make)

    def as_causal_lm(self, model: nn.Module, config: ModelConfig, make: LayerFactory) -> CausalLM:
        """What `build` made, with its weights, as the engine calls it."""
        if self.convention == "jetstream":
            model = jetstream_model.JetStreamModel(model, Environment(config, make.ops, make))
        return cast(CausalLM, model)


MODELS: dict[tuple[str, str], RegisteredModel] = {}  # by architecture and version


def register(
    *architectures: str,
    table: str,
    config: ReadNumbers | str = "LlamaForCausalLM",
    version: str = DEFAULT_VERSION,
    convention: str = "penstock",
) -> Callable[[ModelClass], ModelClass]:
    """Class decorator: this class computes these architectures.

    table: the YAML file of its parameters, beside the file of the class.
    config: for an architecture that is new to Penstock, how its config.json is read: a function, or the name of an
        architecture whose rules it follows.
    version: several classes may compute one architecture; the engine option `model_impl` chooses.
    convention: "penstock", forward(input_ids [T], ctx) and compute_logits as CausalLM has them; or "jetstream",
        forward(tokens [B, S], input_pos [B, S], caches, mask) as layers/jetstream.py has it.

    Raises:
        InvalidRequestError: another class has registered one of them in that version, or a word is not known.
    """
    check_choice("convention", convention, CONVENTIONS)
    if version == "auto" or not version.isidentifier():
        raise fail("version", version, "a word, and not auto")

    def decorate(model_class: ModelClass) -> ModelClass:
        file = inspect.getfile(model_class)
        entry = RegisteredModel(model_class, Path(file).parent / table, convention)
        for name in architectures:
            if not model_class.__module__.startswith(f"{BUILT_IN}."):
                _import_built_in(name)  # it has the name first, whoever is asked for first
            known = MODELS.get((name, version))
            if known is not None and _place(known.model_class) != _place(model_class):
                raise InvalidRequestError(f"{name} is already registered by {known.model_class.__qualname__}")
            if name not in known_architectures():
                read = find_architecture(config).read if isinstance(config, str) else config
                ARCHITECTURES[name] = Architecture(model_class.__module__, None, read, entry.table_file)
            MODELS[name, version] = entry
        return model_class

    return decorate


def _place(model_class: type[nn.Module]) -> tuple[str, str]:
    """The same for a class whose file is imported again."""
    return model_class.__qualname__, inspect.getfile(model_class)


def _import_built_in(architecture: str) -> None:
    """Import what Penstock itself has for an architecture, if anything: the family, and its versions."""
    if architecture not in known_architectures():
        return
    family = find_architecture(architecture).family
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        is_version = module.name.startswith(f"{family}_") and not module.name.endswith("_config")
        if module.name == family or is_version:
            importlib.import_module(f"{BUILT_IN}.{module.name}")


def lookup(architecture: str, version: str = "auto") -> RegisteredModel:
    """The model for an architecture; the module of a built-in family is imported when it is first asked for.

    version: "auto" is the default one.

    Raises:
        ModelLoadError: nobody has registered it; the message names the nearest one.
        InvalidRequestError: it has no such version; the message names those that it has.
    """
    if version == "auto":
        version = DEFAULT_VERSION
    if (architecture, version) not in MODELS:
        found = versions(architecture)
        check_choice("model_impl", version, ["auto", *found] if DEFAULT_VERSION in found else found)
    return MODELS[architecture, version]


def versions(architecture: str) -> list[str]:
    """Every version of an architecture that somebody has registered, the default one first.

    Built-in ones stand in models/<family>_<version>.py.

    Raises:
        ModelLoadError: nobody has registered the architecture.
    """
    find_architecture(architecture)
    _import_built_in(architecture)
    found = [version for name, version in MODELS if name == architecture]
    return sorted(found, key=lambda version: (version != DEFAULT_VERSION, version))
