"""Finds stop strings in a text that comes in pieces, wherever the pieces are cut. It knows no tokens or requests."""

from collections.abc import Sequence


class StopStrings:
    """A text and its stop strings; it returns the text that is safe to show.

    The match that is complete first wins; of several complete at the same character, the one listed first. The result
    does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._include = include
        self._held = ""  # the longest end of the text that begins a stop string

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Return the text that may be shown now, and the stop string that this piece completed, if any.

        After a match the text ends there (with the stop string itself if `include`) and no push may follow. With
        may_stop=False, matches that are complete within this piece do not count (`min_tokens` is not reached).
        """
        whole = self._held + text
        if self._first_chars.isdisjoint(whole):  # most pieces: nothing in it begins a stop string
            return whole, None
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
        ends = []
        for stop in self._stops:
            start = whole.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                ends.append((start + len(stop), stop))
        return min(ends, key=lambda match: match[0], default=None)

    def _first_held(self, whole: str) -> int:
        """Return where the longest end of the text that begins a stop string starts.

        A character that is passed here is never looked at again, so this takes linear time over the whole text.
        """
        for start in range(max(0, len(whole) - self._longest), len(whole)):
            if whole[start] in self._first_chars:
                end = whole[start:]
                for stop in self._stops:
                    if stop.startswith(end):
                        return start
        return len(whole)
