"""Generated frames for both ends of an engine's connection, sent to the decoders and to a real engine process.

The engine drops and counts every invalid frame, so its count must equal ours. It obeys whatever decodes, however odd,
and must then still give an honest request the same tokens as before.
"""

import asyncio
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import inspect

from penstock import EngineError, SamplingParams
from penstock.client import frames
from penstock.client.engine_handle import EngineChild
from penstock.interface.messages import EngineRequest
from penstock_lab.prove.mutations import Mutator
from penstock_lab.prove.proof import Trials

EPOCH = 7
SOCKET_SHARE = (
    0.1  # share of the frames for an engine that go to a real one; each frame that it obeys costs it a request
)
CANARY = "the-canary"
WAIT_S = 120.0
NAMES = ("type", "request", "request_ids", "params", "epoch", "seed", "n", "", "prompt_token_ids", "output_token_ids")


class FrameAttack:
    """One engine process, and what has been sent to it."""

    def __init__(self, trials: Trials, mutator: Mutator) -> None:
        self._trials = trials
        self._mutator = mutator
        self._to_engine = inspect.type_info(frames.ToEngine)
        self._from_engine = inspect.type_info(frames.FromEngine)
        self._child: EngineChild | None = None
        self._solo: list[int] = []
        self._num_sent = self._num_invalid = 0
        self._counted = 0  # invalid frames counted by the engine

    async def start(self) -> None:
        """Start the engine process, and get the canary's tokens without other frames."""
        options = {"model": self._trials.subject.model, **self._trials.subject.options}
        self._child = EngineChild(frames.Start(EPOCH, options))
        await self._child.connect()
        while not isinstance(frame := await self._receive(), frames.Ready):
            if isinstance(frame, frames.Failed):
                raise frame.as_error()
        self._solo = await self._sing()

    async def aclose(self) -> None:
        """End the engine process."""
        if self._child is not None:
            self._child.hang_up()
            await self._child.wait()

    async def round(self, number: int) -> None:
        """Try `number` frames on each decoder and some of them on the engine, and then check its canary."""
        for _ in range(number):
            data = self._mutator.input(self._from_engine, encode, NAMES)
            self._decodes(frames.unpack_from_engine, data)
            data = self._for_engine()
            decodes = self._decodes(frames.unpack_to_engine, data)
            if self._mutator.random.random() < SOCKET_SHARE:
                self._send(data, obeyed=decodes)
        self._trials.tried(2 * number)
        await self._check()

    async def finish(self) -> None:
        """Report how many frames were sent to the engine, and how many it dropped."""
        self._trials.figure("frames_to_the_engine", self._num_sent)
        self._trials.figure("frames_dropped_by_it", self._counted)

    def _for_engine(self) -> bytes:
        """Make a frame of any kind, or one that almost adds an honest request."""
        if self._mutator.random.random() < 0.5:
            return self._mutator.input(self._to_engine, encode, NAMES)
        value = msgspec.to_builtins(frames.AddRequest(EngineRequest("other", [1, 2, 3], SamplingParams(seed=1))))
        with suppress(TypeError, ValueError, OverflowError):
            return encode(self._mutator.nearly(value, NAMES))
        return b""

    def _decodes(self, unpack: Any, data: bytes) -> bool:
        """Check that the bytes are a valid frame. Any exception other than InvalidFrameError is wrong."""
        try:
            return not isinstance(unpack(data), frames.Start)  # a second Start is invalid, too
        except frames.InvalidFrameError:
            return False
        except Exception as error:
            self._trials.wrong(f"{data[:300]!r} gave {type(error).__name__}: {error}")
            return False

    def _send(self, data: bytes, *, obeyed: bool) -> None:
        assert self._child is not None
        self._child.send_bytes(frames.with_header(data))
        self._num_sent += 1
        self._num_invalid += not obeyed

    async def _check(self) -> None:
        try:
            tokens = await self._sing()
        except (EngineError, TimeoutError) as error:
            self._trials.wrong(f"after {self._num_sent} frames: {type(error).__name__}: {error}")
            await self.aclose()
            self._num_sent = self._num_invalid = 0
            return await self.start()
        if tokens != self._solo:
            self._trials.wrong(f"after {self._num_sent} frames the canary had other tokens than alone")
        if self._counted != self._num_invalid:
            self._trials.wrong(f"the engine dropped {self._counted} frames of {self._num_invalid} invalid ones")

    async def _sing(self) -> list[int]:
        """Ask an honest request, and return its tokens."""
        assert self._child is not None
        params = SamplingParams(max_tokens=8, seed=13, ignore_eos=True)
        self._child.send(frames.AddRequest(EngineRequest(CANARY, [1, 2, 3, 4, 5], params)))
        tokens: list[int] = []
        async with asyncio.timeout(WAIT_S):
            while True:
                frame = await self._receive()
                if isinstance(frame, frames.Rejected) and frame.request_id == CANARY:
                    raise EngineError(f"the canary was rejected: {frame.message}")
                if not isinstance(frame, frames.Outputs):
                    continue
                for output in frame.outputs:
                    if output.request_id == CANARY:
                        tokens += output.new_token_ids
                        self._counted = frame.stats.num_invalid_frames_total
                        if output.finish_reason is not None:
                            return tokens

    async def _receive(self) -> frames.FromEngine:
        assert self._child is not None
        frame = await self._child.receive()
        if frame is None:
            raise EngineError(f"the engine process ended with {await self._child.wait()}")
        return frame


def encode(value: Any) -> bytes:
    """Encode as msgpack. Raise ValueError, OverflowError or TypeError for what has no encoding."""
    return msgspec.msgpack.encode(value)
