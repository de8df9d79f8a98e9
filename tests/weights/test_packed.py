"""Packed directories: what convert writes is what loading a checkpoint makes, and nothing else is taken for it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.assembly import build_engine
from penstock.config import EngineConfig, NumericsConfig
from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.kernels.backends import load_ops
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.scheme import Scheme
from penstock.kernels.tensors import as_torch
from penstock.models.config_json import load_model_config
from penstock.ranks.build import RankPlace
from penstock.ranks.stage import Stage
from penstock.weights.loader import ANYWHERE, load_model, weight_layers
from penstock.weights.packed import fit, read_info
from penstock.weights.safetensors import PACKED, Checkpoint, fingerprint, read_entries, verify_checksums
from penstock_lab.check.files import check_files
from penstock_lab.convert.pack import convert_model
from tests.hf_models import make_llama, make_qwen2
from tests.kernels import packed
from tests.weights.gguf_files import write_gguf

pytestmark = pytest.mark.skipif(not packed.levels(), reason="no native library")
SCHEMES: list[dict[str, Any]] = [
    {},
    {"quantization": "int8"},
    {"quantization": "int4", "quantization_group_size": 32},
    {"dtype": "float32", "quantization": "int4-a16"},
]


def load(directory: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    return load_model(directory, load_model_config(directory), load_ops("cpu", dtype), **options)


def convert(source: Path, destination: Path, **options: Any) -> int:
    return convert_model(EngineConfig.from_options(model=str(source), **options), destination)


def state_of(model: object) -> dict[str, torch.Tensor]:
    """Everything that a model's layers hold, by layer and part."""
    result = {}
    for name, layer in weight_layers(model):
        result.update({f"{name}.{part}": as_torch(value) for part, value in layer.state().items()})
    return result


@pytest.fixture
def int8_directory(tmp_path: Path) -> Path:
    _, source = make_llama(tmp_path)
    convert(source, tmp_path / "packed", dtype="bfloat16", quantization="int8")
    return tmp_path / "packed"


@pytest.mark.parametrize("options", SCHEMES, ids=str)
def test_a_converted_model_is_the_loaded_one(options: dict[str, Any], tmp_path: Path) -> None:
    """Guards against a layer that is packed otherwise, forgotten or mixed up; biases and a tied head are there too."""
    _, source = make_qwen2(tmp_path, tie_word_embeddings=True)
    config = {"dtype": "bfloat16"} | options
    size = convert(source, tmp_path / "packed", **config)
    assert size == (tmp_path / "packed" / PACKED).stat().st_size
    dtype = getattr(torch, config["dtype"])
    scheme = Scheme.parse(config.get("quantization"), config.get("quantization_group_size"))
    expected = state_of(load(source, dtype, scheme=scheme))
    found = state_of(load(tmp_path / "packed", dtype, scheme=scheme))
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name


