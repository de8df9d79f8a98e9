"""`system_fingerprint` changes when, and only when, a bit of an answer could: option by option, and beyond them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.assembly import build_engine
from penstock.config import EngineConfig, option_names
from penstock.layers import rotary
from penstock_lab.planner.table_template import table_text
from penstock_lab.prove.completions import Completion, Query, ask_alone
from tests.hf_models import make_llama, random_ids
from tests.kernels.packed import levels

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")
BASE: dict[str, Any] = {
    "dtype": "bfloat16", "kernels": "cpu", "threads": 1, "cpu_affinity": "none", "max_model_len": 128,
    "max_num_seqs": 4, "enable_prefix_caching": False, "quantization": "int4", "quantization_group_size": 32,
    "kv_cache_dtype": "int8", "block_size": 16,
}  # fmt: skip
QUERIES = [
    Query(random_ids(length, length), {"temperature": 0.8 * (length % 2), "seed": 3, "max_tokens": 6, "logprobs": 3})
    for length in (5, 40, 70)
]
MAY_CHANGE: dict[str, Any] = {  # option -> another value; a name in capitals stands for a file of the test's own
    "imports": ["OWN"], "kv_cache_dtype": "bfloat16", "kv_cache_scales": "SCALES", "dtype": "float32",
    "quantization": "int4-a16", "quantization_group_size": 64, "load_format": "dummy", "kernels": "reference",
    "model_impl": "plain", "hf_overrides": {"rms_norm_eps": 1e-3},
    "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "attention_sinks": 4, "sliding_window": 20,
}  # fmt: skip
CANNOT_CHANGE: dict[str, Any] = {
    "model": "COPY", "block_size": 128, "kv_cache_memory_bytes": 2**22, "memory": 2**32, "enable_prefix_caching": True,
    "max_model_len": 112, "max_num_seqs": 2, "max_num_batched_tokens": 7, "lm_head_pieces": 3,
    "pad_vocab_multiple": 64, "sharding_config": "SHARDING", "threads": 2, "cpu_affinity": "auto", "seed": 5,
    "verify_files": True, "speculative_config": {"method": "ngram"}, "pooler_config": {"pooling_type": "MEAN"},
    "kv_offload_memory_bytes": 2**20, "kv_offload_dir": "STORE", "kv_offload_dir_bytes": 2**20,
    "chat_template": "{{ messages }}", "device": "cpu", "enable_lora": True,
    "scheduling_policy": "length_classes", "max_stall_ms": 5, "prefill_ratio": 2.0, "pipeline_parallel_size": 2,
}  # fmt: skip
PROVED_ELSEWHERE = (  # tests/parallel
    "activation_dtype",  # tests/weights/test_coded.py
    "tensor_parallel_size", "attention_parallel_size", "mlp_parallel_size", "expert_parallel_size",
    "distributed_executor_backend",  # tests/lab/ray_app
    "max_loras", "max_lora_rank", "lora_modules", "merge_lora",  # tests/lora
)  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths by their name in the tables above; MODEL is the model itself."""
    directory = tmp_path_factory.mktemp("files")
    _, model = make_llama(directory, hidden_size=96, intermediate_size=192)
    shutil.copytree(model, directory / "copy")
    (directory / "own.py").write_text("import penstock\n")
    (directory / "sharding.yaml").write_text(table_text(model, sharding=True))
    names = (f"layers.{index}.{kind}" for index in range(2) for kind in ("key_scale", "value_scale"))
    save_file({name: torch.tensor(0.05) for name in names}, directory / "scales.safetensors")
    found = {
        "MODEL": model,
        "COPY": "copy",
        "OWN": "own.py",
        "SHARDING": "sharding.yaml",
        "SCALES": "scales.safetensors",
        "STORE": "store",
    }
    return {name: str(directory / file) for name, file in found.items()}


