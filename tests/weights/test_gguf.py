"""Models in GGUF files, written by the package `gguf` from Transformers' models, against these models."""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from penstock.errors import ModelLoadError
from penstock.models.config_json import load_model_config
from penstock.weights.hub import resolve_model
from penstock.weights.rows import read_rows
from penstock.weights.safetensors import find_files, fingerprint
from penstock.weights.sources import open_source, read_parameters
from tests.families.case import Case, all_cases
from tests.hf_models import hf_logprobs, random_ids, randomise
from tests.paged import PagedModel
from tests.weights.gguf_files import write_gguf

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
# Names of cases -> fields with which a GGUF file can say what the case is there for.
CASES: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
              "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    "ernie4.5": SIZES,
    "llama-biases": SIZES,
    "llama-linear-rope": SIZES,
    "llama-yarn": SIZES,
    "mistral-no-window": SIZES,
    "mixtral": SIZES,
    "qwen2": SIZES | {"head_dim": 16},
    "qwen3": SIZES,
    "olmoe": SIZES | {"head_dim": 16, "num_key_value_heads": 4},
    "qwen2-moe": SIZES | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "head_dim": 16},
    "qwen3-moe": SIZES | {"moe_intermediate_size": 32},
    "gemma": SIZES,
    "gemma2": SIZES | {"query_pre_attn_scalar": 32},
    "gemma3": SIZES | {"query_pre_attn_scalar": 32, "num_hidden_layers": 7, "layer_types": None},
    "olmo2": SIZES | {"head_dim": 16},
    "olmo3": SIZES | {"head_dim": 16},
    "exaone4": SIZES,
    "exaone4-no-window": SIZES | {"head_dim": 16},
    "granite": SIZES | {"head_dim": 16},
    "ministral3": SIZES | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
                   "mscale_all_dim": 1.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}},
    "seed-oss": SIZES,
    "smollm3": SIZES | {"head_dim": 16, "num_hidden_layers": 5, "no_rope_layer_interval": 4},
    "phi3": SIZES | {"head_dim": 16},
    "phi3-longrope": SIZES | {"head_dim": 16, "original_max_position_embeddings": 32, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "attention_factor": 1.19,
        "short_factor": [1.0] * 8, "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0]}},
    "llama4": SIZES | {"num_hidden_layers": 5, "no_rope_layer_interval": 4, "attention_chunk_size": 8192,
               "floor_scale": 8192, "attn_scale": 0.1, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 128},
    "phimoe": SIZES | {"head_dim": 16, "router_jitter_noise": 0.01, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_mscale": 1.24, "long_mscale": 1.24,
        "short_factor": [1.0, 1.2] * 4, "long_factor": [2.0] * 8, "original_max_position_embeddings": 512}},
    "falcon-7b": {"hidden_size": 64, "num_attention_heads": 4},
    "falcon-40b": {"hidden_size": 64, "num_attention_heads": 8, "num_kv_heads": 2},
    "falcon-11b": {"hidden_size": 64, "num_attention_heads": 8, "num_kv_heads": 2, "ffn_hidden_size": 96},
    "gpt2": {"n_embd": 64, "n_head": 4},
    "gpt-oss": SIZES,
    "apertus": SIZES | {"head_dim": 16},
    "apertus-biases": SIZES | {"head_dim": 16, "attention_bias": False, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0}},
    "arcee": SIZES,
    "arcee-biases": SIZES,
    "bloom": {"hidden_size": 64, "num_attention_heads": 4},
    "cohere": SIZES | {"head_dim": 16},
    "cohere2": SIZES | {"head_dim": 16, "num_hidden_layers": 5, "layer_types": None},
    "ernie4-5-moe": SIZES,
    "ernie4-5-moe-some-layers": SIZES | {"moe_layer_end_index": -1},
    "glm4": SIZES,
    "glm4-moe": SIZES | {"num_nextn_predict_layers": 1},
    "glm4-moe-plain-biases": SIZES,
    "minimax-m2": SIZES,
    "nemotron": SIZES,
    "nemotron-biases": SIZES,
    "stablelm": SIZES | {"head_dim": None},
    "stablelm-parallel": SIZES | {"head_dim": None},
    "starcoder2": SIZES | {"head_dim": 16, "sliding_window": None},
}  # fmt: skip
TOLERANCE = 1e-4
CODED = 5e-3  # activations are two int8 slices


def _make(name: str) -> Any:
    case: Case = next(case for case in all_cases() if case.name == name)
    config = case.config(**{key: value for key, value in CASES[name].items() if key not in case.without})
    config._attn_implementation = case.attention
    model = case.model_class(config).eval()
    randomise(model, seed=0)
    return model


