"""JetStream's command line: its flags, random weights, tokens and times."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock import InvalidRequestError
from penstock.assembly import build_engine
from penstock.client import llm
from penstock.models.config_json import parse_model_config
from penstock.models.registry import ARCHITECTURES, find_model
from penstock.ranks.sharding_map import ShardingMap
from penstock.weights.hub import MODEL_DIR
from penstock_lab.compat import run_interactive
from penstock_lab.compat.run_interactive import ID_PROMPTS, main, read_size
from penstock_lab.compat.shardings import FOLDER, read_sizes, sharding_texts
from penstock_lab.planner.planned import num_elements
from penstock_lab.planner.table_template import table_text
from penstock_lab.prove.parallel import start_threads
from tests.kernels.packed import levels

FAMILIES = read_sizes()
ONE_A_TABLE = {  # families with the same table have the same weights and the same sharding file
    find_model(sizes["tiny"]["architectures"][0]).table_file: family for family, sizes in reversed(FAMILIES.items())
}.values()
COMMON = ["--max_cache_length=64", "--max_output_length", "6", "--batch_size=4"]
PARAMETERS = {  # billions, as published
    ("llama-2", "7b"): 6.74,
    ("llama-2", "13b"): 13.02,
    ("llama-2", "70b"): 68.98,
    ("llama-3", "8b"): 8.03,
    ("gemma", "2b"): 2.51,
    ("gemma", "7b"): 8.54,
    ("mistral", "7b"): 7.24,
    ("mixtral", "8x7b"): 46.7,
}


@pytest.mark.skipif(not levels(), reason="no native library")
@pytest.mark.covers("J17", "J18")
@pytest.mark.parametrize("family", ONE_A_TABLE)
def test_every_family_runs_with_random_weights(
    family: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against code that is only right with a checkpoint at hand, and against a sharding file of the package that
    does not fit its family: over 8 ranks, which are threads here."""
    monkeypatch.setattr(llm, "build_engine", partial(build_engine, start=start_threads))
    sharding = f"default_shardings/{FAMILIES[family]['tiny']['model_type']}.yaml"
    shards = ["--tensor_parallel_size=8", f"--sharding_config={sharding}"]
    assert main([f"--model={family}", "--size", "tiny", *COMMON, *shards]) == 0
    lines = capsys.readouterr().out.splitlines()
    answers = [lines[index + 1] for index, line in enumerate(lines) if line == "---- All output tokens."]
    assert len(answers) == len(ID_PROMPTS)
    assert all(1 <= len(json.loads(answer)) <= 6 for answer in answers)
    assert lines[0].startswith("Load params ")
    assert sum("tokens/s" in line for line in lines) == len(ID_PROMPTS)


@pytest.mark.covers("J9", "J17")
def test_sharding_files_are_those_of_the_generator() -> None:
    """Guards against a family without a file, a file of a family that is no longer served, and one that was changed
    here and not in the family's table: `python -m penstock_lab.compat.shardings` writes them."""
    assert {file.name: file.read_text() for file in FOLDER.iterdir()} == sharding_texts(FAMILIES)
    for config in (parse_model_config(config) for sizes in FAMILIES.values() for config in sizes.values()):
        table = find_model(config.architecture).read_table()
        sharding = ShardingMap.from_file(FOLDER / f"{config.model_type}.yaml").of(table)
        assert any(axis is not None for axis in sharding.resolve(table.parameters(config)).values())
    assert {config["architectures"][0] for sizes in FAMILIES.values() for config in sizes.values()} == {*ARCHITECTURES}


