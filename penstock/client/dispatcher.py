"""Dispatcher: which of a client's engines computes what.

    a new request       to the engine that has it soonest (client/router.py), among those that are ready; all of its
                        choices to the same one, which computes their prompt once
    an engine dies      what it had goes on at once in engines with free rows; the rest waits for a row, or for the
                        engine that comes in its place
    a choice that ended engines twice    stays, to be tried alone by the next engine (client/recovery.py)

Knows neither processes nor prompts as text; not for several threads at once.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.client.open_requests import OpenRequest, OpenRequests
from penstock.client.replica import Replica
from penstock.client.router import Router, block_hashes
from penstock.interface.messages import EngineOutput

OutputsLeft = Callable[[int, bool], float]  # (at most, whether none ends by itself) -> outputs to be expected


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a choice is computed, and the content hashes of its prompt; none where there is one engine only."""

    replica: Replica
    request: OpenRequest
    hashes: list[bytes]


class Dispatcher:
    """Gives the choices of OpenRequests to replicas.

    Args:
        replicas: all that there are; its owner adds to them.
        outputs_left: estimates the outputs of a choice.
        several: whether there will be more than one, between which to choose.

    Attributes:
        router: chooses between them.
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
        """Set the size of the engines' caches, which the first engine that is ready tells; no request comes before."""
        self._block_size = block_size
        self.router: Router[int] = Router(block_size, num_blocks)

    def submit(self, request: OpenRequest) -> None:
        """Let an engine compute the running choices of a request, all of them the same one."""
        ids = self._requests.running_of(request)
        able = [replica for replica in self._replicas if replica.recovery.accepts]
        able = able or [replica for replica in self._replicas if not replica.given_up and not replica.recovery.leaving]
        able = able or [replica for replica in self._replicas if not replica.given_up]
        if ids and able:
            self._give(request, ids, able)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Tell the engines that nobody wants these choices any more, or not now."""
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
        """Forget what an engine has cached: its process has ended."""
        self.router.forget(replica.index)

    def its_own(self, replica: Replica, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """Return an engine's outputs without those of choices that have moved to another engine."""
        if not self._several:
            return outputs
        homes = (self._homes.get(output.request_id) for output in outputs)
        return [output for output, home in zip(outputs, homes, strict=True) if home is None or home.replica is replica]

    def received(self, replica: Replica, outputs: Sequence[EngineOutput]) -> None:
        """Note what an engine has computed, after it has been handed to its readers."""
        accepted = replica.recovery.accepts
        for output in outputs:
            replica.queued.computed(output.request_id, len(output.new_token_ids))
        ended = [output.request_id for output in outputs if output.finish_reason is not None]
        left = [self._leave(request_id) for request_id in ended]
        replica.recovery.received([o.request_id for o in outputs if o.new_token_ids or o.finish_reason is not None])
        if any(left) or replica.recovery.accepts != accepted:
            self.move()

    def move(self) -> None:
        """Give what waits for an engine that is not ready to engines with free rows; what belongs to an engine that was
        given up goes to any other, free rows or not."""
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
        prompt, params = request.prepared.prompt_token_ids, request.prepared.params
        target, cached, hashes = able[0], 0, list[bytes]()
        if self._several:
            hashes = block_hashes(prompt, request.prepared.engine_requests[0].cache_salt, self._block_size)
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
        """Forget where a choice is computed, but not that the engine has its tokens in the cache."""
        home = self._homes.pop(request_id, None)
        if home is not None:
            home.replica.queued.remove(request_id)
            if self._several and home.replica.recovery.accepts:
                source = home.request.prepared.engine_requests[0]
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
    """Return the rows that a choice takes: all beams of a search are one."""
    params = request.prepared.params
    return params.n if params.use_beam_search else 1
