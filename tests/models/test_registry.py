"""The registry: built-in families are found by name, a user's own class is as good as ours."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from penstock.architecture import ARCHITECTURES
from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.model_config import ModelConfig
from penstock.models import registry
from tests.hf_models import hf_logprobs, make_llama, random_ids
from tests.paged import PagedModel

OWN = '''
from penstock.models.llama import LlamaForCausalLM
from penstock.models.registry import register

@register("HouseForCausalLM", table="house.yaml")
class HouseForCausalLM(LlamaForCausalLM):
    """A model in a user's own file."""
'''


@pytest.mark.covers("J16")
def test_a_users_own_file_registers_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a list of models that only our own code can extend."""
    monkeypatch.setattr(registry, "MODELS", dict(registry.MODELS))
    hf_model, directory = make_llama(tmp_path)
    config_file = directory / "config.json"
    config = json.loads(config_file.read_text()) | {"architectures": ["HouseForCausalLM"], "model_type": "house"}
    config_file.write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="HouseForCausalLM"):
        ModelConfig.from_directory(directory)

    table = Path(registry.__file__).parent / "llama.yaml"
    (tmp_path / "house.yaml").write_text(table.read_text())
    (tmp_path / "house.py").write_text(OWN)
    spec = importlib.util.spec_from_file_location("house", tmp_path / "house.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "house", module)
    try:
        spec.loader.exec_module(module)
        ids = random_ids(20)
        logprobs = PagedModel(directory).step({0: ids})[0]
    finally:
        ARCHITECTURES.pop("HouseForCausalLM", None)
    torch.testing.assert_close(logprobs, hf_logprobs(hf_model, ids), atol=1e-4, rtol=0)


def test_every_built_in_architecture_has_its_class() -> None:
    """Guards against a family named in model_config whose module does not register it."""
    for name in ARCHITECTURES:
        assert registry.lookup(name).table_file.is_file()


def test_one_architecture_has_one_class() -> None:
    """Guards against a second registration that silently wins."""
    with pytest.raises(InvalidRequestError, match="LlamaForCausalLM is already registered"):

        @registry.register("LlamaForCausalLM", table="llama.yaml")
        class Other(torch.nn.Module):
            pass

    with pytest.raises(ModelLoadError, match="nearest: Llama"):
        registry.lookup("LamaForCausalLM")
