"""Checkpoints of safetensors: single, sharded, damaged, hostile."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.errors import ModelLoadError
from penstock.kernels.tensors import as_torch
from penstock.weights import safetensors
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
        assert torch.equal(as_torch(checkpoint.rows("one").read(0, 2)), ONE)
        assert torch.equal(as_torch(checkpoint.rows("one").read(1, 2)), ONE[1:])
        assert torch.equal(as_torch(checkpoint.rows("two").read(0, 4)), TWO)
        assert torch.equal(as_torch(checkpoint.rows("two").read(1, 3)), TWO[1:3])


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
    shards(tmp_path, files, {"one": "a.safetensors", "two": "c" * 300 + ".safetensors"})  # longer than a name may be
    with pytest.raises(ModelLoadError, match=r"c+ is missing"):
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


FAR = 2**63
F32 = '{"dtype": "F32", "shape": [1], "data_offsets": '
HOSTILE: dict[str, tuple[bytes | str, bytes]] = {
    "duplicate": (f'{{"a": {F32}[0, 4]}}, "a": {F32}[0, 4]}}}}', bytes(4)),
    "duplicate field": ('{"a": {"dtype": "F32", "shape": [2], "shape": [1], "data_offsets": [0, 4]}}', bytes(4)),
    "overlap": (f'{{"a": {F32}[0, 4]}}, "b": {F32}[2, 6]}}}}', bytes(6)),
    "gap": (f'{{"a": {F32}[0, 4]}}, "b": {F32}[8, 12]}}}}', bytes(12)),
    "trailing bytes": (f'{{"a": {F32}[0, 4]}}}}', bytes(5)),
    "deep JSON": ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", b""),
    "bad UTF-8": (b'{"\xff": 1}', b""),
    "negative offsets": (f'{{"a": {F32}[-4, 0]}}}}', bytes(4)),
    "shape of other bytes": ('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', bytes(4)),
    "negative shape": ('{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', bytes(4)),
    "overflow": (f'{{"a": {{"dtype": "F32", "shape": [{FAR}, {FAR}], "data_offsets": [0, 4]}}}}', bytes(4)),
    "shape of lists": ('{"a": {"dtype": "F32", "shape": [[1]], "data_offsets": [0, 4]}}', bytes(4)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_headers_are_refused(kind: str, tmp_path: Path) -> None:
    """Guards against a header that two readers would read differently (two equal keys), and against one that is only
    found out when its tensor is asked for."""
    text, data = HOSTILE[kind]
    header = text if isinstance(text, bytes) else text.encode()
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + data)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: "):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 200_000_000, 3])
def test_header_lengths_beyond_the_file(length: int, tmp_path: Path) -> None:
    """Guards against reading, or allocating, as much as eight bytes say."""
    (tmp_path / SINGLE).write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelLoadError, match="cut short"):
        Checkpoint(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that opens and cannot be read")
@pytest.mark.parametrize("read", [Checkpoint, fingerprint])
def test_an_unreadable_file_is_named(read: Callable[[Path], object], tmp_path: Path) -> None:
    """Guards against a bare OSError from a disk error or a file without permission."""
    (tmp_path / SINGLE).symlink_to("/proc/self/mem")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: cannot be read"):
        read(tmp_path)


def test_directories_in_place_of_files(tmp_path: Path) -> None:
    """Guards against IsADirectoryError, for the weights, a shard and the headers behind them."""
    (tmp_path / SINGLE).mkdir()
    with pytest.raises(ModelLoadError, match="no weights"):
        Checkpoint(tmp_path)
    with pytest.raises(ModelLoadError, match="cannot be read"):
        safetensors.read_header(tmp_path / SINGLE)
    (tmp_path / "a.safetensors").mkdir()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"one": "a.safetensors"}}))
    with pytest.raises(ModelLoadError, match=r"a\.safetensors is missing"):
        Checkpoint(tmp_path)


def test_a_file_cut_short_is_refused_at_once(tmp_path: Path) -> None:
    """Guards against weights that end in zeros after an interrupted copy, noticed only when they are read."""
    save_file({"one": torch.ones(1000)}, tmp_path / SINGLE)
    whole = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(whole[:-100])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: not a sound"):
        Checkpoint(tmp_path)


def test_integer_tensors_are_refused(tmp_path: Path) -> None:
    """Guards against a quantised checkpoint without quantization_config, whose integers would pass for weights."""
    save_file({"one": torch.ones(3, dtype=torch.int8)}, tmp_path / SINGLE)
    with pytest.raises(ModelLoadError, match="one is I8"):
        Checkpoint(tmp_path).rows("one")


def test_rows_of_a_file_that_changed_are_refused(tmp_path: Path) -> None:
    """Guards against zeros, or a wait for ever, where a checkpoint is cut or removed while it is loaded."""
    save_file({"one": torch.ones(1000)}, tmp_path / SINGLE)
    rows = Checkpoint(tmp_path).rows("one")
    (tmp_path / SINGLE).write_bytes((tmp_path / SINGLE).read_bytes()[:-4])
    assert torch.equal(as_torch(rows.read(0, 999)), torch.ones(999))
    with pytest.raises(ModelLoadError, match="one is cut short"):
        rows.read(0, 1000)
    (tmp_path / SINGLE).unlink()
    with pytest.raises(ModelLoadError, match="one cannot be read"):
        rows.read(0, 1)


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
