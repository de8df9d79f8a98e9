"""What is particular to Gemma: against Transformers, and which layers have which rotary base."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.errors import ModelLoadError
from penstock.kernels.backends import load_ops
from penstock.layers.factory import LayerFactory
from penstock.models.config_json import load_model_config, parse_model_config
from penstock.weights.loader import empty_model, rotary_bytes
from penstock.weights.sources import read_parameters
from tests.families.case import Case
from tests.families.gemma import CASES, FULL, SLIDING, TWO_BASES
from tests.hf_models import hf_logprobs, random_ids
from tests.paged import PagedModel

TOLERANCE = 1e-4
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.covers("J8", "M28")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logprobs_equal_those_of_transformers(case: Case, tmp_path: Path) -> None:
    """Guards against a norm on the wrong side of a residual, a soft cap or scale left out, a window or a rotary base on
    the wrong layer. 70 tokens are more than four windows: whole, in chunks of 7, and token by token at the end."""
    hf_model, directory = case.make(tmp_path)
    ids, other = random_ids(70), random_ids(33, seed=1)
    expected = hf_logprobs(hf_model, ids)
    paged = PagedModel(directory, num_seqs=4)
    whole = paged.step({0: ids, 1: other})
    torch.testing.assert_close(whole[0], expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(whole[1], hf_logprobs(hf_model, other), atol=TOLERANCE, rtol=0)
    chunks = [paged.step({2: ids[start : start + 7], 1: [5]})[2] for start in range(0, len(ids), 7)]
    torch.testing.assert_close(torch.cat(chunks), expected, atol=TOLERANCE, rtol=0)
    decoded = [paged.step({3: ids[:60]})[3]] + [paged.step({3: [token]})[3] for token in ids[60:]]
    torch.testing.assert_close(torch.cat(decoded), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 16}),
        ("gemma2", {"layer_types": [FULL, SLIDING]}),
        ("gemma2", {"hidden_activation": "gelu"}),
        ("gemma3", {"rope_parameters": {SLIDING: TWO_BASES[FULL], FULL: TWO_BASES[FULL]}}),
        ("gemma3", {"rope_parameters": {SLIDING: TWO_BASES[FULL], FULL: TWO_BASES[SLIDING]}}),
    ],
)
def test_every_number_counts(name: str, change: dict[str, object], tmp_path: Path) -> None:
    """Guards against tiny models that would agree whatever the file says: with one number of it changed, the
    log-probabilities leave the tolerance. The closest is the other form of GELU."""
    hf_model, directory = BY_NAME[name].make(tmp_path)
    file, ids = directory / "config.json", random_ids(70)
    changed = json.loads(file.read_text()) | change
    file.write_text(json.dumps({key: value for key, value in changed.items() if key != "hidden_act"}))
    error = (PagedModel(directory).step({0: ids})[0] - hf_logprobs(hf_model, ids)).abs().max()
    assert error > 2 * TOLERANCE


def test_layers_with_a_window_have_a_rotary_base_of_their_own(tmp_path: Path) -> None:
    """Guards against two tables that are mixed up, made once a layer, or left out where memory is counted."""
    _, directory = BY_NAME["gemma3"].make(tmp_path)
    config = load_model_config(directory)
    assert config.rope is not None
    assert config.local_rope is not None
    assert (config.rope.theta, config.rope.factor, config.local_rope.theta) == (1e6, 8.0, 1e4)
    ops = load_ops("reference", torch.float32)
    model = empty_model(config, LayerFactory.single_device(ops, read_parameters(config), max_positions=64))
    rotaries = [block.self_attn.rotary for block in model.model.layers]
    assert rotaries[0] is rotaries[1]
    assert rotaries[0] is not rotaries[2]
    assert not torch.equal(rotaries[0].cos_sin, rotaries[2].cos_sin)
    assert rotary_bytes(config, 64) == 2 * 64 * config.head_dim * 4
    assert rotary_bytes(replace(config, rope=None, local_rope=None), 64) == 0


def test_older_files_of_gemma_3_mean_the_same(tmp_path: Path) -> None:
    """Guards against checkpoints of Transformers 4, which spell windows and bases otherwise."""
    _, directory = BY_NAME["gemma3"].make(tmp_path)
    newer = json.loads((directory / "config.json").read_text())
    older = {key: value for key, value in newer.items() if key not in ("layer_types", "rope_parameters")} | {
        "sliding_window_pattern": 3,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    assert parse_model_config(older) == parse_model_config(newer)


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma", {"hidden_activation": "silu"}, "hidden_activation"),
        ("gemma", {"sliding_window": 8}, "sliding_window"),
        ("gemma", {"num_key_value_heads": None}, "num_key_value_heads"),
        ("gemma2", {"hidden_act": "silu"}, "hidden_act"),
        ("gemma2", {"sliding_window": None}, "layer_types"),
        ("gemma2", {"sliding_window_size": 8}, "sliding_window_size"),
        ("gemma2", {"final_logit_softcapping": 0}, "final_logit_softcapping"),
        ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"rope_theta": 1e6}, "rope_theta"),
        ("gemma3", {"rope_parameters": {"full_attention": {}, "chunked_attention": {}}}, "chunked_attention"),
        ("gemma3", {"rope_parameters": {"sliding_attention": {"factor": 2.0}}}, "factor"),
        ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config = None must be"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(
    name: str, fields: dict[str, object], named: str, tmp_path: Path
) -> None:
    """Guards against keys that are accepted and then ignored; and against half a multimodal model."""
    case = BY_NAME[name]
    case.config_class(architectures=[case.architecture], **case.fields).save_pretrained(tmp_path)
    contents = json.loads((tmp_path / "config.json").read_text())
    parse_model_config(contents)
    with pytest.raises(ModelLoadError, match=named):
        parse_model_config(contents | fields)


def test_the_first_files_of_gemma_say_gelu_and_mean_its_tanh_form(tmp_path: Path) -> None:
    """Guards against the exact GELU: `hidden_act: gelu` beside a `hidden_activation` of null, or of the true name."""
    case = BY_NAME["gemma"]
    case.config_class(architectures=[case.architecture], **case.fields).save_pretrained(tmp_path)
    contents = json.loads((tmp_path / "config.json").read_text())
    for more in ({}, {"hidden_activation": None}, {"hidden_activation": "gelu_pytorch_tanh"}):
        assert parse_model_config(contents | {"hidden_act": "gelu"} | more).hidden_act == "gelu_tanh"
