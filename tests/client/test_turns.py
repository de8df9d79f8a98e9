"""Turns: who waits for a limited resource gets it flow by flow."""

import asyncio

import pytest

from penstock.client.turns import Turns


async def queued(turns: Turns, flow: str, done: list[str]) -> None:
    async with turns.turn(flow):
        await asyncio.sleep(0)
        done.append(flow)


def test_one_flow_does_not_hold_up_another() -> None:
    """Guards against a hundred slow forms of one key that another key waits for."""

    async def scenario() -> list[str]:
        turns, done = Turns(1), list[str]()
        async with turns.turn("z"):
            tasks = [asyncio.create_task(queued(turns, flow, done)) for flow in "aaaaabbc"]
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        return done

    assert "".join(asyncio.run(scenario())) == "abcabaaa"


@pytest.mark.parametrize("places", [1, 3])
def test_no_place_is_lost(places: int) -> None:
    """Guards against a turn that a cancelled waiter takes with it, and against too many at once."""

    async def scenario() -> None:
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

    asyncio.run(scenario())
