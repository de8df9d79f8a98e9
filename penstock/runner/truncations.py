"""Truncations: functions that decide which tokens stay in the draw. Each gets the logits [n] float32 of the remaining n
tokens, divided by the temperature and ordered by id, and returns which of them stay, [n] bool: at least one.

TRUNCATIONS lists them in the order in which they apply. They compute in numpy, in float64, and only for rows that ask
for a truncation that the kernels do not have. There, min_p, top_k and top_p mean the same as in `kernels/sampling.py`.
A truncation depends on the logits, the parameters and a Draw, and on nothing else.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import SamplerState
from penstock.kernels.sampling import XTC_STREAM, uniform_at
from penstock.kernels.tensors import Float32, Float64, Int64
from penstock.runner.masks import is_on

Kept = npt.NDArray[np.bool_]
NEVER = np.float32(-np.inf)
TOP_H_TOKENS = 100
MIROSTAT_TOKENS = 100  # the most likely tokens, from which version 1 estimates the shape of the distribution
FIRST_LOOK = 256  # how many tokens are sorted at first, instead of the whole vocabulary


@dataclass(frozen=True, slots=True)
class Draw:
    """What one draw depends on besides logits and parameters.

    Attributes:
        noise_key: seed, choice and output position.
        state: what it needs of the draws before; None for requests that need nothing.
        vocab_size: set by `truncate`.
    """

    noise_key: tuple[int, int, int]
    state: SamplerState | None = None
    vocab_size: int = 0

    @property
    def mu(self) -> float:
        """Mirostat's limit of surprise, in bits."""
        return self.state[0] if self.state else 0.0


def log_probabilities(logits: Float32) -> Float64:
    """Return the log-softmax of logits [n]; at least one of them is above -inf."""
    shifted = logits.astype(np.float64) - float(logits.max())
    found: Float64 = shifted - math.log(float(np.exp(shifted).sum()))
    return found


def _entropy(logs: Float64) -> float:
    weights = np.exp(logs)
    return float(-(logs[weights > 0] * weights[weights > 0]).sum())


def _only(logits: Float32, indices: Int64) -> Kept:
    kept = np.zeros(len(logits), dtype=np.bool_)
    kept[indices] = True
    return kept


def _smallest(keys: Float64 | Float32, count: int) -> Int64:
    """Return the indices of the `count` smallest keys [n], in order of key and index; more on a tie at the end."""
    found = np.arange(len(keys))
    if count < len(keys):
        found = np.flatnonzero(keys <= np.partition(keys, count - 1)[count - 1])
    ordered: Int64 = found[np.argsort(keys[found], kind="stable")]
    return ordered


def _in_order(keys: Float64 | Float32, probabilities: Float64, mass: float) -> tuple[Int64, Float64]:
    """Return the indices of the smallest keys in order, at least as many as have a total probability of `mass`, and the
    cumulative sums. Only the beginning is sorted, because sorting a whole vocabulary takes long."""
    count = FIRST_LOOK
    while True:
        indices = _smallest(keys, count)
        sums = np.cumsum(probabilities[indices])
        if sums[-1] >= mass or len(indices) == len(keys):
            return indices, sums
        count *= 8


def top_h(logits: Float32, params: SamplingParams, draw: Draw) -> Kept:
    best = _smallest(-logits, TOP_H_TOKENS)[:TOP_H_TOKENS]
    logs = log_probabilities(logits[best])
    sums = np.cumsum(-np.exp(logs) * logs)
    within = sums <= (params.top_h or 1.0) * sums[-1]
    within[0] = True
    return _only(logits, best[within])


def min_p(logits: Float32, params: SamplingParams, draw: Draw) -> Kept:
    probabilities = np.exp(log_probabilities(logits))
    kept: Kept = probabilities >= params.min_p * probabilities.max()
    return kept


def top_k(logits: Float32, params: SamplingParams, draw: Draw) -> Kept:
    count = params.top_k if params.top_k > 0 else len(logits)
    return _only(logits, _smallest(-logits, count)[:count])


def top_p(logits: Float32, params: SamplingParams, draw: Draw) -> Kept:
    probabilities = np.exp(log_probabilities(logits))
    indices, sums = _in_order(-logits, probabilities, params.top_p)
    before = sums - probabilities[indices]
    before[0] = 0.0
    return _only(logits, indices[before < params.top_p])


def typical_p(logits: Float32, params: SamplingParams, draw: Draw) -> Kept:
    logs = log_probabilities(logits)
    distances = np.abs(-logs - _entropy(logs))
    indices, sums = _in_order(distances, np.exp(logs), params.typical_p)
    last = min(int((sums < params.typical_p).sum()), len(indices) - 1)
    kept: Kept = distances <= distances[indices[last]]
    return kept


