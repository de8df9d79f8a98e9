"""The connections between machines, over loopback."""

import asyncio
import secrets

import pytest

from penstock_lab.ray_app.door import LABEL_BYTES, TOKEN_BYTES, Door, dial


def test_a_connection_that_does_not_come_is_not_waited_for() -> None:
    """Guards against a rank that waits for ever for one that ended before it called, and keeps those that did call."""

    async def story() -> None:
        token, one, other = secrets.token_bytes(TOKEN_BYTES), bytes(LABEL_BYTES), b"\1" * LABEL_BYTES
        with Door(token, "127.0.0.1") as door:
            came = await asyncio.to_thread(dial, door.address, token + one)
            with pytest.raises(TimeoutError, match=r"1 of 2 connections have not come in 0\.1 s"):
                await door.accept(one, other, within_s=0.1)
        with came:
            assert await asyncio.to_thread(came.recv, 1) == b""  # it learns that nobody answers

    asyncio.run(asyncio.wait_for(story(), 240))
