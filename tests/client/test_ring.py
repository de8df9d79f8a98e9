"""The ring: whole records in order, whatever is dropped, and whenever its writer is killed."""

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.records import NUM_SEGMENTS, Ring
from penstock.errors import EngineError

WRITER = """
import sys
from penstock.client.records import Ring
ring, number = Ring(int(sys.argv[1])), 0
while True:
    record = number.to_bytes(8, "little") * (1 + number % 40)
    if not ring.append(record):
        ring.start_segment()
        ring.append(record)
    number += 1
    if number == 5000:
        print("running", flush=True)
"""


def write(ring: Ring, record: bytes) -> None:
    if not ring.append(record):
        ring.start_segment()
        assert ring.append(record)


@given(records=st.lists(st.binary(max_size=300), max_size=60), num_bytes=st.integers(1600, 8000))
def test_holds_the_last_records_in_order(records, num_bytes):
    """Guards against a record that is cut off, out of order or written over while newer ones are kept."""
    ring = Ring.create(num_bytes)
    for record in records:
        write(ring, record)
    found = [record for segment in ring.read() for record in segment.records]
    assert found == records[len(records) - len(found) :]
    kept = sum(len(record) + 8 for record in found)
    assert found == records or kept > num_bytes // NUM_SEGMENTS  # one segment at most is empty, and others were full


def test_a_killed_writer_leaves_whole_records():
    """Guards against a record that is half written when its writer is killed, and against memory that dies with it."""
    for _ in range(3):
        ring = Ring.create(40_000)
        command = [sys.executable, "-c", WRITER, str(ring.descriptor)]
        with subprocess.Popen(command, pass_fds=[ring.descriptor], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "running\n"
            for _ in range(50):  # while it writes
                check_numbers(ring)
            os.kill(writer.pid, signal.SIGKILL)
        assert check_numbers(ring) > 100


def check_numbers(ring: Ring) -> int:
    """Each segment holds consecutive records, each intact; return how many."""
    count = 0
    for segment in ring.read():
        numbers = [int.from_bytes(record[:8], "little") for record in segment.records]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        assert all(record == record[:8] * (1 + n % 40) for record, n in zip(segment.records, numbers, strict=True))
        count += len(numbers)
    return count


def test_a_damaged_record_ends_its_segment():
    ring = Ring.create(4000)
    for index in range(3):
        write(ring, bytes([index]) * 20)
    os.pwrite(ring.descriptor, b"x", 64 + ring.segment_bytes + 16 + 28 + 8 + 3)  # in the second record of segment 1
    assert [segment.records for segment in ring.read()] == [[bytes(20)]]


def test_a_new_writer_goes_on_after_the_last_one():
    """Guards against the next engine writing over what the dead one has left."""
    ring = Ring.create(4000)
    write(ring, b"first")
    write(Ring(ring.descriptor), b"second")
    assert [segment.records for segment in ring.read()] == [[b"first"], [b"second"]]


def test_another_file_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(1000))
    with open(file, "r+b") as opened, pytest.raises(EngineError, match="not a flight recorder"):
        Ring(opened.fileno())
