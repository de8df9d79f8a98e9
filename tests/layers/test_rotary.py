"""Rotary tables."""

from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from penstock.config import EngineConfig
from penstock.errors import ModelLoadError, NotSupportedError
from penstock.kernels.backends import load_ops
from penstock.kernels.reference import ReferenceOps
from penstock.layers import rotary
from penstock.layers.rotary import Rotary, inverse_frequencies
from penstock.models.config_json import load_model_config
from penstock.spec.config_reader import ConfigReader
from penstock.spec.config_rules import read_rope
from penstock.spec.model_config import RopeConfig
from penstock.weights.loader import load_model
from tests.hf_models import LLAMA3_ROPE, hf_logprobs, make_llama, random_ids
from tests.paged import PagedModel

OPS = ReferenceOps(torch.float32)
POSITIONS = np.zeros((1, 1))
CONTEXT = 32  # of the dynamic cases
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": LLAMA3_ROPE,
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn-bounds": {
        "rope_type": "yarn", "rope_theta": 1e5, "factor": 8.0, "original_max_position_embeddings": 4096,
        "beta_fast": 20, "beta_slow": 2, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5,
    },
    "yarn-attention": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
    },
    "yarn-partial": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256,
        "partial_rotary_factor": 0.75,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "proportional": {"rope_type": "proportional", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 0.3},
}  # fmt: skip


def ours(parameters: dict[str, Any], **fields: Any) -> RopeConfig:
    read = ConfigReader({"rope_parameters": parameters} | fields, "config.json")
    return read_rope(read, 512, partial_rotary=1.0)


