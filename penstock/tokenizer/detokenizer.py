"""Convert token ids to text while they are generated.

IncrementalDetokenizer returns text as soon as it can no longer change, never an incomplete character, in linear time.
The concatenation of its pieces is the text that the ids add to the prompt:

- byte-level vocabularies: exactly decode(ids), for every sequence of ids;
- other vocabularies: decode(prompt + ids) without the leading decode(prompt), so that the first token keeps its space.
  One exception: if a byte token (<0xE2>) of a run is invalid, decode() turns *all* bytes of the run into U+FFFD, even
  complete characters. Here those characters have been returned already, and only the bytes after them become U+FFFD.

clean_up_tokenization_spaces is not applied to streams. StopStrings cuts the text at the first stop string.
"""

import codecs
from collections.abc import Sequence

from penstock.tokenizer.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
PROMPT_TAIL = 32  # last tokens of the prompt that are read: enough for CONTEXT_TOKENS without special tokens
CONTEXT_TOKENS = 4  # how many preceding tokens are decoded together with new ones; they determine the leading space
MAX_BYTES_OF_CHAR = 4


class IncrementalDetokenizer:
    """A converter of one sequence of ids to text.

    Args:
        prompt_token_ids: the preceding ids, whose tail is the context of the first id.
        skip_special_tokens, spaces_between_special_tokens: as in `Tokenizer.decode`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._reader: _ByteReader | _PieceReader
        if tokenizer.joins_bytes:
            self._reader = _ByteReader(tokenizer)
        else:
            tail = [token_id for token_id in prompt_token_ids[-PROMPT_TAIL:] if token_id not in self._skipped]
            self._reader = _PieceReader(tokenizer, tail, skip_special_tokens, spaces_between_special_tokens)

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that the next ids complete."""
        return "".join([self._reader.push(token_id) for token_id in ids if token_id not in self._skipped])

    def finish(self) -> str:
        """Return the text of the incomplete character that was held back. No push may follow."""
        return self._reader.finish()


class _ByteReader:
    """A reader of byte-level tokens, with a streaming UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_to_bytes = tokenizer.token_to_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._token_to_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceReader:
    """A reader of tokens that are pieces of text, some of which may be single bytes.

        ids:   ... | context  | pending                      |
                     returned   text that may still change

    The pending tokens are the bytes of an incomplete character or, with other decoders, tokens that end inside a
    character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tail: list[int], skip_special: bool, spaces_between: bool) -> None:
        self._tokenizer = tokenizer
        self._options = {"skip_special_tokens": skip_special, "spaces_between_special_tokens": spaces_between}
        self._context = self._begin_after(prompt_tail)
        self._context_text: str | None = None  # decode(context), computed on first use
        self._pending: list[int] = []
        self._broken_run = False  # a byte was invalid: the rest of this run becomes U+FFFD, as in decode()

    def _begin_after(self, tail: list[int]) -> list[int]:
        """Return the prompt's last tokens as context. If the prompt ends in bytes, return those of its last character
        if that is complete, else the last tokens that are not bytes."""
        is_byte = self._tokenizer.byte_fallback_ids.__contains__
        if not tail or not is_byte(tail[-1]):
            return tail[-CONTEXT_TOKENS:]
        for length in range(1, MAX_BYTES_OF_CHAR + 1):
            last = tail[-length:]
            if all(map(is_byte, last)) and self._state_of(last) == "character":
                return last
        return [token_id for token_id in tail if not is_byte(token_id)][-CONTEXT_TOKENS:]

    def _state_of(self, byte_ids: list[int]) -> str:
        """Return "character", "unfinished" (more bytes may complete it) or "invalid"."""
        data = b"".join(map(self._tokenizer.token_to_bytes, byte_ids))
        try:
            return "character" if codecs.getincrementaldecoder("utf-8")().decode(data) else "unfinished"
        except UnicodeDecodeError:
            return "invalid"

    def push(self, token_id: int) -> str:
        if token_id in self._tokenizer.byte_fallback_ids:
            return self._push_byte(token_id)
        if not self._tokenizer.token_to_bytes(token_id):
            return ""  # an id outside the tokenizer's vocabulary; it does not even end a run of bytes
        rest = self._give_up_bytes()
        self._broken_run = False
        self._pending.append(token_id)
        text = self._text_of_pending()
        if text.endswith(REPLACEMENT) and len(self._pending) < MAX_BYTES_OF_CHAR:
            return rest
        self._keep_as_context()
        return rest + text

    def finish(self) -> str:
        return self._give_up_bytes() + self._show_pending()

    def _push_byte(self, token_id: int) -> str:
        before = "" if self._pending_is_bytes() else self._show_pending()
        self._pending.append(token_id)
        state = "invalid" if self._broken_run else self._state_of(self._pending)
        if state == "invalid":
            return before + self._give_up_bytes()
        return before if state == "unfinished" else before + self._show_pending()

    def _pending_is_bytes(self) -> bool:
        return bool(self._pending) and self._pending[0] in self._tokenizer.byte_fallback_ids

    def _give_up_bytes(self) -> str:
        """Return one U+FFFD per pending byte, because these bytes are not a character."""
        if not self._pending_is_bytes():
            return ""
        text = REPLACEMENT * len(self._pending)
        self._context, self._context_text, self._pending = self._pending[-1:], None, []
        self._broken_run = True
        return text

    def _text_of_pending(self) -> str:
        if self._context_text is None:
            self._context_text = self._tokenizer.decode(self._context, **self._options)
        return self._tokenizer.decode(self._context + self._pending, **self._options)[len(self._context_text) :]

    def _show_pending(self) -> str:
        text = self._text_of_pending() if self._pending else ""
        self._keep_as_context()
        return text

    def _keep_as_context(self) -> None:
        """Make the pending tokens the context. If they are bytes, they are a whole character."""
        if self._pending:
            context = self._pending if self._pending_is_bytes() else self._context + self._pending
            self._context, self._context_text, self._pending = context[-CONTEXT_TOKENS:], None, []


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
