"""Blocks in files and in memory, and engines that find them again: equal bits, or a miss."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.assembly import BuiltEngine, build_engine
from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError
from penstock.runner import block_store
from penstock.runner.block_store import HEADER_BYTES, BlockFiles, TieredBlockStore
from tests.answers import MAX_MODEL_LEN, PROMPTS, WATCHED, ask, ask_alone, check, request
from tests.kernels.packed import levels

pytestmark = pytest.mark.covers("J23")
NAME = f"0-{'ab' * 16}"


def test_a_changed_byte_anywhere_is_a_miss(tmp_path: Path) -> None:
    """Guards against damage that is believed: every byte of a file, its end, and a file under another's name."""
    content = bytes(range(100))
    assert BlockFiles(tmp_path, "penstock-a", 10**6).write(NAME, content)
    path = tmp_path / "penstock-a" / NAME
    whole = path.read_bytes()
    damaged = [whole[:i] + bytes([whole[i] ^ 4]) + whole[i + 1 :] for i in range(len(whole))]
    for data in (*damaged, whole[:-1], whole[:HEADER_BYTES], b"", whole + b"x"):
        path.write_bytes(data)
        files = BlockFiles(tmp_path, "penstock-a", 10**6)
        assert files.has(NAME)
        assert files.read(NAME, len(content)) is None
        assert not files.has(NAME)
        assert files.num_unreadable == 1
        assert files.write(NAME, content)
        assert files.read(NAME, len(content)) == content
    other = f"1-{'ab' * 16}"
    path.with_name(other).write_bytes(whole)
    assert files.read(other, len(content)) is None


def test_what_is_no_file_is_a_miss(tmp_path: Path) -> None:
    """Guards against a FIFO in a block's place, at which an engine would wait for ever."""
    files = BlockFiles(tmp_path, "penstock-a", 10**6)
    assert files.write(NAME, bytes(100))
    (tmp_path / "penstock-a" / NAME).unlink()
    os.mkfifo(tmp_path / "penstock-a" / NAME)
    assert files.read(NAME, 100) is None
    assert files.read_whole(NAME) is None


def test_the_end_of_the_disk_is_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against blocks that fill the disk on which the journal lies."""
    files = BlockFiles(tmp_path, "penstock-a", 10**6)
    free = [10 * (HEADER_BYTES + 100)]
    monkeypatch.setattr(files, "_free_bytes", lambda: free[0] - sum(p.stat().st_size for p in tmp_path.glob("*/*")))
    names = [f"0-{i:032x}" for i in range(40)]
    assert all(files.write(name, bytes(100)) for name in names)
    assert 5 <= len(list(tmp_path.glob("*/*"))) <= 10
    assert files.read(names[-1], 100) == bytes(100)
    free[0] = 0
    assert not files.write(NAME, bytes(100))


def test_files_are_bounded_and_only_own_ones_deleted(tmp_path: Path) -> None:
    """Guards against a disk that fills up, against losing what is used most, and against a stranger's files."""
    stranger = tmp_path / "penstock-a" / "notes.txt"
    stranger.parent.mkdir()
    stranger.write_bytes(b"x" * 5000)
    files = BlockFiles(tmp_path, "penstock-a", 10 * (HEADER_BYTES + 100))
    names = [f"0-{i:032x}" for i in range(40)]
    for i, name in enumerate(names):
        assert files.write(name, bytes(100))
        os.utime(tmp_path / "penstock-a" / name, ns=(i, i))
    left = sorted(path.name for path in stranger.parent.glob("0-*"))
    assert 5 <= len(left) <= 10
    assert left == names[-len(left) :]
    assert stranger.exists()


def test_a_file_that_another_server_cannot_get_is_not_offered(tmp_path: Path) -> None:
    """Guards against a block that is offered for ever to other servers, whose every request for it fails."""
    files, other = (BlockFiles(tmp_path, "penstock-a", 10**6) for _ in range(2))
    (tmp_path / "penstock-a" / NAME).mkdir()
    assert files.has(NAME)
    assert files.read_whole(NAME) is None
    assert not files.has(NAME)  # it is broken
    (tmp_path / "penstock-a" / NAME).rmdir()
    assert files.write(NAME, b"content")
    assert files.read_whole(NAME) is not None
    (tmp_path / "penstock-a" / NAME).unlink()
    assert files.read_whole(NAME) is None
    assert not files.has(NAME)  # it is gone
    assert other.write(NAME, b"content")
    assert files.has(NAME)  # and has come back


