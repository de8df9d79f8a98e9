"""Scales of an int8 cache by channel: what a file may hold, and that the engine uses it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.errors import InvalidRequestError
from penstock.kernels.tensors import as_torch
from penstock.weights.kv_scales import read_kv_scales
from tests.hf_models import make_llama, random_ids

LAYERS, HKV, D = 2, 2, 8
FIELDS = ("key_scales", "key_offsets", "value_scales", "value_offsets")


def scales(**changes: Tensor | None) -> dict[str, Tensor]:
    """A sound file's tensors, with some changed or left out; names with __ for dots."""
    made = {
        f"layers.{i}.{kind}": torch.rand(HKV, D) + 0.1 for i in range(LAYERS) for kind in ("key_scale", "value_scale")
    }
    for name, tensor in changes.items():
        made.pop(name.replace("__", "."), None)
        if tensor is not None:
            made[name.replace("__", ".")] = tensor
    return made


def read(tmp_path: Path, tensors: dict[str, Tensor]) -> Any:
    save_file(tensors, tmp_path / "scales.safetensors")
    layers = read_kv_scales(tmp_path / "scales.safetensors", [(HKV, D)] * LAYERS)
    return [SimpleNamespace(**{name: as_torch(getattr(layer, name)) for name in FIELDS}) for layer in layers]


def test_every_granularity(tmp_path: Path) -> None:
    """Guards against a scale of the wrong head or channel, and against keys and values mixed up."""
    by_head, offsets = torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.randn(HKV, D, dtype=torch.float64)
    tensors = scales(
        layers__0__key_scale=torch.tensor(0.5), layers__1__key_scale=by_head, layers__1__value_offset=offsets
    )
    first, second = read(tmp_path, tensors)
    assert torch.equal(first.key_scales, torch.full((HKV, D), 0.5))
    assert torch.equal(first.value_scales, tensors["layers.0.value_scale"])
    assert torch.equal(first.key_offsets, torch.zeros(HKV, D))
    assert torch.equal(second.key_scales, torch.tensor([[1.0] * D, [2.0] * D]))
    assert torch.equal(second.value_offsets, offsets.float())
    assert not second.key_offsets.any()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (scales(layers__2__key_scale=torch.ones(1)), r"'layers.2.key_scale' is not a scale"),
        (scales(layers__0__keys=torch.ones(1)), r"'layers.0.keys' is not a scale"),
        (scales(layers__1__value_scale=None), r"layers.1.value_scale is missing"),
        (scales(layers__0__key_scale=torch.ones(D)), r"layers.0.key_scale is F32 \[8\]; it must be one number, \[2\]"),
        (scales(layers__0__key_scale=torch.ones(HKV, D, dtype=torch.int8)), r"layers.0.key_scale is I8"),
        (scales(layers__0__key_scale=torch.zeros(HKV)), r"layers.0.key_scale must be between"),
        (scales(layers__0__value_scale=torch.tensor([1.0, torch.nan])), r"layers.0.value_scale is not finite"),
        (scales(layers__1__key_offset=torch.tensor(torch.inf)), r"layers.1.key_offset is not finite"),
        (scales(layers__1__value_scale=torch.tensor(3e38)), r"layers.1.value_scale must be between"),
        (scales(layers__0__value_offset=torch.tensor(3e38)), r"layers.0.value_offset times its scale"),
    ],
)
def test_what_nobody_could_use_is_refused(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    """Guards against a misspelt tensor that is ignored, and against scales that make NaN of every answer."""
    with pytest.raises(InvalidRequestError, match=message):
        read(tmp_path, tensors)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    """Guards against a traceback where a path is misspelt, longer than a name may be, or no name at all."""
    for name in ("nothing", "x" * 3000, "a\0b", "."):
        with pytest.raises(InvalidRequestError, match="a safetensors file") as caught:
            read_kv_scales(tmp_path / name, [(HKV, D)] * LAYERS)
        assert caught.value.param == "kv_cache_scales"


def test_only_an_int8_cache_has_scales() -> None:
    """Guards against a file that is accepted and ignored."""
    with pytest.raises(InvalidRequestError, match="only kv_cache_dtype = int8") as caught:
        LLM(model="demo", kv_cache_scales="scales.safetensors")
    assert caught.value.param == "kv_cache_scales"


def test_the_engine_uses_them_and_says_so(tmp_path: Path) -> None:
    """Guards against scales that change nothing, and against other answers under the same fingerprint."""
    _, directory = make_llama(tmp_path)
    files = {"fine": 0.05, "coarse": 0.5}
    for name, scale in files.items():
        tensors = {f"layers.{i}.{kind}": torch.tensor(scale) for i in range(2) for kind in ("key_scale", "value_scale")}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    prompt = {"prompt_token_ids": random_ids(40)}

    def answer(**options: Any) -> tuple[Tensor, str]:
        with LLM(model=str(directory), dtype="float32", kernels="reference", **options) as llm:
            (output,) = llm.generate([prompt], params)
            assert output.prompt_logprobs is not None
            found = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs if entry is not None]
            return torch.tensor(found), llm.engine.model_info.system_fingerprint

    exact, fingerprint = answer()
    found = {"tokens": answer(kv_cache_dtype="int8")}
    for name in files:
        found[name] = answer(kv_cache_dtype="int8", kv_cache_scales=str(tmp_path / f"{name}.safetensors"))
    errors = {name: float((logprobs - exact).abs().max()) for name, (logprobs, _) in found.items()}
    assert 0 < errors["tokens"] < 0.05
    assert errors["fine"] < 0.2 < errors["coarse"], errors
    assert len({fingerprint, *(word for _, word in found.values())}) == 4
