"""InFlight: the steps that were submitted and not yet collected, oldest first, and the requests whose results count.

An executor whose devices hold a few layers each (a pipeline) computes several steps at once. A request is in at most
one of them, because its next step begins with what this one samples. A plan depends on committed state only, and the
executor computes in the order of submission, so blocks that are freed meanwhile may be given to a later step.

    running   [ a b | c d | e f | g h ]     rows spread over `depth` micro-batches
    steps       k     k+1   k+2   ready     k is collected and committed first

A request that is preempted, aborted or reset while in flight loses its results. If it is still open, it is computed
again, to the same tokens, but not before that step has been collected, so that old results are never taken for new
ones.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

from penstock.engine.request import Request
from penstock.engine.speculation import Proposal
from penstock.interface.step import SchedulerOutput


@dataclass(slots=True)
class Step:
    """A step that was submitted.

    Attributes:
        handle: the executor's handle; None if submitting the step raised `error`.
        proposal: the proposal that its drafts come from.
        began: when it was submitted.
    """

    plan: SchedulerOutput
    proposal: Proposal | None
    began: float
    handle: Any = None
    error: Exception | None = None


class InFlight:
    """The steps in flight, at most `depth`, and their requests by id."""

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth
        self.steps: deque[Step] = deque()
        self._requests: dict[str, Request | None] = {}  # None: its results are lost

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        """Return the number of requests that wait for results."""
        return sum(request is not None for request in self._requests.values())

    @property
    def has_room(self) -> bool:
        return len(self.steps) < self.depth

    @property
    def num_streams(self) -> int:
        """Return how many of the requests are streams."""
        return sum(request is not None and request.is_stream for request in self._requests.values())

    def add(self, step: Step, requests: dict[str, Request]) -> None:
        """Add the youngest step. `requests` has its requests, by id."""
        self.steps.append(step)
        self._requests.update({item.request_id: requests[item.request_id] for item in step.plan.scheduled})

    def lose(self, request: Request) -> None:
        """Note that a request has lost its blocks and, if it is in flight, its results."""
        if self._requests.get(request.request_id) is request:
            self._requests[request.request_id] = None

    def lose_all(self) -> None:
        """Do the same for every request."""
        self._requests = dict.fromkeys(self._requests)

    def land(self) -> tuple[Step, dict[str, Request]]:
        """Remove the oldest step. Return it, and those of its requests whose results count."""
        step = self.steps.popleft()
        found = {item.request_id: self._requests.pop(item.request_id) for item in step.plan.scheduled}
        return step, {name: request for name, request in found.items() if request is not None}