@pytest.mark.parametrize("kind", ["floats", "Q8_0"])
def test_a_tied_embedding_is_written_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a table beside the head that holds the same rows, and a stage without a head that misses it; files
    that hold both are read too."""
    model, source = make_qwen2(tmp_path, tie_word_embeddings=True, hidden_size=96, intermediate_size=160)
    if kind != "floats":
        source = write_gguf(model, tmp_path / "model.gguf", kind)
    convert(source, tmp_path / "once", dtype="bfloat16")
    monkeypatch.setattr("penstock_lab.convert.pack.tied_heads", lambda *_: {})
    convert(source, tmp_path / "twice", dtype="bfloat16")
    once, twice = (read_entries(tmp_path / name / PACKED) for name in ("once", "twice"))
    embedding = {name for name in twice if "embed_tokens" in name and not name.startswith("_filler.")}
    assert embedding
    assert not embedding & {*once}

    whole = load(source)
    expected = as_torch(whole.decoder.embed_tokens.table()).float()
    for name in ("once", "twice"):
        assert {*state_of(load(tmp_path / name))} == {*state_of(whole)}
        for place in (ANYWHERE, RankPlace(stage=Stage(range(1), 2))):
            found = load(tmp_path / name, place=place)
            assert ("lm_head" in dict(weight_layers(found))) == place.is_whole
            assert torch.equal(as_torch(found.decoder.embed_tokens.table()).float(), expected)


def test_loading_copies_nothing(int8_directory: Path) -> None:
    """Guards against weights that every process holds for itself: they lie in the pages of the file."""
    model = load(int8_directory, scheme=Scheme.parse("int8"))
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if PACKED in line]
    ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps]
    for name, tensor in state_of(model).items():
        if "norm" not in name:
            assert any(low <= tensor.data_ptr() < high for low, high in ranges), name


def test_the_file_is_a_safetensors_file(int8_directory: Path) -> None:
    """Guards against tensors that kernels could not read where they are, and holes that other readers refuse."""
    entries = read_entries(int8_directory / PACKED)
    assert all(entry.offset % 64 == 0 for name, entry in entries.items() if not name.startswith("_filler."))
    assert "model.layers.1.mlp.down_proj.column_scales" in entries
    assert str(read_info(int8_directory / PACKED)) == "bfloat16, int8"


def test_companions_come_along_and_the_fingerprint_tells_directories_apart(tmp_path: Path) -> None:
    """Guards against a converted model without its tokenizer, and one whose answers cannot be told from another's."""
    _, source = make_llama(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (source / name).write_text("{}")
    (source / "notes.txt").write_text("stays")
    convert(source, tmp_path / "one", quantization="int8")
    convert(source, tmp_path / "two", quantization="int8")
    convert(source, tmp_path / "three")
    names = {file.name for file in (tmp_path / "one").iterdir()}
    assert names == {PACKED, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                     "chat_template.jinja"}  # fmt: skip
    words = [fingerprint(tmp_path / name) for name in ("one", "two", "three")]
    assert words[0] == words[1]
    assert len({*words, fingerprint(source)}) == 3


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"dtype": "float32"}, "dtype"),
        ({"quantization": "int4"}, "quantization"),
        ({"kernels": "reference"}, "kernels"),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], param: str, int8_directory: Path) -> None:
    """Guards against an option that is ignored in silence."""
    with pytest.raises(InvalidRequestError, match=rf"^{param}: '.*packed") as caught:
        fit(NumericsConfig(**options), int8_directory)
    assert caught.value.param == param


def test_open_options_become_what_the_directory_holds(int8_directory: Path, tmp_path: Path) -> None:
    """Guards against int8 weights read as bfloat16, and against refusing a scheme that stores weights alike."""
    numerics, reasons = fit(NumericsConfig(), int8_directory)
    assert (numerics.dtype, numerics.quantization) == ("bfloat16", "int8")
    assert set(reasons) == {"dtype", "quantization"}
    finer, _ = fit(NumericsConfig(quantization="int8-x2"), int8_directory)
    assert finer.quantization == "int8-x2"
    load(int8_directory, scheme=finer.scheme)
    assert fit(NumericsConfig(quantization="int4"), tmp_path)[1] == {}
    _, source = make_llama(tmp_path / "other")
    convert(source, tmp_path / "int4", quantization="int4", quantization_group_size=64)
    assert fit(NumericsConfig(), tmp_path / "int4")[0].quantization_group_size == 64
    assert fit(NumericsConfig(quantization="int4-a16"), tmp_path / "int4")[0].quantization_group_size == 64
    with pytest.raises(InvalidRequestError, match=r"^quantization_group_size: 32 "):
        fit(NumericsConfig(quantization="int4", quantization_group_size=32), tmp_path / "int4")


