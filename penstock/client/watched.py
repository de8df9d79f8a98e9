"""WatchedEngine: one engine process from start to end. It receives the frames of the process, and kills the process
when it makes no progress. It knows no requests and no other process."""

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from penstock.client import frames
from penstock.client.child import EngineChild, EngineConnection
from penstock.client.liveness import Liveness
from penstock.errors import EngineError

LOGGER = logging.getLogger("penstock")
CHECK_S = 0.25  # seconds between checks whether the engine makes progress


class WatchedEngine:
    """An engine process. The constructor starts it, and raises OSError if it cannot; `run` watches it.

    Args:
        start: its first frame.
        take: called with each frame; may be replaced at any time.
        launch: makes the connection to the engine; None: to a child process.

    Attributes:
        ready: its Ready frame, while it is ready.
    """

    def __init__(
        self,
        start: frames.Start,
        take: Callable[[frames.FromEngine], None],
        launch: Callable[[frames.Start], EngineConnection] | None = None,
    ) -> None:
        self.child: EngineConnection = (launch or EngineChild)(start)
        self.liveness = Liveness()
        self.ready: frames.Ready | None = None
        self.take = take
        self._epoch = start.epoch

    async def run(self) -> tuple[int, bool]:
        """Receive frames until the connection ends. Return the exit code, and whether the engine was ready."""
        watch = asyncio.create_task(self._kill_if_stuck(), name="watch for a stuck engine")
        try:
            await self.child.connect()
            while (frame := await self.child.receive()) is not None:
                if frame.epoch == self._epoch:  # otherwise it belongs to another engine
                    self._note(frame)
                await asyncio.sleep(0)  # a fast engine must not keep new requests and refusals waiting
        except (EngineError, msgspec.DecodeError) as error:
            LOGGER.error("invalid frame from the engine process; terminating it: %s", error)
        finally:
            watch.cancel()
            was_ready, self.ready = self.ready is not None, None
            self.liveness.engine_ended()
            self.child.hang_up()
        return await self.child.wait(), was_ready

    def _note(self, frame: frames.FromEngine) -> None:
        self.liveness.note(frame)
        if isinstance(frame, frames.Ready):
            self.ready = frame
        self.take(frame)

    async def _kill_if_stuck(self) -> None:
        """Kill the process once it has made no progress for too long: stopped, in a deadlock, or swapped out."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(CHECK_S)
            if not self.liveness.heard:
                self.liveness.watch_start(self.child.effort())
            if time.monotonic() - before > 4 * CHECK_S:
                self.liveness.excuse()  # this process stood still too, so it cannot tell
            elif self.liveness.stuck:
                LOGGER.error("the engine process is stuck (%s); killing it", self.liveness.symptom)
                self.child.kill()
                return
