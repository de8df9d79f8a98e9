"""The text part of multimodal checkpoints against Transformers' whole models, which are given text only."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from penstock import LLM, SamplingParams
from penstock.errors import ModelLoadError
from penstock.models.config_json import load_model_config
from tests.hf_models import TINY, hf_logprobs, random_ids, randomise

TEXT = TINY | {"head_dim": 16}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TOWER |= {"image_size": 28, "patch_size": 14}
QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
INTERLEAVED = MROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
MODELS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "gemma3": (
        Gemma3ForConditionalGeneration,
        lambda: Gemma3Config(text_config=TEXT | {"sliding_window": 16}, vision_config=TOWER, mm_tokens_per_image=4),
    ),
    "llama4": (
        Llama4ForConditionalGeneration,
        lambda: Llama4Config(
            text_config=TEXT | {"num_local_experts": 4, "attention_chunk_size": 16, "pad_token_id": 0},
            vision_config=TOWER | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        ),
    ),
    "mistral3": (
        Mistral3ForConditionalGeneration,
        lambda: Mistral3Config(
            text_config=TEXT | {"model_type": "mistral", "sliding_window": None},
            vision_config=TOWER | {"model_type": "pixtral"},
            tie_word_embeddings=False,
        ),
    ),
    "qwen2-vl": (
        Qwen2VLForConditionalGeneration,
        lambda: Qwen2VLConfig(
            text_config=TINY | {"rope_parameters": MROPE},
            vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 48, "num_heads": 2},
        ),
    ),
    "qwen2.5-vl": (
        Qwen2_5_VLForConditionalGeneration,
        lambda: Qwen2_5_VLConfig(text_config=TINY | {"rope_parameters": MROPE}, vision_config=QWEN),
    ),
    "qwen3-vl": (
        Qwen3VLForConditionalGeneration,
        lambda: Qwen3VLConfig(
            text_config=TEXT | {"rope_parameters": INTERLEAVED},
            vision_config=QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        ),
    ),
    "qwen3-vl-moe": (
        Qwen3VLMoeForConditionalGeneration,
        lambda: Qwen3VLMoeConfig(
            text_config=TEXT | EXPERTS | {"rope_parameters": INTERLEAVED},
            vision_config=QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        ),
    ),
}
PREFIXES = {  # of the language model, of its LM head, of the vision tower
    "as saved": None,
    "language_model first": ("language_model.model.", "language_model.lm_head.", ""),
    "model first": ("model.language_model.", "lm_head.", "model."),
}


def make(name: str, directory: Path) -> PreTrainedModel:
    """Make a random model and its directory."""
    model_class, config = MODELS[name]
    model = model_class(config()).eval()
    randomise(model, 3)
    model.save_pretrained(directory)
    return model


def rename(directory: Path, prefixes: tuple[str, str, str]) -> None:
    """Give the tensors of a checkpoint other prefixes."""
    text, head, tower = prefixes
    names = {}
    for name in (tensors := load_file(directory / "model.safetensors")):
        if "lm_head." in name:
            names[name] = head + name.split("lm_head.")[1]
        elif "vis" in name.split("layers")[0] or "projector" in name:
            names[name] = tower + name.removeprefix("model.")
        else:
            names[name] = text + name.removeprefix("language_model.").removeprefix("model.").removeprefix(
                "language_model."
            )
    save_file({names[name]: tensor for name, tensor in tensors.items()}, directory / "model.safetensors")


@pytest.mark.parametrize("prefixes", PREFIXES)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_whole_model(name: str, prefixes: str, tmp_path: Path) -> None:
    """Guards against a tensor that is not found under a prefix, another rotation than mrope's for text, another tied
    head, a window of the family's default, and sizes of the vision tower."""
    model = make(name, tmp_path)
    if other := PREFIXES[prefixes]:
        rename(tmp_path, other)
    prompt = random_ids(40)
    llm = LLM(model=str(tmp_path), dtype="float32", threads=1, max_num_seqs=2)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
    found = output.outputs[0]
    oracle = model.language_model if name == "llama4" else model  # the whole one fails at any text
    expected = hf_logprobs(oracle, [*prompt, *found.token_ids])[len(prompt) - 1 : -1]
    assert found.logprobs is not None
    ours = torch.tensor([step[token].logprob for step, token in zip(found.logprobs, found.token_ids, strict=True)])
    assert (expected.max(dim=-1).values - ours).abs().max() < 2e-4
    assert "images are not served" in load_model_config(tmp_path).notes["vision_config"]


def test_what_belongs_to_neither_part_is_refused(tmp_path: Path) -> None:
    """Guards against tensors that are left out because the checkpoint is multimodal."""
    make("qwen3-vl", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.language_model.extra.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"unknown: model\.language_model\.extra\.weight"):
        LLM(model=str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    text = config["text_config"] | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(text))
    with pytest.raises(ModelLoadError, match=r"unknown: model\.language_model"):
        LLM(model=str(tmp_path))
