"""Turns: who waits for a limited resource gets it flow by flow."""

import asyncio

import pytest

from penstock.client.turns import MANY, Turns


def order(flows: str, seconds: dict[str, float]) -> str:
    """In which order flows get their turns, each of which takes some seconds."""
    now = 0.0

    async def queued(turns: Turns, flow: str, done: list[str]) -> None:
        nonlocal now
        async with turns.turn(flow):
            await asyncio.sleep(0)
            now += seconds[flow]
            done.append(flow)

    async def scenario() -> list[str]:
        turns, done = Turns(1, lambda: now), list[str]()
        async with turns.turn("z"):
            tasks = [asyncio.create_task(queued(turns, flow, done)) for flow in flows]
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        return done

    return "".join(asyncio.run(scenario()))


def test_one_flow_does_not_hold_up_another() -> None:
    """Guards against a hundred slow forms of one key that another key waits for: by their number, or by their time."""
    assert order("aaaaabbc", dict.fromkeys("abc", 1.0)) == "abcabaaa"
    assert order("aaaabbbbbbbb", {"a": 4.0, "b": 1.0}) == "abbbbabbbbaa"


def test_of_several_places_one_is_left_to_others() -> None:
    """Guards against a key whose slow forms take every place, so that the others wait for the end of one."""

    async def scenario() -> str:
        turns, done = Turns(2), ""
        slow = asyncio.Event()

        async def hold(flow: str, until: asyncio.Event | None = None) -> None:
            nonlocal done
            async with turns.turn(flow):
                if until is not None:
                    await until.wait()
                done += flow

        tasks = [asyncio.create_task(hold("a", slow)) for _ in range(3)]
        await asyncio.sleep(0)
        for flow in "bcb":
            await hold(flow)
        slow.set()
        await asyncio.gather(*tasks)
        return done

    assert asyncio.run(asyncio.wait_for(scenario(), 20)) == "bcbaaa"


def test_times_of_flows_are_forgotten() -> None:
    """Guards against a table that grows with every flow."""

    async def scenario() -> int:
        turns = Turns(1)
        for number in range(10 * MANY):
            async with turns.turn(str(number)):
                waiting = asyncio.create_task(hold(turns, "x"))
                await asyncio.sleep(0)
            await waiting
        return len(turns._held)

    async def hold(turns: Turns, flow: str) -> None:
        async with turns.turn(flow):
            await asyncio.sleep(0)

    assert asyncio.run(scenario()) <= 2 * MANY


@pytest.mark.parametrize("places", [1, 3])
async def test_no_place_is_lost(places: int) -> None:
    """Guards against a turn that a cancelled waiter takes with it, and against too many at once."""
    turns, running, most = Turns(places), 0, 0

    async def work() -> None:
        nonlocal running, most
        async with turns.turn(None):
            running += 1
            most = max(most, running)
            try:
                await asyncio.sleep(0.001)
            finally:
                running -= 1

    for round_ in range(20):
        tasks = [asyncio.create_task(work()) for _ in range(8)]
        await asyncio.sleep(0.0005)
        for task in tasks[round_ % 8 :: 3]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert most == places
    assert turns._free == places
