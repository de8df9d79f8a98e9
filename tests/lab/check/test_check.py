"""`penstock check` as a user meets it: exit codes, the named layer, the certificate and where it is shown."""

import json
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from penstock import EngineConfig
from penstock.assembly import build_engine, info
from penstock.cli.main import main
from penstock.kernels.ops import NUMERICS_VERSION
from penstock.models import certificate
from penstock.models.certificate import Basis, find_basis, read_certificate
from penstock.weights.safetensors import fingerprint
from penstock_lab.check.run import Options, check_model
from penstock_lab.check.target import make_tiny
from penstock_lab.check.twin import find_class
from tests.families.case import all_cases
from tests.hf_models import MAKERS
from tests.kernels.packed import levels
from tests.server.fakes import FakeEngineClient
from tests.server.harness import TestClient, app_client

KERNELS = "cpu" if levels() else "reference"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Certificates go to a directory of the test; commands leave the signals of pytest alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    return tmp_path / "cache" / "penstock" / "certificates"


def edited(directory: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of a model with another config.json."""
    copy = directory.with_name("edited")
    shutil.copytree(directory, copy, dirs_exist_ok=True)
    config = json.loads((copy / "config.json").read_text())
    change(config)
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["check", *words, "--kernels", KERNELS, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if captured.out else {"said": captured.err}


@pytest.mark.parametrize("family", MAKERS)
def test_what_was_changed_is_named(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a check that passes, or names a later layer, when a weight, an epsilon or an angle was changed in
    a copy on disk; and against a certificate for the comparison of two different models."""
    _, directory = MAKERS[family](tmp_path, num_hidden_layers=3)
    code, report = check(capsys, str(directory), "--against", str(directory))
    assert (code, report["first_difference"], report["certificate"]) == (0, None, None)

    changes: list[tuple[Callable[[dict[str, Any]], Any], str, str]] = [
        (lambda c: c.update(rms_norm_eps=1e-4), "model.layers.0.input_layernorm", "epsilon is 1e-06 here and 0.0001"),
        (
            lambda c: c["rope_parameters"].update(rope_theta=c["rope_parameters"]["rope_theta"] * 1.05),
            "model.layers.0.self_attn attention (rotary, mask, scale)",
            "rotary tables differ (base or scaling)",
        ),
        (lambda c: c.update(hidden_act="gelu"), "model.layers.0.mlp.gate_up_proj activation", "activation function"),
    ]
    for change, layer, cause in changes:
        code, report = check(capsys, str(directory), "--against", str(edited(directory, change)))
        assert code == 1
        assert report["first_difference"]["name"] == layer
        assert cause in report["cause"]

    copy = edited(directory, lambda c: None)
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] += 0.5
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    code, report = check(capsys, str(directory), "--against", str(copy))
    assert code == 1
    assert report["first_difference"]["block"] == 1
    assert report["first_difference"]["name"] == "model.layers.1.mlp.gate_up_proj activation"
    assert "model.layers.1.mlp.up_proj.weight has different values there (1 of" in report["cause"]


