"""Beams: the requests of beam searches. To the scheduler, each beam is an ordinary request. Its tokens are chosen by
the search, as soon as all beams of the search have been scored.

    step     every beam computes its last token, in one batch with all other requests, and is scored
    choose   each beam is replaced by its continuations, which share its blocks (Scheduler.fork)

A scored beam waits for the other beams of its search. If one of them waits for a row or for blocks, the scored beams
give up theirs, so that two searches can never wait for each other. What a search finds depends on log-probabilities
alone, so its answer has the same bits whichever beams are preempted, and in whichever steps they are computed.
"""

import copy
from collections.abc import Iterator

from penstock.engine.beam_search import BeamSearch
from penstock.engine.request import Request
from penstock.engine.scheduler import Scheduler
from penstock.errors import InvalidRequestError
from penstock.interface.messages import EngineOutput, EngineRequest
from penstock.interface.outputs import FinishReason
from penstock.interface.step import TokenLogprobs


class Beam(Request):
    """One beam.

    Attributes:
        search: the search that it belongs to.
        scored: its most likely next tokens; None until a step has computed them.
    """

    def __init__(
        self, source: EngineRequest, arrival: int, max_model_len: int, end_ids: frozenset[int], now: float = 0.0
    ) -> None:
        super().__init__(source, arrival, max_model_len, now)
        goes_on = source.params.ignore_eos and source.params.structured_outputs is None
        self.search = Search(self, frozenset() if goes_on else end_ids)
        self.request_id = self.search.new_id()
        self.scored: TokenLogprobs | None = None

    def continued(self, token_id: int) -> "Beam":
        """Return a beam with one more token, and with nothing computed."""
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


class Searches:
    """The open searches, and all requests of the engine, beams included, by the ids that the scheduler uses."""

    def __init__(self, requests: dict[str, Request]) -> None:
        self._requests = requests
        self._open: dict[str, Search] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def open(self, beam: Beam) -> None:
        """Add a search with its first beam."""
        self._open[beam.search.request_id] = beam.search
        self._requests[beam.request_id] = beam

    def first_beam(self, request_id: str) -> Beam:
        """Return a beam of an open search."""
        return self._open[request_id].beams[0]

    def forget(self, request: Request) -> list[Request]:
        """Remove a request, or every beam of its search, and return them. A request that is gone is ignored."""
        members = [request]
        if isinstance(request, Beam):
            search = request.search
            members = [item for item in self._requests.values() if isinstance(item, Beam) and item.search is search]
            self._open.pop(search.request_id, None)
        for member in members:
            self._requests.pop(member.request_id, None)
        return members

    def advance(self, search: Search, scheduler: Scheduler) -> EngineOutput | None:
        """Let a search choose tokens. Return its output if it has ended; its beams are gone then."""
        before = search.beams
        output = search.advance(scheduler)
        if search.beams is not before:
            for beam in before:
                del self._requests[beam.request_id]
            self._requests.update((beam.request_id, beam) for beam in search.beams)
        if output is not None:
            del self._open[search.request_id]
        return output

    def __iter__(self) -> Iterator[Search]:
        return iter(list(self._open.values()))


def check_search(source: EngineRequest, vocab_size: int) -> None:
    """Raise InvalidRequestError for more beams than the vocabulary has tokens, and for a search to be resumed."""
    if source.params.n > vocab_size:
        message = f"n: {source.params.n} beams are more than the {vocab_size} tokens of the vocabulary"
        raise InvalidRequestError(message, param="n")
    if source.output_token_ids:
        message = "output_token_ids: not allowed with use_beam_search: a search cannot be resumed"
        raise InvalidRequestError(message, param="output_token_ids")
