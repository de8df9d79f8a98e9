"""Truncations: which tokens stay in the draw. Each takes logits [V] float32 after the temperature, and returns them
with -inf where a token is dropped; at least one token stays.

TRUNCATIONS lists them in the order in which they apply. They are numpy's, in float64, and run only on rows that ask for
one that the kernels do not have; min_p, top_k and top_p mean there what they mean in `kernels/sampling.py`. What a
truncation does depends on the logits, the parameters and a Draw, and on nothing else.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.interface.sampling_params import SamplingParams
from penstock.kernels.sampling import XTC_STREAM, uniform_at
from penstock.runner.masks import Float32, Int64

Float64 = npt.NDArray[np.float64]
NEVER = np.float32(-np.inf)
TOP_H_TOKENS = 100
MIROSTAT_TOKENS = 100  # from which version 1 estimates the shape of the distribution
FIRST_LOOK = 256  # tokens that are put in order at first, in place of the whole vocabulary


@dataclass(frozen=True, slots=True)
class Draw:
    """What one draw depends on besides logits and parameters.

    Attributes:
        noise_key: seed, choice and output position.
        mu: mirostat's largest surprise, in bits.
    """

    noise_key: tuple[int, int, int]
    mu: float = 0.0


def log_probabilities(logits: Float32) -> Float64:
    """Return log-softmax of logits [V], of which one is above -inf."""
    shifted = logits.astype(np.float64) - float(logits.max())
    found: Float64 = shifted - math.log(float(np.exp(shifted).sum()))
    return found


def _entropy(logs: Float64) -> float:
    some = logs[logs > -np.inf]
    return float(-(some * np.exp(some)).sum())


def _keep(logits: Float32, kept: npt.NDArray[np.bool_]) -> Float32:
    found: Float32 = np.where(kept, logits, NEVER)
    return found


def _keep_ids(logits: Float32, ids: Int64) -> Float32:
    found: Float32 = np.full_like(logits, NEVER)
    found[ids] = logits[ids]
    return found


def _smallest(keys: Float64 | Float32, count: int) -> Int64:
    """Return the ids of the `count` smallest keys [V], or more on a tie: smallest first, lowest id on a tie."""
    found = np.arange(len(keys))
    if count < len(keys):
        found = np.flatnonzero(keys <= np.partition(keys, count - 1)[count - 1])
    ordered: Int64 = found[np.argsort(keys[found], kind="stable")]
    return ordered


def _in_order(keys: Float64 | Float32, probabilities: Float64, mass: float) -> tuple[Int64, Float64]:
    """Return the ids with the smallest keys in order, as many as reach a probability of `mass`, and the sums up to
    each. Only the beginning is sorted: a whole vocabulary takes long.
    """
    count = FIRST_LOOK
    while True:
        ids = _smallest(keys, count)
        sums = np.cumsum(probabilities[ids])
        if sums[-1] >= mass or len(ids) == len(keys):
            return ids, sums
        count *= 8


def top_h(logits: Float32, params: SamplingParams, draw: Draw) -> Float32:
    if params.top_h is None:
        return logits
    ids = _smallest(-logits, TOP_H_TOKENS)[:TOP_H_TOKENS]
    ids = ids[logits[ids] > NEVER]
    logs = log_probabilities(logits[ids])
    sums = np.cumsum(-np.exp(logs) * logs)
    kept = sums <= params.top_h * sums[-1]
    kept[0] = True
    return _keep_ids(logits, ids[kept])


def min_p(logits: Float32, params: SamplingParams, draw: Draw) -> Float32:
    if params.min_p == 0.0:
        return logits
    probabilities = np.exp(log_probabilities(logits))
    return _keep(logits, probabilities >= params.min_p * probabilities.max())


def top_k(logits: Float32, params: SamplingParams, draw: Draw) -> Float32:
    if not 0 < params.top_k < len(logits):
        return logits
    return _keep_ids(logits, _smallest(-logits, params.top_k)[: params.top_k])


def top_p(logits: Float32, params: SamplingParams, draw: Draw) -> Float32:
    if params.top_p >= 1.0:
        return logits
    probabilities = np.exp(log_probabilities(logits))
    ids, sums = _in_order(-logits, probabilities, params.top_p)
    before = sums - probabilities[ids]
    before[0] = 0.0
    return _keep_ids(logits, ids[before < params.top_p])


def typical_p(logits: Float32, params: SamplingParams, draw: Draw) -> Float32:
    if params.typical_p >= 1.0:
        return logits
    logs = log_probabilities(logits)
    distances = np.abs(-logs - _entropy(logs))
    ids, sums = _in_order(distances, np.exp(logs), params.typical_p)
    last = min(int((sums < params.typical_p).sum()), len(ids) - 1)
    return _keep(logits, distances <= distances[ids[last]])


def epsilon_cutoff(logits: Float32, params: SamplingParams, draw: Draw) -> Float32:
    if not 0.0 < params.epsilon_cutoff < 1.0:
        return logits
    probabilities = np.exp(log_probabilities(logits))
    return _keep(logits, (probabilities >= params.epsilon_cutoff) | (logits == logits.max()))


def eta_cutoff(logits: Float32, params: SamplingParams, draw: Draw) -> Float32:
    if not 0.0 < params.eta_cutoff < 1.0:
        return logits
    logs = log_probabilities(logits)
    least = min(params.eta_cutoff, math.sqrt(params.eta_cutoff) * math.exp(-_entropy(logs)))
    return _keep(logits, (np.exp(logs) >= least) | (logits == logits.max()))


def xtc(logits: Float32, params: SamplingParams, draw: Draw) -> Float32:
    if params.xtc_probability == 0.0 or params.xtc_threshold > 0.5:
        return logits
    if uniform_at(draw.noise_key, XTC_STREAM) > params.xtc_probability:
        return logits
    top = np.flatnonzero(np.exp(log_probabilities(logits)) >= params.xtc_threshold)
    if len(top) < 2:
        return logits
    found = logits.copy()
    found[top[np.argsort(-logits[top], kind="stable")][:-1]] = NEVER
    return found


def mirostat(logits: Float32, params: SamplingParams, draw: Draw) -> Float32:
    if params.mirostat == 0:
        return logits
    logs = log_probabilities(logits)
    if params.mirostat == 1:
        count = _mirostat_count(logs, draw.mu)
        return _keep_ids(logits, _smallest(-logits, min(count, len(logits)))[:count])
    kept = -logs / math.log(2.0) <= draw.mu
    kept[int(logits.argmax())] = True
    return _keep(logits, kept)


def _mirostat_count(logs: Float64, mu: float) -> int:
    """Return how many of the most likely tokens version 1 keeps: the exponent of a Zipf distribution is estimated."""
    num_tokens = len(logs)
    best = logs[_smallest(-logs, MIROSTAT_TOKENS)[:MIROSTAT_TOKENS]]
    best = best[best > -np.inf]
    if len(best) < 2:
        return 1
    steps = np.log(np.arange(2, len(best) + 1) / np.arange(1, len(best)))
    exponent = float((steps * (best[:-1] - best[1:])).sum() / (steps * steps).sum())
    excess = exponent - 1.0
    share = 1.0 / math.log(num_tokens) if abs(excess) < 1e-9 else excess / -math.expm1(-excess * math.log(num_tokens))
    log_count = (math.log(share) + mu * math.log(2.0)) / max(exponent, 1e-9)
    return max(1, int(math.exp(min(log_count, math.log(num_tokens)))))


def next_mu(logits: Float32, token_id: int, params: SamplingParams, mu: float) -> float:
    """Return mirostat's mu after a token was drawn from what the truncations have left of logits [V]."""
    surprise = -float(log_probabilities(logits)[token_id]) / math.log(2.0)
    return mu - params.mirostat_eta * (surprise - params.mirostat_tau)


Truncation = Callable[[Float32, SamplingParams, Draw], Float32]
TRUNCATIONS: dict[str, Truncation] = {  # field of SamplingParams that turns it on -> truncation, in order
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
IN_KERNELS = ("min_p", "top_k", "top_p")  # what the kernels do themselves, if nothing else is asked for


def truncate(logits: Float32, params: SamplingParams, draw: Draw) -> Float32:
    """Apply all of them to logits [V]. What has nothing above -inf stays as it is."""
    if logits.max() == NEVER:
        return logits
    for truncation in TRUNCATIONS.values():
        logits = truncation(logits, params, draw)
    return logits
