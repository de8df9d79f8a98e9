"""A fleet in several processes: replicas that do not depend on each other are simulated apart, a part at a time.

A part is small enough that its block pools fit in memory, whatever the size of the fleet; so the memory depends on the
part, and not on the number of replicas or requests.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

from penstock.bench.simulator.figures import Figures
from penstock.bench.simulator.scenario import Scenario

MAX_BLOCKS = 2**20  # of the replicas of a part: about 200 MB
MIN_REPLICAS = 16  # a fleet of fewer is simulated in this process: others would take longer to start


def simulate(
    scenario: Scenario, num_replicas: int, processes: int | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Figures:  # fmt: skip
    """Simulate a fleet and return its figures, which do not depend on the number of processes.

    Args:
        processes: most that compute; None: one for each core.
        advance: called with the number of requests sent.
    """
    processes = processes or os.cpu_count() or 1
    if not scenario.has_independent_replicas or num_replicas < MIN_REPLICAS:
        return scenario.run(num_replicas, advance)
    figures = Figures(scenario.goals)
    parts = list(divided(num_replicas, processes, sum(group.num_blocks for group in scenario.planned.groups)))
    if processes == 1:
        for part in parts:
            figures.merge(scenario.run_part(num_replicas, part, advance))
        return figures
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks, and not the threads
    with ProcessPoolExecutor(min(processes, len(parts)), mp_context=context) as pool:
        running = [pool.submit(scenario.run_part, num_replicas, part) for part in parts]
        try:
            for done in as_completed(running):
                found = done.result()
                figures.merge(found)
                advance(found.requests + found.rejected)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return figures


def divided(num_replicas: int, processes: int, num_blocks: int) -> Iterator[range]:
    """Yield parts of a fleet, at least one for each process, none with more than MAX_BLOCKS unless it is one replica.

    num_blocks: of a replica.
    """
    size = max(1, min(-(-num_replicas // processes), MAX_BLOCKS // max(1, num_blocks)))
    for start in range(0, num_replicas, size):
        yield range(start, min(start + size, num_replicas))
