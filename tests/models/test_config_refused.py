"""Which config.json files are refused, and that the error names what is wrong."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ModelLoadError, NotSupportedError
from penstock.models.config_json import load_model_config, parse_model_config
from penstock.models.registry import DOCUMENTATION
from penstock.spec.model_config import ModelConfig
from tests.models.configs import LLAMA, LLAMA3, MISTRAL, ODD, PHI3, PUBLISHED, QWEN2, QWEN3_MOE

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("num_experts_per_tok", {"num_experts_per_tok": 9}),
        ("num_experts", {"num_experts": 0}),
        ("num_local_experts", {"num_experts": None}),
        ("mlp_only_layers", {"mlp_only_layers": [3]}),
        ("mlp_only_layers", {"mlp_only_layers": [True]}),
        ("mlp_only_layers", {"mlp_only_layers": 0}),
        ("decoder_sparse_step", {"decoder_sparse_step": 0}),
        ("norm_topk_prob", {"norm_topk_prob": 1}),
        ("max_window_layers", {"use_sliding_window": True, "max_window_layers": 2}),
    ],
)
def test_experts_that_make_no_sense_are_named(key: str, fields: dict[str, Any]) -> None:
    """Guards against a model that is built with other experts than its file says."""
    with pytest.raises(ModelLoadError, match=key):
        parse_model_config(QWEN3_MOE | fields)


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic"])
def test_scalings_that_phi3_does_not_have(kind: str) -> None:
    """Guards against a scaling that Transformers refuses here, or takes for longrope ("yarn")."""
    with pytest.raises(ModelLoadError, match="rope_scaling"):
        parse_model_config(PHI3 | {"rope_scaling": {"type": kind, "factor": 2.0}})


@pytest.mark.parametrize(
    ("key", "largest"),
    [
        ("num_hidden_layers", 4096),
        ("hidden_size", 2**20),
        ("intermediate_size", 2**20),
        ("num_attention_heads", 2**16),
        ("head_dim", 2**16),
        ("vocab_size", 2**24),
        ("max_position_embeddings", 2**24),
    ],
)
def test_sizes_beyond_any_model_are_refused(key: str, largest: int) -> None:
    """Guards against a MemoryError, or minutes, over a tuple of 2^31 layers: key, value and limit are named."""
    for value in (largest + 1, 2**31 - 1):
        with pytest.raises(ModelLoadError, match=f"{key} = {value} is not allowed.* to {largest}"):
            parse_model_config(LLAMA | {key: value})
    assert getattr(parse_model_config(LLAMA | {"head_dim": 8, key: largest}), key) == largest


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": None}, "hidden_size"),
    ({"hidden_size": "32"}, "hidden_size"),
    ({"hidden_size": True}, "hidden_size"),
    ({"hidden_size": 33}, "hidden_size"),
    ({"vocab_size": 0}, "vocab_size"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"num_key_value_heads": 8}, "num_key_value_heads"),
    ({"head_dim": 7}, "head_dim"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"hidden_act": "mish"}, "hidden_act"),
    ({"dtype": "float8"}, "dtype"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ({"attention_bias": "yes"}, "attention_bias"),
    ({"sliding_window": 8}, "sliding_window"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ({"eos_token_id": 100}, "eos_token_id"),
    ({"eos_token_id": [1, None]}, "eos_token_id"),
    ({"bos_token_id": -1}, "bos_token_id"),
    ({"model_type": "mistral"}, "model_type"),
    ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "architectures"),
    ({"architectures": None}, "architectures"),
    ({"rope_theta": 0}, "rope_theta"),
    ({"rope_scaling": {"type": "magic"}}, "rope_scaling: type"),
    ({"rope_scaling": {"type": "linear"}}, "factor"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}}, "rope_scaling: beta"),
    ({"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, "type"),
    ({"rope_scaling": {"rope_type": "llama3"} | LLAMA3 | {"high_freq_factor": 0.5}}, "high_freq_factor"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 1}}, "beta_fast"),
    ({"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "default"}}, "rope_scaling"),
    ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"num_local_experts": 8}, "num_local_experts"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder"),
    ({"rope_theta": 10**400}, "rope_theta"),  # no float holds it
    ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ({"rope_scaling": {"type": "linear", "factor": -(10**400)}}, "factor"),
    ({"is_decoder": 0}, "is_decoder"),
    ({"rope_interleaved": 0}, "rope_interleaved"),
    ({"partial_rotary_factor": True}, "partial_rotary_factor"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": True}}, "partial_rotary_factor"),
    ({"pruned_heads": []}, "pruned_heads"),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED)
def test_wrong_values_are_named(fields: dict[str, Any], named: str) -> None:
    """Guards against a checkpoint that is computed wrongly instead of refused."""
    with pytest.raises(ModelLoadError) as caught:
        parse_model_config(LLAMA | fields)
    assert named in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("key", [key for key in LLAMA if not key.endswith("token_id")])
def test_missing_keys_are_named(key: str) -> None:
    """Guards against a default that stands in for a number only the file can know."""
    with pytest.raises(ModelLoadError, match=key):
        parse_model_config({name: value for name, value in LLAMA.items() if name != key})


def test_keys_an_architecture_does_not_have_may_only_agree() -> None:
    """Guards against a bias that the file announces and the architecture leaves out."""
    for architecture, model_type in (("MistralForCausalLM", "mistral"), ("Qwen3ForCausalLM", "qwen3")):
        base = LLAMA | {"architectures": [architecture], "model_type": model_type, "head_dim": 8}
        assert not parse_model_config(base | {"mlp_bias": False}).mlp_bias
        with pytest.raises(ModelLoadError, match="mlp_bias"):
            parse_model_config(base | {"mlp_bias": True})
    with pytest.raises(ModelLoadError, match="use_sliding_window"):
        parse_model_config(MISTRAL | {"use_sliding_window": False})
    with pytest.raises(ModelLoadError, match="attention_bias"):
        parse_model_config(QWEN2 | {"attention_bias": False})
    with pytest.raises(ModelLoadError, match="layer_types"):
        parse_model_config(QWEN2 | {"layer_types": ["sliding_attention"] * 3})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization_config: quant_method = 'aqlm'"),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "mrope"),
        ({"rope_parameters": {"rope_type": "axial", "factor": 2.0}}, "axial"),
    ],
)
def test_what_is_planned_is_refused_as_such(fields: dict[str, Any], named: str) -> None:
    """Guards against an error that calls a well-formed checkpoint broken."""
    with pytest.raises(NotSupportedError, match=named):
        parse_model_config(LLAMA | fields)


def test_errors_name_the_documentation_that_exists() -> None:
    """Guards against an error that sends users to a page of the source tree, which `pip install` does not bring."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Documentation"] == DOCUMENTATION
    with pytest.raises(ModelLoadError) as caught:
        parse_model_config(LLAMA | {"architectures": ["NewForCausalLM"]})
    (page,) = re.findall(rf"{DOCUMENTATION}/(\S+)", str(caught.value))
    assert (ROOT / "docs" / page).is_file()


