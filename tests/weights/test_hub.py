"""Finding a model's files."""

import importlib
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from penstock.errors import ModelLoadError
from penstock.weights.hub import MODEL_DIR, resolve_model
from penstock.weights.safetensors import PACKED


def test_demo_and_directories(tmp_path: Path) -> None:
    """Guards against a directory that is looked up on the hub."""
    assert resolve_model("demo") == MODEL_DIR
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/no/such/directory", "./missing", "~/missing-model", "a/b/c", "plain"])
def test_what_is_neither_is_refused(name: str) -> None:
    """Guards against a mistyped path that goes to the network."""
    with pytest.raises(ModelLoadError, match="there is no directory"):
        resolve_model(name)
    with pytest.raises(ModelLoadError, match=r"there is no file .*\.gguf"):
        resolve_model(f"{name}.gguf")


def test_a_file_is_no_model(tmp_path: Path) -> None:
    """Guards against a path to the weights themselves."""
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelLoadError, match="is a file"):
        resolve_model(str(tmp_path / "model.safetensors"))


def fake_hub(monkeypatch: pytest.MonkeyPatch, files: list[str], folder: Path) -> list[str]:
    """Replace the download by one from a repository that has these files, and return the list of what it fetches."""
    fetched: list[str] = []

    def fetch(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert name == "owner/model"
        for file in filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            if not (folder / file).exists():
                fetched.append(file)
                (folder / file).parent.mkdir(exist_ok=True)
                (folder / file).touch()
        return str(folder)

    monkeypatch.setattr(importlib.import_module("huggingface_hub"), "snapshot_download", fetch)
    return fetched


COMMON = ["config.json", "chat_template.jinja", "tokenizer.json"]
CODE = ["modeling.py", "pytorch_model.bin", "model.pt", "README.md", "onnx/model.safetensors"]


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        (["model.safetensors"], ["model.safetensors"]),
        (["model-1-of-2.safetensors", "model.safetensors.index.json"],) * 2,
        (["model-1-of-1.safetensors", "consolidated.safetensors"], ["model-1-of-1.safetensors"]),
        (["consolidated.safetensors", "params.json"],) * 2,
        ([PACKED],) * 2,
    ],
    ids=["one", "shards", "twice", "Mistral", "packed"],
)
def test_the_hub_is_asked_for_weights_once_and_never_for_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, held: list[str], wanted: list[str]
) -> None:
    """Guards against fetching pickles or Python files, and the weights of Mistral's repositories in both formats."""
    fetched = fake_hub(monkeypatch, [*COMMON, *CODE, *held], tmp_path)
    assert resolve_model("owner/model") == tmp_path
    assert sorted(fetched) == sorted([*COMMON, *wanted])


def test_without_weights_only_small_files_are_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fetched = fake_hub(monkeypatch, [*COMMON, *CODE, "model.safetensors"], tmp_path)
    assert resolve_model("owner/model", weights=False) == tmp_path
    assert sorted(fetched) == sorted(COMMON)


def test_what_the_hub_answers_becomes_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, **patterns: list[str]) -> str:
        raise OSError("no route\nto the hub")

    monkeypatch.setattr(importlib.import_module("huggingface_hub"), "snapshot_download", offline)
    with pytest.raises(ModelLoadError, match=r"no route to the hub$"):  # in one line
        resolve_model("owner/model")


@pytest.mark.parametrize("wanted", ["Q4_K_M", "q4_k_m", "model-Q4_K_M.gguf"])
def test_one_gguf_file_is_fetched(wanted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against fetching every quantisation of a model, or one whose name only begins alike."""
    files = ["model-Q4_K_M.gguf", "model-Q4_K_S.gguf", "model-IQ4_K_M.gguf", "mmproj-Q4_K_M.gguf", *COMMON]
    fetched = fake_hub(monkeypatch, files, tmp_path)
    assert resolve_model(f"owner/model:{wanted}") == tmp_path / "model-Q4_K_M.gguf"
    assert set(fetched) <= {"model-Q4_K_M.gguf", "mmproj-Q4_K_M.gguf"}


def test_all_parts_of_a_gguf_model_are_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a model of which only the first part is there."""
    parts = [f"Q8_0/model-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    fetched = fake_hub(monkeypatch, [*parts, "model-Q4_0.gguf"], tmp_path)
    assert resolve_model("owner/model:Q8_0") == tmp_path / parts[0]
    assert fetched == parts


def test_a_hub_name_without_safetensors_says_how_to_name_a_gguf_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_hub(monkeypatch, ["model-Q4_0.gguf", "README.md"], tmp_path)
    with pytest.raises(ModelLoadError, match=r"say which one, for instance owner/model:Q4_K_M$"):
        resolve_model("owner/model")


def test_a_gguf_file_of_a_directory(tmp_path: Path) -> None:
    """Guards against a directory with several models from which one is guessed."""
    one, other = tmp_path / "a-Q4_0.gguf", tmp_path / "a-Q8_0.gguf"
    one.touch()
    assert resolve_model(str(tmp_path)) == resolve_model(str(one)) == one
    other.touch()
    assert resolve_model(f"{tmp_path}:Q8_0") == other
    with pytest.raises(ModelLoadError, match=r"several could be meant: a-Q4_0\.gguf, a-Q8_0\.gguf; give the path"):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"no GGUF file is called 'Q5_0'; there are a-Q4_0\.gguf, a-Q8_0\.gguf"):
        resolve_model(f"{tmp_path}:Q5_0")
    (tmp_path / "config.json").touch()
    assert resolve_model(str(tmp_path)) == tmp_path
