"""Which class computes which architecture. `register` also works from a user's own file."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import nn

from penstock.architecture import ARCHITECTURES, Architecture, ReadNumbers, find_architecture, known_architectures
from penstock.errors import InvalidRequestError
from penstock.layers.causal_lm import CausalLM
from penstock.models.param_table import ParamTable

__all__ = ["MODELS", "CausalLM", "RegisteredModel", "lookup", "register"]

ModelClass = TypeVar("ModelClass", bound=type[nn.Module])


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A model class and the file of its parameter table."""

    model_class: type[nn.Module]
    table_file: Path

    def read_table(self) -> ParamTable:
        return ParamTable.from_file(self.table_file)


MODELS: dict[str, RegisteredModel] = {}


def register(
    *architectures: str, table: str, config: ReadNumbers | str = "LlamaForCausalLM"
) -> Callable[[ModelClass], ModelClass]:
    """Class decorator: this class computes these architectures.

    table: the YAML file of its parameters, beside the file of the class.
    config: for an architecture that is new to Penstock, how its config.json is read: a function, or the name of an
        architecture whose rules it follows.

    Raises:
        InvalidRequestError: another class has registered one of them.
    """

    def decorate(model_class: ModelClass) -> ModelClass:
        entry = RegisteredModel(model_class, Path(inspect.getfile(model_class)).parent / table)
        for name in architectures:
            known = MODELS.get(name)
            if known is not None and known.model_class.__qualname__ != model_class.__qualname__:
                raise InvalidRequestError(f"{name} is already registered by {known.model_class.__qualname__}")
            if name not in known_architectures():
                read = find_architecture(config).read if isinstance(config, str) else config
                ARCHITECTURES[name] = Architecture(model_class.__module__, None, read, entry.table_file)
            MODELS[name] = entry
        return model_class

    return decorate


def lookup(architecture: str) -> RegisteredModel:
    """The model for an architecture; the module of a built-in family is imported when it is first asked for.

    Raises:
        ModelLoadError: nobody has registered it; the message names the nearest one.
    """
    if architecture not in MODELS:
        importlib.import_module(f"penstock.models.{find_architecture(architecture).family}")
    return MODELS[architecture]