def epsilon_cutoff(logits: Float32, params: SamplingParams, draw: Draw) -> Kept:
    least = params.epsilon_cutoff if params.epsilon_cutoff < 1.0 else 0.0  # 1 is off, as in Transformers
    kept: Kept = (np.exp(log_probabilities(logits)) >= least) | (logits == logits.max())
    return kept


def eta_cutoff(logits: Float32, params: SamplingParams, draw: Draw) -> Kept:
    logs = log_probabilities(logits)
    eta = params.eta_cutoff if params.eta_cutoff < 1.0 else 0.0
    least = min(eta, math.sqrt(eta) * math.exp(-_entropy(logs)))
    kept: Kept = (np.exp(logs) >= least) | (logits == logits.max())
    return kept


def xtc(logits: Float32, params: SamplingParams, draw: Draw) -> Kept:
    kept = np.ones(len(logits), dtype=np.bool_)
    if params.xtc_threshold <= 0.5 and uniform_at(draw.noise_key, XTC_STREAM) <= params.xtc_probability:
        likely = np.flatnonzero(np.exp(log_probabilities(logits)) >= params.xtc_threshold)
        kept[likely[np.argsort(-logits[likely], kind="stable")][:-1]] = False
    return kept


def mirostat(logits: Float32, params: SamplingParams, draw: Draw) -> Kept:
    logs = log_probabilities(logits)
    if params.mirostat == 1:
        count = min(_mirostat_count(logs, draw), len(logits))
        return _only(logits, _smallest(-logits, count)[:count])
    kept: Kept = -logs / math.log(2.0) <= draw.mu
    kept[int(logits.argmax())] = True
    return kept


def _mirostat_count(logs: Float64, draw: Draw) -> int:
    """Return how many of the most likely tokens version 1 keeps, from an estimated exponent of Zipf's distribution."""
    best = logs[_smallest(-logs, MIROSTAT_TOKENS)[:MIROSTAT_TOKENS]]
    best = best[best > -np.inf]
    if len(best) < 2:
        return 1
    steps = np.log(np.arange(2, len(best) + 1) / np.arange(1, len(best)))
    exponent = float((steps * (best[:-1] - best[1:])).sum() / (steps * steps).sum())
    excess, log_size = exponent - 1.0, math.log(draw.vocab_size)
    share = 1.0 / log_size if abs(excess) < 1e-9 else excess / -math.expm1(-excess * log_size)
    log_count = (math.log(share) + draw.mu * math.log(2.0)) / max(exponent, 1e-9)
    return max(1, int(math.exp(min(log_count, log_size))))


def first_state(params: SamplingParams) -> SamplerState | None:
    """Return the state before the first output, which is mirostat's mu; None if draws do not depend on each other."""
    return (2.0 * params.mirostat_tau,) if params.has_sampler_state and not params.greedy else None


def next_state(logits: Float32, token_id: int, params: SamplingParams, state: SamplerState) -> SamplerState:
    """Return the state after token_id was drawn from truncated logits [V]."""
    (mu,) = state
    surprise = -float(log_probabilities(logits)[token_id]) / math.log(2.0)
    return (mu - params.mirostat_eta * (surprise - params.mirostat_tau),)


Truncation = Callable[[Float32, SamplingParams, Draw], Kept]
TRUNCATIONS: dict[str, Truncation] = {  # in order: the field of SamplingParams that turns it on -> truncation
    "top_h": top_h,
    "min_p": min_p,
    "top_k": top_k,
    "top_p": top_p,
    "typical_p": typical_p,
    "epsilon_cutoff": epsilon_cutoff,
    "eta_cutoff": eta_cutoff,
    "xtc_probability": xtc,
    "mirostat": mirostat,
}
IN_KERNELS = ("min_p", "top_k", "top_p")  # the kernels apply these, unless the row asks for another truncation


def truncate(logits: Float32, params: SamplingParams, draw: Draw) -> Float32:
    """Return logits [V] after the truncations that are on: dropped tokens become -inf. Does not change `logits`."""
    wanted = [truncation for name, truncation in TRUNCATIONS.items() if is_on(params, name)]
    if not wanted:
        return logits
    ids = np.flatnonzero(logits > NEVER)
    left, draw = logits[ids], replace(draw, vocab_size=len(logits))
    for truncation in wanted if ids.size else ():
        kept = truncation(left, params, draw)
        ids, left = ids[kept], left[kept]
    found: Float32 = np.full_like(logits, NEVER)
    found[ids] = left
    return found
