"""Mistral's own format: params.json and consolidated.safetensors are the same model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

from penstock import LLM, AsyncLLM
from penstock.errors import ModelLoadError
from penstock.models.config_json import load_model_config, parse_model_config
from penstock.spec.config_file import config_of_params as config_of
from penstock.weights.safetensors import INDEX, MISTRAL, SINGLE
from penstock_lab.convert.rewrite import rewrite_model
from penstock_lab.planner.table_template import table_text
from tests.families.case import Case
from tests.hf_models import hf_logprobs, make_llama, make_mistral, random_ids
from tests.paged import PagedModel
from tests.test_cli import called
from tests.weights.mistral_files import PARAMS, as_mistral, write_mistral


@pytest.fixture
def made(tmp_path: Path) -> tuple[Any, Path, Path]:
    """Transformers' model, its directory, and one in Mistral's format."""
    hf_model, directory = make_mistral(tmp_path)
    return hf_model, directory, write_mistral(directory, tmp_path / "own")


@pytest.mark.covers("M1")
def test_the_same_model_in_mistrals_format(made: tuple[Any, Path, Path]) -> None:
    """Guards against rotated pairs that are taken for halves, and a window or a base that is another."""
    hf_model, directory, own = made
    assert "layers.0.attention.wq.weight" in load_file(own / MISTRAL)
    ids = random_ids(40)  # longer than the window
    found = PagedModel(own).step({0: ids})[0]
    torch.testing.assert_close(found, hf_logprobs(hf_model, ids), atol=1e-4, rtol=0)
    assert torch.equal(found, PagedModel(directory).step({0: ids})[0])


@pytest.mark.covers("M1")
def test_conversion_gives_the_checkpoint_of_transformers(made: tuple[Any, Path, Path], tmp_path: Path) -> None:
    """Guards against a checkpoint under Transformers' names in Mistral's order of rows."""
    hf_model, directory, own = made
    rewrite_model(str(own), tmp_path / "back", "transformers", 10**9)
    expected, found = load_file(directory / SINGLE), load_file(tmp_path / "back" / SINGLE)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    again = type(hf_model).from_pretrained(tmp_path / "back", dtype=torch.float32)
    ids = random_ids(30)
    torch.testing.assert_close(hf_logprobs(again, ids), hf_logprobs(hf_model, ids), atol=1e-5, rtol=0)
    rewrite_model(str(own), tmp_path / "sharded", "merged", 40_000)
    assert (tmp_path / "sharded" / INDEX).exists()
    assert "model.layers.*.self_attn.qkv_proj.weight" in table_text(own)


@pytest.mark.covers("M1")
def test_mixtral_in_mistrals_format(tmp_path: Path) -> None:
    """Guards against experts that are not found, or found in another order."""
    case = Case("mixtral", MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2})
    hf_model, directory = case.make(tmp_path)
    own = tmp_path / "own"
    own.mkdir()
    tensors = dict(as_mistral(name, value) for name, value in load_file(directory / SINGLE).items())
    assert "layers.1.feed_forward.experts.3.w2.weight" in tensors
    save_file(tensors, own / MISTRAL)
    theirs = load_model_config(directory)
    params = PARAMS | {
        "moe": {"num_experts": 4, "num_experts_per_tok": 2},
        "norm_eps": theirs.norm_eps,
        "rope_theta": theirs.rope.theta if theirs.rope else None,
        "sliding_window": theirs.layer_windows[0],
    }
    (own / "params.json").write_text(json.dumps(params))
    ids = random_ids(40)
    found = PagedModel(own).step({0: ids})[0]
    torch.testing.assert_close(found, hf_logprobs(hf_model, ids), atol=1e-4, rtol=0)


def test_several_files_have_an_index(made: tuple[Any, Path, Path]) -> None:
    """Guards against the larger models, whose files have an index of that name."""
    _, directory, own = made
    tensors = load_file(own / MISTRAL)
    (own / MISTRAL).unlink()
    halves = [dict(list(tensors.items())[at::2]) for at in range(2)]
    places = {}
    for index, half in enumerate(halves):
        file = f"consolidated-{index + 1:05}-of-00002.safetensors"
        save_file(half, own / file)
        places |= dict.fromkeys(half, file)
    (own / f"{MISTRAL}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    ids = random_ids(9)
    assert torch.equal(PagedModel(own).step({0: ids})[0], PagedModel(directory).step({0: ids})[0])
    (own / file).unlink()
    with pytest.raises(ModelLoadError, match=r"consolidated-00002.* is missing, though consolidated.safetensors.index"):
        PagedModel(own)


@pytest.mark.covers("M1")
def test_params_json_says_what_config_json_says(made: tuple[Any, Path, Path]) -> None:
    """Guards against a number under the wrong name."""
    _, directory, own = made
    theirs, ours = load_model_config(directory), load_model_config(own)
    for name in theirs.__dataclass_fields__:
        if name not in ("dtype", "default_sampling", "ignored_generation", "source"):
            assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.dtype == "bfloat16"


def test_what_params_json_leaves_open() -> None:
    """Guards against the base of the windowed model for the one without, and experts that are not seen."""
    silent = {key: value for key, value in PARAMS.items() if key not in ("sliding_window", "max_seq_len")}
    config = config_of(silent)
    assert (config["sliding_window"], config["rope_theta"], config["max_position_embeddings"]) == (None, 1e6, 32768)
    assert config_of(PARAMS)["rope_theta"] == 1e4
    assert config_of(silent | {"rope_theta": 5e5, "sliding_window": 7})["rope_theta"] == 5e5
    sparse = config_of(silent | {"moe": {"num_experts": 8, "num_experts_per_tok": 2}})
    assert (sparse["architectures"], sparse["num_local_experts"]) == (["MixtralForCausalLM"], 8)


def test_windows_of_some_layers() -> None:
    """Guards against Ministral's `_sliding_window`, passed over as bookkeeping, and against a list of windows."""
    silent = {key: value for key, value in PARAMS.items() if key != "sliding_window"} | {"n_layers": 6}
    by_layer = parse_model_config(config_of(silent | {"_sliding_window": [None, 9, 9]}))
    assert (by_layer.architecture, by_layer.layer_windows) == ("MinistralForCausalLM", (None, 9, 9) * 2)
    for key, value in (("_sliding_window", 9), ("sliding_window", [9, 9])):
        alike = parse_model_config(config_of(silent | {key: value}))
        assert (alike.architecture, alike.layer_windows) == ("MistralForCausalLM", (9,) * 6)
    assert config_of(silent | {"_sliding_window": None})["sliding_window"] is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"_sliding_window": 8}, r"params.json: _sliding_window = 8 is not allowed; it must be null beside"),
        ({"sliding_window": [None, 8, 8]}, r"params.json: sliding_window = .* is not allowed"),  # of two layers
        ({"sliding_window": [4, 8]}, r"params.json: sliding_window = .* is not allowed"),
        ({"sliding_window": [None, None]}, r"params.json: sliding_window = .* is not allowed"),
        ({"sliding_window": []}, r"params.json: sliding_window = .* is not allowed"),
        ({"sliding_window": [None, True]}, r"params.json: sliding_window = .* is not allowed"),
        ({"sliding_window": [None, [8]]}, r"params.json: sliding_window = .* is not allowed"),
        ({"sliding_window": [None, 8], "moe": {"num_experts": 8, "num_experts_per_tok": 2}}, r"params.json: moe = "),
        ({"dim": "4096"}, r"params.json: dim = '4096' is not allowed"),
        ({"n_kv_heads": None}, r"params.json: n_kv_heads"),
        ({"lora": {"rank": 64}}, r"params.json: lora = .* is unknown"),
        ({"vision_encoder": {}}, r"params.json: vision_encoder = .* is unknown"),
        ({"use_biases": True}, r"params.json: use_biases = True is not allowed"),
        ({"moe": {"num_experts": 8}}, r"params.json: moe: num_experts_per_tok is missing"),
    ],
)
def test_what_params_json_says_wrongly_is_named(change: dict[str, Any], said: str) -> None:
    """Guards against an adapter or an image encoder that is left out without a word."""
    with pytest.raises(ModelLoadError, match=said):
        config_of(PARAMS | change)


def test_a_tokenizer_in_another_format_is_named_with_what_to_do(tmp_path: Path) -> None:
    """Guards against a model that is served as one without a tokenizer, though its directory has one that
    Transformers can convert."""
    _, directory = make_llama(tmp_path)
    file = "vocab.json"
    (directory / file).write_text("{}")
    for make in (LLM, AsyncLLM):
        with pytest.raises(ModelLoadError, match=rf"found only {file}. Convert it once with Transformers"):
            make(model=str(directory))
    for command in (["generate", str(directory), "-p", "x"], ["serve", str(directory), "--port", "0"]):
        done = called(*command)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"found only {file}" in done.stderr
