"""Files of torch.save are read in place, and never run."""

import json
import os
import pickle
import random
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock import LLM, SamplingParams
from penstock.errors import ModelLoadError
from penstock.weights.safetensors import Checkpoint
from penstock_lab.convert.rewrite import rewrite_model
from tests.hf_models import MAKERS, random_ids

BIN = "pytorch_model.bin"


def save(value: Any, directory: Path, name: str = BIN, **options: Any) -> Path:
    torch.save(value, directory / name, **options)
    return directory


def tokens(directory: Path) -> list[int]:
    llm = LLM(model=str(directory), dtype="float32", threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    return list(llm.generate([{"prompt_token_ids": random_ids(20)}], params)[0].outputs[0].token_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values_are_those_that_were_saved(dtype: torch.dtype, tmp_path: Path) -> None:
    """Guards against another place, type or shape, tensors that share a storage, and parameters."""
    whole = torch.randn(6, 4).to(dtype)
    save({"a": whole, "part": whole[2:5], "p": torch.nn.Parameter(whole[0].clone()), "step": 3}, tmp_path)
    checkpoint = Checkpoint(tmp_path)
    for name, tensor in {"a": whole, "part": whole[2:5]}.items():
        rows = checkpoint.rows(name).read(1, 3)
        assert torch.equal(torch.frombuffer(bytearray(rows.tobytes()), dtype=dtype).reshape(2, 4), tensor[1:3])
    assert checkpoint.entries["p"].shape == (4,)
    assert "step" not in checkpoint.entries


def test_a_model_gives_the_same_tokens(tmp_path: Path) -> None:
    """Guards against a checkpoint that has to be converted before it is served, and a conversion that changes it."""
    _, directory = MAKERS["llama"](tmp_path)
    expected = tokens(directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    assert tokens(save(tensors, directory)) == expected
    rewrite_model(str(directory), tmp_path / "plain", "transformers", 10**9)
    assert tokens(tmp_path / "plain") == expected
    (directory / BIN).unlink()
    halves = {"a.bin": dict(list(tensors.items())[::2]), "b.bin": dict(list(tensors.items())[1::2])}
    for name, half in halves.items():
        save(half, directory, name)
    index = {"weight_map": {name: file for file, half in halves.items() for name in half}}
    (directory / f"{BIN}.index.json").write_text(json.dumps(index))
    assert tokens(directory) == expected
    (directory / f"{BIN}.index.json").unlink()
    with pytest.raises(ModelLoadError, match=r"a\.bin is not read"):
        Checkpoint(directory)
    assert tokens(save({"model": tensors}, directory, "consolidated.00.pth")) == expected


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def write(directory: Path, data: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    """Write an archive with the given data.pkl."""
    with zipfile.ZipFile(directory / BIN, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/data/0", bytes(64))
    return directory


STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x10tQ"
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K%cK%c\x85K\x01\x85\x89NtR"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickle.dumps({"a": _Evil()}, 2), r"posix\.mkdir, which no state dict needs"),
        (pickle.dumps(_Evil(), 4), r"posix\.mkdir, which no state dict needs"),
        (b"\x80\x02cbuiltins\neval\n(X\x01\x00\x00\x001tR.", r"builtins\.eval"),
        (b"\x80\x02}X\x01\x00\x00\x00a" + TENSOR % (0, 17) + b"s.", "larger than its storage"),
        (b"\x80\x02}X\x01\x00\x00\x00a" + TENSOR % (1, 16) + b"s.", "larger than its storage"),
        (b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"K\x01s.", "neither a word nor a number"),
        (b"\x80\x02}r\xff\xff\xff\xff.", "no tensors"),
        (b"\x80\x02}(X\x01\x00\x00\x00ai__main__\nx\n.", "INST is not supported"),
        (b"\x80\x02.", "list index|pop from"),
        (b"\x80\x02}", "exhausted|no end"),
        (b"\x80\x02X\xff\xff\xff\xffa.", "expected 4294967295 bytes"),
    ],
)
def test_what_is_no_list_of_tensors_is_refused(
    data: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against code of a stranger, memory that a number of four bytes asks for, and a recursion without end."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match=rf"pytorch_model\.bin: .*({message})"):
        Checkpoint(write(tmp_path, data))
    assert not (tmp_path / "ran").exists()


def test_other_archives_are_refused(tmp_path: Path) -> None:
    """Guards against compressed members read as if they were not, tensors out of order, and the format before 1.6."""
    with pytest.raises(ModelLoadError, match=r"data\.pkl is compressed"):
        Checkpoint(write(tmp_path, pickle.dumps({}, 2), zipfile.ZIP_DEFLATED))
    with pytest.raises(ModelLoadError, match="elements are not in order"):
        Checkpoint(save({"a": torch.ones(3, 4).T}, tmp_path))
    with pytest.raises(ModelLoadError, match=r"older than torch 1\.6"):
        Checkpoint(save({"a": torch.ones(3)}, tmp_path, _use_new_zipfile_serialization=False))


def test_mutated_files(tmp_path: Path) -> None:
    """Guards against anything but a checkpoint or one line."""
    save({f"layer.{index}.weight": torch.ones(4, 3) for index in range(3)}, tmp_path)
    sound, rng = (tmp_path / BIN).read_bytes(), random.Random(5)
    for _ in range(300):
        data = bytearray(sound)
        for _ in range(rng.choice((1, 2, 8))):
            data[rng.randrange(len(data))] = rng.choice((0, 0xFF, rng.randrange(256)))
        (tmp_path / BIN).write_bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])
        with suppress(ModelLoadError):
            checkpoint = Checkpoint(tmp_path)
            for name, entry in checkpoint.entries.items():
                checkpoint.rows(name).read(0, entry.shape[0] if entry.shape else 0)
