"""The registry: built-in families are found by name, a user's own class is as good as ours."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.interface.plugins import files_fingerprint, import_files
from penstock.models import registry
from penstock.models.config_json import load_model_config
from penstock.models.registry import ARCHITECTURES, find_architecture, find_model
from tests.hf_models import hf_logprobs, make_llama, random_ids
from tests.lab.compat.user_file import imported, registry_as_before
from tests.paged import PagedModel

OWN = '''
from penstock.models.llama.model import LlamaForCausalLM
from penstock.models.registry import register_model

@register_model("HouseForCausalLM", table="house.yaml")
class HouseForCausalLM(LlamaForCausalLM):
    """A model in a user's own file."""
'''


@pytest.mark.covers("J16")
def test_a_users_own_file_registers_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a list of models that only our own code can extend."""
    hf_model, directory = make_llama(tmp_path)
    config_file = directory / "config.json"
    config = json.loads(config_file.read_text()) | {"architectures": ["HouseForCausalLM"], "model_type": "house"}
    config_file.write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="HouseForCausalLM"):
        load_model_config(directory)

    (tmp_path / "house.yaml").write_text(find_model("LlamaForCausalLM").table_file.read_text())
    (tmp_path / "house.py").write_text(OWN)
    with imported(tmp_path / "house.py", monkeypatch):
        ids = random_ids(20)
        logprobs = PagedModel(directory).step({0: ids})[0]
    torch.testing.assert_close(logprobs, hf_logprobs(hf_model, ids), atol=1e-4, rtol=0)


def test_every_built_in_architecture_has_its_class() -> None:
    """Guards against a family named in model_config whose module does not register it."""
    for name in ARCHITECTURES:
        assert registry.find_model(name).table_file.is_file()


def test_one_architecture_has_one_class() -> None:
    """Guards against a second registration that silently wins."""
    with pytest.raises(InvalidRequestError, match="LlamaForCausalLM is already registered"):

        @registry.register_model("LlamaForCausalLM", table="llama.yaml")
        class Other(torch.nn.Module):
            pass

    with pytest.raises(ModelLoadError, match="nearest: Llama"):
        registry.find_model("LamaForCausalLM")


@pytest.mark.parametrize("config", ["LlamaForCausalLM", "NoSuchForCausalLM"])
def test_several_architectures_are_registered_together_or_not_at_all(config: str) -> None:
    """Guards against a refused registration that leaves some of its names behind, without a class."""
    before = set(ARCHITECTURES)
    with pytest.raises((InvalidRequestError, ModelLoadError)):

        @registry.register_model("NewForCausalLM", "LlamaForCausalLM", table="llama.yaml", config=config)
        class Other(torch.nn.Module):
            pass

    assert set(ARCHITECTURES) == before


TWICE = """
from penstock import register_model

@register_model("{name}", table="none.yaml", config="LlamaForCausalLM", version="{version}")
class {own}:
    pass
"""


@pytest.mark.parametrize(
    ("name", "version", "own"),
    [
        ("GPT2LMHeadModel", "default", "Mine"),
        ("GPT2LMHeadModel", "default", "GPT2LMHeadModel"),  # called as ours is
        ("LlamaForCausalLM", "plain", "Mine"),
    ],
)
def test_a_name_of_ours_is_taken_before_its_module_is_imported(
    name: str, version: str, own: str, tmp_path: Path
) -> None:
    """Guards against a user's file that silently takes the place of a built-in model which nobody has asked for yet,
    and breaks its relatives later. A process of its own, because here all are imported."""
    file = tmp_path / "twice.py"
    file.write_text(TWICE.format(name=name, version=version, own=own))
    code = f"from penstock.interface.plugins import import_files; import_files([{str(file)!r}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"{file}:4: {name} is already registered by" in done.stderr


def test_two_files_with_a_class_of_one_name(tmp_path: Path) -> None:
    """Guards against the second of two files that silently wins, because both call their class alike; and against a
    traceback where the table is missing, or where only another version is registered."""
    files = [tmp_path / "one.py", tmp_path / "two.py"]
    with registry_as_before():
        for file in files:
            file.write_text(TWICE.format(name="TwiceForCausalLM", version="mine", own="Twice"))
        import_files([str(files[0])])
        import_files([str(files[0])])
        with pytest.raises(InvalidRequestError, match="TwiceForCausalLM is already registered by Twice"):
            import_files([str(files[1])])
        with pytest.raises(InvalidRequestError, match=r"model_impl: .*mine"):
            registry.find_model("TwiceForCausalLM")
        with pytest.raises(ModelLoadError, match=r"none\.yaml: cannot be read"):
            registry.find_model("TwiceForCausalLM", "mine").read_table()


def test_a_file_that_ends_the_process_is_an_error(tmp_path: Path) -> None:
    """Guards against a script without a guard of its main part, which would end a server without a word."""
    (tmp_path / "script.py").write_text("import sys\n\nsys.exit(0)\n")
    with pytest.raises(InvalidRequestError, match=r"script\.py:3: SystemExit"):
        import_files([str(tmp_path / "script.py")])


def test_a_field_that_a_config_function_makes_up_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a traceback where an author has misspelt a field of ModelConfig."""
    _, directory = make_llama(tmp_path)
    theirs = find_architecture("LlamaForCausalLM")
    misspelt = replace(theirs, read_config=lambda read: theirs.read_config(read) | {"norm_epss": 1e-5})
    monkeypatch.setitem(ARCHITECTURES, "LlamaForCausalLM", misspelt)
    message = r"LlamaForCausalLM: its config function returns 'norm_epss'.*did you mean norm_eps"
    with pytest.raises(ModelLoadError, match=message):
        load_model_config(directory)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """Guards against a traceback: Path.expanduser raises for a user that does not exist."""
    for file in ("~nobody-of-this-name/x.py", str(tmp_path / "missing.py")):
        with pytest.raises(InvalidRequestError, match="it must be a Python file"):
            import_files([file])
        with pytest.raises(InvalidRequestError, match="cannot be read: No such file"):
            files_fingerprint([file])
