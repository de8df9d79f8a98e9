"""Simulate a fleet in several processes: replicas that do not depend on each other are simulated apart, part by part.

A part is small enough that the block pools of its replicas fit in memory. So the memory depends on the size of a part,
and not on the number of replicas or requests.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection

from penstock import EngineError
from penstock.errors import fail
from penstock_lab.simulator.figures import Figures
from penstock_lab.simulator.scenario import Scenario

MAX_BLOCKS = 2**20  # of the replicas of a part: about 200 MB
MIN_REPLICAS = 16  # a smaller fleet is simulated in this process, because other processes would take longer to start


def simulate(
    scenario: Scenario, num_replicas: int, processes: int | None = None,
    advance: Callable[[int], None] = lambda count: None, sample: int | None = None,
) -> Figures:  # fmt: skip
    """Simulate a fleet and return its figures, which do not depend on the number of processes.

    Args:
        processes: maximum number of processes that compute; None: only this one.
        advance: called with the number of requests sent.
        sample: number of replicas that are simulated, evenly spread, and stand for all, because their loads are alike.
            None: all are simulated.

    Raises:
        InvalidRequestError: there is a sample, but the requests of a replica depend on the other replicas.
    """
    processes = processes or 1
    if sample is not None and not scenario.has_independent_replicas:
        raise fail("sample", sample, "left out unless replicas are independent: the router is round_robin, "
                         "without --users, autoscaling or failures")  # fmt: skip
    if not scenario.has_independent_replicas or (num_replicas < MIN_REPLICAS and sample is None):
        return scenario.run(num_replicas, advance)
    simulated = range(num_replicas)
    if sample is not None and sample < num_replicas:
        simulated = range(0, num_replicas, num_replicas // sample)[:sample]
    parts = list(divided(simulated, processes, sum(group.num_blocks for group in scenario.planned.groups)))
    figures = Figures(scenario.goals)
    if processes == 1:
        for part in parts:
            figures.merge(scenario.run_part(num_replicas, part, advance))
    else:
        _in_processes(scenario, num_replicas, parts, min(processes, len(parts)), advance, figures)
    if len(simulated) < num_replicas:
        figures.stand_for(num_replicas / len(simulated))
    return figures


def _in_processes(
    scenario: Scenario, num_replicas: int, parts: list[range], processes: int, advance: Callable[[int], None],
    figures: Figures,
) -> None:  # fmt: skip
    """Simulate parts in other processes, and add their results to `figures`.

    The processes end with this call, however it ends, and with this process.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of threads, but not the threads
    reader, writer = context.Pipe(duplex=False)
    try:
        with ProcessPoolExecutor(processes, context, initializer=_end_with, initargs=(reader,)) as pool, writer:
            running = [pool.submit(scenario.run_part, num_replicas, part) for part in parts]
            for done in as_completed(running):
                found = done.result()
                figures.merge(found)
                advance(found.requests + found.rejected)
    except BrokenProcessPool:
        message = "a simulating process died, perhaps for lack of memory; use --processes 1, or fewer replicas"
        raise EngineError(message) from None
    finally:
        reader.close()


def _end_with(reader: Connection) -> None:
    """End this process when the other end of the pipe, which only its parent has, is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, and that is enough

    def watch() -> None:
        reader.poll(None)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def divided(replicas: range, processes: int, num_blocks: int) -> Iterator[range]:
    """Yield parts of a fleet, at least one per process, of one replica or of at most MAX_BLOCKS in all.

    num_blocks: of a replica.
    """
    size = max(1, min(-(-len(replicas) // processes), MAX_BLOCKS // max(1, num_blocks)))
    for start in range(0, len(replicas), size):
        yield replicas[start : start + size]
