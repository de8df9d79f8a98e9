"""Registry: the family that reads and computes each architecture. No torch: built-in classes are imported on first use.

To add a family: a folder with config.py (the keys of config.json), table.yaml (the parameters) and model.py (the
computation), a line in ARCHITECTURES, and a case in tests/families; docs/adding_a_family.md has the whole list.
`register_model` adds an architecture, or a version of an architecture, from a user's own file.
"""

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, cast

from penstock.errors import InvalidRequestError, ModelLoadError, check_choice, check_installed, fail, nearest
from penstock.interface import entry_points
from penstock.models.bert import config as bert
from penstock.models.falcon.config import read_bloom, read_falcon
from penstock.models.gemma.config import read_gemma
from penstock.models.gemma2.config import read_gemma2, read_gemma3
from penstock.models.gemma4.config import read_gemma4
from penstock.models.gpt2.config import read_gpt2
from penstock.models.gpt_oss.config import read_gpt_oss
from penstock.models.granite.config import read_granite, read_granite_hybrid
from penstock.models.llama.config import (
    read_apertus,
    read_arcee,
    read_ernie4_5,
    read_glm,
    read_glm4,
    read_internlm3,
    read_llama,
    read_mimo,
    read_ministral,
    read_ministral3,
    read_mistral,
    read_qwen2,
    read_qwen3,
    read_seed_oss,
    read_smollm3,
)
from penstock.models.llama.layer_norms import (
    read_cohere,
    read_cohere2,
    read_nemotron,
    read_stablelm,
    read_starcoder2,
)
from penstock.models.llama4.config import read_llama4
from penstock.models.mixtral.config import (
    read_ernie4_5_moe,
    read_glm4_moe,
    read_minimax_m2,
    read_mixtral,
    read_olmoe,
    read_phimoe,
    read_qwen2_moe,
    read_qwen3_moe,
)
from penstock.models.olmo2.config import read_exaone4, read_olmo2, read_olmo3
from penstock.models.phi3.config import read_phi3
from penstock.models.transformers import ADOPTED
from penstock.spec.config_file import SUPPORTED, why_unsupported
from penstock.spec.config_reader import ConfigReader
from penstock.spec.config_rules import read_labels
from penstock.spec.model_config import ModelConfig
from penstock.spec.param_table import ParamTable

DOCUMENTATION = "https://github.com/penstock/penstock/tree/main/docs"  # for users who have only installed the package
OWN_CONVENTION = "penstock"
DEFAULT_VERSION = "default"
MAX_NAME = 80  # maximum number of characters of a name that an error message repeats

ReadConfig = Callable[[ConfigReader], dict[str, Any]]  # config.json -> fields of ModelConfig
ModelClass = TypeVar("ModelClass", bound=type)


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One implementation of an architecture.

    Attributes:
        source: the class, or its dotted name, by which it is imported on first use.
        table_file: the YAML file of its parameters.
        convention: how the class is called: OWN_CONVENTION, or an entry point of penstock.calling_conventions.
    """

    source: type | str
    table_file: Path
    convention: str = "penstock"

    @property
    def needs_torch(self) -> bool:
        """Tell whether the class computes with torch's tensors: it is a user's own, or has another convention."""
        return isinstance(self.source, type) or self.convention != OWN_CONVENTION

    @property
    def model_class(self) -> type:
        """The class, imported on first use."""
        if isinstance(self.source, type):
            return self.source
        module, name = self.source.rsplit(".", 1)
        return cast(type, getattr(importlib.import_module(module), name))

    def find_convention(self) -> Any | None:
        """Find the module that builds and adapts classes of another convention; None for the engine's own."""
        if self.convention == OWN_CONVENTION:
            return None
        return entry_points.load("calling_conventions", self.convention, "convention")

    def read_table(self, config: ModelConfig | None = None) -> ParamTable:
        """Read the parameter table, without torch. config: the model's, for a version whose table depends on it."""
        return ParamTable.from_file(self.table_file)