def test_a_disk_that_fails_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Guards against a full disk, or one that cannot be read, that reaches a request; and against a log full of it."""

    def full(name: str, content: bytes) -> bytes:
        raise OSError(28, "No space left on device")

    files = BlockFiles(tmp_path, "penstock-a", 10**6)
    (tmp_path / "penstock-a" / NAME).mkdir()
    assert files.has(NAME)
    assert files.read(NAME, 10) is None
    assert not files.has(NAME)
    monkeypatch.setattr(block_store, "_header", full)
    store = TieredBlockStore([10], 0, files)
    for i in range(3):
        store.save(0, bytes([i]) * 16, bytes(10))
        assert store.counters()["num_saved_blocks_total"] == 0  # a counter that fell would read as a restart
    store.close()
    assert store.counters() == {
        "num_saved_blocks_total": 0, "num_unsaved_blocks_total": 3, "num_unreadable_blocks_total": 1
    }  # fmt: skip
    assert [record.getMessage().count("cannot be") for record in caplog.records] == [1, 1]
    assert not [path for path in (tmp_path / "penstock-a").iterdir() if path.is_file()]


def test_one_block_that_cannot_be_written_does_not_end_the_writing(tmp_path: Path, caplog: Any) -> None:
    """Guards against a thread that ends with the first surprise, after which nothing is kept and nobody is told."""

    class Surprised(BlockFiles):
        def write(self, name: str, content: bytes) -> bool:
            if content == bytes(10):
                raise MemoryError
            return super().write(name, content)

    store = TieredBlockStore([10], 0, Surprised(tmp_path, "penstock-a", 10**6))
    for i in range(3):
        store.save(0, bytes([i]) * 16, bytes([i]) * 10)
    store.close()
    assert (store.counters()["num_saved_blocks_total"], store.counters()["num_unsaved_blocks_total"]) == (2, 1)
    assert "could not be written" in caplog.text


Make = Callable[..., BuiltEngine]
FORMS: dict[str, dict[str, Any]] = {"bfloat16": {}, "float32": {"dtype": "float32"}, "int8": {"kv_cache_dtype": "int8"}}


@pytest.fixture(scope="module", params=FORMS)
def make(request: pytest.FixtureRequest) -> Make:
    form = {
        "model": "demo", "dtype": "bfloat16", "kernels": "cpu", "threads": 1, "max_num_seqs": len(PROMPTS),
        "max_model_len": MAX_MODEL_LEN, **FORMS[request.param],
    }  # fmt: skip
    return lambda **options: build_engine(EngineConfig.from_options(**{**form, **options}))


@pytest.mark.skipif(not levels(), reason="no native library")
def test_a_restart_finds_its_blocks_with_equal_bits(make: Make, tmp_path: Path) -> None:
    """Guards against keys and values that come back changed, after a restart and after damage to the files."""
    alone = ask_alone(make(enable_prefix_caching=False).engine)
    kept = {"kv_offload_dir": str(tmp_path)}
    questions = [request(index, prompt_logprobs=False) for index in WATCHED]
    for cached, damage in (([0, 0, 0, 0, 0], False), ([0, 16, 32, 0, 64], True), ([0, 0, 0, 0, 0], False)):
        built = make(**kept)
        found = ask(built.engine, questions)
        assert [found[index][-1].num_cached_tokens for index in WATCHED[:5]] == cached
        check(found, alone, prompts=False)
        built.engine.check_integrity()
        built.engine.shutdown()
        for path in tmp_path.glob("*/0-*"):
            content = path.read_bytes()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1])) if damage else None


def test_the_reference_finds_its_blocks(tmp_path: Path) -> None:
    """Guards against a backend in torch whose blocks are written back in another order, or not at all."""
    options = {"model": "demo", "kernels": "reference", "dtype": "float32", "max_model_len": MAX_MODEL_LEN}
    answers = []
    for cached in (0, 32):
        built = build_engine(EngineConfig.from_options(**options, kv_offload_dir=str(tmp_path)))
        found = ask(built.engine, [request(WATCHED[2], prompt_logprobs=False)])[WATCHED[2]]
        assert found[-1].num_cached_tokens == cached
        answers.append([token_id for output in found for token_id in output.new_token_ids])
        built.engine.shutdown()
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "options",
    [
        {"kv_offload_dir_bytes": 100},
        {"kv_offload_dir": "x", "enable_prefix_caching": False},
        {"kv_offload_memory_bytes": 100, "load_format": "mock"},
        {"kv_offload_memory_bytes": 100, "block_size": 2**16},
        {"kv_offload_dir": "/dev/null/x"},
    ],
)
def test_what_cannot_be_kept_is_refused(options: dict[str, Any]) -> None:
    """Guards against an option that is accepted and does nothing."""
    with pytest.raises(InvalidRequestError):
        build_engine(EngineConfig.from_options(model="demo", max_model_len=64, **options))
