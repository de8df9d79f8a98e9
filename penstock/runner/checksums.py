"""Checksums of logits: they show the flight recorder's replay a changed bit even in a step that chose the same tokens.

A checksum covers a window of the vocabulary, because all of it would cost as much as sampling does: 4 MiB a step with
32 requests and 32,000 tokens. A bit that changes before the LM head changes nearly every logit. The window moves with
the step, so that a change in the LM head alone is seen within vocab_size / WINDOW steps.
"""

import numpy as np

from penstock.kernels.tensors import Array

WINDOW = 2048  # columns; an even number, because two float32 are added as one 64-bit word


def logits_checksums(logits: Array, step_id: int) -> list[int]:
    """Return, for each row of logits [M, V] float32, the sum modulo 2**64 of the words in this step's window."""
    vocab_size = logits.shape[1]
    width = min(WINDOW, vocab_size // 2 * 2)
    if width == 0:
        return [int(row.view(np.uint32)[0]) for row in logits]
    start = min(step_id % -(-vocab_size // width) * width, vocab_size - width)
    words = logits[:, start : start + width].view(np.uint64)
    return list(np.add.reduce(words, axis=1, dtype=np.uint64).tolist())
