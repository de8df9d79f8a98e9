"""The process of a rank, started by group.py or pipeline.py.

It builds its part of the model as its first message says, and computes it until its engine, or a rank beside it, is
gone.
"""

import contextlib
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from penstock.errors import ExecutorLostError, PenstockError
from penstock.interface.plugins import import_files
from penstock.ranks.build import Begin, RankPlan, make_runner, open_grammars
from penstock.ranks.group import RANK_OF_GROUP, CannotStart, Ready, StepOrder
from penstock.ranks.links import Links, inherit_links
from penstock.ranks.pipeline import (
    NO_END,
    Channel,
    Done,
    Span,
    StageFailedError,
    StepFailed,
    decode_order,
    encode,
    receive_activations,
    send_activations,
    send_failure,
)
from penstock.ranks.stage import FollowingRunner, Stage, StageRunner
from penstock.weights.loader import make_ops

EXIT_CANNOT_BUILD = 2
EXIT_FAILED = 1


def main(words: list[str]) -> int:
    """Run a rank. words: the executor that it belongs to, then the descriptors of what it has inherited."""
    role, *ends = words
    return _run_in_group(ends) if role == RANK_OF_GROUP else _run_in_pipeline(ends)


def _run_in_group(ends: Sequence[str]) -> int:
    """Build a part of the model as the leader says, and compute it. ends: the connection to the leader, then the links
    (Mesh.words)."""
    links, leader = inherit_links(ends[1:]), Connection(int(ends[0]))
    with contextlib.suppress(EOFError, OSError):  # the leader is gone
        plan: RankPlan = leader.recv()
        try:
            import_files(plan.config.imports)
            runner = make_runner(plan, make_ops(plan.config, plan.model_config, links.rank), links.rank, links)
        except ExecutorLostError:
            return EXIT_FAILED  # the leader says what happened
        except PenstockError as error:
            leader.send(CannotStart(str(error), getattr(error, "param", None)))
            return EXIT_CANNOT_BUILD
        leader.send(Ready(runner.cache_bytes))
        try:
            assert isinstance(runner, FollowingRunner), "the leader is no process of its own"
            follow(runner, leader)
        except ExecutorLostError:
            return EXIT_FAILED  # the leader says what happened
        except Exception:
            _print_failure(links.rank)
            return EXIT_FAILED
    return 0


def _print_failure(rank: int) -> None:
    print(f"penstock: rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)


def follow(runner: FollowingRunner, leader: Connection) -> None:
    """Compute this rank's part of every step until the leader is gone.

    Raises:
        ExecutorLostError: another rank is gone.
        Exception: whatever the step raised. The rank must end then.
    """
    while True:
        try:
            order = leader.recv()
        except (EOFError, OSError):
            return
        if not isinstance(order, StepOrder):
            raise ExecutorLostError(f"the leader sent {type(order).__name__}")
        order.load_adapters(runner)
        runner.append_sampled(order.sampled)
        runner.execute(order.plan)


def _run_in_pipeline(ends: Sequence[str]) -> int:
    """Compute a stage, or a part of it. ends: the sockets to the engine, from the stage before, and to the next stage;
    then the links (Mesh.words) if the stage has several ranks."""
    engine, before, after = (None if end == NO_END else Channel(socket.socket(fileno=int(end))) for end in ends[:3])
    if engine is None:
        raise ValueError("a rank needs the socket of its engine")
    return serve(engine, before, after, inherit_links(ends[3:]) if ends[3:] else None)


def serve(engine: Channel, before: Channel | None, after: Channel | None, links: Links | None) -> int:
    """Load a part of a pipeline and compute its steps over these connections. Return the exit status."""
    try:
        begin: Begin = pickle.loads(engine.receive())  # from the process that started this one
        runner = make_stage_runner(begin, links)
        engine.send(encode(Ready(runner.cache_bytes)))
    except (ExecutorLostError, OSError):
        return 0
    except (PenstockError, MemoryError) as error:
        message = str(error) or "there is not enough memory for its layers"
        engine.send(encode(CannotStart(message, getattr(error, "param", None))))
        return 1
    StageLoop(begin, runner, engine, before, after, links).run()
    return 0


def make_stage_runner(begin: Begin, links: Links | None) -> StageRunner:
    """Load the part that a rank computes. links: to the other ranks of its stage; None if it is the only one.

    Raises:
        ModelLoadError, InvalidRequestError: the part cannot be loaded.
    """
    plan = begin.plan
    import_files(plan.config.imports)
    ops = make_ops(plan.config, plan.model_config)
    stage = Stage(begin.layers, plan.model_config.num_hidden_layers)
    samples = stage.is_last and begin.rank == 0
    model = plan.model_config
    forms = open_grammars(plan.weights, model.vocab_size, model.eos_token_ids) if samples else None
    return StageRunner(make_runner(plan, ops, begin.rank, links, forms, stage), stage)


@dataclass(frozen=True, slots=True)
class StageLoop:
    """The loop of a rank of a pipeline: it computes its layers of every step, in order, until its engine disconnects.

    If a stage of one rank cannot compute a step, only that step is lost. Ranks that share a stage would no longer be at
    the same place of the model after such a failure, so they end, and their engine ends with them.

    Attributes:
        links: to the other ranks of the stage; None: it has no others.
    """

    begin: Begin
    runner: StageRunner
    engine: Channel
    before: Channel | None
    after: Channel | None
    links: Links | None

    def run(self) -> None:
        """Compute steps until the engine, or a rank beside this one, is gone."""
        while True:
            try:
                self._step(decode_order(self.engine.receive()))
            except (ExecutorLostError, OSError):
                return

    def _step(self, order: StepOrder) -> None:
        order.load_adapters(self.runner.runner)
        failure: StepFailed | None = None
        result, activations, received = None, None, 0
        before = 0 if self.links is None else self.links.bytes_received
        try:
            if self.before is not None:
                activations, received = receive_activations(self.before)
        except StageFailedError as error:
            failure = error.failure
        begin = time.perf_counter()
        try:
            if failure is None:
                result = self.runner.compute(order.plan, order.sampled, activations)
            else:
                self.runner.skip(order.plan, order.sampled)
        except ExecutorLostError:
            raise
        except Exception as error:  # only this step is lost; later steps go on
            if self.links is not None:
                print(
                    f"penstock: rank {self.begin.rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True
                )
                raise ExecutorLostError("the ranks of a stage are not at the same place any more") from error
            failure = failure or StepFailed(f"{type(error).__name__}: {error}", isinstance(error, MemoryError))
        received += 0 if self.links is None else self.links.bytes_received - before
        if self.begin.rank == 0:
            rows, tokens = len(order.plan.scheduled), order.plan.num_tokens
            span = Span(self.begin.stage, order.plan.step_id, rows, tokens, begin, time.perf_counter())
            self.engine.send(encode(span))
        if self.after is None:
            if self.begin.rank == 0:
                done = Done(replace(result, bytes_received=received)) if failure is None and result else failure
                self.engine.send(encode(done))
        elif failure is not None:
            send_failure(self.after, failure)
        else:
            send_activations(self.after, result, received)
