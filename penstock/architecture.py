"""Architecture: how the config.json of one architecture is read, and which family of models computes it.

Each family registers its own (models/<family>_config.py); a user's file does the same through `register_model`. Nothing
here knows an architecture by name, and nothing needs torch.
"""

import difflib
import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from penstock.config_reader import ConfigReader
from penstock.errors import ModelLoadError

Numbers = dict[str, Any]  # fields of ModelConfig
ReadNumbers = Callable[[ConfigReader], Numbers]

# What the names of Transformers say about a model that has no cache of keys and values to continue from.
FOREIGN: dict[str, str] = {
    r"Pipeline$|UNet|Diffusion|Autoencoder|Transformer2D": "a diffusion model: it refines a whole image at once",
    r"For(MaskedLM|PreTraining|(Sequence|Token|Image)Classification|QuestionAnswering|MultipleChoice)$|^Bert|Roberta": (
        "an encoder: it reads a text and does not continue one"
    ),
    r"^(T5|MT5|Bart|MBart|Pegasus|Marian|Whisper|Speech2Text)": "an encoder-decoder: it needs a cache of another kind",
    r"Mamba|Rwkv|RecurrentGemma|Jamba|Zamba": "a recurrent model: its state is no cache of keys and values",
    r"ForConditionalGeneration$|Vision|LlavaFor|Audio": "a model of more than text",
    r"(?<!LMHead)Model$": "a model without a language-model head",
}
MAX_NAME = 80  # characters of a name that an error repeats
WHAT_IS_SERVED = "only autoregressive decoders with a cache of keys and values are served"


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a config.json of one architecture means.

    Attributes:
        family: module of penstock.models that computes it, and the name of its parameter table.
        model_type: what config.json must say; None allows anything.
        read: ModelConfig's numbers from the file; what it does not return stays at ModelConfig's default.
        table: the parameter table, where it is not the family's own.
    """

    family: str
    model_type: str | None
    read: ReadNumbers
    table: Path | None = None


ARCHITECTURES: dict[str, Architecture] = {}


def architecture(
    name: str, model_type: str | None, family: str, *, table: str | None = None
) -> Callable[[ReadNumbers], ReadNumbers]:
    """Decorator: this function reads the config.json of that architecture.

    table: the YAML file of its parameters, beside the family's module; None is the family's own.
    """

    def decorate(read: ReadNumbers) -> ReadNumbers:
        file = None if table is None else Path(__file__).parent / "models" / table
        ARCHITECTURES[name] = Architecture(family, model_type, read, file)
        return read

    return decorate


def known_architectures() -> Mapping[str, Architecture]:
    """Every architecture that somebody has registered, the built-in families among them."""
    _import_families()
    return ARCHITECTURES


def find_architecture(name: str) -> Architecture:
    """What a config.json of that architecture means.

    Raises:
        ModelLoadError: nobody has registered it. The message says why it cannot be served, where its name tells, and
            the nearest one that can.
    """
    known = known_architectures()
    if name not in known:
        reason = why_foreign(name)
        because = f" ({reason}; {WHAT_IS_SERVED})" if reason else ""
        way_out = "" if reason else "; docs/adding_a_model.md tells how to add a decoder, --import FILE brings it"
        raise ModelLoadError(
            f"config.json: architectures = {name[:MAX_NAME]!r} is not supported{because}; supported are "
            f"{', '.join(sorted(known))} (nearest: {nearest(name, sorted(known))}){way_out}"
        )
    return known[name]


def why_foreign(name: str) -> str | None:
    """What kind of model the name of an architecture stands for, where that kind is not served."""
    return next((reason for pattern, reason in FOREIGN.items() if re.search(pattern, name)), None)


def nearest(name: str, known: list[str]) -> str:
    """The known name most like this one."""
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


@cache
def _import_families() -> None:
    """Import models/*_config.py, each of which registers what it reads."""
    from penstock import models

    for module in pkgutil.iter_modules(models.__path__):
        if module.name.endswith("_config"):
            importlib.import_module(f"penstock.models.{module.name}")
