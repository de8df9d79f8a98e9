"""EngineObserver: the one seam through which measurements, records and injected faults see an engine at work.

    planning -> the plan is made -> submitting -> the executor starts it -> ... -> collected, or failed -> committed

An observer is passed to `Engine.observe`. It sees plans and results but must not change them. An exception from
`planning`, `submitting` or `collected` counts as a failure of the step at that point: that is how a proof injects
faults. An observer that must never disturb a request catches its own (client/recorder.py).
"""

from penstock.interface.messages import EngineRequest
from penstock.interface.step import SchedulerOutput, StepOutput


class EngineObserver:
    """Base of observers, which does nothing at any event; a subclass overrides the events that it needs.

    Attributes:
        wants_checksums: whether the steps that are planned from now on carry checksums of their logits.
    """

    wants_checksums = False

    # --- requests --------------------------------------------------------------------------------------------------

    def arrived(self, request: EngineRequest) -> None:
        """A request was accepted."""

    def aborted(self, request_id: str) -> None:
        """An open request was ended by its client."""

    def preempted(self, request_id: str) -> None:
        """A running request, or a beam of it, has lost its blocks, and waits to be recomputed."""

    # --- steps -----------------------------------------------------------------------------------------------------

    def step_began(self) -> None:
        """Engine.step has something to do."""

    def planning(self) -> None:
        """A step is about to be planned."""

    def submitting(self, plan: SchedulerOutput) -> None:
        """A step was planned, and is about to be submitted to the executor."""

    def collected(self, plan: SchedulerOutput, output: StepOutput, seconds: float) -> None:
        """The executor has returned the results of a step, for which the engine has waited `seconds`."""

    def failed(self, plan: SchedulerOutput, error: Exception) -> None:
        """A step has failed as a whole, perhaps because an observer raised before this one learned of the step."""

    def step_ended(self) -> None:
        """Engine.step has committed its results, or is about to raise."""
