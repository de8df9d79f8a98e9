"""Turns documents into training rows: the tokenizer, the tokens that count in the loss, and the documents of a row.

The loss counts plain text after <|bos|> and the assistant's turns with their <|end|>. It does not count the turns of
user and system, or padding. Documents are never cut. Most rows are short and hold a few documents; some are as long as
the context and hold many, so that all positions are trained. The documents of a row attend to each other, as is usual
in packed training.
"""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from penstock_lab.training import chats

Ids = NDArray[np.int64]
Batch = tuple[Ids, Ids]

VOCAB_SIZE = 4096
PAD, BOS, _, SYSTEM, USER, ASSISTANT, _ = range(len(chats.SPECIAL_TOKENS))  # the special tokens have the first ids
UNUSED_BYTES = range(0xF5, 0xF5 + len(chats.TOOL_TOKENS))  # these bytes never occur in UTF-8
IGNORE = -100
CHUNK = 5000
OPEN_ROWS = 48
LONG_SHARE = 0.06  # share of the documents fitting into a short row that go into a long one


def train_tokenizer(documents: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens that splits numbers into digits and adds <|bos|>.

    Raises:
        ValueError: the special tokens are not the first ids.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in chats.SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    special = re.compile("|".join(map(re.escape, chats.SPECIAL_TOKENS)))  # BPE must not learn pieces of these
    tokenizer.train_from_iterator((special.sub("\n", document) for document in documents), trainer)
    if [tokenizer.token_to_id(token) for token in chats.SPECIAL_TOKENS] != list(range(len(chats.SPECIAL_TOKENS))):
        raise ValueError("the special tokens are not the first ids")
    bos = chats.BOS
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, BOS)]
    )
    return tokenizer


def with_tool_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Copy a tokenizer; each of TOOL_TOKENS becomes one token, with the id of a byte that never occurs in UTF-8.

    The size of the vocabulary and the ids of any text without these tags do not change.
    """
    content = json.loads(tokenizer.to_str())
    vocab = content["model"]["vocab"]
    if chats.TOOL_TOKENS[0] in vocab:
        return tokenizer
    flags = {"special": False, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
    for token, byte in zip(chats.TOOL_TOKENS, UNUSED_BYTES, strict=True):
        vocab[token] = vocab.pop(chr(byte))  # the byte-level alphabet maps these bytes to the same code points
        content["added_tokens"].append({"id": vocab[token], "content": token, **flags})
    content["added_tokens"].sort(key=lambda added: added["id"])
    content["model"]["vocab"] = dict(sorted(vocab.items(), key=lambda pair: pair[1]))
    return Tokenizer.from_str(json.dumps(content))


def counted(ids: Ids) -> NDArray[np.bool_]:
    """Mark the tokens that the model learns to produce: those after BOS or ASSISTANT along the last axis.

    The special tokens that begin a document or a turn, and padding, are not counted.
    """
    marker = np.isin(ids, (BOS, ASSISTANT, SYSTEM, USER))
    places = np.where(marker, np.arange(ids.shape[-1]), 0)
    last = np.take_along_axis(ids, np.maximum.accumulate(places, axis=-1), axis=-1)
    result: NDArray[np.bool_] = np.isin(last, (BOS, ASSISTANT)) & ~marker & (ids != PAD)
    return result


class Packer:
    """Collects documents in rows of one length, and returns a batch whenever enough rows are full."""

    def __init__(self, length: int, per_step: int) -> None:
        self.length, self.batch_rows = length, per_step // length
        self.open: list[list[int]] = []
        self.full: list[list[int]] = []

    def add(self, ids: list[int]) -> Batch | None:
        """Put a document into the fullest open row with room for it, and return a batch if that completes one.

        A batch is (inputs, labels), padded to the row length. Labels that do not count are IGNORE. A row holds one
        token more than the inputs.
        """
        fitting = [row for row in self.open if len(row) + len(ids) <= self.length + 1]
        if fitting:
            max(fitting, key=len).extend(ids)
            return None
        self.open.append(list(ids))
        if len(self.open) > OPEN_ROWS:
            self.open.sort(key=len)
            self.full.append(self.open.pop())
        if len(self.full) < self.batch_rows:
            return None
        padded = np.full((len(self.full), self.length + 1), PAD, dtype=np.int64)
        for index, row in enumerate(self.full):
            padded[index, : len(row)] = row
        self.full = []
        return padded[:, :-1], np.where(counted(padded), padded, IGNORE)[:, 1:]


class Batches:
    """Batches of `per_step` tokens, until the documents end. `documents` counts the documents read so far."""

    def __init__(self, documents: Iterable[str], tokenizer: Tokenizer, per_step: int, lengths: tuple[int, int]) -> None:
        self.source, self.tokenizer = iter(documents), tokenizer
        self.short, self.long = (Packer(length, per_step) for length in lengths)
        self.documents = 0

    def __iter__(self) -> Iterator[Batch]:
        rng = Random("rows")
        while chunk := list(islice(self.source, CHUNK)):
            for encoded in self.tokenizer.encode_batch_fast(chunk, add_special_tokens=False):
                self.documents += 1
                to_long = len(encoded.ids) > self.short.length + 1 or rng.random() < LONG_SHARE
                batch = (self.long if to_long else self.short).add(encoded.ids)
                if batch:
                    yield batch