def _compare(model: Any, place: Path, tolerance: float = TOLERANCE) -> None:
    ids = random_ids(70)
    found = PagedModel(place).step({0: ids})[0]
    torch.testing.assert_close(found, hf_logprobs(model, ids), atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_floats_of_every_family(name: str, tmp_path: Path) -> None:
    """Guards against a name, an order of rows or a key of the configuration that is read in another sense."""
    model = _make(name)
    _compare(model, write_gguf(model, tmp_path / "model.gguf"))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-oss", "mixtral"])
def test_values_are_those_of_the_file(name: str, kind: str, tmp_path: Path) -> None:
    """Guards against codes that are read as another row's or another expert's: the twin has the file's values."""
    model = _make(name)
    path = write_gguf(model, tmp_path / "model.gguf", kind)
    model.save_pretrained(tmp_path / "twin")
    config = load_model_config(tmp_path / "twin")
    found, expected = (open_source(place, config, "auto") for place in (path, tmp_path / "twin"))
    for parameter in read_parameters(config).values():
        rows, theirs = found.rows(parameter), expected.rows(parameter)
        np.testing.assert_array_equal(read_rows(rows, 0, rows.shape[0]), read_rows(theirs, 0, rows.shape[0]))
    _compare(model, path, CODED if kind.startswith("Q") else TOLERANCE)


def test_several_files(tmp_path: Path) -> None:
    """Guards against tensors of later parts that are not found, and a part that is missing or taken for the first."""
    model = _make("llama-yarn")
    write_gguf(model, tmp_path / "model.gguf", "Q8_0", split_max_tensors=8)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) == 3
    assert resolve_model(str(tmp_path)) == files[0]
    assert find_files(files[0]) == files
    _compare(model, files[0], CODED)
    with pytest.raises(ModelLoadError, match=r"is not the first part of the model; give model-00001-of-00003\.gguf"):
        find_files(files[1])
    files[2].rename(tmp_path / "away")
    with pytest.raises(ModelLoadError, match=r"model-00003-of-00003\.gguf: missing"):
        find_files(files[0])


def test_fingerprint_changes_with_the_weights(tmp_path: Path) -> None:
    """Guards against two files of one name that pass for the same model."""
    model = _make("llama-yarn")
    path = write_gguf(model, tmp_path / "model.gguf", "Q8_0")
    before = fingerprint(path)
    assert fingerprint(path) == before
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert fingerprint(path) != before


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general__architecture": "mpt"}, "general.architecture = 'mpt' is not supported; supported are "),
        (
            {"general__architecture": "deepseek2", "deepseek2__attention__kv_lora_rank": 512},
            "general.architecture = 'deepseek2' is not supported (latent attention: it keeps one compressed vector",
        ),
        (
            {"general__architecture": "mamba", "mamba__ssm__state_size": 16},
            "general.architecture = 'mamba' is not supported (a recurrent state",
        ),
        ({"llama__attention__scale": 0.5}, "attention.scale = 0.5 is unknown, and it may change what the model"),
        ({"llama__attention__causal": False}, "attention.causal = False is not allowed"),
        ({"general__type": "adapter"}, "general.type = 'adapter'"),
        ({"llama__rope__scaling__type": "longrope"}, "rope.scaling.type = 'longrope' is not allowed"),
        ({"llama__vocab_size": 7}, "vocab_size = 7 is not allowed; it must be 199"),
        ({"llama__attention__layer_norm_rms_epsilon": -1.0}, "model.gguf: rms_norm_eps = -1.0 is not allowed"),
        ({"general__sampling__top_p": 7.0}, "model.gguf: top_p = 7.0 is not allowed"),
    ],
)
def test_what_is_refused(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Guards against a key that is accepted and ignored, and against an architecture that is not named."""
    original = gguf.GGUFWriter.add_key_value

    def replacing(self: Any, key: str, value: Any, kind: Any, sub_type: Any = None) -> None:
        for shard in self.kv_data:
            shard.pop(key, None)
        original(self, key, value, kind, sub_type)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_key_value", replacing)
        path = write_gguf(_make("mistral-no-window"), tmp_path / "model.gguf", **metadata)
    with pytest.raises(ModelLoadError, match=re.escape(message)) as found:
        load_model_config(path)
    assert "\n" not in str(found.value)
    assert "config.json" not in str(found.value)  # there is none


@pytest.mark.parametrize("name", ["safetensors", "gguf"])
def test_a_constant_of_another_value_is_refused(name: str, tmp_path: Path) -> None:
    """Guards against xIELU computed with other constants than those that the checkpoint was trained with."""
    model = _make("apertus")
    curve = model.model.layers[1].mlp.act_fn
    curve.beta += 0.125
    if name == "gguf":
        path = write_gguf(model, tmp_path / "model.gguf")
    else:
        model.save_pretrained(path := tmp_path)
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.act_fn\.beta = 0\.625 .*must be 0\.5"):
        open_source(path, load_model_config(path), "auto")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """Guards against a file of which a part is left out."""
    model = _make("mistral-no-window")
    del model.model.layers[1].mlp.up_proj
    path = write_gguf(model, tmp_path / "model.gguf")
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        open_source(path, load_model_config(path), "auto")
