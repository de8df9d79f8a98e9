"""GPT-2: the files that people have, and what a learned position cannot do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.assembly import build_engine
from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.models.config_json import load_model_config, parse_model_config
from penstock.spec.model_config import ModelConfig
from tests.families import gpt2
from tests.families.case import Case
from tests.hf_models import hf_logprobs, random_ids
from tests.kernels.packed import levels
from tests.models.configs import ODD
from tests.paged import PagedModel

TOLERANCE = 1e-4
KERNELS = ["reference", *(["cpu"] if levels() else [])]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("case", gpt2.CASES, ids=lambda case: case.name)
def test_rows_at_different_positions(case: Case, kernels: str, tmp_path: Path) -> None:
    """Guards against the position of another row, a scale of another layer, and weights that were not turned."""
    hf_model, directory = case.make(tmp_path)
    paged = PagedModel(directory, kernels=kernels, num_seqs=3)
    sequences = [random_ids(length + 5, seed=length) for length in (1, 17, 64)]
    steps = [paged.step({row: ids[:-5] for row, ids in enumerate(sequences)})]
    steps += [paged.step({row: [ids[at]] for row, ids in enumerate(sequences)}) for at in range(-5, 0)]
    for row, ids in enumerate(sequences):
        found = torch.cat([step[row] for step in steps])
        torch.testing.assert_close(found, hf_logprobs(hf_model, ids), atol=TOLERANCE, rtol=0)


def test_the_first_published_form(tmp_path: Path) -> None:
    """Guards against refusing the checkpoint that everybody has: names without prefix, and the causal mask of every
    layer as a tensor, an older mark beside it."""
    hf_model, directory = gpt2.CASES[0].make(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    old = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    for layer in range(2):
        old[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 512, 512).tril()
        old[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    assert not set(old) & set(tensors)
    save_file(old, directory / "model.safetensors", {"format": "pt"})
    ids = random_ids(20)
    found = PagedModel(directory).step({0: ids})[0]
    torch.testing.assert_close(found, hf_logprobs(hf_model, ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kernels", KERNELS)
def test_there_are_no_positions_beyond_the_last(kernels: str, tmp_path: Path) -> None:
    """Guards against a row of memory that is no position: the context is n_positions, and more is refused; the last
    position is computed with."""
    hf_model, directory = gpt2.CASES[0].make(tmp_path, n_positions=32)
    config = load_model_config(directory)
    assert EngineConfig().resolve(config).scheduler.max_model_len == 32
    with pytest.raises(InvalidRequestError, match=r"max_model_len.*32"):
        build_engine(EngineConfig.from_options(model=str(directory), max_model_len=33, kernels=kernels))
    paged = PagedModel(directory, kernels=kernels, num_seqs=2)
    ids = random_ids(33)
    found = paged.step({0: ids[:32]})[0]
    torch.testing.assert_close(found, hf_logprobs(hf_model, ids[:32]), atol=TOLERANCE, rtol=0)
    with pytest.raises((IndexError, ValueError)):
        paged.step({1: ids})


SMALL: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 100,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
}


def read(**fields: Any) -> ModelConfig:
    return parse_model_config(SMALL | fields)


def test_what_a_file_says() -> None:
    """Guards against a size read from the wrong key, and a switch that is not felt."""
    config = read(n_ctx=64, summary_type="cls_index", reorder_and_upcast_attn=True)
    assert (config.hidden_size, config.intermediate_size, config.num_key_value_heads, config.head_dim) == (
        32,
        128,
        4,
        8,
    )
    assert (config.max_position_embeddings, config.rope, config.tie_word_embeddings) == (64, None, True)
    assert (config.hidden_act, config.norm_eps, config.attention_scale) == ("gelu_tanh", 1e-5, None)
    assert read(n_inner=48).intermediate_size == 48
    assert read(scale_attn_weights=False).attention_scale == 1.0
    assert read(scale_attn_by_inverse_layer_idx=True).extra == {"scale_by_layer": True}
    theirs = json.loads(gpt2.GPT2Config(architectures=["GPT2LMHeadModel"]).to_json_string(use_diff=False))
    assert parse_model_config(theirs).vocab_size == 50257


# As published with the smallest one.
PUBLISHED: dict[str, Any] = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip


def test_the_published_file_is_read() -> None:
    """Guards against strictness that refuses the checkpoint people begin with, and against a TypeError out of a damaged
    one: whatever stands at a key, the answer is a ModelConfig or one of our errors."""
    config = parse_model_config(PUBLISHED)
    assert (config.hidden_size, config.num_hidden_layers, config.max_position_embeddings) == (768, 12, 1024)
    assert config.dtype == "float32"
    refused = 0
    for key, value in [(key, value) for key in PUBLISHED for value in ODD]:
        try:
            assert isinstance(parse_model_config(PUBLISHED | {key: value}), ModelConfig)
        except ModelLoadError:
            refused += 1
    assert refused > 150


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n_embd": 30}, "n_embd"),
        ({"n_positions": None}, "n_positions"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"head_dim": 16}, "head_dim"),
        ({"activation_function": "mish"}, "activation_function"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"reorder_and_upcast_attn": 1}, "reorder_and_upcast_attn"),
    ],
)
def test_wrong_values_are_named(fields: dict[str, Any], named: str) -> None:
    """Guards against a file that is computed wrongly instead of refused."""
    with pytest.raises(ModelLoadError, match=named):
        read(**fields)
