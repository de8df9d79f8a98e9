"""Tokenizer: conversations and texts become token ids, and generated ids become text again.

Tokenizer is the protocol; hf.py implements it over tokenizer.json, and tests implement it over bytes. The engine uses
none of this.

A chat template puts control tokens (<|im_end|>) between messages. Spelled out inside a message they must remain text:
otherwise a user could end their own turn and write one of the system. So render_chat puts a mark inside each such
spelling before the template runs. The rendered text is cut at the marks and tokenised in parts, so that no spelling is
ever whole.
"""

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import NotSupportedError, fail, invalid, shown, unsupported
from penstock.tokenizer.template_variables import KWARGS, check_template_kwargs

if TYPE_CHECKING:  # keeps Jinja and the library out of processes that only talk to an engine
    from tokenizers import Tokenizer as Backend

    from penstock.tokenizer.chat_template import ChatTemplate

MAX_CHARS_PER_TOKEN = 8  # longer texts are refused before they are tokenised
MAX_CHARS_SLACK = 64
PLANNED_PARTS = frozenset({"image_url", "input_audio", "file", "video_url"})
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode's noncharacters, which normal text does not contain
LISTS = ("tools", "documents")  # what a conversation may come with, if the template shows it to the model
REPLACEMENT = "\ufffd"
PROMPT_TAIL = 32  # last tokens of the prompt that are read: enough for CONTEXT_TOKENS without special tokens
CONTEXT_TOKENS = 4  # how many preceding tokens are decoded together with new ones; they determine the leading space
MAX_BYTES_OF_CHAR = 4


class Tokenizer(Protocol):
    """A converter from text to token ids and back.

    Attributes:
        special_ids: ids that `skip_special_tokens` leaves out of texts.
        joins_bytes: decode(ids) is the concatenation of the tokens' bytes, read as UTF-8 (byte-level vocabularies).
        byte_fallback_ids: tokens of a sentencepiece-like vocabulary that represent one byte (<0xE2>).
        chat_template: None if the model has none.
    """

    bos_token_id: int | None
    eos_token_id: int | None
    special_ids: frozenset[int]
    joins_bytes: bool
    byte_fallback_ids: frozenset[int]
    chat_template: "ChatTemplate | None"

    @property
    def vocab_size(self) -> int:
        """The number of ids including added tokens: one more than the largest id."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode the text, by default with the special tokens that the model expects around it (BOS).

        Raises:
            InvalidRequestError: the text contains a lone surrogate.
        """

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Decode the ids. Invalid UTF-8 becomes U+FFFD; ids outside the vocabulary are left out.

        spaces_between_special_tokens=False joins neighbouring added tokens without the space that word-level decoders
        put between tokens.
        """

    def token_to_text(self, token_id: int, /) -> str:
        """Decode one token, for logprobs: special tokens by name, incomplete characters as U+FFFD."""

    def token_to_bytes(self, token_id: int, /) -> bytes:
        """Find the bytes of one token, which may end inside a character; b"" for an id outside the vocabulary."""


def encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Encode each text, without special tokens. It is one call if the tokenizer has `encode_all`."""
    at_once = getattr(tokenizer, "encode_all", None)
    if at_once is not None:
        return list(at_once(texts, add_special_tokens=False))
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def encode_pair(tokenizer: Tokenizer | None, first: str, second: str) -> tuple[list[int], int | None]:
    """Encode two texts as one prompt, as a cross-encoder was trained on them, with the special tokens around both.

    Returns:
        The ids, and where the tokens begin whose type is that of a second text; None: the tokenizer has no types.

    Raises:
        InvalidRequestError: there is no tokenizer, or it encodes no pairs.
    """
    encode = getattr(tokenizer, "encode_pair", None)
    if encode is None:
        raise invalid("text_1", "the model has no tokenizer that encodes pairs of texts")
    ids, start = encode(first, second)
    return list(ids), start


def check_prompt_length(text: str, max_model_len: int, *, param: str = "prompt") -> None:
    """Check that a text can fit into the context, before tokenising it costs time and memory.

    Raises:
        InvalidRequestError: the text is too long (code "context_length_exceeded").
    """
    limit = MAX_CHARS_PER_TOKEN * max_model_len + MAX_CHARS_SLACK
    if len(text) > limit:
        raise invalid(
            param,
            f"{len(text)} characters are too many; the context of {max_model_len} tokens takes at most "
            f"{limit} characters",
            "context_length_exceeded",
        )


