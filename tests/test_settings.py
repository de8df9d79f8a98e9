"""Options from a file and from the environment: their order, their types, and what is refused."""

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import serve, settings
from penstock.cli.main import build_parser, main
from penstock.cli.options import parse_object


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(settings.PREFIX):
            monkeypatch.delenv(name)


def parsed(*words: str) -> dict[str, Any]:
    return vars(build_parser(list(words)).parse_args(words))


def written(tmp_path: Path, text: str) -> str:
    (tmp_path / "penstock.yaml").write_text(text)
    return str(tmp_path / "penstock.yaml")


def test_flags_come_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an order that depends on where --config stands, and against lists that are joined."""
    file = written(tmp_path, "port: 1\nmax-num-seqs: 2\nblock_size: 48\nallowed_host: [a, b]\nmodel: x\nseed: 7\n")
    monkeypatch.setenv("PENSTOCK_MAX_NUM_SEQS", "3")
    monkeypatch.setenv("PENSTOCK_BLOCK_SIZE", "32")
    monkeypatch.setenv("PENSTOCK_SEED", "")  # counts as none
    for words in (["--config", file, "--block-size", "16"], ["--block-size=16", f"--config={file}"]):
        found = parsed("serve", *words)
        expected = {"port": 1, "max_num_seqs": 3, "block_size": 16, "allowed_host": ["a", "b"], "model": "x", "seed": 7}
        assert {name: found[name] for name in expected} == expected
        assert parsed("serve", *words, "y")["model"] == parsed("serve", *words, "--model", "y")["model"] == "y"
        assert parsed("serve", *words, "--allowed-host", "c")["allowed_host"] == ["c"]
    monkeypatch.setenv("PENSTOCK_CONFIG", file)
    monkeypatch.setenv("PENSTOCK_ALLOWED_HOST", '["d", "e"]')
    assert parsed("serve")["port"] == 1
    assert parsed("serve")["allowed_host"] == ["d", "e"]


def test_values_have_the_types_of_the_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a size that YAML reads as a text, a switch that cannot be turned off, and objects as texts."""
    text = "enable_prefix_caching: false\nkv_cache_memory_bytes: 2GiB\nstandby: true\non_ray: false\n"
    text += "default_chat_template_kwargs: {enable_thinking: false}\nspeculative_config: {method: ngram}\n"
    found = parsed("serve", "--config", written(tmp_path, text))
    expected: dict[str, Any] = {
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 2**31,
        "standby": True,
        "on_ray": False,
    }
    expected |= {"default_chat_template_kwargs": {"enable_thinking": False}, "speculative_config": {"method": "ngram"}}
    assert {name: found[name] for name in expected} == expected
    text = "stop: a\nstop_token_ids: [1, 2]\nearly_stopping: true\nlogit_bias: [5=1, 6=-2]\nbad_words_ids: [[1]]\n"
    text += "exponential_decay_length_penalty: [3, 1.5]\n"
    found = parsed("generate", "--config", written(tmp_path, text))
    assert (found["stop"], found["stop_token_ids"], found["early_stopping"]) == (["a"], [1, 2], True)
    assert (found["logit_bias"], found["bad_words_ids"]) == ([(5, 1.0), (6, -2.0)], [[1]])
    assert found["exponential_decay_length_penalty"] == [3.0, 1.5]
    monkeypatch.setenv("PENSTOCK_STANDBY", "on")
    assert parsed("serve")["standby"] is True
    monkeypatch.setenv("PENSTOCK_INPUT_LEN", "4k")
    assert parsed("bench", "offline")["input_len"] == 4000


def test_every_flag_of_serve_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a flag that is added beside the table."""
    parser = argparse.ArgumentParser()
    serve.configure(parser)
    for name, action in settings._flags(parser).items():
        text = "{}" if action.type is parse_object else str(next(iter(action.choices or ["1"])))
        monkeypatch.setenv(f"PENSTOCK_{name.upper()}", text)
    found = parsed("serve")
    for name, action in settings._flags(parser).items():
        assert found["sources"][action.dest] == f"PENSTOCK_{name.upper()}"
        assert action.dest in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_model_length: 3", "max_model_length: there is no such option; did you mean --max-model-len?"),
        ("gpu_memory_utilization: 0.9", "use --memory, which limits the size"),
        ("port: x", "port: invalid int value: 'x'"),
        ("port: 99999", "port: 99999 is not allowed; it must be an integer from 0 to 65535"),
        ("port: [1, 2]", "port: [1, 2] is not allowed"),
        ("port:", "port: None is not allowed; write a value as for --port"),
        ("standby: maybe", "standby: 'maybe' is not true or false"),
        ("port: 1\nport: 2", "duplicate key 'port'"),
        ("- port", "must have lines like port: 8000"),
        ("port: [", "not YAML"),
        ("models: &a {x: *a}", "models: Circular reference"),
        ("models: {a: {model: demo, x: 1}}", "models.a.x: there is no such option"),
        ("config: other.yaml", "config: there is no such option"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    """Guards against a misspelt option that is ignored, and errors that do not say which file is wrong."""
    file = written(tmp_path, text)
    assert _code(["serve", "--config", file]) == 2
    line = capsys.readouterr().err.strip()
    assert message in line
    assert file in line
    assert "\n" not in line


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against an error about a flag that is nowhere on the command line, and a misspelt variable that is ignored
    without a word."""
    monkeypatch.setenv("PENSTOCK_PORT", "tcp://10.0.0.1:8000")
    assert _code(["serve"]) == 2
    assert "PENSTOCK_PORT: invalid int value" in capsys.readouterr().err
    monkeypatch.setenv("PENSTOCK_PORT", "99999")
    monkeypatch.setenv("PENSTOCK_MAX_NUM_SEQ", "3")
    assert _code(["serve"]) == 2
    said = capsys.readouterr().err
    assert "PENSTOCK_PORT: 99999 is not allowed" in said
    assert "the variable PENSTOCK_MAX_NUM_SEQ is not an option of this command; did you mean --max-num-seqs?" in said


def _code(words: list[str]) -> Any:
    try:
        return main(words)
    except SystemExit as end:
        return end.code
