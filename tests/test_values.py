"""Every bad value of every field a user can set is refused by an error that names the field; good ones are not."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.client.prompts import read_prompts
from penstock.config import PARTS, EngineConfig, option_names, read_hints
from penstock.errors import InvalidRequestError, PenstockError, shown
from penstock.interface.sampling_params import HINTS, BeamSearchParams, SamplingParams
from penstock.kernels.cpu.library import NOT_BUILT
from penstock.models.config_json import load_model_config
from penstock.weights.hub import resolve_model

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=300),
    st.binary(max_size=4),
    st.lists(st.one_of(st.integers(-5, 5), st.text(max_size=3), st.none()), max_size=3),
    st.dictionaries(st.one_of(st.integers(-5, 5), st.text(max_size=3)), st.floats(), max_size=2),
    st.just(object()),
    st.just(10**5000),
)
FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
BAD_SAMPLING = {
    "n": [0, -1, 129, 10**9, 1.0, "2", True, None],
    "presence_penalty": [-2.1, 2.1, math.nan, math.inf, "0", None, True],
    "frequency_penalty": [-2.1, 2.1, math.nan, -math.inf, "0", None],
    "repetition_penalty": [0, -1, 1e-30, math.nan, math.inf, 101, None],
    "temperature": [-0.1, math.nan, math.inf, -math.inf, 1e-45, 1e308, "1", None, True],
    "top_p": [0, -0.0, 1.0000001, math.nan, "1", None],
    "top_k": [-2, 2**40, 1.5, "5", None, True],
    "min_p": [-0.1, 1.1, math.nan, None],
    "seed": [-(2**63) - 1, 2**64, 1.5, "x", True],
    "stop": ["", ["a"] * 17, "x" * 257, [1], 5, [None], {"a": 1}, "a\ud800"],
    "stop_token_ids": [[-1], [2**31], ["a"], 5, [1] * 129, [True], "12"],
    "max_tokens": [0, -1, 2**31, 2**63, 1e300, "5", True],
    "min_tokens": [-1, 17, 1.0, None, "0"],
    "logprobs": [-2, 2**20 + 1, 10**9, 1.0, True],
    "prompt_logprobs": [-2, 2**20 + 1, 10**9, 1.0, "1"],
    "logprob_token_ids": [5, [-1], ["a"], [1] * 129, [True], "12"],
    "allowed_token_ids": [5, [], [-1], ["a"], [2**31], [1] * (2**17 + 1), [True], "12"],
    "truncate_prompt_tokens": [0, -2, 1.0, "5", True, 2**31],
    "truncation_side": ["middle", None, 1, ["left"]],
    "thinking_token_budget": [-2, 1.0, "5", True, 2**31],
    "thinking_token_ids": [5, [5], [[-1]], [[1], [2], [3]], "ab"],
    "repetition_detection": [
        5,
        [20],
        [20, 0, 1],
        [257, 0, 2],
        [1, 2, 2],
        [-1, 0, 2],
        [1, 1, 2, 2],
        {"max_pattern_size": 3},
        {"max_pattern": 3, "min_count": 2},
        {"max_pattern_size": "3", "min_count": 2},
        {"max_pattern_size": True},
    ],
    "logit_bias": [{-1: 0.0}, {"AI": 1.0}, {2**63: 1.0}, {1: math.nan}, {1: 1e30}, {1: -101}, [1], "x"],
    "bad_words": ["", [""], ["x"] * 17, [3]],
    "bad_words_token_ids": [5, [5], [[-1]], [["x"]], "ab", [[2**31]], {1: 2}],
    "logits_processors": [
        "x",
        5,
        [""],
        [3],
        {"x": object()},
        {1: 2},
        {"x": {1: 2}},
        {"x": 2**70},
        ["\ud800"],
        {"x": {"a": ["\ud800"]}},
        {"x": {"\ud800": 1}},
    ],
    "no_repeat_ngram_size": [-1, 65, 1.0, None, True],
    "suppress_tokens": [5, [-1], ["a"], [1] * 1025, [True]],
    "begin_suppress_tokens": [5, [-1], [2**31], "12"],
    "bad_words_ids": [5, [5], [[-1]], [["x"]], "ab", [[1]] * 1025],
    "sequence_bias": [5, [5], [[[1]]], [[[], 1.0]], [[[1], "x"]], [[[1], math.nan]], [[[1], 1e5]], {1: 1.0}],
    "forced_bos_token_id": [-1, 1.0, "x", True, [1]],
    "forced_eos_token_id": [-1, 1.0, "x", True, [-1], [True]],
    "min_length": [-1, 1.0, None, 2**31],
    "min_new_tokens": [-1, 1.0, None, True],
    "exponential_decay_length_penalty": [1, [1], [1, 2, 3], [-1, 1.5], [1.5, 1.5], [1, 0], [1, math.inf], "ab"],
    "typical_p": [0, -0.1, 1.1, math.nan, None, "1"],
    "epsilon_cutoff": [-0.1, 1.1, math.nan, None],
    "eta_cutoff": [-0.1, 1.1, math.nan, None],
    "top_h": [0, 1.1, math.nan, "1", True],
    "xtc_probability": [-0.1, 1.1, math.nan, None],
    "xtc_threshold": [-0.1, 1.1, None],
    "dry_multiplier": [-1, 101, math.nan, None],
    "dry_base": [0.9, 101, math.inf, None],
    "dry_allowed_length": [0, 1.0, None],
    "dry_penalty_last_n": [-2, 1.0, None],
    "dry_sequence_breakers": ["", ["a"] * 17, "x" * 41, [1], 5],
    "dry_sequence_breaker_ids": [5, [5], [[-1]], "ab"],
    "mirostat": [-1, 3, 1.0, True, None],
    "mirostat_tau": [-1, 101, math.nan, None],
    "mirostat_eta": [-0.1, 1.1, math.nan, None],
    "ignore_eos": [0, 1, "true", None],
    "detokenize": [0, "false", None],
    "skip_special_tokens": [1, None],
    "spaces_between_special_tokens": [1, None],
    "include_stop_str_in_output": [1, None],
    "output_kind": ["all", None, 1],
    "pooling": [True, "MEAN", {"pooling_type": "MEAN"}],
    "use_beam_search": [0, 1, "true", None],
    "length_penalty": [0.5, -6, 5.1, math.nan, math.inf, "1", None, True],  # the first: without a beam search
    "early_stopping": [True, "never", "always", 0, 1.0, None, ["never"]],  # the first two: without a beam search
    "structured_outputs": [{"json": {}, "regex": "a"}, "x", 1],
    "guided_decoding": [{"json": {}}, "x", 1],
}
BAD_OPTIONS = {
    "model": ["", None, 5, [], "x" * 5000],
    "imports": [5, {"a": 1}, [""], ["a.py"] * 100, [3]],
    "dtype": ["float16", "bf16", None, 3, [], {}],
    "quantization": ["int3", 8, "int8-x4", "INT8", ["int4"], ""],
    "quantization_group_size": [16, 48, "32", True],
    "activation_dtype": ["int4", "bfloat16", "int8-x4", None, 2],
    "kv_cache_dtype": ["int4", "fp8", None],
    "kv_cache_scales": ["", 5, "scales.safetensors"],  # the last: without an int8 cache
    "attention_sinks": [0, -1, 2**40, "4", True, 4],  # the last: without sliding_window
    "sliding_window": [0, -1, 2**40, "4", True, 4],  # and the other way round
    "model_impl": ["", None, 5, "x" * 100],
    "load_format": ["gguf", None],
    "hf_overrides": ["{}", 1, [1]],
    "rope_scaling": ["yarn", 1, [1]],
    "verify_files": [1, None, "yes"],
    "speculative_config": [5, "ngram", ["ngram"]],
    "enable_lora": [1, "true", None],
    "max_loras": [0, 1025, 1.0, "2", None, True],
    "max_lora_rank": [0, 257, 1.0, "8", None, True],
    "lora_modules": [5, ["a"], ["=x"], ["a="], ["a=x", "a=y"], [3], {"a": 1}],
    "merge_lora": ["", 5, ["a"]],
    "pooler_config": [5, "MEAN", ["MEAN"]],
    "chat_template": [5, ["x"], {"default": "x"}, True],
    "kernels": ["cuda", None],
    "device": ["gpu", "cuda:", "cuda:-1", "cuda:x", None, 0],
    "max_model_len": [0, 1, -5, 2**40, 1.5, "4k", True],
    "max_num_seqs": [0, -1, 2**20, "8", 1.0],
    "max_num_batched_tokens": [0, -1, 2**40, "1"],
    "scheduling_policy": ["lifo", 1, None, ""],
    "max_stall_ms": [0, -1, 1.5, "1", True, 3_600_001],
    "prefill_ratio": [0, -1.0, math.nan, math.inf, "2", True],
    "block_size": [0, 8, 17, -16, 16.0, "16"],
    "memory": [0, -1, 2**60, "2GiB", 1.5],
    "kv_cache_memory_bytes": [0, -1, 2**60, "2GiB", 1.5],
    "kv_offload_memory_bytes": [0, -1, 2**60, "2GiB", 1.5],
    "kv_offload_dir": ["", 5, ["store"]],
    "kv_offload_dir_bytes": [0, -1, 2**61, "2GiB", 1.5],
    "enable_prefix_caching": [1, None, "yes"],
    "tensor_parallel_size": [0, -1, 3, 16, "1", True],
    "attention_parallel_size": [0, 3, "2", True],
    "mlp_parallel_size": [0, 3, "2", 2.0],
    "expert_parallel_size": [0, 3, 16, None],
    "pipeline_parallel_size": [0, 5000, 1.0],
    "distributed_executor_backend": ["", "RAY", None, "ray"],  # the last: nothing is split
    "sharding_config": ["", 5, ["x.yaml"]],
    "lm_head_pieces": [0, -1, 2**20, "2", 1.5, None, True],
    "pad_vocab_multiple": [0, -1, 2**20, "2", 1.5, None, True],
    "threads": [0, -1, 10**6, "2", 1.5],
    "cpu_affinity": ["", "all", "3-1", "0,,1", "0-", "-1", "70000", 0, None, [0]],
    "seed": [2**63, 1.5, "x", None],
}


def test_the_lists_know_every_field():
    """A new field without bad values here would go unchecked."""
    assert set(BAD_SAMPLING) == set(FIELDS)
    assert set(BAD_OPTIONS) == set(option_names())


@pytest.mark.parametrize(("name", "value"), [(name, bad) for name, bads in BAD_SAMPLING.items() for bad in bads])
def test_bad_sampling_value_is_named(name, value):
    with pytest.raises(InvalidRequestError, match=f"^{name}: ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(("name", "value"), [(name, bad) for name, bads in BAD_OPTIONS.items() for bad in bads])
def test_bad_option_is_named(name, value):
    with pytest.raises(InvalidRequestError, match=f"^{name}: ") as caught:
        EngineConfig.from_options(**{name: value})
    assert caught.value.param == name


def made_or_refused(make: Callable[[], Any], name: str) -> Any:
    """What `make` makes, or None if it was refused with an error that names the field."""
    try:
        return make()
    except InvalidRequestError as error:
        if error.param == name or (error.param, name) == ("min_tokens", "max_tokens"):
            return None
        raise


@settings(max_examples=400)
@given(name=st.sampled_from(FIELDS), value=JUNK)
def test_any_sampling_value_is_taken_or_refused_by_name(name, value):
    """Never another exception, never a value that is not finite where a number is meant."""
    params = made_or_refused(lambda: SamplingParams(**{name: value}), name)
    kept = None if params is None else getattr(params, name)
    assert not isinstance(kept, float) or math.isfinite(kept)
    if params is not None:
        hash(
            dataclasses.replace(params, logit_bias=None, logits_processors=None)
        )  # normalised: nothing mutable is kept


@settings(max_examples=300)
@given(name=st.sampled_from(option_names()), value=JUNK)
def test_any_option_is_taken_or_refused_by_name(name, value):
    made_or_refused(lambda: EngineConfig.from_options(**{name: value}), name)


def test_errors_about_huge_values_are_short():
    """An error message must not cost what the value costs: megabytes, or a nesting that repr() cannot follow."""
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for value in ([1.5] * 10**6, "x" * 10**7, b"x" * 10**7, deep, {i: i for i in range(10**5)}, [10**5000], 10**9999):
        assert len(shown(value)) <= 80
    assert shown("abc") == "'abc'"
    assert shown([1, 2]) == "[1, 2]"


def test_unknown_options_are_refused():
    with pytest.raises(InvalidRequestError, match="max_seqs: unknown option") as caught:
        EngineConfig.from_options(max_seqs=4)
    assert caught.value.param == "max_seqs"
    for name, meant in {
        "max_seqs": "did you mean max_num_seqs",
        "enforce_eager": "leave it out",
        "x": "known are",
    }.items():
        with pytest.raises(InvalidRequestError, match=f"{name}: unknown option; .*{meant}"):
            EngineConfig.from_options(**{name: 4})


def test_hints_name_options_that_exist():
    """Guards against advice to use an option that was renamed."""
    options = {*option_names(), "data_parallel_size"}
    named = {name for text in read_hints().values() for name in re.findall(r"\{(\w+)\}", text)}
    assert named <= options
    assert not options & read_hints().keys()


def test_an_unknown_sampling_parameter_is_told_its_name():
    """Guards against the bare TypeError that a parameter of another engine or another version got."""
    for name, advice in (("temprature", "did you mean temperature?"), ("best_of", "ask for n answers"), ("zzz", "")):
        with pytest.raises(InvalidRequestError, match=f"^{name}: unknown field(; {re.escape(advice)})?") as caught:
            SamplingParams(**{name: 2})
        assert advice in str(caught.value)
        assert caught.value.param == name
    assert not HINTS.keys() & set(FIELDS)


def test_group_sizes_belong_to_int4():
    """A group size that nothing uses is not ignored in silence."""
    for quantization in (None, "int8", "int8-x2"):
        with pytest.raises(InvalidRequestError, match=r"^quantization_group_size: 32 is not allowed") as caught:
            resolved(quantization=quantization, quantization_group_size=32)
        assert caught.value.param == "quantization_group_size"
    with pytest.raises(InvalidRequestError):
        EngineConfig.from_options(quantization="int8", quantization_group_size=32)
    for quantization in ("int4", "int4-a16"):
        for size, expected in ((None, 128), (32, 32), (64, 64), (128, 128)):
            numerics = EngineConfig.from_options(quantization=quantization, quantization_group_size=size).numerics
            assert numerics.scheme.group_size == expected
    assert EngineConfig.from_options().numerics.scheme is None


def resolved(**options):
    return EngineConfig.from_options(model="demo", **options).resolve(load_model_config(resolve_model("demo")))


@pytest.mark.parametrize(
    ("level", "asked", "kernels", "reason"),
    [
        ("avx2", "auto", "cpu", "level avx2"),
        ("avx2", "cpu", "cpu", None),
        ("avx2", "reference", "reference", None),
        (None, "auto", "reference", "slow"),
        (None, "reference", "reference", None),
    ],
)
def test_kernels_are_the_native_ones_where_they_are(monkeypatch, level, asked, kernels, reason):
    """Guards against a slow backend that is chosen without a word, or a choice of the user's that is overruled."""
    monkeypatch.setattr("penstock.config.chosen_level", lambda: level)
    config = resolved(kernels=asked)
    assert config.numerics.kernels == kernels
    assert (reason is None) == ("kernels" not in config.reasons)
    assert reason is None or reason in config.reasons["kernels"]


