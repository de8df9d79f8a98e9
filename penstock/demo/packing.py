"""From documents to training rows: token ids, which of them count in the loss, and where rows begin.

What counts: plain text after <|bos|>, and what the assistant says with its <|end|>. What the user and the system
say does not. A row begins where a document begins and holds as many as fit; the rest of the last one is dropped,
and the next row begins with the document after it. Documents in a row see each other, as in any packed training.
Knows nothing of the model.
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from penstock.demo import chats

IGNORE = -100
CHUNK = 5000


class Tokens:
    """All training tokens in one array, with the loss mask and the starts of the documents."""

    def __init__(self, ids: NDArray[np.uint16], counts: NDArray[np.bool_], starts: NDArray[np.int64]) -> None:
        self.ids, self.counts, self.starts = ids, counts, starts

    def row(self, start: int, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(inputs, labels) of one row; labels that do not count are IGNORE."""
        ids = self.ids[start : start + length + 1].astype(np.int64)
        return ids[:-1], np.where(self.counts[start + 1 : start + length + 1], ids[1:], IGNORE)


def loss_mask(ids: NDArray[np.uint16], tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """True for tokens that the model shall learn to produce."""
    bos, assistant, system, user = (
        tokenizer.token_to_id(t) for t in (chats.BOS, "<|assistant|>", "<|system|>", "<|user|>")
    )
    marker = np.isin(ids, (bos, assistant, system, user))
    last = np.maximum.accumulate(np.where(marker, np.arange(len(ids)), 0))
    return np.isin(ids[last], (bos, assistant)) & ~marker


def encode(documents: Iterator[str], tokenizer: Tokenizer, count: int) -> Tokens:
    """Take documents until there are `count` tokens."""
    parts: list[NDArray[np.uint16]] = []
    lengths: list[int] = []
    while sum(map(len, parts)) < count:
        encoded = tokenizer.encode_batch_fast(list(islice(documents, CHUNK)), add_special_tokens=False)
        lengths += [len(one.ids) for one in encoded]
        parts.append(np.concatenate([np.asarray(one.ids, dtype=np.uint16) for one in encoded]))
    ids = np.concatenate(parts)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    return Tokens(ids, loss_mask(ids, tokenizer), starts)


def batches(
    tokens: Tokens, per_step: int, lengths: tuple[int, ...]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Batches of `per_step` tokens, whose row length goes round through `lengths`, until the tokens are used up."""
    position, step = 0, 0
    while True:
        length = lengths[step % len(lengths)]
        rows = []
        for _ in range(per_step // length):
            if position + length + 1 > len(tokens.ids):
                return
            rows.append(tokens.row(position, length))
            after = np.searchsorted(tokens.starts, position + length + 1)
            position = int(tokens.starts[after]) if after < len(tokens.starts) else len(tokens.ids)
        step += 1
        yield np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])