# --- conversations to token ids --------------------------------------------------------------------------------------


def text_of_content(content: Any, role: str) -> str:
    """Join a message's content to one text; text parts are joined by newlines.

    Raises:
        InvalidRequestError: the content is neither a string nor a list of at least one part {"type": "text", "text":
            "..."}, nor null or empty in a message of the assistant or a tool.
        NotSupportedError: a part is an image, audio, video or a file.
    """
    if isinstance(content, str):
        return content
    if not content and role in ("assistant", "tool") and content in (None, []):
        return ""  # so clients write that the model said nothing, or that a function returned nothing
    if isinstance(content, list | tuple) and content:
        return "\n".join(_text_of_part(part) for part in content)
    raise fail("messages", content, f"a string or a list of text parts, as the content of the {role} message")


def _text_of_part(part: Any) -> str:
    fields = {name: value for name, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    if isinstance(fields.get("type"), str) and fields["type"] in PLANNED_PARTS:
        raise unsupported("messages", f"parts of type {fields['type']} are not built yet")
    fields.pop("cache_control", None)  # of clients of Anthropic's API: prefixes are cached without it
    if set(fields) != {"type", "text"} or fields["type"] != "text" or not isinstance(fields["text"], str):
        raise fail("messages", part, 'a part of the content like {"type": "text", "text": "..."}')
    return fields["text"]


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as the model's template renders it. `parts` is the same text, cut inside spelled-out tokens."""

    text: str
    parts: tuple[str, ...]

    def token_ids(self, tokenizer: Tokenizer, *, add_special_tokens: bool = False) -> list[int]:
        """Encode the prompt. Templates write BOS themselves, so no special tokens are added by default.

        Raises:
            InvalidRequestError: the tokenizer adds special tokens inside a text, not only around it.
        """
        encoded = encode_all(tokenizer, self.parts)
        ids = [token_id for part in encoded for token_id in part]
        if not add_special_tokens:
            return ids
        text, part = next((pair for pair in zip(self.parts, encoded, strict=True) if pair[1]), ("", []))
        around = tokenizer.encode(text, add_special_tokens=True)
        for before in range(len(around) - len(part) + 1):
            if around[before : before + len(part)] == part:
                return [*around[:before], *ids, *around[before + len(part) :]]
        raise invalid("add_special_tokens", "this tokenizer does not add them around the prompt")


def turn_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message for templates: its content is one text, and the arguments of its tool calls are objects.

    An assistant's content may be null, and stays null beside tool calls. Arguments that are not JSON stay text: the
    model wrote them, and they must not end the conversation.
    """
    calls = message.get("tool_calls")
    content = message.get("content")
    is_null = calls and content is None
    turn = {**message, "content": None if is_null else text_of_content(content, message["role"])}
    if not calls:
        return {name: value for name, value in turn.items() if name != "tool_calls"}
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise fail("messages", calls, "a list of tool calls, each an object with the function that it calls")
    return {**turn, "tool_calls": [_call_of(call) for call in calls]}


def _call_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """Make the arguments of a tool call an object. The function is in a field `function`, or is the call itself."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call_of(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "arguments": arguments}


def render_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any) -> RenderedChat:
    """Render a conversation. options: those of ChatTemplate.render. Only the template writes control tokens.

    Raises:
        InvalidRequestError: there is no chat template, or it does not read the tools, documents or further variables
            that are given, or it refuses the conversation.
    """
    template = tokenizer.chat_template
    if template is None:
        raise invalid("messages", "the model has no chat template; send a prompt", "no_chat_template")
    for name in LISTS:
        options[name] = options.get(name) or None
        if options[name] and name not in template.text:
            raise invalid(
                name,
                f"the model's chat template does not support {name}, so the model would not see them",
                f"no_{name}",
            )
    check_variables(template, options.get("template_kwargs") or {})
    spellings = [tokenizer.token_to_text(token_id) for token_id in tokenizer.special_ids]
    spellings = sorted((text for text in spellings if len(text) > 1), key=len, reverse=True)
    marks = _Marks(spellings, _unused_mark((messages, options)), getattr(tokenizer, "forges_token", None))
    mark = marks.mark
    options = {name: marks.put(value) for name, value in options.items()}
    text = template.render([marks.put(message) for message in messages], **options)
    text = text.replace(ascii(mark)[1:-1], mark)  # a template may write JSON with escapes
    return RenderedChat(text.replace(mark, ""), tuple(text.split(mark)))