def test_a_group_size_alone_is_held_against_the_directory(int8_directory: Path, tmp_path: Path) -> None:
    """Guards against refusing what the directory holds, and against a size that is ignored or leads to a traceback."""
    _, source = make_llama(tmp_path / "other")
    convert(source, tmp_path / "int4", quantization="int4", quantization_group_size=32)
    numerics, reasons = fit(NumericsConfig(quantization_group_size=32), tmp_path / "int4")
    assert (numerics.quantization, numerics.quantization_group_size) == ("int4", 32)
    assert set(reasons) == {"dtype", "quantization"}
    convert(source, tmp_path / "plain")
    for directory, size in ((tmp_path / "int4", 64), (int8_directory, 32), (tmp_path / "plain", 32)):
        with pytest.raises(InvalidRequestError, match=rf"^quantization_group_size: {size} does not match .*packed"):
            fit(NumericsConfig(quantization_group_size=size), directory)


@pytest.mark.parametrize("kernels", ["auto", "cpu"])
def test_packed_weights_without_native_kernels_are_refused(
    kernels: str, int8_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against "use cpu" where there is none, and against a word about the reference, which nobody asked for."""
    monkeypatch.setattr("penstock.weights.packed.best_level", lambda: None)
    monkeypatch.setattr("penstock.weights.packed.why_missing", lambda: "there was no C++ compiler")
    with pytest.raises(InvalidRequestError, match=r"^kernels: .*packed weights need .*no C\+\+ compiler$") as caught:
        fit(NumericsConfig(kernels=kernels), int8_directory)
    assert caught.value.param == "kernels"
    assert fit(NumericsConfig(load_format="dummy"), int8_directory) == (NumericsConfig(load_format="dummy"), {})


def test_random_weights_do_not_care_what_is_packed(int8_directory: Path) -> None:
    """Guards against load_format=dummy that is held against a file which it never reads."""
    numerics = NumericsConfig(load_format="dummy", dtype="float32", kernels="reference")
    assert fit(numerics, int8_directory) == (numerics, {})


def test_other_readers_refuse_packed_weights(int8_directory: Path, tmp_path: Path) -> None:
    """Guards against a traceback, or bytes taken for something else, below the engine's own check."""
    config = load_model_config(int8_directory)
    with pytest.raises(InvalidRequestError, match=r"kernels: 'reference' cannot read packed weights"):
        load_model(int8_directory, config, ReferenceOps(torch.bfloat16), scheme=Scheme.parse("int8"))
    with pytest.raises(InvalidRequestError, match=r"^dtype: 'float32'"):
        load(int8_directory, torch.float32, scheme=Scheme.parse("int8"))
    with pytest.raises(InvalidRequestError, match=r"^quantization: None"):
        load(int8_directory)
    with pytest.raises(ModelLoadError, match="packed"):
        Checkpoint(int8_directory)
    with pytest.raises(InvalidRequestError, match="packed weights already"):
        convert(int8_directory, tmp_path / "again", quantization="int8")


def damage_header(file: Path, old: str, new: str) -> None:
    content = file.read_bytes()
    assert len(old) == len(new)
    assert old.encode() in content
    file.write_bytes(content.replace(old.encode(), new.encode(), 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"version":"2"', '"version":"9"', "version 9.*Convert the checkpoint again"),
        ('"format":"penstock-packed"', '"format":"penstock-pickle"', "holds no packed weights"),
        ('"quantization":"int8"', '"quantization":"int7"', "metadata is damaged"),
        ('"quantization":"int8"', '"group_size"  : 1e999', "metadata is damaged"),
        ("model.layers.0.mlp.down_proj.values", "model.layers.0.mlp.down_proj.volume", "down_proj does not match"),
        ("model.layers.1.mlp.", "model.layers.9.mlp.", "does not match config.json in model.layers"),
    ],
)
def test_damaged_headers_are_refused(old: str, new: str, message: str, int8_directory: Path) -> None:
    """Guards against a segmentation fault where a file is not what the loader thinks."""
    damage_header(int8_directory / PACKED, old, new)
    with pytest.raises(ModelLoadError, match=message):
        load(int8_directory, scheme=Scheme.parse("int8"))


@pytest.mark.parametrize("size", [0, 5, 3000, -1])
def test_a_file_cut_short_is_refused(size: int, int8_directory: Path) -> None:
    """Guards against a bus error in the middle of an answer."""
    file = int8_directory / PACKED
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelLoadError, match=r"penstock\.safetensors: .*(cut short|not a sound)"):
        load(int8_directory, scheme=Scheme.parse("int8"))


