"""Finds stop strings in a text that comes in pieces, wherever the pieces are cut.

In: pieces of text. Out: the text that is safe to show. It knows nothing of tokens or requests. All stop strings are
looked for at once by one automaton (Aho and Corasick): its state is the longest end of the text that begins a stop
string, which is exactly what has to be held back, and each character costs constant time whatever the strings are.
The automaton depends on the strings alone, so all choices and prompts of a call share one.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

SHARED_AUTOMATA = 8  # kept for the next request with the same strings; at most about 1 MB each


class StopAutomaton:
    """The immutable part: where each character leads from each prefix of a stop string.

    Attributes:
        stops: in the order listed.
        depth: by node, the length of its prefix. Node 0 is the empty prefix.
        found: by node, the first listed stop string that ends there; len(stops) for none.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.depth = [0]
        self.found = [len(stops)]
        self._next: list[dict[str, int]] = [{}]
        for order, stop in enumerate(stops):
            self._insert(stop, order)
        self._shorter = [0] * len(self._next)
        self._link()

    def _insert(self, stop: str, order: int) -> None:
        node = 0
        for char in stop:
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[node] + 1)
                self.found.append(len(self.stops))
            node = self._next[node][char]
        self.found[node] = min(self.found[node], order)

    def _link(self) -> None:
        """For every node the longest proper end of its prefix that is a prefix too, shortest nodes first."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            self.found[node] = min(self.found[node], self.found[self._shorter[node]])
            for char, child in self._next[node].items():
                self._shorter[child] = self.step(self._shorter[node], char)
                queue.append(child)

    def step(self, node: int, char: str) -> int:
        while node and char not in self._next[node]:
            node = self._shorter[node]
        return self._next[node].get(char, 0)


@lru_cache(maxsize=SHARED_AUTOMATA)
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these strings, built once."""
    return StopAutomaton(stops)


class StopStrings:
    """One text's way through the automaton.

    The match that is complete first wins; of several complete at the same character, the one listed first. The result
    does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._automaton = stop_automaton(tuple(stops))
        self._include = include
        self._held = ""  # the end of the text that may still become a stop string
        self._state = 0

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Take a piece; return the text that may be shown now and the stop string that was completed, if one was.

        After a match the text ends there (with the stop string itself if `include`) and no push may follow. With
        may_stop=False, matches that are complete within this piece do not count (`min_tokens` is not reached).
        """
        automaton = self._automaton
        if not automaton.stops:
            return text, None
        whole = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._state = automaton.step(self._state, char)
            order = automaton.found[self._state]
            if may_stop and order < len(automaton.stops):
                return self._end(whole[:end], automaton.stops[order])
        cut = len(whole) - automaton.depth[self._state]
        self._held = whole[cut:]
        return whole[:cut], None

    def _end(self, text: str, stop: str) -> tuple[str, str]:
        self._held = ""
        return text if self._include else text[: len(text) - len(stop)], stop

    def finish(self) -> str:
        """The text ended without a match: what was held back."""
        rest, self._held = self._held, ""
        return rest