def check_variables(template: "ChatTemplate | None", variables: Mapping[str, Any], param: str = KWARGS) -> None:
    """Raise InvalidRequestError for further variables that must not be set, or that the template does not read."""
    check_template_kwargs(variables, param)
    for name in variables:
        if template is None or not _is_read(template.text, name):
            raise invalid(param, f"the model's chat template reads no variable named {shown(name)}", "no_variable")


def effort_variables(template: "ChatTemplate | None", effort: str) -> dict[str, Any]:
    """Find the variables that tell a template how much the model should think, with vLLM's names.

    Raises:
        NotSupportedError: the template has neither levels, nor a switch that "none" turns off.
    """
    has_levels, has_switch = (
        template is not None and _is_read(template.text, name) for name in ("reasoning_effort", "enable_thinking")
    )
    if not has_levels and not (has_switch and effort == "none"):
        text = "reasoning_effort: the model's chat template has no levels of reasoning"
        raise NotSupportedError(f"{text}, only none" if has_switch else text, param="reasoning_effort")
    levels = {"reasoning_effort": effort} if has_levels else {}
    return levels | ({"enable_thinking": effort != "none"} if has_switch else {})


def switch_variables(template: "ChatTemplate | None", *, enable_thinking: bool, reasons: bool) -> dict[str, Any]:
    """Find the variable that tells a template whether the model is to think. reasons: whether it does without one.

    Raises:
        NotSupportedError: the template has no such switch, and the model does the opposite.
    """
    if template is not None and _is_read(template.text, "enable_thinking"):
        return {"enable_thinking": enable_thinking}
    if enable_thinking is not reasons:
        text = f"{enable_thinking} is not supported; the model's chat template has no such switch"
        raise unsupported("enable_thinking", text)
    return {}


def verbosity_variables(template: "ChatTemplate | None", verbosity: str) -> dict[str, Any]:
    """Find the variable that tells a template how long answers should be; "medium", the default, needs none.

    Raises:
        NotSupportedError: the template does not read it.
    """
    if template is not None and _is_read(template.text, "verbosity"):
        return {"verbosity": verbosity}
    if verbosity != "medium":
        text = f"the model's chat template has no levels of verbosity: {verbosity} would change nothing"
        raise unsupported("verbosity", text)
    return {}


def _is_read(text: str, name: Any) -> bool:
    """Search a template's text for a name, which it contains if the template reads a variable of that name."""
    return isinstance(name, str) and name.isidentifier() and re.search(rf"\b{name}\b", text) is not None


def _unused_mark(messages: Any) -> str:
    used = repr(messages)
    for mark in MARKS:
        if mark not in used and ascii(mark)[1:-1] not in used:
            return mark
    raise invalid("messages", "contain every noncharacter from U+FDD0 to U+FDEF")


