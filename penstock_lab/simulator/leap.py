"""Leap: many steps of an engine at once, when none of them has anything to decide.

As long as no request waits or ends and free blocks suffice, every step of an engine gives each running stream one
token. Such steps are counted instead of planned: their times are added up one by one, and the engine's own objects are
updated once with the result of all of them. What the engine decides afterwards is the same, to the block (except that
equivalent blocks may have other numbers), and so are all figures: tests compare them.
"""

from collections import Counter

from penstock import EngineError
from penstock.engine.engine import Engine
from penstock_lab.simulator.executor import TOKEN, StepCosts

SHORTEST = 2  # steps; fewer are computed one by one


def num_forced_steps(engine: Engine) -> int:
    """Return how many of the next steps are already decided and end no request; 0 if that is hard to say."""
    scheduler, cache = engine.scheduler, engine.kv_cache
    running, (group, *others) = scheduler.running, cache.groups
    is_plain = not others and not group.ring and group.sliding_window is None and scheduler.pace is None
    if scheduler.waiting or not is_plain or len(running) > scheduler.max_num_batched_tokens:
        return 0
    if scheduler.is_trying or engine.speculation is not None:
        return 0
    count = min((item.max_output_tokens - item.num_output_tokens for item in running), default=0) - 1
    if count < SHORTEST or not all(item.is_stream for item in running):
        return 0
    size = group.block_size
    needed = sum(-(-(item.num_tokens - 1 + count) // size) + (item.num_tokens - 1) // -size for item in running)
    return count if needed <= cache.num_free else 0


def leap(engine: Engine, costs: StepCosts, now: float, until: float) -> tuple[float, int, Counter[float]]:
    """Take forced steps, as many as begin before `until`.

    Returns:
        The time at which the last of them ends, their number, and a count of steps by duration; (now, 0, empty) if the
        next step has to be planned.
    """
    seconds = Counter[float]()
    most = num_forced_steps(engine)
    if not most:
        return now, 0, seconds
    running, count = engine.scheduler.running, 0
    sequences, cached = len(running), sum(item.num_computed_tokens for item in running)
    while count < most and now < until:
        ended = now + costs.decode_seconds(sequences, cached)
        seconds[ended - now] += 1
        now = ended
        cached += sequences
        count += 1
    for request in running:
        if not engine.kv_cache.allocate_slots(request, count):
            raise EngineError(f"{count} steps were taken for which there are no blocks")
        request.token_ids.extend([TOKEN] * count)
        request.num_computed_tokens += count
        engine.kv_cache.commit(request)
        engine.scheduler.policy.generated(request, count)
    return now, count, seconds
