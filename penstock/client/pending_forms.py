"""PendingForms: requests whose answer form is still to be compiled, in a thread, so that streams go on meanwhile."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from penstock.interface.messages import EngineRequest
from penstock.interface.structured_outputs import StructuredOutputsParams


class Compiler(Protocol):
    """A compiler of forms (tokenizer/grammars.py). Thread-safe."""

    def knows(self, form: StructuredOutputsParams) -> bool: ...

    def check(self, form: StructuredOutputsParams) -> None: ...


class PendingForms:
    """Holds back frames of requests until their forms are compiled. One thread uses it, and another compiles."""

    def __init__(self, compiler: Compiler | None) -> None:
        self._compiler = compiler
        self._pool: ThreadPoolExecutor | None = None
        self._pending: dict[str, tuple[bytes, Future[None]]] = {}
        self._dropped: list[bytes] = []

    def holds(self, request: EngineRequest, body: bytes, again: Callable[[bytes], None]) -> bool:
        """Return whether a request has to wait, or was dropped while it waited.

        Args:
            body: its frame, which distinguishes it from another request with the same id.
            again: called with the frame, in the compiling thread, when `holds` is to be called again.

        Raises:
            InvalidRequestError: the form cannot be compiled.
        """
        form, held = request.params.structured_outputs, self._pending.get(request.request_id)
        if held is not None and held[0] is body:
            del self._pending[request.request_id]
            held[1].result()
            return False
        if any(body is dropped for dropped in self._dropped):
            self._dropped = [dropped for dropped in self._dropped if dropped is not body]
            return True
        if form is None or self._compiler is None or self._compiler.knows(form):
            return False
        self._pool = self._pool or ThreadPoolExecutor(1, "forms")
        future = self._pool.submit(self._compiler.check, form)
        self._pending[request.request_id] = (body, future)
        future.add_done_callback(lambda _: again(body))
        return True

    def drop(self, request_id: str) -> None:
        """Forget a waiting request: its frame is ignored when it comes again."""
        held = self._pending.pop(request_id, None)
        if held is not None:
            self._dropped.append(held[0])
