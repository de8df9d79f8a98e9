"""Dispatcher: which of a client's engines computes which choices.

    a new request       goes to the ready engine that can compute it soonest (client/router.py); all of its choices go
                        to the same engine, which computes their prompt once
    an engine dies      its choices go on at once in engines with free rows; the rest wait for a row, or for the
                        engine that takes its place
    a choice that ended engines twice    stays, to be tried alone by the next engine (client/recovery.py)

It knows neither processes nor prompts as text, and is not thread-safe.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.client.open_requests import OpenRequest, OpenRequests
from penstock.client.replica import Replica
from penstock.client.router import Router, block_hashes
from penstock.interface.messages import EngineOutput

OutputsLeft = Callable[[int, bool], float]  # (limit, whether choices never end early) -> expected outputs


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a choice is computed, and the content hashes of its prompt; none if there is only one engine."""

    replica: Replica
    request: OpenRequest
    hashes: list[bytes]


class Dispatcher:
    """Gives the choices of OpenRequests to replicas.

    Args:
        replicas: all replicas; the owner of the list adds to it.
        outputs_left: estimates the outputs of a choice.
        several: whether there will be more than one replica.

    Attributes:
        router: chooses among replicas.
    """

    def __init__(
        self, requests: OpenRequests, replicas: Sequence[Replica], outputs_left: OutputsLeft, *, several: bool
    ) -> None:
        self._requests = requests
        self._replicas = replicas
        self._outputs_left = outputs_left
        self._several = several
        self._homes: dict[str, _Home] = {}  # by engine request id
        self.use(1, 1)

    def use(self, block_size: int, num_blocks: int) -> None:
        """Set the size of the engines' caches, reported by the first ready engine, before any request arrives."""
        self._block_size = block_size
        self.router: Router[int] = Router(block_size, num_blocks)

    def submit(self, request: OpenRequest) -> None:
        """Let one engine compute all running choices of a request."""
        ids = self._requests.running_of(request)
        able = [replica for replica in self._replicas if replica.recovery.accepts]
        able = able or [replica for replica in self._replicas if not replica.given_up and not replica.recovery.leaving]
        able = able or [replica for replica in self._replicas if not replica.given_up]
        if ids and able:
            self._give(request, ids, able)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Tell the engines that these choices are not wanted any more, or not now."""
        gone: dict[Replica, list[str]] = {}
        for request_id in request_ids:
            home = self._leave(request_id)
            if home is not None:
                gone.setdefault(home.replica, []).append(request_id)
        for replica, ids in gone.items():
            replica.recovery.abort(ids)
        if gone:
            self.move()

    def forget(self, replica: Replica) -> None:
        """Forget what an engine has cached, because its process has ended."""
        self.router.forget(replica.index)

    def its_own(self, replica: Replica, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """Return an engine's outputs without those of choices that have moved to another engine."""
        if not self._several:
            return outputs
        homes = (self._homes.get(output.request_id) for output in outputs)
        return [output for output, home in zip(outputs, homes, strict=True) if home is None or home.replica is replica]

    def received(self, replica: Replica, outputs: Sequence[EngineOutput]) -> None:
        """Note what an engine has computed, after the outputs have been handed to their readers."""
        accepted = replica.recovery.accepts
        for output in outputs:
            replica.queued.computed(output.request_id, len(output.new_token_ids))
        ended = [output.request_id for output in outputs if output.finish_reason is not None]
        left = [self._leave(request_id) for request_id in ended]
        replica.recovery.received([o.request_id for o in outputs if o.new_token_ids or o.finish_reason is not None])
        if any(left) or replica.recovery.accepts != accepted:
            self.move()

    def move(self) -> None:
        """Move choices that wait for an engine that is not ready to engines with free rows. Choices of an engine that
        was given up go to any other engine, with or without free rows."""
        if not self._several:
            return
        for replica in self._replicas:
            if replica.recovery.leaving and not len(replica.queued):
                replica.let_go()
            if replica.recovery.accepts or not len(replica.queued):
                continue
            wanted = self._running_in(replica) if replica.given_up else replica.recovery.waiting()
            for request, ids in self._by_request(wanted).items():
                able = [other for other in self._replicas if other is not replica and other.recovery.accepts]
                if not replica.given_up:
                    rows = len(ids) * _rows(request)
                    able = [other for other in able if other.free_rows >= rows]
                if able:
                    for request_id in ids:
                        self._leave(request_id)
                    replica.recovery.abort(ids)
                    self._give(request, ids, able)

    def _give(self, request: OpenRequest, ids: Sequence[str], able: Sequence[Replica]) -> None:
        """Let one of these engines compute running choices of a request."""
        prompt, params = request.prompt_token_ids, request.params
        target, cached, hashes = able[0], 0, list[bytes]()
        if self._several:
            hashes = block_hashes(prompt, request.engine_requests[0].cache_salt, self._block_size)
            queued = {replica.index: replica.queued.total for replica in able}
            target = self._replicas[self.router.choose(hashes, len(prompt), queued)]
            cached = self.router.cached_tokens(target.index, hashes, len(prompt))
            self.router.note(target.index, hashes)
        for place, request_id in enumerate(ids):
            at_most = (params.max_tokens or 0) - self._requests.num_tokens_of(request_id)
            prompt_left = 0 if place else len(prompt) - cached  # the others find it in the cache
            rows = _rows(request)
            target.queued.add(request_id, prompt_left, rows * self._outputs_left(at_most, params.ignore_eos), rows)
            self._homes[request_id] = _Home(target, request, hashes)
        target.recovery.submit(ids)

    def _leave(self, request_id: str) -> _Home | None:
        """Forget where a choice is computed, but remember that the engine has its tokens in the cache."""
        home = self._homes.pop(request_id, None)
        if home is not None:
            home.replica.queued.remove(request_id)
            if self._several and home.replica.recovery.accepts:
                source = home.request.engine_requests[0]
                of_it = (one for one in home.request.choices if one.request.request_id == request_id)
                tokens = source.prompt_token_ids + next((one.token_ids for one in of_it), [])
                found = block_hashes(tokens, source.cache_salt, self._block_size, home.hashes)
                self.router.note(home.replica.index, found)
        return home

    def _running_in(self, replica: Replica) -> list[str]:
        running = self._requests.running()
        return [key for key, home in self._homes.items() if home.replica is replica and key in running]

    def _by_request(self, request_ids: Iterable[str]) -> dict[OpenRequest, list[str]]:
        found: dict[OpenRequest, list[str]] = {}
        for request_id in request_ids:
            request = self._requests.owner(request_id)
            if request is not None:
                found.setdefault(request, []).append(request_id)
        return found


def _rows(request: OpenRequest) -> int:
    """Return the rows that a choice takes; the beams of a search are one choice."""
    params = request.params
    return params.n if params.use_beam_search else 1
