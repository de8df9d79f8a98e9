"""The loop of a pipeline's rank: it computes its layers of every step, in order, until its engine disconnects.

If a stage of one rank cannot compute a step, only that step is lost. Ranks that share a stage would no longer be at the
same place of the model after such a failure, so they end, and their engine ends with them.
"""

import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from penstock.errors import ExecutorLostError
from penstock.interface.step import SchedulerOutput
from penstock.parallel.channel import (
    Channel,
    Done,
    Span,
    StageFailedError,
    StepFailed,
    StepOrder,
    decode_order,
    encode,
    receive_handed,
    send_failure,
    send_handed,
)


class StagePart(Protocol):
    """Computes the layers of one stage (runner/stage_runner.py)."""

    def skip(self, plan: SchedulerOutput, outputs: Mapping[str, Sequence[int]]) -> None: ...

    def compute(
        self, plan: SchedulerOutput, outputs: Mapping[str, Sequence[int]], handed: Sequence[Any] | None
    ) -> Any: ...


class Peers(Protocol):
    """Counts what a rank receives from the other ranks of its stage.

    Attributes:
        bytes_received: bytes that the rank has received from them so far.
    """

    bytes_received: int


class Rank:
    """A stage, or a rank's part of it, with its connections to the engine and to the previous and the next stage. A
    connection to a stage that does not exist is None."""

    def __init__(
        self,
        stage: int,
        runner: StagePart,
        engine: Channel,
        before: Channel | None,
        after: Channel | None,
        *,
        rank: int = 0,
        peers: Peers | None = None,
    ) -> None:
        """rank: number in its stage. peers: the other ranks of the stage; None: this rank computes the whole stage."""
        self._index = stage
        self._rank = rank
        self._peers = peers
        self._runner = runner
        self._engine = engine
        self._before = before
        self._after = after

    def run(self) -> None:
        """Compute steps until the engine, or a rank beside this one, is gone."""
        while True:
            try:
                self._step(decode_order(self._engine.receive()))
            except (ExecutorLostError, OSError):
                return

    def _step(self, order: StepOrder) -> None:
        failure: StepFailed | None = None
        result, handed, received = None, None, 0
        before = 0 if self._peers is None else self._peers.bytes_received
        try:
            if self._before is not None:
                handed, received = receive_handed(self._before)
        except StageFailedError as error:
            failure = error.failure
        begin = time.perf_counter()
        try:
            if failure is None:
                result = self._runner.compute(order.plan, order.outputs, handed)
            else:
                self._runner.skip(order.plan, order.outputs)
        except ExecutorLostError:
            raise
        except Exception as error:  # only this step is lost; later steps go on
            if self._peers is not None:
                print(f"penstock: rank {self._rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                raise ExecutorLostError("the ranks of a stage are not at the same place any more") from error
            failure = failure or StepFailed(f"{type(error).__name__}: {error}", isinstance(error, MemoryError))
        received += 0 if self._peers is None else self._peers.bytes_received - before
        if self._rank == 0:
            rows, tokens = len(order.plan.scheduled), order.plan.num_tokens
            span = Span(self._index, order.plan.step_id, rows, tokens, begin, time.perf_counter())
            self._engine.send(encode(span))
        if self._after is None:
            if self._rank == 0:
                done = Done(replace(result, bytes_received=received)) if failure is None and result else failure
                self._engine.send(encode(done))
        elif failure is not None:
            send_failure(self._after, failure)
        else:
            send_handed(self._after, result, received)
