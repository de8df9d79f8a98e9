"""SequenceBreakers: the token ids that stand for DRY's sequence breakers, which are texts.

A breaker may lie inside a token ("\\n" in ".\\n\\n"), or begin in one token and continue in the next. So, as in
llama.cpp, it is represented by every token that contains it, and by every token that ends with its beginning, followed
by the tokens of its rest.
"""

from collections.abc import Iterable
from functools import lru_cache

from penstock.errors import InvalidRequestError, check_unicode
from penstock.interface.sampling_params import MAX_BREAKER_IDS
from penstock.tokenizer.tokenizer import Tokenizer, encode_all

MAX_TAIL = 20  # tokens of the rest of a breaker
KEPT = 64  # breakers whose ids are kept, because the search goes through the whole vocabulary

Sequences = tuple[tuple[int, ...], ...]


class SequenceBreakers:
    """Finds ids of breakers with one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: list[bytes] = []  # read when it is first needed
        self._of_one = lru_cache(KEPT)(self._search)

    def ids_of(self, breakers: Iterable[str]) -> Sequences:
        """Return the sequences of ids that stand for these texts.

        Raises:
            InvalidRequestError: too many tokens contain them.
        """
        found: dict[tuple[int, ...], None] = {}
        for breaker in breakers:
            check_unicode(breaker, param="dry_sequence_breakers")
            found |= dict.fromkeys(self._of_one(breaker))
        if len(found) > MAX_BREAKER_IDS:
            message = f"dry_sequence_breakers: {len(found)} tokens contain one; at most {MAX_BREAKER_IDS} are allowed"
            raise InvalidRequestError(message, param="dry_sequence_breakers")
        return tuple(found)

    def _search(self, breaker: str) -> Sequences:
        if not self._vocabulary:
            count = self._tokenizer.vocab_size
            self._vocabulary = [self._tokenizer.token_to_bytes(token_id) for token_id in range(count)]
        whole = breaker.encode()
        starts = [breaker[:length].encode() for length in range(1, len(breaker))]
        rests = encode_all(self._tokenizer, [breaker[length:] for length in range(1, len(breaker))])
        tails = [tuple(ids[:MAX_TAIL]) for ids in rests]
        found: list[tuple[int, ...]] = []
        for token_id, text in enumerate(self._vocabulary):
            if whole in text:
                found.append((token_id,))
            else:
                pairs = zip(starts, tails, strict=True)
                found += [(token_id, *tail) for start, tail in pairs if tail and text.endswith(start)]
        return tuple(found)
