"""Journal: what every open request would need to go on in a new engine: prompt, parameters, tokens received.

It lives on the client's side of the process edge, so that it survives the engine. An entry is opened before the
request is sent and closed when its end has arrived.
"""

from dataclasses import dataclass, replace

from penstock.interface.messages import EngineOutput, EngineRequest


@dataclass(slots=True)
class _Entry:
    request: EngineRequest
    output_token_ids: list[int]


class Journal:
    """Open requests by id."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self.num_tokens = 0

    @property
    def num_requests(self) -> int:
        return len(self._entries)

    def open(self, request: EngineRequest) -> None:
        self._entries[request.request_id] = _Entry(request, list(request.output_token_ids))
        self.num_tokens += len(request.output_token_ids)

    def note(self, output: EngineOutput) -> None:
        """Add the tokens of an output; ones noted before (a lower start index) are not added twice.

        An output that leaves a gap is not noted: OutputProcessor ends such a request.
        """
        entry = self._entries.get(output.request_id)
        if entry is None or output.start_index > len(entry.output_token_ids):
            return
        fresh = output.new_token_ids[max(0, len(entry.output_token_ids) - output.start_index) :]
        entry.output_token_ids.extend(fresh)
        self.num_tokens += len(fresh)
        if output.finish_reason is not None:
            self.close(output.request_id)

    def close(self, request_id: str) -> None:
        """The request needs nothing more. Unknown ids are fine: it may have ended by itself."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self.num_tokens -= len(entry.output_token_ids)

    def clear(self) -> None:
        self._entries.clear()
        self.num_tokens = 0

    def resumable(self) -> list[EngineRequest]:
        """The open requests as a new engine would take them: the tokens received so far come back as outputs."""
        entries = self._entries.values()
        return [replace(entry.request, output_token_ids=list(entry.output_token_ids)) for entry in entries]