class FallbackVersion(ModelVersion):
    """Transformers' own class of an architecture (models/transformers/), from which the table is derived.

    Its table_file is the one with the library's version.

    Attributes:
        REVISION: incremented whenever the engine replaces other parts of a class, which changes bits of its answers.
    """

    REVISION = 2

    @property
    def needs_torch(self) -> bool:
        return True

    def read_table(self, config: ModelConfig | None = None) -> ParamTable:
        if config is None:
            raise ModelLoadError(f"{FALLBACK}: its parameter table depends on config.json")
        from penstock.models.transformers.derive import derive

        return derive(config.architecture, config.source).table


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of `architectures` in config.json.

    Attributes:
        model_type: the value that config.json must have; None allows any.
        read_config: returns fields of ModelConfig; a field that it does not return keeps its default.
        versions: the classes that compute it, by the value of the engine option `model_impl`.
        has_lm_head: whether checkpoints have an LM head; without it, the model gives hidden states only.
    """

    model_type: str | None
    read_config: ReadConfig
    versions: dict[str, ModelVersion]
    has_lm_head: bool = True


def _built_in(model_type: str, read_config: ReadConfig, source: str, table: str = "") -> Architecture:
    """Describe a built-in architecture, `source` being the name of its class below penstock.models.

    Unless `table` names another, its table is the one beside its class.
    """
    table_file = Path(__file__).parent / (table or f"{source.split('.')[0]}/table.yaml")
    return Architecture(
        model_type, read_config, {DEFAULT_VERSION: ModelVersion(f"penstock.models.{source}", table_file)}
    )


FALCON, LLAMA = "falcon.model.FalconForCausalLM", "llama.model.LlamaForCausalLM"
GEMMA2, MIXTRAL = "gemma2.model.Gemma2ForCausalLM", "mixtral.model.MixtralForCausalLM"
OLMO2 = "olmo2.model.Olmo2ForCausalLM"
QWEN_MOE = "mixtral/qwen3_moe.yaml"

ARCHITECTURES: dict[str, Architecture] = {
    "ApertusForCausalLM": _built_in("apertus", read_apertus, LLAMA, "llama/apertus.yaml"),
    "ArceeForCausalLM": _built_in("arcee", read_arcee, LLAMA),
    "BloomForCausalLM": _built_in("bloom", read_bloom, FALCON),
    "Cohere2ForCausalLM": _built_in("cohere2", read_cohere2, LLAMA),
    "CohereForCausalLM": _built_in("cohere", read_cohere, LLAMA),
    "Ernie4_5ForCausalLM": _built_in("ernie4_5", read_ernie4_5, LLAMA),
    "Ernie4_5_MoeForCausalLM": _built_in("ernie4_5_moe", read_ernie4_5_moe, MIXTRAL, QWEN_MOE),
    "Exaone4ForCausalLM": _built_in("exaone4", read_exaone4, OLMO2, "olmo2/exaone4.yaml"),
    "FalconForCausalLM": _built_in("falcon", read_falcon, FALCON),
    "GPT2LMHeadModel": _built_in("gpt2", read_gpt2, "gpt2.model.GPT2LMHeadModel"),
    "Gemma2ForCausalLM": _built_in("gemma2", read_gemma2, GEMMA2),
    "Gemma3ForCausalLM": _built_in("gemma3_text", read_gemma3, GEMMA2),
    "Gemma4ForCausalLM": _built_in("gemma4_text", read_gemma4, "gemma4.model.Gemma4ForCausalLM"),
    "GemmaForCausalLM": _built_in("gemma", read_gemma, LLAMA, "gemma/table.yaml"),
    "Glm4ForCausalLM": _built_in("glm4", read_glm4, LLAMA, "llama/glm.yaml"),
    "Glm4MoeForCausalLM": _built_in("glm4_moe", read_glm4_moe, MIXTRAL, QWEN_MOE),
    "GlmForCausalLM": _built_in("glm", read_glm, LLAMA, "llama/glm.yaml"),
    "GptOssForCausalLM": _built_in("gpt_oss", read_gpt_oss, MIXTRAL, "gpt_oss/table.yaml"),
    "GraniteForCausalLM": _built_in("granite", read_granite, LLAMA),
    "GraniteMoeHybridForCausalLM": _built_in("granitemoehybrid", read_granite_hybrid, LLAMA, "granite/table.yaml"),
    "InternLM3ForCausalLM": _built_in("internlm3", read_internlm3, LLAMA),
    "Llama4ForCausalLM": _built_in("llama4_text", read_llama4, MIXTRAL, "llama4/table.yaml"),
    "LlamaForCausalLM": _built_in("llama", read_llama, LLAMA),
    "MiMoForCausalLM": _built_in("mimo", read_mimo, LLAMA),
    "Ministral3ForCausalLM": _built_in("ministral3", read_ministral3, LLAMA),
    "MiniMaxM2ForCausalLM": _built_in("minimax_m2", read_minimax_m2, MIXTRAL),
    "MinistralForCausalLM": _built_in("ministral", read_ministral, LLAMA),
    "MistralForCausalLM": _built_in("mistral", read_mistral, LLAMA),
    "MixtralForCausalLM": _built_in("mixtral", read_mixtral, MIXTRAL),
    "NemotronForCausalLM": _built_in("nemotron", read_nemotron, LLAMA),
    "Olmo2ForCausalLM": _built_in("olmo2", read_olmo2, OLMO2),
    "Olmo3ForCausalLM": _built_in("olmo3", read_olmo3, OLMO2),
    "OlmoeForCausalLM": _built_in("olmoe", read_olmoe, MIXTRAL, QWEN_MOE),
    "Phi3ForCausalLM": _built_in("phi3", read_phi3, LLAMA, "phi3/table.yaml"),
    "PhimoeForCausalLM": _built_in("phimoe", read_phimoe, MIXTRAL),
    "Qwen2ForCausalLM": _built_in("qwen2", read_qwen2, LLAMA),
    "Qwen2MoeForCausalLM": _built_in("qwen2_moe", read_qwen2_moe, MIXTRAL, QWEN_MOE),
    "Qwen3ForCausalLM": _built_in("qwen3", read_qwen3, LLAMA),
    "Qwen3MoeForCausalLM": _built_in("qwen3_moe", read_qwen3_moe, MIXTRAL, QWEN_MOE),
    "SeedOssForCausalLM": _built_in("seed_oss", read_seed_oss, LLAMA),
    "SmolLM3ForCausalLM": _built_in("smollm3", read_smollm3, LLAMA),
    "StableLmForCausalLM": _built_in("stablelm", read_stablelm, LLAMA, "llama/stablelm.yaml"),
    "Starcoder2ForCausalLM": _built_in("starcoder2", read_starcoder2, LLAMA, "llama/starcoder2.yaml"),
}


def _encoder(model_type: str, read_config: ReadConfig) -> Architecture:
    return replace(_built_in(model_type, read_config, "bert.model.BertModel"), has_lm_head=False)


ENCODERS = {
    f"{name}{kind}": _encoder(model_type, read if of_tokens is None else bert.classifier(read, of_tokens=of_tokens))
    for name, model_type, read in (
        ("Bert", "bert", bert.read_bert),
        ("Camembert", "camembert", bert.read_roberta),
        ("DistilBert", "distilbert", bert.read_distilbert),
        ("JinaBert", "bert", bert.read_jina_bert),
        ("MPNet", "mpnet", bert.read_mpnet),
        ("ModernBert", "modernbert", bert.read_modernbert),
        ("Roberta", "roberta", bert.read_roberta),
        ("XLMRoberta", "xlm-roberta", bert.read_roberta),
        ("NomicBert", "nomic_bert", bert.read_nomic_bert),
    )
    for kind, of_tokens in (
        ("Model", None), ("ForMaskedLM", None), ("ForSequenceClassification", False), ("ForTokenClassification", True),
    )
}  # fmt: skip


def _without_head(name: str) -> str:
    if name in ("Gemma3ForCausalLM", "Gemma4ForCausalLM", "Llama4ForCausalLM"):
        return name.replace("ForCausalLM", "TextModel")
    return re.sub("(ForCausalLM|LMHeadModel)$", "Model", name)


HEADLESS = {_without_head(name): name for name in ARCHITECTURES}  # name without a head -> name with a head


def _headless(architecture: Architecture) -> Architecture:
    """Derive an architecture for checkpoints without an LM head, such as those of embedding models.

    The head is tied to the embedding and has no bias, so it needs no tensor. Its logits are never asked for.
    """
    read = architecture.read_config

    def read_headless(config: ConfigReader) -> dict[str, Any]:
        return {**read(config), "tie_word_embeddings": True, "lm_head_bias": False}

    return replace(architecture, read_config=read_headless, has_lm_head=False)


# name of the classifier -> name of the decoder with its LM head, in the place of which it has a head of its own
CLASSIFIERS = {re.sub("(Text)?Model$", r"\1ForSequenceClassification", name): HEADLESS[name] for name in HEADLESS}


class ClassifierVersion(ModelVersion):
    """A decoder whose last product gives logits of labels, not of tokens."""

    def read_table(self, config: ModelConfig | None = None) -> ParamTable:
        table = super().read_table(config)
        head = ParamTable.from_text("lm_head.weight: {shape: [labels, hidden], from: [score.weight]}", "classifier")
        rows = (row for row in table.rows if not row.pattern.startswith("lm_head."))
        return replace(table, rows=(*rows, *head.rows))


def _classifier(architecture: Architecture) -> Architecture:
    """Derive the architecture of a classifier from that of the decoder."""
    read, version = architecture.read_config, architecture.versions[DEFAULT_VERSION]

    def read_classifier(config: ConfigReader) -> dict[str, Any]:
        head = {"tie_word_embeddings": False, "lm_head_bias": False, "logit_scale": 1.0}
        return {**read(config), **read_labels(config), **head, "final_logit_softcapping": None}

    versions: dict[str, ModelVersion] = {DEFAULT_VERSION: ClassifierVersion(version.source, version.table_file)}
    return Architecture(architecture.model_type, read_classifier, versions, has_lm_head=False)


def is_registered(name: str) -> bool:
    """Tell whether a family here has the architecture."""
    return any(name in known for known in (ARCHITECTURES, ENCODERS, HEADLESS, CLASSIFIERS))


FALLBACK = "transformers"  # the version that every decoder of Transformers has


def _read_fallback(read: ConfigReader) -> dict[str, Any]:
    from penstock.models.transformers.derive import read_config

    return read_config(read)


@lru_cache(maxsize=1)
def fallback() -> Architecture:
    """Describe what every decoder of Transformers is.

    Raises:
        InvalidRequestError: Transformers is not installed.
    """
    check_installed("model_impl", FALLBACK, FALLBACK)
    version = FallbackVersion("penstock.models.transformers.model.TransformersLM", _library() / "__init__.py")
    return Architecture(None, _read_fallback, {FALLBACK: version})


def _library() -> Path:
    """Find the folder of the installed library, without importing it, which takes seconds."""
    found = importlib.util.find_spec(FALLBACK)
    return Path(found.origin).parent if found is not None and found.origin is not None else Path()


@lru_cache(maxsize=1)
def _known_to_transformers() -> str:
    """Read the file in which Transformers lists its classes; it is empty if the library or torch is not installed."""
    file = _library() / "models" / "auto" / "modeling_auto.py"
    return file.read_text(encoding="utf-8") if importlib.util.find_spec("torch") and file.is_file() else ""


def adopt_class(model_class: type) -> str:
    """Register a program's own class that derives from a decoder of Transformers, to be computed by its own modules.

    It is built again from its config. Return the name of its architecture: that of the class, and a number if another
    class has this name.
    """
    own = (name for name, known in ADOPTED.items() if known is model_class)
    numbered = (model_class.__name__ + (f"_{number}" if number > 1 else "") for number in count(1))
    name = next(own, None) or next(name for name in numbered if name not in {*ARCHITECTURES, *HEADLESS, *ADOPTED})
    ADOPTED[name] = model_class
    return name


def may_fall_back(name: str, model_type: str = "") -> bool:
    """Tell whether Transformers lists an architecture, or a program has brought it, and neither name says that it is of
    a kind never served."""
    kind = why_unsupported(name) or why_unsupported(model_type)
    return kind is None and name.isidentifier() and (name in ADOPTED or f'"{name}"' in _known_to_transformers())


def find_architecture(name: str) -> Architecture:
    """Find a registered architecture by its name, with or without the head.

    Raises:
        ModelLoadError: it is not registered. The message gives the nearest name, and the reason if the name shows it.
    """
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    if name in ENCODERS:
        return ENCODERS[name]
    if name in HEADLESS:
        return _headless(ARCHITECTURES[HEADLESS[name]])
    if name in CLASSIFIERS:
        return _classifier(ARCHITECTURES[CLASSIFIERS[name]])
    if may_fall_back(name):
        return fallback()
    raise unsupported(name)


def unsupported(name: str, kind: str | None = None) -> ModelLoadError:
    """Make the error for an architecture that is not registered. kind: the kind of model, if more than the name shows
    it."""
    kind = kind or why_unsupported(name)
    because = f" ({kind}; {SUPPORTED})" if kind else ""
    hint = "" if kind else f"; {DOCUMENTATION}/adding_a_model.md explains how to add a decoder, --import FILE loads it"
    return ModelLoadError(
        f"config.json: architectures = {name[:MAX_NAME]!r} is not supported{because}; supported are "
        f"{', '.join(sorted(ARCHITECTURES))} (nearest: {nearest(name, ARCHITECTURES)}){hint}"
    )


def find_model(architecture: str, version: str = "auto") -> ModelVersion:
    """Find an implementation of an architecture. The version "auto" is the default one, or else the fallback.

    Raises:
        ModelLoadError: the architecture is not registered.
        InvalidRequestError: the architecture has no such version; the message lists its versions.
    """
    versions = find_architecture(architecture).versions
    if version == FALLBACK or (version == "auto" and FALLBACK in versions):
        return fallback().versions[FALLBACK]
    wanted = DEFAULT_VERSION if version == "auto" else version
    if wanted not in versions:  # other packages are asked only for a version that is not known here
        versions = find_versions(architecture)
    if wanted not in versions:
        check_choice("model_impl", wanted, ["auto", *versions] if DEFAULT_VERSION in versions else list(versions))
    return versions[wanted]


def find_versions(architecture: str) -> dict[str, ModelVersion]:
    """List all implementations of an architecture by their names, those of other installed packages included.

    Raises:
        ModelLoadError: the architecture is not registered.
    """
    found = dict(find_architecture(architecture).versions)
    for entry in entry_points.names("model_versions"):
        added = entry_points.load("model_versions", entry, "model_impl")
        found |= {name: version for name, version in added.get(architecture, {}).items() if name not in found}
    return found


def register_model(
    *architectures: str,
    table: str,
    config: ReadConfig | str = "LlamaForCausalLM",
    version: str = DEFAULT_VERSION,
    convention: str = "penstock",
) -> Callable[[ModelClass], ModelClass]:
    """Register the decorated class as the implementation of these architectures.

    Args:
        table: the YAML file of its parameters, in the directory of the class's file.
        config: for a new architecture, the function that reads its config.json, or the name of an architecture whose
            function can be used.
        version: name of this implementation if there are several; the engine option `model_impl` chooses among them.
        convention: "penstock", forward(input_ids [T], ctx) and compute_logits as in layers/module.py; or
            "jetstream", forward(tokens [B, S], input_pos [B, S], caches, mask); penstock_lab/conventions/jetstream.py
            explains both.

    Raises:
        InvalidRequestError: another class is registered for one of these architectures in that version, or an argument
            is not allowed.
    """
    check_choice("convention", convention, [OWN_CONVENTION, *entry_points.names("calling_conventions")])
    if version == "auto" or not version.isidentifier():
        raise fail("version", version, "an identifier other than auto")

    def decorate(model_class: ModelClass) -> ModelClass:
        entry = ModelVersion(model_class, Path(inspect.getfile(model_class)).parent / table, convention)
        found: dict[str, Architecture] = {}
        for name in architectures:
            if name not in ARCHITECTURES:
                read_config = find_architecture(config).read_config if isinstance(config, str) else config
                found[name] = Architecture(None, read_config, {})
                continue
            found[name] = ARCHITECTURES[name]
            known = find_versions(name).get(version, entry)
            if not _same_class(known.source, model_class):
                raise InvalidRequestError(
                    f"{name} is already registered by {known.model_class.__qualname__}; choose another version"
                )
        for name, architecture in found.items():  # only if all of them can be registered
            ARCHITECTURES.setdefault(name, architecture).versions[version] = entry
        return model_class

    return decorate


def _same_class(known: type | str, other: type) -> bool:
    """Tell whether two classes are the same class of a file that was imported twice. False for a built-in class."""
    if isinstance(known, str):
        return False
    return known.__qualname__ == other.__qualname__ and inspect.getfile(known) == inspect.getfile(other)