def build(files: dict[str, str], **options: Any) -> tuple[str, dict[Any, Completion]]:
    """The fingerprint of an engine, and its answers."""
    options = {"model": "MODEL"} | BASE | options
    for name, value in options.items():
        if isinstance(value, list):
            options[name] = [files.get(item, item) for item in value]
        elif isinstance(value, str):
            options[name] = files.get(value, value)
    built = build_engine(EngineConfig.from_options(**options))
    answers = ask_alone(built.engine, QUERIES, [(index, 0) for index in range(len(QUERIES))])
    for answer in answers.values():
        answer.num_cached = 0  # which a store of blocks changes, and nothing else
    built.engine.shutdown()
    return built.info.system_fingerprint, answers


def test_every_option_is_judged() -> None:
    """Guards against a new option that nobody has asked whether it changes bits."""
    assert sorted([*MAY_CHANGE, *CANNOT_CHANGE, *PROVED_ELSEWHERE]) == sorted(option_names())


@pytest.mark.parametrize("name", CANNOT_CHANGE)
def test_an_option_that_changes_no_bit_keeps_it(name: str, files: dict[str, str]) -> None:
    """Guards against streams that are given up for nothing when an engine restarts, and against bits that do change."""
    needed: dict[str, Any] = {"scheduling_policy": "length_classes"} if name == "prefill_ratio" else {}
    if name.startswith("kv_offload"):
        needed = {"enable_prefix_caching": True}
    if name == "kv_offload_dir_bytes":
        needed |= {"kv_offload_dir": "STORE"}
    assert build(files, **needed, **{name: CANNOT_CHANGE[name]}) == build(files)


@pytest.mark.parametrize("name", MAY_CHANGE)
def test_an_option_that_may_change_a_bit_changes_it(name: str, files: dict[str, str]) -> None:
    """Guards against answers of different bits under one fingerprint."""
    without = {"quantization": None, "quantization_group_size": None} if name == "model_impl" else {}
    if name in ("kernels", "model_impl"):  # what computes with torch is slow to quantise, and has other caches
        without |= {"kv_cache_dtype": "auto"}
    if name in ("attention_sinks", "sliding_window"):
        without |= {"attention_sinks": 5, "sliding_window": 21}
    assert build(files, **without)[0] != build(files, **without | {name: MAY_CHANGE[name]})[0]


def test_defaults_that_are_spelled_out_keep_it(files: dict[str, str]) -> None:
    """Guards against a fingerprint of what was typed, not of what computes."""
    short = build(files, kv_cache_dtype="auto", model_impl="auto")[0]
    assert build(files, kv_cache_dtype="bfloat16", model_impl="default")[0] == short


def test_the_context_matters_where_it_chooses_frequencies(tmp_path: Path) -> None:
    """Guards against longrope, whose frequencies depend on max_model_len, and against all others, where none do."""
    fields = {"short_factor": [1.0, 1.1, 1.2, 1.4], "long_factor": [1.0, 2.0, 4.0, 8.0]}
    for kind, expected in (({"rope_type": "longrope", "factor": 4.0, **fields}, 2), ({"rope_type": "default"}, 1)):
        config = {
            "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 64, "hidden_size": 32,
            "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
            "max_position_embeddings": 256, "original_max_position_embeddings": 64, "hidden_act": "silu",
            "rms_norm_eps": 1e-5, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0, "dtype": "float32",
            "rope_theta": 10000.0, "rope_scaling": kind if kind["rope_type"] == "longrope" else None,
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(config))
        words = set()
        for max_model_len in (48, 64, 128):
            options = {"model": str(tmp_path), "load_format": "dummy", "max_model_len": max_model_len, "threads": 1}
            words.add(build_engine(EngineConfig.from_options(**options)).info.system_fingerprint)
        assert len(words) == expected


def test_another_c_library_changes_it(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against two machines that round a cosine differently, and call themselves equal."""
    before = build(files)[0]
    exact = rotary._rows
    monkeypatch.setattr(rotary, "_rows", lambda *args, **kwargs: exact(*args, **kwargs) * (1 + 1e-6))
    assert build(files)[0] != before
