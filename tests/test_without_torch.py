"""Serving a bundled family with native kernels imports no torch, from the weights to the sampled tokens."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from penstock import AsyncLLM, SamplingParams, register_model
from penstock.config import EngineConfig
from penstock.kernels.tensors import is_torch
from penstock.models.config_json import load_model_config
from penstock.models.llama.model import LlamaForCausalLM
from penstock.models.registry import ARCHITECTURES
from penstock.weights.loader import dtype_for
from penstock_lab.convert.pack import convert_model
from tests.hf_models import make_llama
from tests.kernels.packed import levels
from tests.lab.compat.user_file import registry_as_before
from tools import structure

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")

BLOCKED = "import sys\nsys.modules['torch'] = sys.modules['transformers'] = None\n"  # importing them raises
GENERATE = """
import json
from penstock import LLM, SamplingParams
kinds = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "logit_bias": {3: 5.0}, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "min_tokens": 2},
    {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
]
options = json.loads(sys.argv[1])
with LLM(max_num_seqs=8, threads=2, kv_cache_memory_bytes=2**22, **options) as llm:
    for kind in kinds:
        prompt = {"prompt_token_ids": [1, 2, 3, 4] * 20}
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=4, detokenize=False, **kind))
        assert output.error is None and len(output.outputs[0].token_ids) == 4, output
"""


def run(script: str, options: dict[str, object]) -> None:
    """Run a script in a process in which importing torch raises."""
    subprocess.run([sys.executable, "-c", BLOCKED + script, json.dumps(options)], check=True, cwd=structure.ROOT)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_converted_model(quantization: str | None, tmp_path: Path) -> None:
    """Guards against seconds of importing torch before the first token of a model that needs none of it."""
    _, source = make_llama(tmp_path)
    options = {"dtype": "bfloat16", "quantization": quantization}
    convert_model(EngineConfig.from_options(model=str(source), **options), tmp_path / "packed")
    run(GENERATE, {"model": str(tmp_path / "packed")})


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "float32"}, {"kv_cache_dtype": "int8", "quantization": "int4"}], ids=str
)
def test_a_checkpoint_that_is_packed_while_it_loads(options: dict[str, object], tmp_path: Path) -> None:
    """Guards against torch in the readers of checkpoints, or in the packing of their weights."""
    _, source = make_llama(tmp_path)
    run(GENERATE, {"model": str(source), **options})


def test_random_weights(tmp_path: Path) -> None:
    """Guards against torch in load_format dummy."""
    _, source = make_llama(tmp_path)
    run(GENERATE, {"model": str(source), "load_format": "dummy"})


def test_the_engine_process_of_a_server() -> None:
    """Guards against torch in the other process, which no import in the server's own would show."""

    async def maps() -> str:
        async with AsyncLLM(model="demo") as llm:
            async for _ in llm.generate("Once", SamplingParams(max_tokens=4)):
                pass
            return Path(f"/proc/{llm.status().pid}/maps").read_text()

    found = asyncio.run(maps())
    assert "penstock_cpu" in found
    assert "libtorch" not in found


def test_a_model_of_a_users_own_gets_torch(tmp_path: Path) -> None:
    """Guards against numpy's arrays where a model file was written for torch's tensors."""
    _, directory = make_llama(tmp_path)
    config = load_model_config(directory)
    assert not is_torch(dtype_for(config, "cpu", "bfloat16"))
    assert is_torch(dtype_for(config, "reference", "bfloat16"))
    assert is_torch(dtype_for(replace(config, model_impl="plain"), "cpu", "bfloat16"))
    with registry_as_before():
        register_model("LlamaForCausalLM", table=str(ARCHITECTURES["LlamaForCausalLM"].versions["default"].table_file),
                       version="own")(type("Own", (LlamaForCausalLM,), {"__module__": __name__}))  # fmt: skip
        assert is_torch(dtype_for(replace(config, model_impl="own"), "cpu", "bfloat16"))
