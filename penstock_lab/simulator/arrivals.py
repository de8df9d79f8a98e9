"""Arrivals: which requests come when. They are drawn as `penstock bench serve` draws them, or read from a file.

A file is CSV with a header. Each line is a request; the last two columns may be missing or empty:

    arrival_s,prompt_len,output_len,prefix_group,prefix_len
    0.00,512,120,7,256
    0.35,60,200,,

Requests of one prefix_group begin with the same prefix_len tokens. Both sources can be iterated any number of times,
and keep no request.
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import NamedTuple, TextIO

from penstock import InvalidRequestError
from penstock.errors import check_int, invalid, one_line, shown
from penstock_lab.bench.datasets import Dataset, Vocabulary, draw_lengths, draw_samples
from penstock_lab.bench.outcomes import Load

COLUMNS = ("arrival_s", "prompt_len", "output_len")
PREFIX_COLUMNS = ("prefix_group", "prefix_len")
MAX_LEN = 2**24


class Arrival(NamedTuple):
    """A request that comes `at` seconds after the start. Arrivals are in order of time.

    Attributes:
        prompt_len: tokens of the prompt, including its prefix.
        prefix_group: requests of one group share a prefix of prefix_len tokens; "" is no group.
    """

    at: float
    prompt_len: int
    output_len: int
    prefix_group: str = ""
    prefix_len: int = 0


@dataclass(frozen=True, slots=True)
class Drawn:
    """The requests that `penstock bench serve` would send with the same options and seed.

    Attributes:
        lengths: tokens of the prompts and answers in a file of conversations; None: they are drawn.
    """

    dataset: Dataset
    load: Load
    count: int
    lengths: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def of(cls, dataset: Dataset, load: Load, count: int, model: str) -> "Drawn":
        """Draw the arrivals of a load. model: its tokenizer counts the tokens of conversations."""
        check_int("num_prompts", count, 1, 10**10)
        if dataset.name != "sharegpt":
            return cls(dataset, load, count)
        samples = draw_samples(dataset, Vocabulary(model), count, load.seed, as_text=True)
        return cls(dataset, load, count, tuple((sample.prompt_len, sample.output_len) for sample in samples))

    def __iter__(self) -> Iterator[Arrival]:
        dataset, times = self.dataset, accumulate(self.load.gaps(self.count))
        pairs = draw_lengths(dataset, self.count, self.load.seed) if self.lengths is None else iter(self.lengths)
        for index, (at, (own, output_len)) in enumerate(zip(times, pairs, strict=True)):
            group = str(index % dataset.num_prefixes) if dataset.prefix_len else ""
            yield Arrival(at, own + dataset.prefix_len, output_len, group, dataset.prefix_len)


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a file, at most `count` of them.

    Raises:
        InvalidRequestError: the file cannot be read, or its header lacks a column. An invalid line raises it only when
            the line is reached, with the number of the line.
    """

    path: Path
    count: int | None = None

    def __post_init__(self) -> None:
        with _open(self.path) as file:
            _reader(self.path, file)

    def __iter__(self) -> Iterator[Arrival]:
        with _open(self.path) as file:
            yield from islice(_lines(self.path, file), self.count)


def _open(path: Path) -> TextIO:
    if path.exists() and not path.is_file():
        raise _refused(path, "is not a file")  # a device may have no end, and a pipe can be read only once
    try:
        return path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from None


def _reader(path: Path, file: TextIO) -> "csv.DictReader[str]":
    try:
        reader = csv.DictReader(file)
        names = reader.fieldnames or []
    except (OSError, ValueError, csv.Error) as error:
        raise _refused(path, f"cannot be read: {one_line(error)}") from None
    missing = [name for name in COLUMNS if name not in names]
    unknown = [str(name) for name in names if name not in COLUMNS + PREFIX_COLUMNS]
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {shown(unknown[0])}"
        raise _refused(path, f"its header {what}; the columns are {', '.join(COLUMNS + PREFIX_COLUMNS)}")
    return reader


def _lines(path: Path, file: TextIO) -> Iterator[Arrival]:
    reader, before = _reader(path, file), 0.0
    while True:
        try:
            line = next(reader, None)
            if line is None:
                return
            arrival = _arrival(line)
            if arrival.at < before:
                raise ValueError(f"arrival_s: {arrival.at} comes after {before}; sort the lines by time")
        except (ValueError, TypeError, csv.Error) as error:
            raise _refused(path, f"line {reader.line_num}: {one_line(error)}") from None
        before = arrival.at
        yield arrival


def _arrival(line: dict[str, str]) -> Arrival:
    at = float(line["arrival_s"])
    if not (math.isfinite(at) and at >= 0):
        raise ValueError(f"arrival_s: {at} must be a number of seconds, 0 or more")
    group, prefix = line.get("prefix_group") or "", int(line.get("prefix_len") or 0)
    prompt_len, output_len = int(line["prompt_len"]), int(line["output_len"])
    check_int("prompt_len", prompt_len, 1, MAX_LEN)
    check_int("output_len", output_len, 1, MAX_LEN)
    check_int("prefix_len", prefix, 0, prompt_len)
    if None in line:
        raise ValueError("it has more fields than the header")
    if prefix and not group:
        raise ValueError("prefix_len: needs a prefix_group")
    return Arrival(at, prompt_len, output_len, group, prefix)


def _refused(path: Path, reason: str) -> InvalidRequestError:
    return invalid("trace", f"{str(path)!r} {reason}")
