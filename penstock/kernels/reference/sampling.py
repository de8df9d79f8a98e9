"""Sampling in plain torch, in the order of kernels/sampling.py, with Philox4x32-10 noise."""

import torch
from torch import Tensor

from penstock.kernels.sampling import MASK, NO_TOKEN, SamplingTensors, adjust, high, philox4x32

NEVER = float("-inf")


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Choose one id per row of logits [M, V] float32: [M] int64; NO_TOKEN where no id may be chosen."""
    logits = logits.clone()
    if params.allowed is not None:
        allowed_rows, bits = params.allowed
        ids = torch.arange(logits.shape[1], device=logits.device)
        is_hidden = (bits[:, ids // 32] >> ids % 32) & 1 == 0
        logits[allowed_rows] = logits[allowed_rows].masked_fill(is_hidden, NEVER)
    logits = adjust(logits, params)
    chosen = logits.argmax(dim=-1)  # the first on a tie
    nothing_left = logits.gather(-1, chosen[:, None])[:, 0] == NEVER
    if params.noise_key is not None:
        rows = (params.temperature > 0).nonzero().flatten()
        if len(rows):
            chosen[rows] = _draw(logits[rows], params, params.noise_key[rows], rows)
    return chosen.masked_fill(nothing_left, NO_TOKEN)


def _draw(logits: Tensor, params: SamplingTensors, noise_key: Tensor, rows: Tensor) -> Tensor:
    """Draw one id for each of these rows, whose temperature is above 0."""
    logits = logits / params.temperature[rows, None]
    logits = truncate(
        logits,
        None if params.top_k is None else params.top_k[rows],
        None if params.top_p is None else params.top_p[rows],
        None if params.min_p is None else params.min_p[rows],
    )
    return (logits + gumbel_noise(noise_key, logits.shape[1])).argmax(dim=-1)


def truncate(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    """Apply min_p, then top_k, then top_p, each to what the previous one has left; removed logits become -inf.

    logits [M, V] float32, already divided by the temperature; the parameters [M]. On a tie the lowest ids are kept, and
    the most likely token always stays.
    """
    if min_p is not None:
        probabilities = logits.softmax(dim=-1)
        threshold = min_p[:, None] * probabilities.amax(dim=-1, keepdim=True)
        logits = logits.masked_fill(probabilities < threshold, NEVER)
    if top_k is None and top_p is None:
        return logits
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        rank = torch.arange(logits.shape[1], device=logits.device)
        ordered = ordered.masked_fill(rank >= top_k[:, None].clamp(min=1), NEVER)
    if top_p is not None:
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities  # the sum of all more likely tokens
        gone = before >= top_p[:, None]
        gone[:, 0] = False
        gone &= top_p[:, None] < 1
        ordered = ordered.masked_fill(gone, NEVER)
    return torch.empty_like(logits).scatter_(1, ids, ordered)


def uniform(words: Tensor) -> Tensor:
    """Map words w to float32 uniforms ((w >> 9) + 0.5) * 2^-23: exact, never 0 or 1."""
    return ((words >> 9).to(torch.float32) + 0.5) * 2.0**-23


def gumbel_noise(noise_key: Tensor, vocab_size: int) -> Tensor:
    """Draw noise -log(-log(u)), [M, V] float32, for noise_key [M, 3] int64: seed, choice index, output position.

    The four words of the counter (choice, position, id // 4, 0) serve four neighbouring ids.
    """
    seed, choice, position = (column[:, None] for column in noise_key.unbind(1))
    blocks = torch.arange((vocab_size + 3) // 4, device=noise_key.device)[None, :]
    zero = torch.zeros_like(blocks)
    words = philox4x32((choice & MASK, position & MASK, blocks, zero), (seed & MASK, high(seed)))
    u = uniform(torch.stack(words, dim=-1)).flatten(1)[:, :vocab_size]  # [M, V]
    return -torch.log(-torch.log(u))
