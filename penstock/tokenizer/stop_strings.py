"""Find stop strings in a text that arrives in pieces, however it is cut. This module does not handle tokens."""

from collections.abc import Sequence


class StopStrings:
    """A filter that passes on the text up to its first stop string.

    The match that ends first wins; if several end at the same character, the stop string that is listed first wins. The
    result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._include = include
        self._held = ""  # the longest suffix of the text that may become a stop string

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Return the text that can be shown now, and the stop string that this piece completes, if any.

        After a match, the text ends before the stop string (after it if `include`), and no push may follow. With
        may_stop=False (`min_tokens` is not reached), matches that end within this piece do not count.
        """
        whole = self._held + text
        if self._first_chars.isdisjoint(whole):  # most pieces: no stop string begins here
            return whole, None
        starts = ((whole.find(stop, max(0, len(self._held) - len(stop) + 1)), stop) for stop in self._stops)
        ends = [(start + len(stop), stop) for start, stop in starts if start >= 0] if may_stop else []
        if ends:  # matches that end in the new piece
            end, stop = min(ends, key=lambda match: match[0])
            self._held = ""
            return whole[: end if self._include else end - len(stop)], stop
        cut = self._first_held(whole)
        self._held = whole[cut:]
        return whole[:cut], None

    def finish(self) -> str:
        """Return the text that was held back. Call it when the text ends without a match."""
        rest, self._held = self._held, ""
        return rest

    def _first_held(self, whole: str) -> int:
        """Return the start of the longest suffix of the text that may become a stop string.

        Characters before it are never read again, so the whole text takes linear time.
        """
        for start in range(max(0, len(whole) - self._longest), len(whole)):
            if whole[start] in self._first_chars:
                end = whole[start:]
                for stop in self._stops:
                    if stop.startswith(end):
                        return start
        return len(whole)
