"""A model written with torch's own modules: it is filled, and its products are quantised once they are swapped."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.config import EngineConfig
from penstock.errors import ModelLoadError
from penstock.kernels.backends import load_ops
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.scheme import Scheme
from penstock.models.config_json import load_model_config
from penstock.weights.loader import load_model
from penstock.weights.safetensors import SINGLE
from penstock_lab.convert.pack import convert_model
from tests.hf_models import make_llama
from tests.kernels import packed
from tests.lab.compat.user_file import imported

MODEL = """
from torch import nn
from penstock.layers.swap import swap_linears
from penstock.models.registry import register_model

class Base(nn.Module):
    def __init__(self, cfg, make):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.mlp = nn.Sequential(nn.Linear(cfg.hidden_size, cfg.intermediate_size), nn.GELU())
        self.out = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)
        self.head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, ctx):
        return self.out(self.mlp(self.embed(input_ids)))

    def compute_logits(self, hidden):
        return self.head(hidden).float()

@register_model("PlainForCausalLM", table="own.yaml")
class PlainForCausalLM(Base):
    pass

@register_model("SwappedForCausalLM", table="own.yaml")
class SwappedForCausalLM(Base):
    def __init__(self, cfg, make):
        super().__init__(cfg, make)
        swap_linears(self, make)

@register_model("WrongForCausalLM", table="own.yaml")
class WrongForCausalLM(Base):
    def __init__(self, cfg, make):
        super().__init__(cfg, make)
        self.out = nn.Linear(cfg.hidden_size, cfg.hidden_size, bias=False)
"""
TABLE = """
embed.weight: {shape: [vocab, hidden], from: [embed.weight]}
mlp.0.weight: {shape: [intermediate, hidden], from: [up.weight], quant: true}
mlp.0.bias: {shape: [intermediate], from: [up.bias]}
out.weight: {shape: [hidden, intermediate], from: {names: [down.weight], transposed: true}, quant: true}
head.weight: {shape: [vocab, hidden], quant: int8, tied_to: embed.weight}
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkpoint of that model, whose architectures are registered while the test runs."""
    (tmp_path / "own.yaml").write_text(TABLE)
    (tmp_path / "own.py").write_text(MODEL)
    _, made = make_llama(tmp_path, tie_word_embeddings=True, hidden_size=96, intermediate_size=64)
    torch.manual_seed(0)
    tensors = {"embed": (199, 96), "up": (64, 96), "down": (64, 96)}
    values = {f"{name}.weight": torch.randn(shape) / 8 for name, shape in tensors.items()}
    save_file(values | {"up.bias": torch.randn(64)}, made / SINGLE)
    with imported(tmp_path / "own.py", monkeypatch):
        yield made


def load(directory: Path, name: str, ops: Any, **options: Any) -> Any:
    file = directory / "config.json"
    config = json.loads(file.read_text()) | {"architectures": [name], "model_type": "own"}
    file.write_text(json.dumps(config))
    return load_model(directory, load_model_config(directory), ops, **options)


def expected_logits(directory: Path, ids: Tensor) -> Tensor:
    tensors = load_file(directory / SINGLE)
    x = tensors["embed.weight"][ids]
    x = torch.nn.functional.gelu(x @ tensors["up.weight"].t() + tensors["up.bias"])
    return x @ tensors["down.weight"] @ tensors["embed.weight"].t()


IDS = torch.tensor([[5, 9, 77], [140, 3, 3]])  # any shape, as nn.Linear takes it


@pytest.mark.parametrize("name", ["PlainForCausalLM", "SwappedForCausalLM"])
def test_torchs_own_modules_are_filled(name: str, directory: Path) -> None:
    """Guards against a hand-written model that answers with the weights it was made with."""
    model = load(directory, name, ReferenceOps(torch.float32))
    logits = model.compute_logits(model(IDS, None))
    torch.testing.assert_close(logits, expected_logits(directory, IDS), atol=1e-5, rtol=1e-5)
    if name.startswith("Plain"):
        assert model.head.weight is model.embed.weight  # shared as they were
        half = load(directory, name, ReferenceOps(torch.bfloat16))
        assert {value.dtype for value in half.parameters()} == {torch.bfloat16}
    load(directory, name, ReferenceOps(torch.float32), load_format="dummy")


@pytest.mark.skipif(not packed.levels(), reason="no native library")
@pytest.mark.covers("J15")
def test_swapped_products_are_quantised(directory: Path) -> None:
    """Guards against int8 that is asked for and not there: the weights take a byte each, and the answers stay near."""
    ops = load_ops("cpu", torch.float32)
    exact, expected = load(directory, "SwappedForCausalLM", ops), expected_logits(directory, IDS)
    torch.testing.assert_close(exact.compute_logits(exact(IDS, None)), expected, atol=1e-5, rtol=1e-5)
    small = load(directory, "SwappedForCausalLM", ops, scheme=Scheme.parse("int8"))
    assert 64 * 96 <= small.out.packed[0].num_bytes < 2 * 64 * 96
    error = (small.compute_logits(small(IDS, None)) - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.03


def test_one_result_does_not_overwrite_another(directory: Path) -> None:
    """Guards against a model that keeps a product's result while it calls the same layer again."""
    model = load(directory, "SwappedForCausalLM", ReferenceOps(torch.float32))
    first = model.mlp(model.embed(IDS))
    kept = first.clone()
    model.mlp(model.embed(IDS + 1))
    assert torch.equal(first, kept)


def test_what_is_not_swapped_is_not_quantised_or_packed(directory: Path, tmp_path: Path) -> None:
    """Guards against a scheme that is accepted and leaves the weights as they are, and a packed file without them."""
    with pytest.raises(ModelLoadError, match=r"mlp.0.weight cannot be quantised, because torch's own.*swap_linears"):
        load(directory, "PlainForCausalLM", ReferenceOps(torch.float32), scheme=Scheme.parse("int8"))
    if packed.levels():
        with pytest.raises(ModelLoadError, match=r"convert: embed.weight, .* cannot be packed, because torch's own"):
            convert_model(EngineConfig.from_options(model=str(directory)), tmp_path / "packed")


def test_a_module_of_another_shape_is_refused(directory: Path) -> None:
    """Guards against a parameter replaced by one that the module's own code cannot use."""
    with pytest.raises(ModelLoadError, match=r"out.weight has the shape \[96, 96\] in the model; .* \[96, 64\]"):
        load(directory, "WrongForCausalLM", ReferenceOps(torch.float32))
