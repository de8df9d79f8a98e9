"""SamplingTensors: the sampling parameters of one step's rows, as arrays that a kernel can read; TokenScores: their
log-probabilities; and the arithmetic of both that is Python: `adjust` and `philox4x32` compute with numpy's arrays and
torch's tensors alike, `score_tokens`, `pack_bits` and `hide` with numpy's.

A backend applies the parameters in this fixed order, which is also vLLM's:

    log-probabilities are taken first, from the raw logits
    form           ids that a row's form does not allow (structured outputs)  -> -inf
    mask           ids that may not be chosen (min_tokens, bad words)         -> -inf
    bias           logit_bias is added
    penalties      repetition, then frequency, then presence
    greedy rows    highest logit, lowest id on a tie
    other rows     / temperature, min_p, top_k, top_p, then the Gumbel-max trick with counter-based noise
    If every id of a row is at -inf after the penalties, no id can be chosen, and the row's result is NO_TOKEN.

Noise: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with
key = the two 32-bit words of the seed (low word first) and counter = (choice index, output position,
vocabulary index // 4, 0); the four words of a block serve four neighbouring vocabulary entries. A word w becomes the
uniform u = ((w >> 9) + 0.5) * 2^-23, which is never 0 or 1 and exact in float32, and the noise -log(-log(u)).
So noise is a function of (seed, choice, position, token) alone. The counter's last word is 0 when a token is drawn; any
other draw uses another last word, and so has a stream of its own (`uniform_at`).
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from penstock.kernels.tensors import INT32, Array, Bools, Float32, Int32, Int64, Tensor

Word: TypeAlias = Any  # an int or an int64 tensor
Words: TypeAlias = tuple[Word, Word, Word, Word]

NO_TOKEN = -1  # never an id
XTC_STREAM = 1
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the two words of the key after each round
MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """The parameters of M rows. A field that no row needs is None, so that its pass is skipped.

    Attributes:
        temperature: [M] float32; 0 is greedy.
        top_k: [M] int64, V where off.    top_p: [M] float32, 1 where off.    min_p: [M] float32, 0 where off.
        noise_key: [M, 3] int64: seed as unsigned 64 bits in two's complement, choice index, output position.
        masked: [P, 2] int64 pairs (row, id) that may not be chosen.
        bias: pairs [P, 2] int64 and their values [P] float32.
        repetition: penalty [M] float32, and the distinct pairs (row, id) seen in prompt or output, [P, 2] int64.
        counts: frequency and presence penalty [M] float32 each, the distinct pairs (row, id) generated so far
            [P, 2] int64, and how often each was generated [P] float32.
        allowed: different rows [R] int64, and bitmaps [R, V / 32, rounded up] int32, as `pack_bits` makes them, of the
            ids that may be chosen there. `choose` may change the logits of these rows.
    """

    temperature: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    noise_key: Tensor | None = None
    masked: Tensor | None = None
    bias: tuple[Tensor, Tensor] | None = None
    repetition: tuple[Tensor, Tensor] | None = None
    counts: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    allowed: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The log-probabilities of some ids in M rows.

    Attributes:
        ids: [M, 1 + N] int64: a given id, then the N likeliest, the likeliest and, of equal ones, the lowest id first.
            There are no more than the vocabulary has.
        logprobs: [M, 1 + N] float32, of these ids.
        ranks: [M] int64: 1 + the number of ids that are likelier than the given one, so tied ids share a rank.
    """

    ids: Tensor
    logprobs: Tensor
    ranks: Tensor


def score_tokens(logprobs: Array, ids: Int64, num_top: int) -> TokenScores:
    """Look up and rank ids [M] and the num_top likeliest ids in log-probabilities [M, V] float32."""
    columns = np.maximum(ids, 0)[:, None]
    own = np.take_along_axis(logprobs, columns, axis=-1)
    ranks = (logprobs > own).sum(axis=-1) + 1
    if most := min(num_top, logprobs.shape[1]):
        columns = np.concatenate([columns, _top_ids(logprobs, most)], axis=-1)
        own = np.take_along_axis(logprobs, columns, axis=-1)
    return TokenScores(columns, own, ranks)


def _top_ids(logprobs: Array, count: int) -> Int64:
    ids = np.zeros((len(logprobs), count), dtype=np.int64)
    for row, values in enumerate(logprobs):
        least = np.partition(values, -count)[-count]
        found = np.flatnonzero(values >= least)  # more than `count` on a tie, none of a row of NaN
        best = found[np.argsort(-values[found], kind="stable")[:count]]
        ids[row, : len(best)] = best
    return ids


def pack_bits(allowed: Bools) -> Int32:
    """Pack the bits of ids [V] into words [V / 32, rounded up]: that of an id is bit id % 32 of word id // 32."""
    bits = np.packbits(allowed, bitorder="little")
    return np.pad(bits, (0, -len(bits) % INT32.itemsize)).view(INT32)


def hide(logits: Float32, bits: Int32) -> None:
    """Set the logits [V] of ids whose bits are 0 to -inf, without a branch per id."""
    most = np.unpackbits(bits.view(np.uint8), count=len(logits), bitorder="little").astype(np.float32)
    most -= np.float32(0.5)
    most *= np.float32(np.inf)
    np.minimum(logits, most, out=logits)


def adjust(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Apply mask, bias and penalties to logits [M, V] float32, in place. Return the logits."""
    if params.masked is not None:
        logits[params.masked[:, 0], params.masked[:, 1]] = -float("inf")
    if params.bias is not None:
        pairs, values = params.bias
        logits[pairs[:, 0], pairs[:, 1]] += values
    if params.repetition is not None:
        penalty, pairs = params.repetition
        rows, ids = pairs[:, 0], pairs[:, 1]
        likely = logits[rows, ids] > 0
        logits[rows[likely], ids[likely]] /= penalty[rows[likely]]
        logits[rows[~likely], ids[~likely]] *= penalty[rows[~likely]]
    if params.counts is not None:
        frequency, presence, pairs, counts = params.counts
        rows, ids = pairs[:, 0], pairs[:, 1]
        logits[rows, ids] -= frequency[rows] * counts
        logits[rows, ids] -= presence[rows]
    return logits


def philox4x32(counter: Words, key: tuple[Word, Word]) -> Words:
    """Compute ten rounds. Counter, key and results are 32-bit words, as ints or in int64 tensors, which broadcast to
    one shape. There the product of two words wraps, but has the right 64 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = high(product1) ^ c1 ^ k0, product1 & MASK, high(product0) ^ c3 ^ k1, product0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def high(product: Word) -> Word:
    """Take the upper 32 bits of each 64."""
    return (product >> 32) & MASK


def uniform_at(noise_key: tuple[int, int, int], stream: int) -> float:
    """Draw the stream's uniform number, between 0 and 1 and never either, for (seed, choice, output position)."""
    seed, choice, position = noise_key
    words = philox4x32((choice & MASK, position & MASK, 0, stream), (seed & MASK, high(seed)))
    return float(((words[0] >> 9) + 0.5) * 2.0**-23)
