"""Damaged and hostile model files: each loads or is refused in one line, and none costs time, memory or a process."""

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ModelLoadError
from penstock.kernels.cpu.library import best_level
from penstock.models.config_json import load_model_config
from penstock.ranks.sharding_map import ShardingMap
from penstock.spec.param_table import ParamTable
from penstock.tokenizer.hf import load_tokenizer
from penstock.weights.hub import MODEL_DIR
from penstock_lab.prove.file_mutations import mutate_gguf
from penstock_lab.prove.hostile_files import HostileFiles, Reader, Target, make_targets
from penstock_lab.prove.proof import Outcome, Subject, Trials
from tests.hf_models import make_llama
from tests.server.harness import send
from tests.weights.files import gguf

TOKENIZERS = ["`tokenizer.json`", "`tokenizer.model`", "`tekken.json`", "GGUF, byte-level BPE", "GGUF, SentencePiece"]
YAML = st.text(st.sampled_from("[]{}:,-?&*!|>'\"%@#\n\t ax1.~<"), max_size=200)


def test_a_sample_of_mutated_files() -> None:
    """Guards against a traceback, a crash or a hang of any reader; `penstock prove` makes 20,000."""
    outcome = Outcome("hostile-files", "", "files")
    HostileFiles().run(Trials(Subject(), outcome, goal=100, seed=3))
    assert outcome.wrong == []
    assert outcome.passed
    assert {"loaded", "refused"} <= set(outcome.figures)


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> dict[str, Target]:
    """Files with tokenizers, by their rows in docs/files.md."""
    found = make_targets(tmp_path_factory.mktemp("tokenizers"), MODEL_DIR)
    targets = {f"`{target.file.name}`": target for target in found if target.kind == "tokenizer"}
    targets["GGUF, SentencePiece"] = next(target for target in found if target.kind == "gguf")
    file, _ = gguf("Q8_0", tmp_path_factory.mktemp("gguf"))
    return targets | {"GGUF, byte-level BPE": Target("gguf", file, file.read_bytes(), mutate_gguf)}


@pytest.mark.parametrize("row", [pytest.param(row, marks=pytest.mark.matrix("damaged", row)) for row in TOKENIZERS])
def test_mutated_tokenizers(row, targets, pytestconfig) -> None:
    """Guards against a traceback, a crash or a hang for a vocabulary, a merge or a special token that is none."""
    target, random = targets[row], Random(row)
    with Reader() as reader:
        assert reader.read(target.kind, target.file) == "loaded"
        for _ in range(pytestconfig.getoption("--mutations")):
            target.file.write_bytes(target.mutate(random, target.content))
            assert reader.read(target.kind, target.file) in ("loaded", "refused")


def test_the_proof_sees_what_it_looks_for(tmp_path) -> None:
    """Guards against a proof that cannot fail: a reader that crashes, and one that is cut off, are told apart."""
    with Reader() as reader:
        (tmp_path / "config.json").write_text("{")
        assert reader.read("config", tmp_path / "config.json") == "refused"
        assert "KeyError" in reader.read("no such kind", tmp_path / "config.json")
        reader._process.kill()
        assert "ended with code -9" in reader.read("config", tmp_path / "config.json")
        assert reader.read("config", tmp_path / "config.json") == "refused"


@pytest.mark.parametrize("read", [ShardingMap.from_text, ParamTable.from_text])
@pytest.mark.parametrize("text", ["[" * 5000, "{a: " * 3000, "- " * 5000, "? [a]\n: 1", "x: 2001-99-99", "%YAML 9.9"])
def test_yaml_that_is_hard_to_read(read, text) -> None:
    """Guards against RecursionError's traceback (finding 8), keys that are lists, and values that cannot be made."""
    with pytest.raises(ModelLoadError, match=r"^map\.yaml: [^\n]*$"):
        read(text, "map.yaml")


@given(YAML)
@settings(max_examples=150)
def test_any_yaml(text: str) -> None:
    """Guards against every other exception of the YAML library."""
    for read in (ShardingMap.from_text, ParamTable.from_text):
        said = "map.yaml: "
        try:
            read(text, "map.yaml")
        except ModelLoadError as error:
            said = str(error)
        assert said.startswith("map.yaml: ")
        assert "\n" not in said


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["pipe", "directory", "large"])
def test_what_is_no_file(name, kind, tmp_path) -> None:
    """Guards against a pipe that is read for ever, and a sparse file of terabytes."""
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_bytes((MODEL_DIR / file).read_bytes())
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    elif kind == "directory":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 2**40)
    load = load_tokenizer if name.startswith("tokenizer") else load_model_config
    if name == "tokenizer_config.json" and kind != "large":  # as if it were absent
        assert load(tmp_path)
        return
    with pytest.raises(ModelLoadError, match=f"{name}"):
        load(tmp_path)


def test_code_from_a_checkpoint_is_never_run(tmp_path) -> None:
    """Guards against auto_map and trust_remote_code, also under python -O, where an assert would not refuse them."""
    _, source = make_llama(tmp_path)
    config = source / "config.json"
    config.write_text(config.read_text().replace("{", '{"auto_map": {"AutoConfig": "evil.Evil"},', 1))
    (source / "evil.py").write_text("open('ran', 'w')\nclass Evil: pass\n")
    command = [sys.executable, "-O", "-c", "import sys; from penstock import LLM; LLM(model=sys.argv[1])", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=source)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (source / "ran").exists()


@pytest.mark.skipif(best_level() is None, reason="no native library")
def test_a_file_that_shrinks_under_the_engine(tmp_path) -> None:
    """Guards against silence: the map's end is gone, the engine dies of SIGBUS, and the log says what happened."""
    packed = tmp_path / "packed"
    subprocess.run([sys.executable, "-m", "penstock", "convert", "demo", str(packed)], check=True, capture_output=True)
    command = [sys.executable, "-m", "penstock", "serve", str(packed), "--port", "0", "--max-model-len", "128"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            url = next(word for word in server.stdout.readline().split() if word.startswith("http://"))
            os.truncate(packed / "penstock.safetensors", 4096)
            body = {"prompt": "Once", "max_tokens": 100, "ignore_eos": True}
            answer = send(f"{url}/v1/completions", json=body)
            assert answer.status_code == 503
            assert str(tmp_path) not in answer.text
            assert server.wait(60) == 70
        finally:
            server.kill()
            log = server.stderr.read()
    assert "a mapped file has become shorter" in log
    assert "penstock.safetensors: not a s" in log
    assert "Traceback" not in log


def test_links_are_followed(tmp_path) -> None:
    """The hub's cache consists of links to files outside of the model's directory."""
    for file in Path(MODEL_DIR).iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert load_model_config(tmp_path) == load_model_config(MODEL_DIR)
    assert load_tokenizer(tmp_path).encode("Once")
