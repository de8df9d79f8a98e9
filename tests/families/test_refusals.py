"""What cannot be served is refused by the reason, and by the nearest that can."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BertConfig,
    LlamaConfig,
    LlavaConfig,
    MambaConfig,
    OPTConfig,
    PreTrainedConfig,
    RecurrentGemmaConfig,
    RobertaConfig,
    T5Config,
    WhisperConfig,
)

from penstock import LLM
from penstock.errors import ModelLoadError
from penstock.models.config_json import load_model_config, parse_model_config
from penstock.models.registry import ARCHITECTURES
from tests.families.case import Case, all_cases, for_cases

FOREIGN: list[tuple[str, PreTrainedConfig, str]] = [
    ("BertForQuestionAnswering", BertConfig(), "an encoder"),
    ("RobertaForCausalLM", RobertaConfig(), "an encoder"),
    ("LlamaForQuestionAnswering", LlamaConfig(), "an encoder"),
    ("OPTModel", OPTConfig(), "without a language-model head"),
    ("T5ForConditionalGeneration", T5Config(), "an encoder-decoder"),
    ("BartForConditionalGeneration", BartConfig(), "an encoder-decoder"),
    ("WhisperForConditionalGeneration", WhisperConfig(), "an encoder-decoder"),
    ("MambaForCausalLM", MambaConfig(), "a recurrent model"),
    ("RecurrentGemmaForCausalLM", RecurrentGemmaConfig(), "a recurrent model"),
    ("LlavaForConditionalGeneration", LlavaConfig(), "more than text"),
]
ONE_OF_EACH = {case.architecture: case for case in all_cases()}


def written(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.covers("J5")
@pytest.mark.parametrize(("name", "config", "reason"), FOREIGN, ids=[name for name, _, _ in FOREIGN])
def test_a_model_of_another_kind_is_refused_by_its_kind(
    name: str, config: PreTrainedConfig, reason: str, tmp_path: Path
) -> None:
    """Guards against an encoder that is said to lack a number, and against a model served as what it is not."""
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        LLM(model=str(tmp_path), load_format="dummy")
    said = str(caught.value)
    assert name[:12] in said  # the middle of a long one is left out
    assert reason in said
    assert "only autoregressive decoders" in said
    assert said.split("nearest: ")[1].rstrip(")") in ARCHITECTURES


@pytest.mark.covers("J5")
@pytest.mark.parametrize("name", ["StableDiffusionPipeline", "UNet2DConditionModel", "FluxTransformer2DModel"])
def test_a_part_of_a_diffusion_model_is_refused_as_such(name: str, tmp_path: Path) -> None:
    """Guards against an error about a missing `architectures`, which such a file never has."""
    for config in ({"_class_name": name, "_diffusers_version": "0.30.0"}, {"architectures": [name]}):
        with pytest.raises(ModelLoadError, match=rf"{name}.*\ba (part of a )?diffusion model.*only autoregressive"):
            load_model_config(written(tmp_path, config))


@pytest.mark.covers("J5")
@pytest.mark.parametrize(
    ("name", "model_type"),
    [("LLaDAModelLM", "llada"), ("DreamModel", "Dream"), ("LLaDAMoEModelLM", "llada_moe"), ("Mine", "dream")],
)
def test_a_diffusion_language_model_is_refused_as_such(name: str, model_type: str, tmp_path: Path) -> None:
    """Guards against advice that does not help: to remove auto_map, which such a file has too, or to add a decoder."""
    config = {"architectures": [name], "model_type": model_type, "auto_map": {"AutoModel": "modeling.Mine"}}
    with pytest.raises(ModelLoadError, match=rf"{name}.*a diffusion language model: it refines all tokens.*at once"):
        load_model_config(written(tmp_path, config))


@pytest.mark.covers("J5")
@pytest.mark.parametrize("with_config", [False, True])
def test_an_adapter_is_refused_as_such(with_config: bool, tmp_path: Path) -> None:
    """Guards against an error about a missing config.json or missing weights, which send a user looking for files that
    an adapter never has."""
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    if with_config:
        written(tmp_path, ONE_OF_EACH["LlamaForCausalLM"].config().to_dict())
    with pytest.raises(
        ModelLoadError, match=r"makes it a LoRA adapter; give the base model's directory.*not supported yet"
    ):
        LLM(model=str(tmp_path))


@pytest.mark.covers("J5")
def test_a_whole_pipeline_is_refused_as_such(tmp_path: Path) -> None:
    """Guards against an error about config.json, which a pipeline's directory never has."""
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"model_index\.json makes it a diffusion pipeline.*only autoregressive"):
        load_model_config(tmp_path)


@pytest.mark.covers("J5")
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_misspelt_architecture_is_told_the_nearest(name: str) -> None:
    """Guards against a name that only the list of all would explain."""
    config = ONE_OF_EACH[name].config().to_dict() | {"architectures": [name.replace("For", "Fro", 1) + "X"]}
    with pytest.raises(ModelLoadError, match=rf"not supported; supported are .*nearest: {name}\)"):
        parse_model_config(config)


@for_cases(list(ONE_OF_EACH.values()))
def test_code_and_pickles_are_refused(case: Case, tmp_path: Path) -> None:
    """Guards against running what came with the weights, for any family: named by auto_map, or in a pickle."""
    config = case.config().to_dict() | {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}
    (tmp_path / "modeling.py").write_text("raise SystemExit('ran')")
    torch.save({}, written(tmp_path, config) / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin: is not a plain list of tensors"):
        LLM(model=str(tmp_path))