def test_native_kernels_that_are_not_there_are_refused(monkeypatch):
    monkeypatch.setattr("penstock.config.chosen_level", lambda: None)
    monkeypatch.setattr("penstock.config.why_missing", lambda: NOT_BUILT)
    with pytest.raises(InvalidRequestError, match=r"^kernels: 'cpu' is not allowed.*not installed") as caught:
        resolved(kernels="cpu")
    assert caught.value.param == "kernels"


def test_reasons_name_the_group_size_that_was_chosen():
    assert "128" in resolved(quantization="int4").reasons["quantization_group_size"]
    for options in ({"quantization": "int4", "quantization_group_size": 32}, {"quantization": "int8"}, {}):
        assert "quantization_group_size" not in resolved(**options).reasons


def test_configs_are_frozen():
    config = EngineConfig.from_options()
    for value in (config, *(getattr(config, part) for part in PARTS), SamplingParams()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, 1)


def test_vocabulary_is_checked_where_it_is_known():
    for params in (SamplingParams(stop_token_ids=[100]), SamplingParams(logit_bias={100: 1.0})):
        params.check_vocabulary(101)
        with pytest.raises(InvalidRequestError):
            params.check_vocabulary(100)


def test_every_error_is_a_penstock_error():
    from penstock import errors

    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert all(issubclass(value, PenstockError) for value in classes)
    assert all(value.__name__ in errors.__doc__ for value in classes)