@pytest.mark.parametrize(
    ("architecture", "changed", "layer"),
    [
        (
            "MPNetForSequenceClassification",
            "mpnet.encoder.relative_attention_bias.weight",
            "bert.layers.0.attention attention (rotary, mask, scale)",
        ),
        ("ModernBertForSequenceClassification", "head.norm.weight", "head.norm"),
        ("RobertaForTokenClassification", "roberta.encoder.layer.1.output.dense.weight", "bert.layers.1.mlp.down_proj"),
        ("Qwen3Model", "layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_up_proj activation"),
    ],
)
def test_models_without_a_language_model_head(
    architecture: str, changed: str, layer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a check that passes, or names a later layer, where an encoder or a classifier has other weights;
    and against proofs of texts that nothing is computed of."""
    make_tiny(find_class(architecture).config_class(), find_class(architecture), tmp_path / "tiny")
    code, report = check(capsys, str(tmp_path / "tiny"), "--dtype", "float32")
    assert (code, report["first_difference"]) == (0, None), report
    assert len(report["proofs"]) == 3 + (architecture == "Qwen3Model")
    assert Path(report["certificate"]).is_file()
    copy = edited(tmp_path / "tiny", lambda c: None)
    weights = load_file(copy / "model.safetensors")
    weights[changed][0] += 0.5
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    code, report = check(capsys, str(tmp_path / "tiny"), "--against", str(copy))
    assert (code, report["first_difference"]["name"]) == (1, layer)


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "sliding_window", "query_pre_attn_scalar"])
def test_a_model_with_one_attention_only(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against bad input (2) in place of a difference (1) where Transformers has no second attention to ask."""
    _, directory = next(case for case in all_cases() if case.name == "gemma2").make(tmp_path)
    copy = edited(directory, lambda c: c.update({key: c[key] * 3 // 2}))
    code, report = check(capsys, str(directory), "--against", str(copy))
    assert (code, report["passed"]) == (1, False)
    assert report["first_difference"]["name"] == "model.layers.0.self_attn attention (rotary, mask, scale)"


def test_what_the_prompt_does_not_reach_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a window that seems to be proved by a prompt shorter than it."""
    _, directory = MAKERS["mistral"](tmp_path, sliding_window=100)
    copy = edited(directory, lambda c: c.update(sliding_window=90))
    code, report = check(capsys, str(directory), "--against", str(copy))
    assert (code, len(report["remarks"])) == (0, 1)
    assert "windows of 100 tokens" in report["remarks"][0]
    assert main(["check", str(directory), "--against", str(copy), "--kernels", KERNELS]) == 0
    assert "windows of 100 tokens" in capsys.readouterr().out
    code, report = check(capsys, str(directory), "--against", str(copy), "--prompt-len", "120")
    assert (code, report["remarks"]) == (1, [])


def info_certificate(directory: Path) -> dict[str, Any] | None:
    options = {"model": str(directory), "kernels": "reference", "max_model_len": 32, "max_num_seqs": 1}
    return build_engine(EngineConfig.from_options(**options)).info.certificate


def test_the_certificate_comes_and_goes(
    tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a certificate that outlives what it was about: another config, other numerics, damage, a failed
    check; and against one that hides that the weights are others."""
    _, directory = MAKERS["qwen3"](tmp_path)
    assert info_certificate(directory) is None
    code, report = check(capsys, str(directory), "--dtype", "bfloat16")
    assert code == 0
    file = Path(report["certificate"])
    assert file.parent == own_cache

    found = info_certificate(directory)
    assert found is not None
    assert found == json.loads(file.read_text()) | {"same_weights": True}
    assert found["architecture"] == "Qwen3ForCausalLM"
    assert found["weights"] == fingerprint(directory)
    assert found["dtypes"] == ["bfloat16", "float32"]
    assert found["proofs"]["log-probabilities"] <= 1e-4
    assert found["proofs"]["batch = solo"] == 0 or KERNELS == "reference"
    other = MAKERS["qwen3"](tmp_path / "other", seed=1)[1]
    assert (info_certificate(other) or {})["same_weights"] is False

    assert info_certificate(edited(directory, lambda c: c.update(rms_norm_eps=2e-6))) is None
    with monkeypatch.context() as patch:
        patch.setattr(info, "NUMERICS_VERSION", NUMERICS_VERSION + 1)
        assert info_certificate(directory) is None
    text = file.read_text()
    for damaged in ("", "[]", text[:-9], text.replace('"date"', '"data"'), text.replace(found["table"], "0" * 32)):
        file.write_text(damaged)
        assert info_certificate(directory) is None
    file.write_text(text)
    assert info_certificate(directory) is not None

    monkeypatch.setattr("penstock_lab.check.parity.logprob_tolerance", lambda *_: 0.0)
    code, report = check(capsys, str(directory))
    assert (code, report["certificate"], report["first_difference"]["name"]) == (1, None, "log-probabilities")
    assert info_certificate(directory) is None


def test_random_weights_do_not_stand_for_real_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a proof of the real weights that a check of random ones replaces."""
    _, directory = MAKERS["llama"](tmp_path)
    for words, same in (["--tiny"], False), ([], True), (["--tiny"], True):
        assert check(capsys, str(directory), *words)[0] == 0
        assert (info_certificate(directory) or {})["same_weights"] is same


def test_what_cannot_be_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a pickle that random weights pass for, a diagnosis of two kinds of models, and a name that is
    taken for a directory only."""
    _, directory = MAKERS["llama"](tmp_path)
    other = MAKERS["mistral"](tmp_path)[1]
    code, report = check(capsys, str(directory), "--against", str(other))
    assert (code, "it holds a MistralForCausalLM" in report["said"]) == (2, True)
    code, report = check(capsys, "LamaForCausalLM")
    assert (code, "nearest: LlamaForCausalLM" in report["said"]) == (2, True)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    code, report = check(capsys, str(directory))
    assert (code, "pytorch_model.bin: is not a zip archive" in report["said"]) == (2, True)


def test_the_basis_is_table_code_numerics_and_config(tmp_path: Path) -> None:
    """Guards against a change that leaves the id as it was."""
    files = [tmp_path / name for name in ("model.py", "table.yaml", "config.json")]
    for file in files:
        file.write_text(file.name)

    def basis(numerics: int = 1) -> Basis:
        return find_basis("LlamaForCausalLM", *files, numerics)

    ids = {basis().id, basis(2).id}
    assert basis() == basis()
    for file in files:
        file.write_text("changed")
        ids.add(basis().id)
    assert len(ids) == 5
    assert read_certificate(basis()) is None


def test_readers_of_config_json_that_others_borrow_from_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a certificate of Mixtral that outlives a change of llama/config.py, whose rules it follows."""
    hashed: list[Path] = []
    monkeypatch.setattr(certificate, "_hash_files", lambda files: hashed.extend(files) or "")
    find_basis("MixtralForCausalLM", Path("model.py"), Path("table.yaml"), Path("config.json"), 1)
    names = {f"{file.parent.name}/{file.name}" for file in hashed}
    assert {"mixtral/config.py", "llama/config.py", "spec/config_rules.py", "spec/config_reader.py"} <= names


def test_models_show_the_certificate() -> None:
    """Guards against a certificate that never reaches the user."""
    engine = FakeEngineClient()
    client = app_client(engine)
    assert certificate_of(client) is None
    engine.info = replace(engine.info, certificate={"id": "0123", "proofs": {"batch = solo": 0.0}})
    assert certificate_of(client) == {"id": "0123", "proofs": {"batch = solo": 0.0}}


def certificate_of(client: TestClient) -> Any:
    (card,) = client.get("/v1/models").json()["data"]
    return card["certificate"]


def test_tiny_models_and_tables(tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a config without weights that cannot be checked, and a table that is not printed."""
    _, directory = MAKERS["mistral"](tmp_path)
    (directory / "model.safetensors").unlink()
    assert main(["check", str(directory), "--kernels", KERNELS, "--prompt-len", "40"]) == 0
    said = capsys.readouterr().out
    assert "random tiny weights" in said
    for name in ("model.layers.0.self_attn.qkv_proj (k_proj)", "residual stream", "chunks of 13 = whole", "passed:"):
        assert name in said
    (file,) = own_cache.iterdir()
    assert json.loads(file.read_text())["weights"] == "random tiny"

    report = check_model(Options(model=str(directory / "config.json"), kernels="reference"))
    assert report.passed
    report = check_model(Options(model="Qwen2ForCausalLM", kernels="reference"))
    assert (report.passed, report.certificate) == (True, None)  # there is no config.json that could be served


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/nowhere"], "there is no directory '/nowhere'"),
        (["ElectraForPreTraining"], "is not supported"),
        (["--dtype", "fp8"], "--dtype: 'fp8' is not allowed"),
        (["--kernels", "triton"], "--kernels: 'triton' cannot be used: this machine has no NVIDIA driver"),
        (["--prompt-len", "3"], "--prompt-len: 3 is not allowed; it must be an integer from 8"),
        (["--prompt-len", "1020"], "--prompt-len: 1020 is not allowed; it must be an integer from 8 to 1015"),
        (["--against", "/a", "--tiny"], "--against: '/a' is not allowed; it must be left out with --tiny and --verify"),
        (["--verify", "--kernels", "reference"], "--kernels must be cpu"),
        (["--against", "/nowhere"], "there is no directory '/nowhere'"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a traceback, and against an option that is taken and ignored."""
    assert main(["check", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err.splitlines()[-1]


def test_without_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a traceback where the optional dependency is missing, and against --verify needing it."""
    _, directory = MAKERS["llama"](tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["check", str(directory)]) == 2
    assert 'pip install "penstock[transformers]"' in capsys.readouterr().err.splitlines()[-1]
    if levels():
        assert main(["check", str(directory), "--verify"]) == 0
