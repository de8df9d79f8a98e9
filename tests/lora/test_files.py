"""Adapters that are refused: each error names the file and the tensor or the option, and the engine stays as it is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.assembly import BuiltEngine, build_engine
from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.interface.messages import EngineRequest
from penstock.interface.sampling_params import SamplingParams
from penstock.models.config_json import load_model_config
from penstock.weights.adapters import digest_of
from penstock.weights.loader import open_reader
from penstock.weights.sources import DummySource
from tests.families.case import all_cases
from tests.hf_models import make_llama, random_ids
from tests.lora.peft_adapters import make_adapter

Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj"
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors, dict[str, Any]]:
    """A model's directory, and the tensors and the config of an adapter that fits it."""
    at = tmp_path_factory.mktemp("files")
    model, directory = make_llama(at)
    make_adapter(model, at / "adapter")
    tensors = load_file(at / "adapter" / "adapter_model.safetensors")
    return directory, tensors, json.loads((at / "adapter" / "adapter_config.json").read_text())


def read(directory: Path, tensors: Tensors, config: dict[str, Any], at: Path, max_rank: int = 256) -> Any:
    at.mkdir(exist_ok=True)
    save_file(tensors, at / "adapter_model.safetensors")
    (at / "adapter_config.json").write_text(json.dumps(config))
    return open_reader(load_model_config(directory), DummySource()).read(at, max_rank)


def changed(name: str, value: Any) -> Callable[[Tensors, dict[str, Any]], None]:
    return lambda _, config: config.update({name: value})


def moved(name: str, to: str | None, shape: tuple[int, ...] | None = None) -> Callable[[Tensors, dict[str, Any]], None]:
    """Give a tensor another name or shape, or drop it."""

    def change(tensors: Tensors, _: dict[str, Any]) -> None:
        value = tensors.pop(name)
        if to is not None:
            tensors[to] = value if shape is None else np.zeros(shape, np.float32)

    return change


def renamed(part: str, to: str) -> Callable[[Tensors, dict[str, Any]], None]:
    """Give all tensors whose names have a part other names."""

    def change(tensors: Tensors, _: dict[str, Any]) -> None:
        for name in [name for name in tensors if part in name]:
            tensors[name.replace(part, to)] = tensors.pop(name)

    return change


A, B = f"{Q_PROJ}.lora_A.weight", f"{Q_PROJ}.lora_B.weight"
WRONG: dict[str, tuple[Callable[[Tensors, dict[str, Any]], None], str]] = {
    "another method": (changed("peft_type", "IA3"), "peft_type = 'IA3'"),
    "an unknown option": (changed("use_magic", True), "use_magic = True"),
    "layers that are copied": (changed("layer_replication", [[0, 2]]), "layer_replication"),
    "parameters of experts": (changed("target_parameters", ["experts.gate_up_proj"]), "target_parameters"),
    "an activated adapter": (changed("alora_invocation_tokens", [1]), "alora_invocation_tokens"),
    "a rank of 0": (changed("r", 0), "r = 0"),
    "a rank of 257": (changed("r", 257), "r = 257"),
    "another rank": (changed("r", 8), "has rank 4, but adapter_config.json says 8"),
    "an alpha that is no number": (changed("lora_alpha", "8"), "lora_alpha"),
    "a pattern that takes hours": (changed("rank_pattern", {"(.*)*x": 4}), "rank_pattern"),
    "options that take hours": (changed("rank_pattern", {".?" * 90 + "x": 4}), "rank_pattern"),
    "groups that take hours": (changed("rank_pattern", {"(.|.)" * 30 + "x": 4}), "rank_pattern"),
    "a pattern that is none": (changed("alpha_pattern", {"(": 4}), "alpha_pattern"),
    "a pattern that ends no other": (changed("alpha_pattern", {"(?i)q_proj": 4}), "alpha_pattern"),
    "DoRA without magnitudes": (changed("use_dora", True), "use_dora"),
    "no A": (moved(A, None), "lora_A.weight is missing"),
    "a wrong A": (moved(A, A, (4, 47)), f"{A}: it has the shape [4, 47]; the model requires [4, 48]"),
    "a wrong B": (moved(B, B, (48, 5)), f"{B}: it has the shape [48, 5]; the model requires [48, 4]"),
    "a vector": (moved(A, A, (4,)), f"{A}: it has the shape [4]"),
    "no such layer": (renamed("layers.1.", "layers.22."), "has no module model.layers.22."),
    "an expert": (moved(A, A.replace("self_attn.q_proj", "mlp.experts.0.up_proj")), "module of experts"),
    "a head": (moved(A, "base_model.model.lm_head.lora_A.weight"), "LoRA of lm_head is not supported"),
    "an embedding": (moved(A, "base_model.model.model.embed_tokens.lora_embedding_A"), "LoRA of an embedding"),
    "a whole weight": (moved(A, "base_model.model.lm_head.weight"), "modules_to_save"),
    "another tensor": (moved(A, "base_model.model.x.hada_w1_a"), "no tensor of LoRA"),
}


