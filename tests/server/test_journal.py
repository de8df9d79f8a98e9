"""The journal's file: what it gives back after a crash at any moment, a damaged byte, a full disk."""

import asyncio
import errno
import os
import subprocess
import sys
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidRequestError
from penstock.server import journal as module
from penstock.server.journal import HEADER, MAGIC, Journal, JournalError, pack, unpack

BODIES = st.lists(st.binary(max_size=40), max_size=8)


class Log:
    """A journal whose owner wants the last `keep` of the records that it appended."""

    def __init__(self, path, keep=10**9):
        self.wanted: list[bytes] = []
        self.keep = keep
        self.journal = Journal(str(path), lambda: [partial(bytes, body) for body in self.wanted])
        self.found = self.journal.pop_found()
        self.wanted += self.found

    def append(self, body: bytes) -> None:
        self.wanted = [*self.wanted, body][-self.keep :]
        self.journal.append(partial(bytes, body))


def written(path, bodies, keep=10**9):
    """Write records one group after the other; return the log when it is closed."""

    async def scenario():
        log = Log(path, keep)
        log.journal.start()
        for body in bodies:
            log.append(body)
            await log.journal.synced()
        await log.journal.close()
        return log

    return asyncio.run(scenario())


def found(path):
    log = Log(path)
    os.close(log.journal._file)
    return log.found


@settings(max_examples=50)
@given(bodies=BODIES)
def test_what_was_written_is_found(bodies, tmp_path_factory):
    path = tmp_path_factory.mktemp("journal") / "j"
    written(path, bodies[:4])
    written(path, bodies[4:])  # a second server goes on
    assert found(path) == bodies


@pytest.mark.parametrize("harm", ["unlink", "rename", "truncate", "append"])
async def test_a_file_that_another_program_changes_is_written_anew(harm, tmp_path, monkeypatch):
    """Guards against acknowledged records in a file that nobody will find, and a file that no server can open."""
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    path = tmp_path / "j"
    log = Log(path)
    log.journal.start()
    log.append(b"first")
    await log.journal.synced()
    if harm == "unlink":
        path.unlink()
    elif harm == "rename":
        path.rename(tmp_path / "moved")
    elif harm == "truncate":
        os.truncate(path, 3)
    else:
        with path.open("ab") as file:
            file.write(b"x")
    log.append(b"second")
    with pytest.raises(JournalError, match="another program"):
        await log.journal.synced()
    while log.journal.error is not None:
        await asyncio.sleep(0.01)
    log.append(b"third")
    await log.journal.synced()
    await log.journal.close()
    assert found(path) == [b"first", b"second", b"third"]


def test_a_file_that_others_can_read_is_closed_to_them(tmp_path):
    """Guards against users' texts in a file that was made with wide permissions."""
    path = tmp_path / "j"
    path.write_bytes(b"")
    path.chmod(0o644)
    written(path, [b"x"])
    assert path.stat().st_mode & 0o777 == 0o600


@settings(max_examples=100)
@given(bodies=BODIES, data=st.data())
def test_a_file_cut_anywhere_gives_its_whole_records(bodies, data, tmp_path_factory):
    """Guards against a crash while a record is written that costs more than this record, or stops the next server."""
    path = tmp_path_factory.mktemp("journal") / "j"
    whole = MAGIC + b"".join(map(pack, bodies))
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    ends = [len(MAGIC) + sum(HEADER.size + len(body) for body in bodies[:k]) for k in range(len(bodies) + 1)]
    expected = bodies[: sum(end <= cut for end in ends[1:])]
    assert found(path) == expected
    written(path, [b"later"])
    assert found(path) == [*expected, b"later"]


@settings(max_examples=100)
@given(bodies=BODIES.filter(any), data=st.data())
def test_a_damaged_byte_costs_one_record(bodies, data, tmp_path_factory):
    """Guards against rot in the middle that hides all records after it, or that is taken for content."""
    path = tmp_path_factory.mktemp("journal") / "j"
    whole = bytearray(MAGIC + b"".join(map(pack, bodies)))
    place = data.draw(st.integers(len(MAGIC), len(whole) - 1))
    whole[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)
    ends = [len(MAGIC) + sum(HEADER.size + len(body) for body in bodies[: k + 1]) for k in range(len(bodies))]
    hit = sum(end <= place for end in ends)
    assert found(path) == bodies[:hit] + bodies[hit + 1 :]
    assert unpack(path.read_bytes()).damage == []  # it has been mended


@settings(max_examples=30)
@given(holes=st.lists(st.integers(0, 3000), max_size=3))
def test_pages_of_zeros_are_no_records(holes, tmp_path_factory):
    """Guards against a file system that has lengthened a file without its content: zeros must not pass for records."""
    path = tmp_path_factory.mktemp("journal") / "j"
    data = MAGIC + pack(b"a") + b"".join(bytes(hole) for hole in holes)
    path.write_bytes(data)
    assert found(path) == [b"a"]


