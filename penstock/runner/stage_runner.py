"""StageRunner: a ModelRunner for the layers of one stage. Every rank gets every step, in the same order.

    a step        the plan, and what has been sampled since the last one, which only one rank knows by itself
    handed        x and h of the stage before, or the failure that it hands on instead

A step that fails in one stage is a step without tokens in those behind it: they forget who has left, and compute
nothing.
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
        """The memory of its caches."""
        return self._runner.cache_bytes

    def skip(self, plan: SchedulerOutput, outputs: Mapping[str, Sequence[int]]) -> None:
        """Note a step that an earlier stage could not compute."""
        self._compute(replace(plan, new_requests=[], scheduled=[], block_copies=[]), outputs)

    def compute(self, plan: SchedulerOutput, outputs: Mapping[str, Sequence[int]], handed: Sequence[Any] | None) -> Any:
        """Compute a step. Return what the next stage goes on with, x and h, or, as the last stage, a StepOutput.

        handed: what the stage before has returned, for all but the first.
        """
        if handed is not None:
            self._stage.receive(handed[0], handed[1])
        return self._compute(plan, outputs)

    def _compute(self, plan: SchedulerOutput, outputs: Mapping[str, Sequence[int]]) -> Any:
        if not self._samples:
            self._runner.note_outputs(outputs)
        return self._runner.execute(plan) if self._stage.is_last else self._runner.compute_stage(plan)