@pytest.mark.parametrize("what", WRONG)
def test_refused(files: tuple[Path, Tensors, dict[str, Any]], what: str, tmp_path: Path) -> None:
    """Guards against an adapter that is applied in part, or otherwise than it was trained."""
    directory, tensors, config = files[0], dict(files[1]), dict(files[2])
    change, message = WRONG[what]
    change(tensors, config)
    with pytest.raises(ModelLoadError) as error:
        read(directory, tensors, config, tmp_path / "adapter")
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_values_that_are_not_finite(files: tuple[Path, Tensors, dict[str, Any]], tmp_path: Path) -> None:
    """Guards against an adapter that would fail every request, and perhaps only much later."""
    directory, tensors, config = files
    with pytest.raises(ModelLoadError, match="not finite"):
        read(directory, {**tensors, B: np.full_like(tensors[B], np.nan)}, config, tmp_path / "adapter")


def test_experts_of_transformers(tmp_path: Path) -> None:
    """Guards against experts that keep their base weights in silence, where PEFT adapts the whole tensors of them."""
    (case,) = (item for item in all_cases() if item.name == "mixtral")
    model, directory = case.make(tmp_path)
    make_adapter(model, tmp_path / "adapter", target_parameters=["mlp.experts.down_proj"], lora_dropout=0.0)
    with pytest.raises(ModelLoadError, match="target_parameters"):
        open_reader(load_model_config(directory), DummySource()).read(tmp_path / "adapter")


def engine_of(directory: Path, **options: Any) -> BuiltEngine:
    fixed = {"model": str(directory), "load_format": "mock", "max_model_len": 128, "enable_lora": True, "max_loras": 2}
    return build_engine(EngineConfig.from_options(**fixed | options))


def copies(files: tuple[Path, Tensors, dict[str, Any]], at: Path, count: int) -> list[str]:
    """Directories of adapters with different contents."""
    for index in range(count):
        read(files[0], {key: value + index for key, value in files[1].items()}, files[2], at / str(index))
    return [str(at / str(index)) for index in range(count)]


def test_the_table_of_an_engine(files: tuple[Path, Tensors, dict[str, Any]], tmp_path: Path) -> None:
    """Guards against a request that changes to another adapter when its name is dropped or taken over, a slot that is
    overwritten while it is used, and a failed load that costs what was loaded."""
    engine = engine_of(files[0]).engine
    paths = copies(files, tmp_path, 3)
    first = engine.add_adapter("a", paths[0])
    assert (first.rank, first.path) == (4, paths[0])
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)

    def tokens(name: str) -> list[int]:
        found = []
        while engine.has_work:
            found += [token for out in engine.step() if out.request_id == name for token in out.new_token_ids]
        return found

    def start(name: str, adapter: str) -> None:
        engine.add_request(EngineRequest(name, random_ids(20), params, adapter=adapter))

    start("alone", "a")
    expected = tokens("alone")
    start("pinned", "a")
    engine.step()
    assert engine.add_adapter("a", paths[1]).sha256 != first.sha256  # other content takes the name over
    start("new", "a")
    with pytest.raises(InvalidRequestError, match="max_loras"):  # one slot has the new one, one is in use
        engine.add_adapter("b", paths[2])
    assert engine.remove_adapter("a")
    assert not engine.remove_adapter("a")
    with pytest.raises(InvalidRequestError, match="not loaded"):
        start("late", "a")
    again = tokens("pinned")
    assert [*expected[-len(again) :]] == again
    engine.add_adapter("a", paths[0])
    engine.add_adapter("b", paths[1])
    start("used", "a")
    tokens("used")
    engine.add_adapter("c", paths[2])  # the least recently used one makes way
    assert [item.name for item in engine.adapters or ()] == ["a", "c"]
    with pytest.raises(InvalidRequestError, match=r"no adapter_config\.json"):
        engine.add_adapter("d", str(tmp_path))
    with pytest.raises(InvalidRequestError, match="have changed"):
        engine.add_adapter("c", paths[1], sha256=first.sha256)
    assert [item.name for item in engine.adapters or ()] == ["a", "c"]


def test_an_adapter_that_is_too_large(files: tuple[Path, Tensors, dict[str, Any]], tmp_path: Path) -> None:
    """Guards against an adapter that is cut to the rank that the engine has room for."""
    (path,) = copies(files, tmp_path, 1)
    with pytest.raises(InvalidRequestError, match=r"has rank 4, but the engine has room for rank 3"):
        engine_of(files[0], max_lora_rank=3, lora_modules=[f"a={path}"])
    with pytest.raises(InvalidRequestError, match="enable_lora"):
        build_engine(EngineConfig.from_options(model=str(files[0]), load_format="mock")).engine.add_adapter("a", path)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "no/such"])
def test_a_directory_that_cannot_be(name: str, tmp_path: Path) -> None:
    """Guards against an error of the system's where a request names a directory that no file system can have."""
    with pytest.raises(ModelLoadError, match="not the directory of a LoRA adapter"):
        digest_of(tmp_path / name)
