"""OpenRequest: a request somebody waits for, and the mailbox between the engine's outputs and its reader.

It knows no engine and no process: outputs and errors are put in, one reader takes them out.
"""

import asyncio
from collections import deque

from penstock.client.input_processor import PreparedRequest
from penstock.errors import PenstockError, RequestFailedError
from penstock.interface.outputs import RequestOutput
from penstock.interface.sampling_params import RequestOutputKind


class OpenRequest:
    """What has come for a request. A slow reader gets the newest state, or all deltas.

    Attributes:
        ended: its last output, or the error that ended it, has come; the reader may not have seen it yet.
    """

    def __init__(self, prepared: PreparedRequest) -> None:
        self.prepared = prepared
        self.ended = False
        self._items: deque[RequestOutput | PenstockError] = deque()
        self._arrived = asyncio.Event()

    def put(self, item: RequestOutput | PenstockError) -> None:
        whole = self.prepared.params.output_kind is not RequestOutputKind.DELTA
        if whole and self._items:
            self._items.clear()  # each output tells everything so far; unread ones would only fill the memory
        self._items.append(item)
        self.ended = self.ended or isinstance(item, PenstockError) or item.finished
        self._arrived.set()

    async def get(self) -> RequestOutput:
        """The next output; raises what ended the request."""
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        item = self._items.popleft()
        if isinstance(item, PenstockError):
            raise item
        if item.error is not None:
            raise RequestFailedError(item.error)
        return item
