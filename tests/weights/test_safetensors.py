"""Checkpoints of safetensors: single, sharded, damaged, hostile."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.errors import ModelLoadError
from penstock.weights.safetensors import INDEX, SINGLE, Checkpoint, fingerprint


def shards(
    directory: Path, files: dict[str, dict[str, torch.Tensor]], weight_map: dict[str, str] | None = None
) -> Path:
    for name, tensors in files.items():
        save_file(tensors, directory / name)
    whole = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (directory / INDEX).write_text(json.dumps({"weight_map": whole if weight_map is None else weight_map}))
    return directory


ONE, TWO = torch.arange(6.0).view(2, 3), torch.arange(4.0).bfloat16()


def test_single_and_sharded_checkpoints_read_alike(tmp_path: Path) -> None:
    """Guards against a tensor looked for in the wrong shard, and against a changed type or shape."""
    (tmp_path / "single").mkdir()
    (tmp_path / "sharded").mkdir()
    save_file({"one": ONE, "two": TWO}, tmp_path / "single" / SINGLE)
    shards(tmp_path / "sharded", {"b.safetensors": {"one": ONE}, "a.safetensors": {"two": TWO}})
    for directory in ("single", "sharded"):
        checkpoint = Checkpoint(tmp_path / directory)
        assert {name: (entry.shape, entry.dtype) for name, entry in checkpoint.entries.items()} == {
            "one": ((2, 3), "F32"),
            "two": ((4,), "BF16"),
        }
        assert torch.equal(checkpoint.read("one"), ONE)
        assert torch.equal(checkpoint.read("two"), TWO)


def test_pickles_are_refused_with_the_reason(tmp_path: Path) -> None:
    """Guards against code from a checkpoint being run."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin is a pickle.*runs code"):
        Checkpoint(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    """Guards against a message that does not say what was expected."""
    with pytest.raises(ModelLoadError, match=SINGLE):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "sub/a.safetensors", "a\\b.safetensors", "..", 3, "a.bin"]
)
def test_an_index_cannot_lead_out_of_its_directory(name: object, tmp_path: Path) -> None:
    """Guards against a downloaded index that reads files elsewhere on the machine."""
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"one": ONE}, tmp_path / "outside.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": {"one": name}}))
    with pytest.raises(ModelLoadError, match="plain name"):
        Checkpoint(directory)


def test_shards_that_do_not_fit_their_index(tmp_path: Path) -> None:
    """Guards against an interrupted download, and against shards of two checkpoints in one directory."""
    files = {"a.safetensors": {"one": ONE}, "b.safetensors": {"two": TWO}}
    shards(tmp_path, files, {"one": "a.safetensors", "two": "c.safetensors"})
    with pytest.raises(ModelLoadError, match=r"c\.safetensors is missing"):
        Checkpoint(tmp_path)
    shards(tmp_path, files, {"one": "a.safetensors", "two": "a.safetensors"})
    with pytest.raises(ModelLoadError, match=r"two is not in a\.safetensors"):
        Checkpoint(tmp_path)
    files["b.safetensors"]["one"] = ONE
    shards(tmp_path, files, {"one": "a.safetensors", "two": "b.safetensors"})
    with pytest.raises(ModelLoadError, match=r"one is in two files, a\.safetensors and b\.safetensors"):
        Checkpoint(tmp_path)
    for text in ("{", "[]", '{"weight_map": {}}'):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(ModelLoadError, match=r"index\.json"):
            Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05",
        b"\xff" * 8 + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"{{{{",
        (30).to_bytes(8, "little") + b'{"one": {"shape": "wrong"}}   ',
    ],
)
def test_damaged_headers_are_named(content: bytes, tmp_path: Path) -> None:
    """Guards against a file of random bytes that asks for a header of 2^64 bytes."""
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(ModelLoadError, match=SINGLE):
        Checkpoint(tmp_path)


def test_a_file_cut_short_is_named_when_it_is_read(tmp_path: Path) -> None:
    """Guards against weights that end in zeros after an interrupted copy."""
    save_file({"one": torch.ones(1000)}, tmp_path / SINGLE)
    whole = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(whole[:-100])
    with pytest.raises(ModelLoadError, match="one cannot be read"):
        Checkpoint(tmp_path).read("one")


def test_integer_tensors_are_refused(tmp_path: Path) -> None:
    """Guards against a quantised checkpoint without quantization_config, whose integers would pass for weights."""
    save_file({"one": torch.ones(3, dtype=torch.int8)}, tmp_path / SINGLE)
    with pytest.raises(ModelLoadError, match="one is I8"):
        Checkpoint(tmp_path).read("one")


def test_fingerprint_tells_checkpoints_apart(tmp_path: Path) -> None:
    """Guards against a packed file that is taken for another model's. A change of one value in a small file is seen,
    a copy elsewhere is the same."""
    words = set()
    for index, tensors in enumerate(
        [{"one": ONE}, {"one": ONE + 1}, {"uno": ONE}, {"one": ONE, "two": TWO}, {"one": ONE.view(3, 2)}]
    ):
        (tmp_path / str(index)).mkdir()
        save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / str(index) / SINGLE)
        words.add(fingerprint(tmp_path / str(index)))
    assert len(words) == 5
    (tmp_path / "copy").mkdir()
    save_file({"one": ONE}, tmp_path / "copy" / SINGLE)
    assert fingerprint(tmp_path / "copy") in words
