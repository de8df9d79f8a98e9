"""StageRunner: a ModelRunner for the layers of one stage. Every rank gets every step, in the same order.

    a step        the plan, and the tokens sampled since the last step, which only the rank that samples knows already
    handed        x and h of the stage before, or the failure that it hands on instead

If a step fails in one stage, the later stages treat it as a step without tokens: they remove the requests that have
left, and compute nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.interface.step import SchedulerOutput
from penstock.layers.stage import Stage
from penstock.runner.following import FollowingRunner
from penstock.runner.model_runner import ModelRunner


class StageRunner:
    """Computes the layers of one stage, step by step."""

    def __init__(self, runner: ModelRunner, stage: Stage) -> None:
        self._runner = runner
        self._stage = stage
        self._samples = stage.is_last and not isinstance(runner, FollowingRunner)

    @property
    def cache_bytes(self) -> int:
        """The bytes of its KV caches."""
        return self._runner.cache_bytes

    def skip(self, plan: SchedulerOutput, outputs: Mapping[str, Sequence[int]]) -> None:
        """Process a step that an earlier stage could not compute: remove requests and append outputs only."""
        self._compute(replace(plan, new_requests=[], scheduled=[], block_copies=[]), outputs)

    def compute(self, plan: SchedulerOutput, outputs: Mapping[str, Sequence[int]], handed: Sequence[Any] | None) -> Any:
        """Compute a step. Return x and h for the next stage or, from the last stage, a StepOutput.

        handed: what the stage before returned; None for the first stage.
        """
        if handed is not None:
            self._stage.receive(handed[0], handed[1])
        return self._compute(plan, outputs)

    def _compute(self, plan: SchedulerOutput, outputs: Mapping[str, Sequence[int]]) -> Any:
        if not self._samples:
            self._runner.note_outputs(outputs)
        return self._runner.execute(plan) if self._stage.is_last else self._runner.compute_stage(plan)
