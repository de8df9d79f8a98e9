"""BeamSearch: which continuations of the beams go on and which have ended, by the rules of Transformers'
generate(num_beams=...). It knows neither requests nor steps: log-probabilities go in, tokens and parents come out.

    beams       [ best | ... | worst ]  at most `width`, all of the same length
    candidates  the most likely continuations of all beams, best first; the first `width` of them may end,
                and the first `width` that do not end go on
    finished    [ best | ... | worst ]  the best `width` that have ended so far, by sum / length ** length_penalty

Sums are rounded to float32 after each addition, as in torch, so that scores that are equal there are equal here.
Candidates with equal sums are ordered by beam, the better beam first, and then by token id.
"""

from collections.abc import Sequence
from ctypes import c_float
from dataclasses import dataclass, field

from penstock.interface.messages import Hypothesis
from penstock.interface.outputs import FinishReason
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import TokenLogprobs

NEVER = float("-inf")  # the log-probability of a token that may not be chosen
Candidate = tuple[float, int, int, int]  # minus its sum, its beam, its token, and the token's place in the beam's entry


@dataclass(frozen=True, slots=True)
class Path:
    """The tokens that a beam has generated.

    Attributes:
        parent: index of the beam that it continues, in the order before the last step.
        total: the sum of its tokens' log-probabilities.
        logprobs: one entry per token, if requested.
    """

    parent: int
    token_ids: list[int]
    total: float
    logprobs: list[TokenLogprobs] | None


@dataclass(slots=True)
class BeamSearch:
    """One search. `paths` are the running beams. A search begins with one beam, which has generated nothing.

    Args:
        max_tokens: length at which every beam ends.
        end_ids: tokens that end a beam.
    """

    params: SamplingParams
    max_tokens: int
    end_ids: frozenset[int]
    paths: list[Path] = field(init=False)
    _finished: list[tuple[float, Hypothesis]] = field(default_factory=list)  # scores and answers, best first

    def __post_init__(self) -> None:
        self.paths = [Path(0, [], 0.0, None if self.params.logprobs is None else [])]

    @property
    def is_done(self) -> bool:
        return not self.paths

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """Return the best complete answers so far, best first."""
        return [hypothesis for _, hypothesis in self._finished]

    def advance(self, scored: Sequence[TokenLogprobs]) -> None:
        """Continue every beam by a token. If the search is done, no beams are left.

        scored: for each beam, an arbitrary token, then its SamplingParams.num_candidates most likely ones, best first.
        """
        width, length = self.params.n, len(self.paths[0].token_ids) + 1
        candidates = self._candidates(scored)
        paths: list[Path] = []
        for place, (minus_total, beam, token_id, rank) in enumerate(candidates):
            ends = token_id in self.end_ids
            if (ends or length == self.max_tokens) and place >= width:
                continue
            path = self._continued(beam, token_id, -minus_total, scored[beam], rank)
            if ends or length == self.max_tokens:
                self._finish(path, FinishReason.STOP if ends else FinishReason.LENGTH)
            elif len(paths) < width:
                paths.append(path)
        self._finished.sort(key=lambda item: -item[0])  # stable: among equals, the earlier one first
        del self._finished[width:]
        self.paths = [] if self._cannot_improve(paths, length) else paths

    def _candidates(self, scored: Sequence[TokenLogprobs]) -> list[Candidate]:
        found: list[Candidate] = []
        for beam, (path, entry) in enumerate(zip(self.paths, scored, strict=True)):
            pairs = zip(entry.token_ids[1:], entry.logprobs[1:], strict=True)
            found += (
                (-_float32(path.total + value), beam, token, rank)
                for rank, (token, value) in enumerate(pairs, 1)
                if value > NEVER
            )
        return sorted(found)[: self.params.num_candidates(len(self.end_ids))]

    def _continued(self, beam: int, token_id: int, total: float, entry: TokenLogprobs, rank: int) -> Path:
        path, logprobs = self.paths[beam], None
        if path.logprobs is not None:
            shown = 1 + (self.params.logprobs or 0)
            ids, values = [token_id, *entry.token_ids[1:shown]], [entry.logprobs[rank], *entry.logprobs[1:shown]]
            logprobs = [*path.logprobs, TokenLogprobs(ids, values, 1 + sum(v > values[0] for v in entry.logprobs[1:]))]
        return Path(beam, [*path.token_ids, token_id], total, logprobs)

    def _finish(self, path: Path, reason: FinishReason) -> None:
        score = self._score(path.total, len(path.token_ids))
        self._finished.append((score, Hypothesis(path.token_ids, path.total, reason, path.logprobs)))

    def _score(self, total: float, length: int) -> float:
        return _float32(total / _float32(length**self.params.length_penalty))

    def _cannot_improve(self, paths: list[Path], length: int) -> bool:
        """Return whether the search is done: every beam has ended, or no better answer is expected.

        The score that the best beam may reach is estimated from its present length; with early_stopping "never", from
        the length at which its score would be best.
        """
        if not paths:
            return True
        if len(self._finished) < self.params.n:
            return False
        if self.params.early_stopping is True:
            return True
        if self.params.early_stopping == "never" and self.params.length_penalty > 0.0:
            length = self.max_tokens
        return self._score(paths[0].total, length) <= self._finished[-1][0]


def _float32(value: float) -> float:
    return c_float(value).value