def test_another_models_config_is_refused(int8_directory: Path) -> None:
    """Guards against kernels that read beyond a weight because config.json was edited."""
    config = json.loads((int8_directory / "config.json").read_text())
    (int8_directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 4096}))
    with pytest.raises(ModelLoadError, match=r"does not match config.json"):
        load(int8_directory, scheme=Scheme.parse("int8"))


def test_dummy_weights_can_be_packed(tmp_path: Path) -> None:
    """Guards against conversions that need weights to measure with: config.json is enough."""
    _, source = make_llama(tmp_path / "source")
    (tmp_path / "bare").mkdir()
    shutil.copy(source / "config.json", tmp_path / "bare")
    convert(tmp_path / "bare", tmp_path / "packed", load_format="dummy", dtype="bfloat16")
    expected = state_of(load(tmp_path / "bare", load_format="dummy"))
    found = state_of(load(tmp_path / "packed"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def rewrite_header(file: Path, change: Any) -> None:
    """Change the header of a file of packed weights in place; its length stays."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    change(header)
    file.write_bytes(content[:8] + json.dumps(header, separators=(",", ":")).encode().ljust(size) + content[8 + size :])


@pytest.mark.parametrize("place", [0.3, 0.6, 0.999])
def test_damaged_data_are_found(place: float, int8_directory: Path) -> None:
    """Guards against a bit that a disk has turned: without checksums it is a slightly other model, and nobody knows."""
    assert "tensors have the checksums" in verify_checksums(int8_directory)
    content = bytearray((int8_directory / PACKED).read_bytes())
    content[int(place * len(content))] ^= 1
    (int8_directory / PACKED).write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"penstock.safetensors: \S+ is damaged: its checksum differs"):
        verify_checksums(int8_directory)
    with pytest.raises(ModelLoadError, match="is damaged"):
        build_engine(EngineConfig.from_options(model=str(int8_directory), verify_files=True))
    report = check_files(str(int8_directory))
    assert [finding.passed for finding in report.findings][:3] == [True, True, False]


def test_a_damaged_header_is_found(int8_directory: Path) -> None:
    """Guards against two tensors of one shape that have changed places, which the data's checksums cannot see."""

    def swap(header: dict[str, Any]) -> None:
        one, other = (f"model.layers.{layer}.mlp.down_proj.values" for layer in (0, 1))
        header[one], header[other] = header[other], header[one]

    rewrite_header(int8_directory / PACKED, swap)
    with pytest.raises(ModelLoadError, match="its header is damaged"):
        verify_checksums(int8_directory)


def test_files_without_checksums_are_served(int8_directory: Path, tmp_path: Path) -> None:
    """Guards against files that an older version has written, and checkpoints, which have none."""
    rewrite_header(int8_directory / PACKED, lambda header: header["__metadata__"].pop("crc32"))
    assert verify_checksums(int8_directory) == f"{PACKED}: no checksums in it, only its structure is verified"
    load(int8_directory, scheme=Scheme.parse("int8"))


@pytest.mark.parametrize("options", [{"load_format": "dummy"}])
def test_nothing_to_verify_is_said(options: dict[str, Any]) -> None:
    """Guards against an option that is accepted and ignored."""
    with pytest.raises(InvalidRequestError, match="verify_files"):
        EngineConfig.from_options(verify_files=True, **options)