@dataclass(frozen=True, slots=True)
class _Marks:
    """Puts a mark after the first character of every spelling in the texts of a value.

    A text of which the tokenizer's normalizer would make a spelling gets a mark after every character.
    """

    spellings: Sequence[str]
    mark: str
    forges_token: Callable[[str], bool] | None

    def put(self, value: Any) -> Any:
        if isinstance(value, str):
            for spelling in self.spellings:
                value = value.replace(spelling, spelling[0] + self.mark + spelling[1:])
            if self.forges_token is not None and any(map(self.forges_token, value.split(self.mark))):
                return self.mark.join(value.replace(self.mark, ""))
            return value
        if isinstance(value, Mapping):
            return {self.put(name): self.put(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.put(item) for item in value]
        return value


# --- the bytes of single tokens --------------------------------------------------------------------------------------


def byte_of_char() -> dict[str, int]:
    """Build GPT-2's alphabet: printable bytes represent themselves, and U+0100 and following the other bytes."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {chr(byte): byte for byte in shown}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


class TokenBytes:
    """A mapping of token ids to bytes.

    Attributes:
        joins: see `Tokenizer.joins_bytes`.
        fallback_ids: see `Tokenizer.byte_fallback_ids`; empty if the decoder does not read <0xE2> as a byte.
    """

    def __init__(self, backend: "Backend") -> None:
        steps = _decoder_steps(backend)
        kinds = [step["type"] for step in steps]
        self._backend = backend
        self._alphabet = byte_of_char() if "ByteLevel" in kinds else {}
        self._replacements = [pair for step in steps for pair in _replacements(step)]
        self._word_prefix = next((step["prefix"] for step in steps if step["type"] == "WordPiece"), "")
        values = range(256) if "ByteFallback" in kinds else ()
        ids = ((backend.token_to_id(f"<0x{value:02X}>"), bytes([value])) for value in values)
        self._fallback = {token_id: byte for token_id, byte in ids if token_id is not None}
        self.joins = bool(kinds) and set(kinds) <= {"ByteLevel", "Fuse"} and "ByteLevel" in kinds
        self.fallback_ids = frozenset(self._fallback)

    def __getitem__(self, token_id: int) -> bytes:
        if token_id in self._fallback:
            return self._fallback[token_id]
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._alphabet:
            try:
                return bytes([self._alphabet[char] for char in token])
            except KeyError:  # an added token, which is plain text
                return token.encode()
        for before, after in self._replacements:
            token = token.replace(before, after)
        return token.removeprefix(self._word_prefix).encode()


def _decoder_steps(backend: "Backend") -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return steps


def _replacements(step: dict[str, Any]) -> list[tuple[str, str]]:
    """Read the (text, replacement) pairs that a step of the decoder applies within every token."""
    if step["type"] == "Metaspace":
        return [(step["replacement"], " ")]
    if step["type"] == "BPEDecoder":
        return [(step["suffix"], " ")]
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return [(step["pattern"]["String"], step["content"])]
    return []


# --- token ids to text, while they are generated ---------------------------------------------------------------------


class IncrementalDetokenizer:
    """A converter of one sequence of ids to text, in linear time. It returns text as soon as it can no longer change,
    never an incomplete character.

    The concatenation of its pieces is the text that the ids add to the prompt:

    - byte-level vocabularies: exactly decode(ids), for every sequence of ids;
    - other vocabularies: decode(prompt + ids) without the leading decode(prompt), so that the first token keeps its
      space. One exception: if a byte token (<0xE2>) of a run is invalid, decode() turns *all* bytes of the run into
      U+FFFD, even complete characters. Here those characters have been returned already, and only the bytes after them
      become U+FFFD.

    clean_up_tokenization_spaces is not applied.

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
        """Read the next ids. Return the text that they complete."""
        return "".join([self._reader.push(token_id) for token_id in ids if token_id not in self._skipped])

    def finish(self) -> str:
        """Give up waiting for the rest of a character, and return its text. No push may follow."""
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
        """Choose the prompt's last tokens as context. If the prompt ends in bytes, take those of its last character if
        that is complete, else the last tokens that are not bytes."""
        is_byte = self._tokenizer.byte_fallback_ids.__contains__
        if not tail or not is_byte(tail[-1]):
            return tail[-CONTEXT_TOKENS:]
        for length in range(1, MAX_BYTES_OF_CHAR + 1):
            last = tail[-length:]
            if all(map(is_byte, last)) and self._state_of(last) == "character":
                return last
        return [token_id for token_id in tail if not is_byte(token_id)][-CONTEXT_TOKENS:]

    def _state_of(self, byte_ids: list[int]) -> str:
        """Classify bytes: "character", "unfinished" (more bytes may complete it) or "invalid"."""
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
        """Replace each pending byte by U+FFFD, because these bytes are not a character."""
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
        """Read a piece. Return the text that can be shown now, and the stop string that this piece completes, if any.

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
        """Release the text that was held back. Call it when the text ends without a match."""
        rest, self._held = self._held, ""
        return rest

    def _first_held(self, whole: str) -> int:
        """Find the start of the longest suffix of the text that may become a stop string.

        Characters before it are never read again, so the whole text takes linear time.
        """
        for start in range(max(0, len(whole) - self._longest), len(whole)):
            if whole[start] in self._first_chars:
                end = whole[start:]
                for stop in self._stops:
                    if stop.startswith(end):
                        return start
        return len(whole)
