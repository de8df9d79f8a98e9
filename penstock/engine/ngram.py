"""NgramProposer: prompt lookup. It guesses that the last tokens are followed by what followed them earlier.

    token_ids  ... a b c d e f ............... x a b c        matches of the end: "c", "b c", "a b c"
                         ^ guessed: d e f

The longest match of at most max_ngram tokens decides, because a longer context predicts better. Among matches of one
length the latest decides, because a text repeats what it has just said rather than its beginning. The search goes from
the end to the start, and stops at the first match of full length. A guess that reaches the end of the text goes on with
its own tokens, so a text that repeats in a cycle is guessed for as long as wanted.
"""

from array import array
from collections.abc import Sequence

from penstock.interface.drafts import DraftQuery

MAX_CANDIDATES = 64  # most matches of the shortest length to look at, which bounds the time for frequent tokens
NONE = -1


class _Index:
    """Where each n-gram of the shortest length ended: the latest place and, for each place, the one before.

    It takes a dictionary entry per distinct n-gram and 4 bytes per token; a token is added in constant time.
    """

    def __init__(self, size: int) -> None:
        self.previous = array("i")  # by position: where the n-gram that ends there ended before
        self._size = size
        self._latest: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: list[int]) -> None:
        """Add the tokens that are new."""
        size, latest = self._size, self._latest
        for end in range(len(self.previous), len(token_ids)):
            key = tuple(token_ids[max(0, end - size + 1) : end + 1])  # shorter at the start, where it matches nothing
            self.previous.append(latest.get(key, NONE))
            latest[key] = end


class NgramProposer:
    """Looks up the last min_ngram to max_ngram tokens of a request in its own text."""

    is_free = True

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self._longest, self._shortest = max_ngram, min_ngram
        self._indices: dict[str, _Index] = {}

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        return [self._propose(query) for query in queries]

    def _propose(self, query: DraftQuery) -> list[int]:
        tokens = query.token_ids
        index = self._indices.get(query.request_id)
        if index is None:
            index = self._indices[query.request_id] = _Index(self._shortest)
        index.extend(tokens)
        end = self._best_match(tokens, index.previous)
        if end == NONE:
            return []
        guess = tokens[end + 1 : end + 1 + query.count]
        while len(guess) < query.count:
            guess += guess[: query.count - len(guess)]
        return guess

    def _best_match(self, tokens: list[int], previous: "array[int]") -> int:
        """Return where the longest match of the text's end ends, the latest among equals; NONE if nothing matches."""
        last = len(tokens) - 1
        found, length = NONE, self._shortest - 1
        place = previous[last]
        for _ in range(MAX_CANDIDATES):
            if place == NONE or length == self._longest:
                break
            size = self._shortest
            while size < self._longest and size <= place and tokens[place - size] == tokens[last - size]:
                size += 1
            if size > length:
                found, length = place, size
            place = previous[place]
        return found

    def forget(self, request_id: str) -> None:
        self._indices.pop(request_id, None)

    def shutdown(self) -> None:
        self._indices.clear()
