"""Finds stop strings in a text that comes in pieces, wherever the pieces are cut.

In: pieces of text. Out: the text that is safe to show. It knows nothing of tokens or requests. All stop strings are
looked for at once by one automaton (Aho and Corasick): its state is the longest end of the text that begins a stop
string, which is exactly what has to be held back, and each character costs constant time whatever the strings are.
"""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The match that is complete first wins; of several complete at the same character, the one listed first.

    The result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""  # the end of the text that may still become a stop string
        self._state = 0
        # One node per distinct prefix of a stop string; node 0 is the empty prefix.
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found = [len(self._stops)]  # first listed stop string that ends at this node; len(stops) for none
        for order, stop in enumerate(self._stops):
            self._insert(stop, order)
        self._link()

    def _insert(self, stop: str, order: int) -> None:
        node = 0
        for char in stop:
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._found.append(len(self._stops))
            node = self._next[node][char]
        self._found[node] = min(self._found[node], order)

    def _link(self) -> None:
        """For every node the longest proper end of its prefix that is a prefix too, shortest nodes first."""
        self._shorter = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            self._found[node] = min(self._found[node], self._found[self._shorter[node]])
            for char, child in self._next[node].items():
                self._shorter[child] = self._step(self._shorter[node], char)
                queue.append(child)

    def _step(self, node: int, char: str) -> int:
        while node and char not in self._next[node]:
            node = self._shorter[node]
        return self._next[node].get(char, 0)

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Take a piece; return the text that may be shown now and the stop string that was completed, if one was.

        After a match the text ends there (with the stop string itself if `include`) and no push may follow. With
        may_stop=False, matches that are complete within this piece do not count (`min_tokens` is not reached).
        """
        if not self._stops:
            return text, None
        whole = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._state = self._step(self._state, char)
            order = self._found[self._state]
            if may_stop and order < len(self._stops):
                return self._end(whole[:end], self._stops[order])
        cut = len(whole) - self._depth[self._state]
        self._held = whole[cut:]
        return whole[:cut], None

    def _end(self, text: str, stop: str) -> tuple[str, str]:
        self._held = ""
        return text if self._include else text[: len(text) - len(stop)], stop

    def finish(self) -> str:
        """The text ended without a match: what was held back."""
        rest, self._held = self._held, ""
        return rest
