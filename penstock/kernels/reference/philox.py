"""Philox4x32-10: counter-based random words (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

A word is a function of key and counter alone. Words are held in int64, whose wrapping product of two 32-bit words has
the right 64 bits.
"""

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the two words of the key after each round
MASK = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Compute ten rounds. Counter, key and results are int64 tensors of 32-bit words that broadcast to one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = high(product1) ^ c1 ^ k0, product1 & MASK, high(product0) ^ c3 ^ k1, product0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def high(product: Tensor) -> Tensor:
    """Return the upper 32 bits of each 64."""
    return (product >> 32) & MASK


def uniform(words: Tensor) -> Tensor:
    """Return words w as float32 uniforms ((w >> 9) + 0.5) * 2^-23: exact, never 0 or 1."""
    return ((words >> 9).to(torch.float32) + 0.5) * 2.0**-23


def gumbel_noise(noise_key: Tensor, vocab_size: int) -> Tensor:
    """Return noise -log(-log(u)), [M, V] float32, for noise_key [M, 3] int64: seed, choice index, output position.

    The four words of the counter (choice, position, id // 4, 0) serve four neighbouring ids.
    """
    seed, choice, position = (column[:, None] for column in noise_key.unbind(1))
    blocks = torch.arange((vocab_size + 3) // 4, device=noise_key.device)[None, :]
    zero = torch.zeros_like(blocks)
    words = philox4x32((choice & MASK, position & MASK, blocks, zero), (seed & MASK, high(seed)))
    u = uniform(torch.stack(words, dim=-1)).flatten(1)[:, :vocab_size]  # [M, V]
    return -torch.log(-torch.log(u))