def frequencies_of(rope: RopeConfig, dim: int) -> Tensor:
    return torch.from_numpy(inverse_frequencies(rope, dim, POSITIONS, is_long=False)).flatten()


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_transformers(kind: str) -> None:
    """Guards against a scaling that is blended the wrong way round; the Llama 3 case has kept, blended and divided
    frequencies. And against cosines without YaRN's factor."""
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=512, rope_parameters=dict(KINDS[kind])
    )
    theirs = LlamaRotaryEmbedding(config)
    rope = ours(KINDS[kind])
    dim = rope.rotary_dim(64)
    frequencies = frequencies_of(rope, dim)
    torch.testing.assert_close(frequencies, theirs.inv_freq.double(), rtol=2e-6, atol=0)
    assert rope.attention_factor == pytest.approx(theirs.attention_scaling)
    cos, sin = theirs(torch.zeros(1), torch.arange(20)[None])
    expected = torch.cat([cos[0, :, : dim // 2], sin[0, :, : dim // 2]], dim=1)
    torch.testing.assert_close(Rotary(rope, 64, 20, OPS).cos_sin, expected, atol=1e-5, rtol=0)
    if kind == "llama3":
        plain = frequencies_of(RopeConfig(theta=500000.0), 64)
        ratio = plain / frequencies
        assert (ratio == 1).any()
        assert ((ratio > 1.001) & (ratio < 7.999)).any()
        assert torch.isclose(ratio, torch.tensor(8.0).double()).any()


@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_an_entry_depends_on_its_position_alone(kind: str) -> None:
    """Guards against tables that change with the context they are made for, or where the blocks that they are made in
    begin; and against float32 angles: at position 100,000 these are off by 4e-3."""
    rope = ours(KINDS[kind])
    short, long = Rotary(rope, 8, 5000, OPS).cos_sin, Rotary(rope, 8, 100_001, OPS).cos_sin
    assert torch.equal(long[:5000], short)
    assert short.dtype == torch.float32
    position = np.array([[100_000.0]])
    exact = position * inverse_frequencies(rope, 8, position, is_long=False)
    assert torch.equal(long[100_000:], torch.from_numpy(np.concatenate([np.cos(exact), np.sin(exact)], axis=1)).float())
    assert len(short) > rotary.BLOCK


def test_dynamic_scaling_is_that_of_transformers_token_by_token(tmp_path: Path) -> None:
    """Guards against frequencies that depend on how long the text is, or on how the prompt was cut. Within the original
    context they are plain; beyond it, each token has those of the length it makes, as where Transformers gets one token
    at a time behind a cache; and our chunks give the same."""
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
    hf_model, directory = make_llama(tmp_path, rope_parameters=parameters, max_position_embeddings=CONTEXT)
    config = load_model_config(directory)
    assert config.context == 3 * CONTEXT
    assert EngineConfig.from_options(model=str(directory)).resolve(config).scheduler.max_model_len == config.context
    ids = random_ids(3 * CONTEXT)
    whole = PagedModel(directory).step({0: ids})[0]
    torch.testing.assert_close(whole[:CONTEXT], hf_logprobs(hf_model, ids[:CONTEXT]), atol=1e-4, rtol=0)
    cut = PagedModel(directory)
    chunks = [cut.step({0: ids[start : start + 7]})[0] for start in range(0, len(ids), 7)]
    torch.testing.assert_close(torch.cat(chunks), whole, atol=1e-5, rtol=0)

    accepted = signature(hf_model.forward).parameters  # the name since Transformers 5.24
    cached = {"cache" if "cache" in accepted else "past_key_values": DynamicCache(config=hf_model.config)}
    with torch.no_grad():
        hf_model(torch.tensor([ids[:CONTEXT]]), use_cache=True, **cached)
        for position in range(CONTEXT, len(ids)):
            answer = hf_model(torch.tensor([[ids[position]]]), use_cache=True, **cached)
            expected = answer.logits[0, -1].float().log_softmax(dim=-1)
            torch.testing.assert_close(whole[position], expected, atol=1e-4, rtol=0)
    at_once = hf_logprobs(hf_model, ids)
    assert (whole - at_once).abs().max() > 1e-2  # the other way that Transformers has: all by the last one's length


FACTORS = {
    "short_factor": [1.0 + index / 8 for index in range(24)],
    "long_factor": [2.0 + index for index in range(24)],
}


@pytest.mark.parametrize("served", [64, 65, 512])
@pytest.mark.parametrize("more", [{}, {"attention_factor": 1.25}, {"factor": 2.0}])
def test_longrope_is_decided_by_the_longest_text_served(served: int, more: dict[str, Any]) -> None:
    """Guards against the wrong set of factors, or an attention factor from the wrong ratio. What is served decides, not
    what stands in the batch; Transformers decides by the text at hand."""
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75} | FACTORS | more
    config = Phi3Config(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        rope_parameters=dict(parameters),
    )
    theirs = Phi3RotaryEmbedding(config)
    rope = ours(parameters, original_max_position_embeddings=64)
    rope.check(64)
    assert rope.rotary_dim(64) == 48
    assert rope.attention_factor == pytest.approx(theirs.attention_scaling)
    cos, sin = theirs(torch.zeros(1), torch.arange(served)[None])
    expected = torch.cat([cos[0, :, :24], sin[0, :, :24]], dim=1)
    torch.testing.assert_close(Rotary(rope, 64, served, OPS).cos_sin, expected, atol=1e-4, rtol=0)


def test_a_model_with_longrope(tmp_path: Path) -> None:
    """Guards against a decision by the context that the file promises, where less is served; and, by Transformers'
    log-probabilities of a text longer than the original context, against factors or their attention factor left out."""
    factors = {name: values[:8] for name, values in FACTORS.items()}
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64} | factors
    hf_model, directory = make_llama(tmp_path, head_dim=16, rope_parameters=parameters)
    ids = random_ids(100)
    torch.testing.assert_close(PagedModel(directory).step({0: ids})[0], hf_logprobs(hf_model, ids), atol=1e-4, rtol=0)
    config, ops = load_model_config(directory), load_ops("reference", torch.float32)
    tables = []
    for served in (64, 65):
        model: Any = load_model(directory, config, ops, max_model_len=served)
        tables.append(model.model.layers[0].self_attn.rotary.cos_sin)
    assert not torch.equal(tables[0], tables[1][:64])


def test_older_spellings_of_longrope() -> None:
    """Guards against Phi-3's first files, which say "su" and keep the original context beside rope_scaling."""
    older = {"rope_scaling": {"type": "su"} | FACTORS, "original_max_position_embeddings": 64}
    newer = {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64} | FACTORS}
    read_older, read_newer = (read_rope(ConfigReader(fields, "config.json"), 512) for fields in (older, newer))
    assert (read_older.rope_type, read_older.original_max_position_embeddings) == ("longrope", 64)
    assert (read_older.factor, read_older.attention_factor) == (8.0, read_newer.attention_factor)
    assert read_older.short_factor == read_newer.short_factor


