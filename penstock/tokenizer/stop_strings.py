"""Finds stop strings in a text that comes in pieces, wherever the pieces are cut. It knows no tokens or requests."""

from collections.abc import Sequence


class StopStrings:
    """A text and its stop strings; it returns the text that is safe to show.

    The match that is complete first wins; of several complete at the same character, the one listed first. The result
    does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""  # the longest end of the text that begins a stop string

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Return the text that may be shown now, and the stop string that this piece completed, if any.

        After a match the text ends there (with the stop string itself if `include`) and no push may follow. With
        may_stop=False, matches that are complete within this piece do not count (`min_tokens` is not reached).
        """
        if not self._stops:
            return text, None
        whole = self._held + text
        match = self._first_match(whole) if may_stop else None
        if match is not None:
            end, stop = match
            self._held = ""
            return whole[: end if self._include else end - len(stop)], stop
        cut = self._first_held(whole)
        self._held = whole[cut:]
        return whole[:cut], None

    def finish(self) -> str:
        """Return what was held back when the text ends without a match."""
        rest, self._held = self._held, ""
        return rest

    def _first_match(self, whole: str) -> tuple[int, str] | None:
        """Return the end and the stop string of the first match that ends beyond what was held back."""
        found = ((whole.find(stop, max(0, len(self._held) - len(stop) + 1)), stop) for stop in self._stops)
        ends = [(start + len(stop), stop) for start, stop in found if start >= 0]
        return min(ends, key=lambda match: match[0], default=None)

    def _first_held(self, whole: str) -> int:
        """Return where the longest end of the text that begins a stop string starts.

        Each step to the right gives up a character for good, so this takes linear time over the whole text.
        """
        first = max(0, len(whole) - max(map(len, self._stops)))
        starts = (start for start in range(first, len(whole)) if self._begins_stop(whole[start:]))
        return next(starts, len(whole))

    def _begins_stop(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stops)