@pytest.mark.parametrize("name", ["bad_words_ids", "bad_words_token_ids", "dry_sequence_breaker_ids"])
def test_an_empty_sequence_is_refused(name):
    """Guards against [[]] that is accepted and bans nothing."""
    with pytest.raises(InvalidRequestError, match=f"^{name}: "):
        SamplingParams(**{name: [[]]})


def test_the_ratio_belongs_to_length_classes():
    """Guards against prefill_ratio that is accepted where it means nothing."""
    assert (
        EngineConfig.from_options(scheduling_policy="length_classes", prefill_ratio=0.5).scheduler.prefill_ratio == 0.5
    )
    for options in ({"prefill_ratio": 1.5}, {"scheduling_policy": "length_classes", "prefill_ratio": 0}):
        with pytest.raises(InvalidRequestError, match=r"^prefill_ratio: "):
            EngineConfig.from_options(**options)


def test_a_beam_search_has_a_length_and_a_file_a_name():
    """Guards against a TypeError in place of a default, or of an error that names the argument."""
    assert BeamSearchParams(beam_width=2).max_tokens == 16
    with pytest.raises(InvalidRequestError, match=r"^prompts: 3 is not allowed"):
        read_prompts(3)


def test_a_choice_that_may_be_left_out_says_so():
    """Guards against an error that offers `null`, which a command line would take for a wrong value, too."""
    for value in ("awq", "null"):
        expected = f"quantization: '{value}' is not allowed; it must be one of int8, int8-x2, int8-x3, int4, int4-a16, "
        with pytest.raises(InvalidRequestError, match=f"^{expected}or left out$"):
            EngineConfig.from_options(quantization=value)