class Crash(BaseException):
    """The machine stops here."""


@settings(max_examples=60)
@given(steps=st.integers(1, 60), torn=st.integers(0, 30))
def test_a_crash_at_any_call_of_the_system_loses_nothing_that_was_promised(steps, torn, tmp_path_factory):
    """Guards against a moment, between a write, a sync and a rename, at which a durable record is in no file.

    What was written after the last sync may reach the disk in part.
    """
    path = tmp_path_factory.mktemp("journal") / "j"
    durable = {"size": 0}
    calls = iter(range(steps))

    def step(function, *args):
        if next(calls, None) is None:
            raise Crash
        return function(*args)

    def sync(function, file):
        step(function, file)
        if os.path.exists(path) and os.fstat(file).st_ino == os.stat(path).st_ino:
            durable["size"] = os.fstat(file).st_size

    def renamed(source, target):
        step(real.rename, source, target)
        durable["size"] = os.stat(path).st_size

    promised: list[bytes] = []
    real = os

    class System:
        def __getattr__(self, name):
            return getattr(real, name)

        write = staticmethod(lambda file, data: step(real.write, file, data))
        fsync = staticmethod(lambda file: sync(real.fsync, file))
        fdatasync = staticmethod(lambda file: sync(real.fdatasync, file))
        rename = staticmethod(renamed)

    log = None
    module.os = System()
    try:
        log = Log(path, keep=3)
        for k in range(30):
            log.wanted = [*log.wanted, b"%d" % k][-3:]
            makers = [partial(bytes, b"%d" % k)]
            if k % 4 == 3:
                log.journal._rewrite([partial(bytes, body) for body in log.wanted])
            else:
                log.journal._append(makers)
            promised = list(log.wanted)
    except Crash:
        pass
    finally:
        module.os = real
        if log is not None:
            os.close(log.journal._file)
    if path.exists():
        os.truncate(path, min(os.stat(path).st_size, durable["size"] + torn))
        still_wanted = set(promised) if log is None else set(promised) & set(log.wanted)
        assert still_wanted <= set(found(path))
    else:
        assert promised == []


def test_what_is_not_wanted_any_more_leaves_the_file(tmp_path, monkeypatch):
    """Guards against a journal that grows for ever."""
    monkeypatch.setattr(module, "MIN_REWRITE_BYTES", 1000)
    written(tmp_path / "j", [b"%050d" % k for k in range(500)], keep=3)
    assert (tmp_path / "j").stat().st_size < 2000
    assert found(tmp_path / "j")[-3:] == [b"%050d" % k for k in (497, 498, 499)]
    assert [file.name for file in tmp_path.iterdir()] == ["j"]


def test_a_full_disk_refuses_and_recovers(tmp_path, monkeypatch, caplog):
    """Guards against a record that is promised and not on the disk, and a journal that stays broken."""
    real_write, is_full = os.write, True
    monkeypatch.setattr(module, "RETRY_S", 0.01)

    def write(file, data):
        if is_full and bytes(data) != MAGIC:
            real_write(file, bytes(data)[:5])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(file, data)

    async def scenario():
        nonlocal is_full
        log = Log(tmp_path / "j")
        log.journal.start()
        log.append(b"first")
        monkeypatch.setattr(os, "write", write)
        with pytest.raises(JournalError, match="No space left"):
            await log.journal.synced()
        log.append(b"second")
        with pytest.raises(JournalError, match="No space left"):
            await log.journal.synced()
        is_full = False
        while log.journal.error is not None:
            await asyncio.sleep(0.005)
        log.append(b"third")
        await log.journal.synced()
        await log.journal.close()

    asyncio.run(scenario())
    assert found(tmp_path / "j") == [b"first", b"second", b"third"]
    assert "requests that need it are refused" in caplog.text


def test_one_server_at_a_time(tmp_path):
    """Guards against two servers that overwrite each other's records, and a lock that outlives a kill."""
    path = tmp_path / "j"
    script = (
        f"import sys\nfrom penstock.server.journal import Journal\nj = Journal({str(path)!r}, list)\n"
        "print('open', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "open\n"
        with pytest.raises(InvalidRequestError, match="in use by another server"):
            Journal(str(path), list)
        process.kill()
        process.wait()
        assert found(path) == []


def test_a_file_that_is_not_a_journal_is_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("my notes, which nobody may overwrite")
    with pytest.raises(InvalidRequestError, match="not a journal"):
        Journal(str(path), list)
    assert path.read_text().startswith("my notes")
    with pytest.raises(InvalidRequestError, match="journal: "):
        Journal(str(tmp_path), list)
    with pytest.raises(InvalidRequestError, match="not a regular file"):
        Journal("/dev/null", list)
