"""Case: one tiny random model of Transformers' own class, and how to make it. Each family's file lists its own.

tests/families/<family>.py has a list CASES; `all_cases` collects them, so a family's tests are its list and nothing
else. A case says which shape it is there for.
"""

import importlib
import pkgutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tests.hf_models import TINY, Made, randomise


@dataclass(frozen=True)
class Case:
    """A model to be made.

    Attributes:
        name: what tests call it, "falcon-40b" for instance.
        model_class, config_class: Transformers' own.
        fields: of the config, over tests.hf_models.TINY.
        without: fields of TINY that this config does not have.
        attention: Transformers' implementation that is the oracle, where "eager" is not to be trusted.
        full: tests/test_same_bits.py takes it, in every form of weights and cache.
        shape: another shape of a model above it: what is proved of the engine, and not of the mathematics, is left out.
    """

    name: str
    model_class: type[PreTrainedModel]
    config_class: type[PreTrainedConfig]
    fields: dict[str, Any] = field(default_factory=dict)
    full: bool = False
    shape: bool = False
    without: tuple[str, ...] = ()
    attention: str = "eager"

    def __str__(self) -> str:
        return self.name

    @property
    def architecture(self) -> str:
        return self.model_class.__name__

    @property
    def sliding_window(self) -> int | None:
        """Tokens that the layers with a window see; shorter than the prompts of every test."""
        window: int | None = self.fields.get("sliding_window", self.fields.get("attention_chunk_size"))
        return window

    def config(self, **fields: Any) -> PreTrainedConfig:
        """Transformers' own, with the architecture's name as save_pretrained writes it."""
        tiny = {name: value for name, value in TINY.items() if name not in self.without}
        return self.config_class(**tiny | self.fields | fields, architectures=[self.architecture])

    def make(self, directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **fields: Any) -> Made:
        """The model, with random weights that all matter, and the directory where Transformers has saved it."""
        config = self.config(**fields)
        config._attn_implementation = self.attention
        model = self.model_class(config).eval()
        randomise(model, seed)
        model = model.to(dtype)
        at = directory / f"{self.name}-{seed}"
        model.save_pretrained(at)
        return model, at


def all_cases(*, shapes: bool = True) -> list[Case]:
    """Every family's, in the order of their files; without those that are shapes of another, if asked."""
    from tests import families

    names = sorted(module.name for module in pkgutil.iter_modules(families.__path__))
    modules = [importlib.import_module(f"tests.families.{name}") for name in names if not name.startswith("test_")]
    found = [case for module in modules for case in getattr(module, "CASES", [])]
    return [case for case in found if shapes or not case.shape]


def for_cases(cases: list[Case]) -> pytest.MarkDecorator:
    """Decorator: the test takes only these as its `case`."""
    return pytest.mark.parametrize("case", cases, ids=str, indirect=True, scope="module")