@pytest.mark.parametrize("name", PUBLISHED)
def test_any_value_of_any_key_is_read_or_refused(name: str) -> None:
    """Guards against a TypeError out of a damaged file: whatever stands at a key, also inside rope_scaling and in
    generation_config.json, the answer is a ModelConfig or one of our errors."""
    base = PUBLISHED[name] | {"rope_parameters": None, "layer_types": None, "auto_map": None}
    scaling = {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "truncate": True, "rope_theta": 1e4, "type": "yarn"}
    sampling = ["do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id"]
    sampling += ["max_new_tokens", "suppress_tokens", "num_beams", "nonsense"]
    refused = 0
    for value in ODD:
        tries = [(base | {key: value}, {}) for key in base]
        tries += [(base | {"rope_scaling": scaling | {key: value}}, {}) for key in scaling]
        tries += [(base, {"do_sample": True, key: value}) for key in sampling]
        for config, generation in tries:
            try:
                assert isinstance(parse_model_config(config, generation), ModelConfig)
            except (ModelLoadError, NotSupportedError):
                refused += 1
    assert refused > 200


def test_unknown_architectures_and_remote_code() -> None:
    """Guards against running code of a checkpoint, and against an error that leaves the reader guessing."""
    with pytest.raises(ModelLoadError, match=r"Qwen9ForCausalLM.*supported are .*Mistral.*nearest: Qwen[23]For"):
        parse_model_config(LLAMA | {"architectures": ["Qwen9ForCausalLM"]})
    auto_map = {"AutoModelForCausalLM": "modeling.Mine"}
    assert "never run" in parse_model_config(LLAMA | {"auto_map": auto_map}).notes["auto_map"]
    quantised = {"quantization_config": {"quant_method": "magic"}, "unheard_of": 1}
    with pytest.raises(ModelLoadError, match=r"Qwen9ForCausalLM.*is not supported"):
        parse_model_config(LLAMA | {"architectures": ["Qwen9ForCausalLM"], "auto_map": auto_map} | quantised)
    with pytest.raises((ModelLoadError, NotSupportedError), match="quantization_config"):
        parse_model_config(LLAMA | quantised)


@pytest.mark.parametrize(
    ("content", "named"),
    [("{", "JSON"), ("[1]", "object"), ('{"architectures": []}', "architectures"), (None, "no such")],
)
def test_bad_files_are_named(content: str | None, named: str, tmp_path: Path) -> None:
    """Guards against a traceback where the name of the file is wanted."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=named) as caught:
        load_model_config(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["x" * 5000, "a\nkey"])
def test_names_of_any_length_are_refused_in_one_line(name: str) -> None:
    """Guards against an error as long as a key of a damaged file, and one of several lines."""
    scheme = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    for config in ({name: 1}, {"quantization_config": scheme | {"config_groups": {name: {"targets": [], name: 1}}}}):
        with pytest.raises(ModelLoadError) as found:
            parse_model_config(LLAMA | config)
        assert len(str(found.value)) < 1200
        assert "\n" not in str(found.value)
