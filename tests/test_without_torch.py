"""Penstock is installed without torch: everything but the reference kernels, the checks and users' own models works."""

import asyncio
import json
import os
import re
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

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


IMPORT_ALL = """
import importlib, json, pkgutil
import penstock, penstock_lab
failed = []
for package in (penstock, penstock_lab):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith(("__main__", "penstock_cpu")) and ".ray_app." not in module.name:
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                assert error.name.partition(".")[0] in ("torch", "transformers", "triton"), error
                failed.append(module.name)
print(json.dumps(failed))
"""
NEED_TORCH = {
    "penstock.kernels.reference", "penstock.kernels.triton", "penstock.kernels.cpu.torch_watch",
    "penstock.layers.swap", "penstock.models.transformers", "penstock.ranks.device_links",
    "penstock_lab.bench.attention", "penstock_lab.bench.contention", "penstock_lab.bench.device",
    "penstock_lab.bench.experts", "penstock_lab.bench.loading", "penstock_lab.bench.ops",
    "penstock_lab.bench.perf_log", "penstock_lab.bench.products", "penstock_lab.bench.ranks", "penstock_lab.check",
    "penstock_lab.compat.falcon", "penstock_lab.compat.jetstream", "penstock_lab.conventions",
    "penstock_lab.training",
}  # fmt: skip


@pytest.fixture
def hidden(tmp_path: Path) -> dict[str, str]:
    """Make an environment in which no process of a command can import torch or Transformers."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules.update(torch=None, transformers=None)\n")
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{structure.ROOT}"}


def penstock(words: list[str], env: dict[str, str], **options: Any) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "penstock", *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, **options)


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


def test_the_modules_that_need_torch_are_few() -> None:
    """Guards against an import of torch that breaks another command where torch is not installed."""
    command = [sys.executable, "-c", BLOCKED + IMPORT_ALL]
    done = subprocess.run(command, capture_output=True, text=True, cwd=structure.ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name for name in found if name not in NEED_TORCH and name.rpartition(".")[0] not in NEED_TORCH} == set()


def test_commands_without_torch(hidden: dict[str, str], tmp_path: Path) -> None:
    """Guards against a command, or a process that it starts, which works only where torch is installed."""
    done = penstock(["generate", "demo", "-p", "Once", "--max-tokens", "2", "--json", "--temperature", "0"], hidden)
    assert json.loads(done.stdout)["token_ids"], done.stderr
    done = penstock(["convert", "demo", str(tmp_path / "packed"), "--quantization", "int8"], hidden)
    assert done.returncode == 0, done.stderr
    done = penstock(["chat", str(tmp_path / "packed"), "--max-tokens", "4"], hidden, input="What is 3 + 4?\n")
    assert (done.returncode, bool(done.stdout.strip())) == (0, True), done.stderr
    words = ["--num-prompts", "1", "--input-len", "4", "--output-len", "2", "--warmup", "0", "--json", "-"]
    done = penstock(["bench", "offline", "demo", *words], hidden)
    assert json.loads(done.stdout)["output_tokens_per_s"] > 0, done.stderr


def test_a_server_without_torch(hidden: dict[str, str]) -> None:
    """Guards against torch in the server, its engine or its text process."""
    command = [sys.executable, "-m", "penstock", "serve", "demo", "--port", "0"]
    with subprocess.Popen(command, env=hidden, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = re.search(r"http://\S+", server.stdout.readline())
        assert url is not None
        body = json.dumps({"prompt": "Once", "max_tokens": 2, "response_format": {"type": "json_object"}}).encode()
        request = urllib.request.Request(f"{url[0]}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["choices"][0]["text"]
        server.terminate()
    assert server.returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "demo", "-p", "x", "--kernels", "reference"], "--kernels: reference needs torch"),
        (["serve", "demo", "--kernels", "reference"], "--kernels: reference needs torch"),
        (
            ["generate", "demo", "-p", "x", "--model-impl", "plain"],
            "--model-impl: LlamaForCausalLM (plain) needs torch",
        ),
        (["bench", "ops"], "bench ops needs torch"),
        (["check", "demo"], "check needs torch"),
    ],
    ids=str,
)
def test_what_needs_torch_says_so(words: list[str], message: str, hidden: dict[str, str]) -> None:
    """Guards against a traceback where only a package is missing."""
    done = penstock(words, hidden)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f'penstock: {message}, which is not installed: pip install "penstock[torch]"'
    )


def test_a_users_file_that_needs_torch(hidden: dict[str, str], tmp_path: Path) -> None:
    """Guards against an ImportError of a user's file without the command that helps, and against a logits processor
    that fails at its first token."""
    wanted = 'torch, which is not installed: pip install "penstock[torch]"'
    register = "import penstock\n@penstock.register_logits_processor('p')\ndef p(logits, args): return logits\n"
    for text in ("import torch\n", register):
        (tmp_path / "own.py").write_text(text)
        done = penstock(["generate", "demo", "-p", "x", "--import", str(tmp_path / "own.py")], hidden)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].endswith(wanted), done.stderr


def test_without_torch_and_without_the_native_library(hidden: dict[str, str], tmp_path: Path) -> None:
    """Guards against advice to install gigabytes where a compiler is missing."""
    env = {**hidden, "PENSTOCK_CPU_LIBRARY": str(tmp_path / "none.so")}
    last = penstock(["generate", "demo", "-p", "x"], env).stderr.splitlines()[-1]
    assert last.startswith("penstock: kernels: the native library cannot be used")
    assert last.endswith(
        '; computing without it, slowly, needs torch, which is not installed: pip install "penstock[torch]"'
    )
