"""Recovery: what an engine process is given to compute, and what its successor is given after a death.

A new engine gets every running choice, with the tokens received so far as outputs, and continues with the next token.
Because a new engine computes the same tokens, no reader can tell afterwards that the old one died.

A choice may itself be what ends the engine (it overflows a buffer, or exhausts the memory). A choice that was in the
engine at two deaths, and received nothing in between, is therefore tried alone: the engine gets nothing else until the
choice has its next token. If the engine dies again, that choice fails, and the others go on.

Several engines have one Recovery each and share the record of deaths: a choice that ends one engine, moves to another
and ends that too has two deaths (client/fleet.py).

Pinned prefixes are given to a new engine first, because whether a request fits beside them is decided when it arrives.
They are computed last, because no request should wait for a prefix that it does not use.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.client import frames
from penstock.client.open_requests import OpenRequests
from penstock.client.prefixes import Pin
from penstock.interface.timeline import IntervalKind

DEATHS_BEFORE_TRIAL = 2


@dataclass(slots=True)
class Deaths:
    """How often engines died with a choice in them since it received its last token."""

    num_tokens: int  # received at the last death
    count: int


class Recovery:
    """Sends choices of OpenRequests to one engine after another.

    Args:
        send: sends to the current engine; frames for a dead engine are dropped.
        deaths: by engine request id, shared by the engines of a client.

    Attributes:
        leaving: whether the current engine is to be shut down when it has nothing to compute.
    """

    def __init__(
        self, requests: OpenRequests, send: Callable[[frames.ToEngine], None], deaths: dict[str, Deaths]
    ) -> None:
        self.leaving = False
        self._requests = requests
        self._send = send
        self._ready = False
        self._assigned: dict[str, None] = {}  # choices for this engine or its successor, oldest first
        self._sent: set[str] = set()  # engine request ids in the current engine
        self._deaths = deaths
        self._pins_to_compute: list[Pin] = []  # by the current engine, after all trials
        self._computing: dict[str, Pin] = {}  # pins that the current engine computes again
        self._trials: deque[str] = deque()  # choices to try alone; the first one is in the engine

    @property
    def accepts(self) -> bool:
        """Whether new choices reach the engine at once: it is ready, stays, and tries none alone."""
        return self._ready and not self.leaving and not self._trials

    def submit(self, request_ids: Iterable[str]) -> None:
        """Send new choices to the engine; while it starts, or tries a choice alone, they wait."""
        request_ids = list(request_ids)
        self._assigned.update(dict.fromkeys(request_ids))
        if self.accepts:
            self._send_missing(request_ids)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Tell the engine that these choices are not wanted any more, or not from this engine."""
        request_ids = list(request_ids)
        for request_id in request_ids:
            self._assigned.pop(request_id, None)
        self._withdraw(request_ids)

    def _withdraw(self, request_ids: Iterable[str]) -> None:
        known = [request_id for request_id in request_ids if request_id in self._sent]
        if known:
            self._send(frames.Abort(known))
            self._sent.difference_update(known)
            self._end_trial(known)

    def waiting(self, *, with_trials: bool) -> set[str]:
        """Return the choices that another engine may take over: those that this engine does not have, without those
        that are to be tried alone, unless it never comes back."""
        return {key for key in self._assigned if key not in self._sent and (with_trials or not self._to_try(key))}

    def _to_try(self, request_id: str) -> bool:
        noted = self._deaths.get(request_id)
        return noted is not None and noted.count >= DEATHS_BEFORE_TRIAL

    def pin(self, pin: Pin) -> None:
        """Tell the engine about a new pin, before the request that computes it is submitted."""
        if self._ready:
            self._declare(pin)

    def compute(self, pin: Pin) -> None:
        """Let the engine compute a pin that another engine has computed."""
        if self._ready:  # otherwise it computes it once it is ready
            self._pins_to_compute.append(pin)
            if not self._trials:
                self._compute_pins()

    def unpin(self, pin: Pin) -> None:
        """Tell the engine that a pin is not wanted any more."""
        if pin in self._pins_to_compute:
            self._pins_to_compute.remove(pin)
        if self._ready:
            self._send(frames.Unpin(pin.name))

    def _declare(self, pin: Pin) -> None:
        source = pin.request
        self._send(frames.Pin(pin.name, source.request_id, source.prompt_token_ids, source.cache_salt))

    @property
    def recovered(self) -> bool:
        """Whether every choice that a death interrupted after its first token has received another token."""
        running = self._requests.running()
        begun = {key: deaths.num_tokens for key, deaths in self._deaths.items() if deaths.num_tokens and key in running}
        return self._ready and all(self._requests.num_tokens_of(key) > count for key, count in begun.items())

    def engine_ready(self) -> None:
        """Give a new engine all running choices, or the first choice that has to be tried alone."""
        assert not self._ready, "an engine is new only after the death of the one before"
        assert not self._sent, "what was sent to a dead engine is lost"
        self._ready = True
        for pin in self._requests.prefixes:
            self._declare(pin)
        self._pins_to_compute = [
            pin for pin in self._requests.prefixes if pin.is_computed and pin.num_deaths < DEATHS_BEFORE_TRIAL
        ]
        self._trials = deque(key for key in self._deaths if key in self._assigned and self._to_try(key))
        self._continue()

    def engine_lost(self, last_heard: float = 0.0) -> str | None:
        """Note the death of an engine that was last heard at `last_heard`. Return the choice that it was computing
        alone, which is to blame."""
        to_blame = self._trials[0] if self._ready and self._trials else None
        self._requests.interrupted(self._sent, IntervalKind.RECOVERY, last_heard)
        running = self._requests.running()
        for request_id in [key for key in self._deaths if key not in running]:
            del self._deaths[request_id]
        for request_id in [key for key in self._assigned if key in self._sent and key in running]:
            noted, num_tokens = self._deaths.get(request_id), self._requests.num_tokens_of(request_id)
            again = noted is not None and noted.num_tokens == num_tokens
            self._deaths[request_id] = Deaths(num_tokens, noted.count + 1 if noted is not None and again else 1)
        for pin in self._computing.values():
            pin.num_deaths += 1
        self._computing.clear()
        self._pins_to_compute.clear()
        self._ready = self.leaving = False
        self._sent.clear()
        self._trials.clear()
        return to_blame

    def received(self, request_ids: Sequence[str]) -> None:
        """Note that the engine has sent tokens, or the end, of these choices."""
        assert self._ready or not request_ids, "an output of a dead engine would count as its successor's"
        if self._trials and self._trials[0] in request_ids:
            self._withdraw([self._trials[0]])  # the next one must be alone; this one comes back after the last trial
        ended = set(request_ids).difference(self._requests.running())
        self._sent.difference_update(ended)
        for request_id in ended:
            self._assigned.pop(request_id, None)
        for request_id in self._computing.keys() & set(request_ids):
            self._computing.pop(request_id).num_deaths = 0

    def _end_trial(self, request_ids: Iterable[str]) -> None:
        """Go on to the next trial if the present one is among these choices."""
        if self._trials and self._trials[0] in request_ids:
            self._deaths.pop(self._trials.popleft(), None)
            self._continue()

    def _continue(self) -> None:
        """Send the next choice to try alone or, if there is none, every choice that the engine does not have."""
        running = self._requests.running()
        while self._trials and self._trials[0] not in running:
            self._deaths.pop(self._trials.popleft(), None)
        self._send_missing([self._trials[0]] if self._trials else [key for key in self._assigned if key in running])
        if not self._trials:
            self._compute_pins()

    def _compute_pins(self) -> None:
        for pin in self._pins_to_compute:
            self._computing[pin.request.request_id] = pin
            self._send(frames.AddRequest(pin.request))
        self._pins_to_compute.clear()

    def _send_missing(self, request_ids: Iterable[str]) -> None:
        assert self._ready, "a frame for a dead engine would be dropped"
        for request_id in request_ids:
            if request_id not in self._sent:
                assert request_id in self._assigned, "another engine computes this choice"
                assert not self._trials or (request_id == self._trials[0] and not self._sent), "it is tried alone"
                self._sent.add(request_id)
                self._send(frames.AddRequest(self._requests.resumed(request_id)))