@pytest.mark.parametrize("head_dim", [20, 10, 3])
def test_partial_rotation_of_an_odd_number_of_elements(head_dim: int) -> None:
    """Guards against a table of an odd number of columns: the last frequency turns one element more, as in
    Transformers."""
    rope = read_rope(ConfigReader({"partial_rotary_factor": 0.75}, "config.json"), 512, partial_rotary=1.0)
    dim = int(0.75 * head_dim)
    theirs = Phi3RotaryEmbedding(
        Phi3Config(hidden_size=4 * head_dim, num_attention_heads=4, partial_rotary_factor=0.75, num_hidden_layers=1)
    )
    assert frequencies_of(rope, dim).tolist() == pytest.approx(theirs.inv_freq.tolist(), rel=1e-6)
    table = Rotary(rope, head_dim, 9, OPS).cos_sin
    assert table.shape == (9, 2 * len(theirs.inv_freq))


@pytest.mark.parametrize("kind", ["mrope", "axial"])
def test_kinds_that_are_not_built_are_refused(kind: str) -> None:
    """Guards against an error that does not say what there is."""
    with pytest.raises(NotSupportedError, match=rf"rope_type = {kind} is not supported.*dynamic.*longrope"):
        ours({"rope_type": kind, "factor": 2.0})


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_type": "dynamic"}, "factor is missing"),
        ({"rope_type": "dynamic", "factor": 0.5}, "factor = 0.5"),
        ({"rope_type": "dynamic", "factor": 2.0, "beta_fast": 1}, "beta_fast"),
        ({"rope_type": "longrope"}, "short_factor is missing"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "long_factor is missing"),
        ({"rope_type": "longrope", "short_factor": [1.0, "2"], "long_factor": [1.0]}, "short_factor: 1 = "),
        ({"rope_type": "longrope", "short_factor": [], "long_factor": [1.0]}, "short_factor = "),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "short_factor has 1 .* must have 32"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor = 0.01 makes 0 elements"),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1},
            "original_max_position_embeddings",
        ),
    ],
)
def test_wrong_numbers_are_named(parameters: dict[str, Any], named: str) -> None:
    """Guards against a scaling that is computed with something else than the file says."""
    with pytest.raises(ModelLoadError, match=named):
        ours(parameters).check(64)


def test_partial_rotation_is_for_architectures_that_have_it() -> None:
    """Guards against a file of Llama that says 0.5, which Transformers ignores and others compute."""
    for fields in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        with pytest.raises(ModelLoadError, match="partial_rotary_factor"):
            read_rope(ConfigReader(fields, "config.json"), 512)
        assert read_rope(ConfigReader(fields, "config.json"), 512, partial_rotary=0.25).partial_rotary_factor == 0.5
    assert read_rope(ConfigReader({}, "config.json"), 512, partial_rotary=0.25).partial_rotary_factor == 0.25
    both = {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}}
    with pytest.raises(ModelLoadError, match="the same as partial_rotary_factor beside it"):
        read_rope(ConfigReader(both, "config.json"), 512, partial_rotary=1.0)
