"""Philox4x32-10 and the noise made from it."""

import numpy as np
import pytest
import torch

from penstock.kernels.reference.sampling import gumbel_noise, uniform
from penstock.kernels.sampling import philox4x32

# Known answers published with Random123: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


def plain_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The generator once more, in Python's unbounded integers."""
    c, (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = ((p1 >> 32) ^ c[1] ^ k0, p1 % 2**32, (p0 >> 32) ^ c[3] ^ k1, p0 % 2**32)
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter: str, key: str, result: str) -> None:
    """Guards against a wrong constant, round count or order of words: noise must be the same in every backend."""
    counters = tuple(torch.tensor([word]) for word in words(counter))
    keys = tuple(torch.tensor([word]) for word in words(key))
    assert tuple(int(word) for word in philox4x32(counters, keys)) == words(result)
    assert plain_philox(words(counter), words(key)) == words(result)


def test_noise_is_that_of_the_written_rule() -> None:
    """Guards against swapped seed words, a wrong counter or neighbours in the wrong order, at seeds and positions
    whose upper bits are set. The vocabulary is no multiple of four."""
    seeds, vocab_size = [0, 1, 2**63 + 12345, 2**64 - 1], 11
    rows = [(seed, choice, position) for seed in seeds for choice in (0, 3) for position in (0, 70000)]
    signed = torch.tensor([(seed - 2**64 if seed >= 2**63 else seed, c, p) for seed, c, p in rows])
    noise = gumbel_noise(signed, vocab_size)
    assert noise.shape == (len(rows), vocab_size)
    for row, (seed, choice, position) in enumerate(rows):
        for token in range(vocab_size):
            word = plain_philox((choice, position, token // 4, 0), (seed % 2**32, seed >> 32))[token % 4]
            u = np.float32(((word >> 9) + 0.5) * 2.0**-23)
            assert noise[row, token].item() == pytest.approx(-np.log(-np.log(np.float64(u))), abs=1e-5, rel=1e-5)


def test_uniforms_are_never_zero_or_one() -> None:
    """Guards against infinite noise, which would choose a token whatever its probability."""
    u = uniform(torch.tensor([0, 2**32 - 1]))
    assert u.dtype == torch.float32
    assert u[0] == 2.0**-24
    assert u[1] == 1 - 2.0**-24
    assert torch.isfinite(torch.log(-torch.log(u))).all()
