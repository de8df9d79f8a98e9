"""docs/adding_a_model.md, done: its files are written, its commands run, and the model is Transformers'."""

import asyncio
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from penstock import LLM, AsyncLLM, SamplingParams
from penstock.cli.main import build_parser, main
from penstock.config import EngineConfig
from penstock.interface.plugins import import_files
from penstock.weights.hub import MODEL_DIR
from penstock_lab.prove.parallel import BASE, answers, draw_map, start_threads
from tests.hf_models import hf_logprobs, random_ids, randomise
from tests.kernels.packed import levels
from tests.lab.compat.test_instances import hf_greedy
from tests.lab.compat.user_file import registry_as_before
from tests.paged import PagedModel

PAGE = Path(__file__).parent.parent / "docs" / "adding_a_model.md"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
SHAPE = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 256}  # fmt: skip
FORMS = [("float32", None), ("bfloat16", None), ("bfloat16", "int8")]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def user_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The page's files in a directory of the user; what they register is forgotten afterwards."""
    directory = tmp_path_factory.mktemp("user")
    for _, text in BLOCKS:
        name = re.match(r"# (\w+\.\w+)\n", text)
        if name:
            (directory / name[1]).write_text(text)
    assert sorted(file.name for file in directory.iterdir()) == ["gpt_neox.py", "gpt_neox.yaml"]
    with registry_as_before():
        yield directory / "gpt_neox.py"
    for name in [name for name in sys.modules if name.endswith("_gpt_neox") and name.startswith("penstock_user")]:
        del sys.modules[name]


def make(directory: Path, **fields: Any) -> tuple[GPTNeoXForCausalLM, Path]:
    """A random model of Transformers, with the bundled model's tokenizer."""
    config = GPTNeoXConfig(**SHAPE | fields)
    config._attn_implementation = "eager"
    model = GPTNeoXForCausalLM(config).eval()
    randomise(model, 0)
    at = directory / "model"
    model.save_pretrained(at)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, at)
    return model, at


@pytest.mark.covers("J16", "C14")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True},
        {"rotary_pct": 1.0, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3},
    ],
    ids=["parallel", "sequential", "rotary"],
)
def test_the_page_s_model_is_transformers(fields: dict[str, Any], user_file: Path, tmp_path: Path) -> None:
    """Guards against a page that leads to another model: log-probabilities, and 24 greedy tokens in a mixed batch."""
    model, directory = make(tmp_path, **fields)
    import_files([str(user_file)])
    ids = random_ids(40, vocab_size=4096)
    logprobs = PagedModel(directory).step({0: ids})[0]
    torch.testing.assert_close(logprobs, hf_logprobs(model, ids), atol=1e-4, rtol=0)
    prompts = [ids, ids[:3], ids[7:24]]
    with LLM(model=str(directory), imports=[str(user_file)], dtype="float32") as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    assert found == [hf_greedy(model, prompt, 24) for prompt in prompts]
    with LLM(model=model, imports=[str(user_file)]) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == found


@pytest.mark.covers("J16", "C14")
def test_the_page_s_commands_run(
    user_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against flags that the commands do not have, and a check that does not find the user's class."""
    _, directory = make(tmp_path)
    monkeypatch.chdir(user_file.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check, generate, serve = (line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines())
    words = {line: shlex.split(line.replace("MODEL", str(directory)))[1:] for line in (check, generate, serve)}
    assert main(words[check]) == 0, capsys.readouterr()
    assert "passed" in capsys.readouterr().out
    flags = words[generate] if levels() else words[generate][:-2]
    assert main([*flags, "--max-tokens", "5", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 5
    assert build_parser(words[serve]).parse_args(words[serve]).port == 8000


@pytest.mark.covers("C14")
def test_the_engine_process_imports_the_file(user_file: Path, tmp_path: Path) -> None:
    """Guards against a model that only this process knows: serving computes in another one."""
    model, directory = make(tmp_path)

    async def answer() -> list[int]:
        options: dict[str, Any] = {"imports": [str(user_file)], "dtype": "float32"}
        async with AsyncLLM(model=str(directory), **options) as llm:
            async for output in llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY):
                ids = output.outputs[0].token_ids
        return ids

    assert asyncio.run(answer()) == hf_greedy(model, [5, 6, 7], 24)


@pytest.mark.covers("J11", "J12", "C14")
@pytest.mark.skipif(not levels(), reason="no native library")
def test_any_split_of_the_page_s_model_has_the_bits_of_one_process(user_file: Path, tmp_path: Path) -> None:
    """Guards against axes in a user's table that are read and not used: 8 random maps, and ranks that are processes,
    which have to import the file, too."""
    _, directory = make(tmp_path)
    import_files([str(user_file)])
    fixed: dict[str, Any] = BASE | {"model": str(directory), "load_format": "auto", "imports": [str(user_file)]}
    whole = {}
    for dtype, quantization in FORMS:
        options = fixed | {"dtype": dtype, "quantization": quantization}
        whole[dtype, quantization] = answers(EngineConfig.from_options(**options))
    split = EngineConfig.from_options(**fixed, dtype="bfloat16", tensor_parallel_size=2)
    assert answers(split) == whole["bfloat16", None]
    for seed in range(8):
        chance, file = random.Random(seed), tmp_path / "map.yaml"
        file.write_text(draw_map(directory, chance))
        dtype, quantization = form = chance.choice(FORMS)
        ranks = {"tensor_parallel_size": 2, "sharding_config": str(file)}
        config = EngineConfig.from_options(**fixed, **ranks, dtype=dtype, quantization=quantization)
        assert answers(config, start_threads) == whole[form], file.read_text()


def test_files_that_cannot_be_imported_are_named(tmp_path: Path) -> None:
    """Guards against a traceback of the engine for a mistake in the user's file."""
    broken = tmp_path / "broken.py"
    broken.write_text("import math\n\nmath.nothing()\n")
    for file, message in ((broken, f"{broken}:3: AttributeError"), (tmp_path / "none.py", "must be a Python file")):
        done = subprocess.run(
            [sys.executable, "-m", "penstock", "generate", "--import", str(file), "-p", "x"],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(PAGE.parent.parent)},
        )
        assert done.returncode == 2
        assert done.stderr.startswith("penstock: --import: ")
        assert message in done.stderr
        assert done.stderr.count("\n") == 1


def test_the_page_is_short() -> None:
    """Guards against a page that nobody reads."""
    assert len(PAGE.read_text().splitlines()) < 150
    assert max(map(len, PAGE.read_text().splitlines())) <= 120
