"""From documents to training rows: token ids, which of them count in the loss, and which documents share a row.

Counted are plain text after <|bos|> and what the assistant says with its <|end|>; turns of user and system and padding
are not. Documents are never cut: most rows are short and hold a few documents, some are as long as the context and hold
many, so that all positions are trained. Documents in a row see each other, as in any packed training.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from penstock.demo import chats

Ids = NDArray[np.int64]
Batch = tuple[Ids, Ids]

IGNORE = -100
CHUNK = 5000
OPEN_ROWS = 48
LONG_SHARE = 0.06  # of the documents that would fit into a short row


@dataclass(frozen=True)
class Marks:
    """Ids of the tokens that decide what counts."""

    pad: int
    says: tuple[int, int]  # after these the model speaks
    hears: tuple[int, int]  # after these the user or the system speaks

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Marks":
        pad, bos, _, system, user, assistant, _ = range(len(chats.SPECIAL_TOKENS))
        if [tokenizer.token_to_id(token) for token in chats.SPECIAL_TOKENS] != list(range(len(chats.SPECIAL_TOKENS))):
            raise ValueError("the special tokens are not the first ids")
        return cls(pad, (bos, assistant), (system, user))

    def counts(self, ids: Ids) -> NDArray[np.bool_]:
        """Return True for tokens that the model learns to produce, along the last axis."""
        marker = np.isin(ids, (*self.says, *self.hears))
        places = np.where(marker, np.arange(ids.shape[-1]), 0)
        last = np.take_along_axis(ids, np.maximum.accumulate(places, axis=-1), axis=-1)
        counted: NDArray[np.bool_] = np.isin(last, self.says) & ~marker & (ids != self.pad)
        return counted


def encoded(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the token ids of each document."""
    stream = iter(documents)
    while chunk := list(islice(stream, CHUNK)):
        for one in tokenizer.encode_batch_fast(chunk, add_special_tokens=False):
            yield one.ids


class Packer:
    """Collects documents in rows of one length and returns a batch whenever enough rows are full."""

    def __init__(self, length: int, per_step: int, marks: Marks) -> None:
        self.length, self.batch_rows, self.marks = length, per_step // length, marks
        self.open: list[list[int]] = []
        self.full: list[list[int]] = []

    def add(self, ids: list[int]) -> Batch | None:
        """Put a document into the fullest open row with room for it. A row holds one token more than the inputs."""
        fitting = [row for row in self.open if len(row) + len(ids) <= self.length + 1]
        if fitting:
            max(fitting, key=len).extend(ids)
            return None
        self.open.append(list(ids))
        return self.close_fullest() if len(self.open) > OPEN_ROWS else None

    def close_fullest(self) -> Batch | None:
        """Move one row to the full ones; return a batch if it is complete."""
        self.open.sort(key=len)
        self.full.append(self.open.pop())
        if len(self.full) < self.batch_rows:
            return None
        rows, self.full = self.full, []
        return self.make_batch(rows)

    def make_batch(self, rows: list[list[int]]) -> Batch:
        """Return (inputs, labels), padded to the length; labels that do not count are IGNORE."""
        ids = np.full((len(rows), self.length + 1), self.marks.pad, dtype=np.int64)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = row
        return ids[:, :-1], np.where(self.marks.counts(ids), ids, IGNORE)[:, 1:]


class Batches:
    """Batches of `per_step` tokens, as long as documents last; `documents` counts those read so far."""

    def __init__(self, documents: Iterable[str], tokenizer: Tokenizer, per_step: int, lengths: tuple[int, int]) -> None:
        marks = Marks.of(tokenizer)
        self.source = encoded(documents, tokenizer)
        self.short, self.long = (Packer(length, per_step, marks) for length in lengths)
        self.rng = Random("rows")
        self.documents = 0

    def __iter__(self) -> Iterator[Batch]:
        for ids in self.source:
            self.documents += 1
            to_long = len(ids) > self.short.length + 1 or self.rng.random() < LONG_SHARE
            batch = (self.long if to_long else self.short).add(ids)
            if batch:
                yield batch