@pytest.mark.skipif(not levels(), reason="no native library")
@pytest.mark.covers("J17", "J18")
def test_the_command_of_the_document(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards against a command of JetStream's document that needs editing, but for the size and the path of a
    tokenizer; and against 8 shards that answer otherwise than one process does."""
    monkeypatch.setattr(llm, "build_engine", partial(build_engine, start=start_threads))
    monkeypatch.chdir(tmp_path)
    words = f"--size=tiny --batch_size=128 --max_cache_length=2048 --tokenizer_path={MODEL_DIR} --model=gemma"
    found = []
    for more in ([], ["--sharding_config=default_shardings/gemma.yaml", "--tensor_parallel_size=8"]):
        assert main([*words.split(), "--max_output_length=6", *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        found.append([lines[index + 1] for index, line in enumerate(lines) if line == "---- All output tokens."])
    assert found[0] == found[1]


@pytest.mark.covers("J17")
@pytest.mark.parametrize(("family", "size"), PARAMETERS)
def test_sizes_are_the_published_ones(family: str, size: str) -> None:
    """Guards against a misprinted size: the number of parameters is the published one."""
    config = parse_model_config(read_size(family, size))
    parameters = find_model(config.architecture).read_table().parameters(config)
    assert num_elements(parameters.values()) / 1e9 == pytest.approx(PARAMETERS[family, size], rel=0.003)
    assert {(name, each) for name, sizes in FAMILIES.items() for each in sizes if each != "tiny"} == set(PARAMETERS)


@pytest.mark.covers("J18")
def test_the_flags_of_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against flags that are accepted and ignored: tokenizer, sharding, quantisation, checkpoint."""
    config = read_size("gemma", "tiny")
    (tmp_path / "config.json").write_text(json.dumps(config))
    sharding = tmp_path / "gemma.yaml"
    sharding.write_text(table_text(tmp_path, sharding=True))
    flags = ["--model=gemma", "--size=tiny", *COMMON, f"--sharding_config={sharding}"]
    assert main([*flags, f"--tokenizer_path={MODEL_DIR}", "--quantize_weights=true", "--quantize_kv_cache"]) == 0
    assert "I believe the meaning of life is" in capsys.readouterr().out
    sharding.write_text(sharding.read_text().replace("model.norm.weight", "model.nrom.weight"))
    assert main(flags) == 2
    assert "sharding_config: gemma.yaml: model.nrom.weight is not a parameter" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert main([*flags[:-1], f"--checkpoint_path={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert "--checkpoint_path: num_hidden_layers = 3 does not match --model=gemma --size=tiny: 2" in error
    assert error.count("\n") == 1


@pytest.mark.covers("J18")
def test_every_flag_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against flags that are accepted and ignored: each changes one option of the engine."""
    made: list[dict[str, Any]] = []

    def recorded(model: str, **options: Any) -> None:
        made.append(options)
        raise InvalidRequestError("it would be loaded now")

    monkeypatch.setattr(run_interactive, "LLM", recorded)
    flags = ["--model=gemma", "--size=tiny", *COMMON]
    assert main(flags) == 2
    (plain,) = made
    for flag, option, value in (
        ("--batch_size=3", "max_num_seqs", 3),
        ("--max_cache_length=48", "max_model_len", 48),
        ("--tokenizer_path=some/where", "tokenizer", "some/where"),
        ("--sharding_config=gemma.yaml", "sharding_config", "gemma.yaml"),
        ("--sharding_config=default_shardings/gemma.yaml", "sharding_config", str(FOLDER / "gemma.yaml")),
        ("--tensor_parallel_size=8", "tensor_parallel_size", 8),
        ("--quantize_weights", "quantization", "int8"),
        ("--quantize_kv_cache=yes", "kv_cache_dtype", "int8"),
        ("--bf16_enable", "dtype", "bfloat16"),
        ("--bf16_enable=false", "dtype", "float32"),
    ):
        assert main([*flags, flag]) == 2
        assert plain[option] != value
        assert made[-1] == plain | {option: value}
    (tmp_path / "config.json").write_text(json.dumps(read_size("gemma", "tiny")))
    assert main([*flags, f"--checkpoint_path={tmp_path}"]) == 2
    assert made[-1] | {"load_format": "dummy"} == plain != made[-1]


@pytest.mark.covers("J18")
def test_the_longest_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a length that is accepted and ignored."""
    assert main(["--size=tiny", *COMMON, "--max_output_length=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    answers = [lines[index + 1] for index, line in enumerate(lines) if line == "---- All output tokens."]
    assert max(len(json.loads(answer)) for answer in answers) == 2


@pytest.mark.covers("J18")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model=gemini"], "--model: 'gemini' is not allowed; it must be one of llama-2, "),
        (["--size=8b"], "--size: '8b' is not allowed; llama-2 has tiny, 7b"),
        (["--batch_size=0"], "max_num_seqs: 0 is not allowed"),
        (["--checkpoint_path=/nowhere"], "--checkpoint_path: /nowhere/config.json cannot be read"),
    ],
)
def test_bad_flags_are_named(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against tracebacks."""
    assert main(flags) == 2
    assert f"run_interactive: {message}" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["--quantize_weights=perhaps"])
    assert caught.value.code == 2
