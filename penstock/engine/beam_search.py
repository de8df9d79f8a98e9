"""Beam search in the batch of all other requests: each beam is an ordinary request to the scheduler.

    step     every beam computes its last token, in one batch with all other requests, and is scored
    choose   each beam is replaced by its continuations, which share its blocks (Scheduler.fork)

BeamSearch has the rules; Search applies them to requests. A scored beam waits for the other beams of its
search. If one of them waits for a row or for blocks, the scored beams give up theirs, so that two searches can never
wait for each other. What a search finds depends on log-probabilities alone, so its answer has the same bits whichever
beams are preempted, and in whichever steps they are computed.
"""

import copy
from collections.abc import Sequence
from ctypes import c_float
from dataclasses import dataclass, field

from penstock.engine.adapters import Adapter
from penstock.engine.request import Request
from penstock.engine.scheduler import Scheduler
from penstock.errors import invalid
from penstock.interface.messages import EngineOutput, EngineRequest, Hypothesis
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
    """Chooses the continuations that go on or have ended, by the rules of Transformers' generate(num_beams=).

        beams       [ best | ... | worst ]  at most `width`, all of the same length; a search begins with an empty one
        candidates  the most likely continuations of all beams, best first; the first `width` of them may end,
                    and the first `width` that do not end go on
        finished    [ best | ... | worst ]  the best `width` that have ended, by sum / length ** length_penalty

    Log-probabilities go in, tokens and parents (`paths`) come out. Sums are rounded to float32 after each addition, as
    in torch, so that scores that are equal there are equal here. Candidates with equal sums are ordered by beam, the
    better beam first, and then by token id.

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
        """List the best complete answers so far, best first."""
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
        """Decide whether the search is done: every beam has ended, or no better answer is expected.

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


class Beam(Request):
    """One beam.

    Attributes:
        search: the search that it belongs to.
        scored: its most likely next tokens; None until a step has computed them.
    """

    def __init__(
        self,
        source: EngineRequest,
        arrival: int,
        max_model_len: int,
        end_ids: frozenset[int],
        now: float = 0.0,
        adapter: Adapter | None = None,
    ) -> None:
        super().__init__(source, arrival, max_model_len, now, adapter)
        goes_on = source.params.ignore_eos and source.params.structured_outputs is None
        self.search = Search(self, frozenset() if goes_on else end_ids)
        self.request_id = self.search.new_id()
        self.scored: TokenLogprobs | None = None

    def continued(self, token_id: int) -> "Beam":
        """Make a beam with one more token, and with nothing computed."""
        beam = copy.copy(self)
        beam.request_id = self.search.new_id()
        beam.token_ids = [*self.token_ids, token_id]
        beam.block_hashes = list(self.block_hashes)
        beam.num_computed_tokens = 0
        beam.scored = None
        return beam


class Search:
    """The search of one request, and its beams, best first."""

    def __init__(self, first: Beam, end_ids: frozenset[int]) -> None:
        self.request_id = first.request_id
        self.beams = [first]
        self.search = BeamSearch(first.params, first.max_output_tokens, end_ids)
        self._num_beams = 0

    def new_id(self) -> str:
        self._num_beams += 1
        return f"{self.request_id} beam {self._num_beams}"

    def advance(self, scheduler: Scheduler) -> EngineOutput | None:
        """Replace the beams by their continuations, once all are scored. Return the output if the search has ended."""
        scored = [beam.scored for beam in self.beams if beam.scored is not None]
        if len(scored) < len(self.beams):
            if scored:
                self._make_way(scheduler)
            return None
        self.search.advance(scored)
        before = self.beams
        self.beams = [before[path.parent].continued(path.token_ids[-1]) for path in self.search.paths]
        children: list[list[Beam]] = [[] for _ in before]
        for path, beam in zip(self.search.paths, self.beams, strict=True):
            children[path.parent].append(beam)
        for parent, its_children in sorted(zip(before, children, strict=True), key=lambda pair: len(pair[1])):
            scheduler.fork(parent, its_children)  # childless parents first, to free their rows and blocks
        return self._output(before[0]) if self.search.is_done else None

    def _make_way(self, scheduler: Scheduler) -> None:
        """Free the rows and blocks of the scored beams if another beam of the search is not even running."""
        if any(beam.scored is None and beam not in scheduler.running for beam in self.beams):
            for beam in self.beams:
                if beam.scored is not None:
                    scheduler.remove(beam)

    def _output(self, last: Beam) -> EngineOutput:
        hypotheses = self.search.hypotheses
        if len(hypotheses) < last.params.n:
            error = f"only {len(hypotheses)} answers can be chosen, but n = {last.params.n} are asked for"
            return EngineOutput(self.request_id, 0, [], finish_reason=FinishReason.ERROR, error=error)
        return EngineOutput(
            self.request_id,
            0,
            [],
            finish_reason=hypotheses[0].finish_reason,
            num_cached_tokens=last.num_cached_tokens or 0,
            hypotheses=hypotheses,
        )


def check_search(source: EngineRequest, vocab_size: int) -> None:
    """Raise InvalidRequestError for more beams than the vocabulary has tokens, and for a search to be resumed."""
    if source.params.n > vocab_size:
        raise invalid("n", f"{source.params.n} beams are more than the {vocab_size} tokens of the vocabulary")
    if source.output_token_ids:
        raise invalid("output_token_ids", "not allowed with use_beam_search: a search cannot be resumed")
