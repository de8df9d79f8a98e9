"""Read a Hugging Face tokenizer from a directory or an object, with the `tokenizers` library alone.

A directory holds tokenizer.json and small files beside it (tokenizer_config.json, special_tokens_map.json,
chat_template.jinja or .json). Ids and texts equal those of Transformers' PreTrainedTokenizerFast on the same directory.
As in Transformers, tokenizer.json alone determines which tokens `add_special_tokens` adds; add_bos_token and
add_eos_token of tokenizer_config.json have no effect.

Without tokenizer.json, Mistral's tekken.json or a SentencePiece model (tokenizer.model) is read by vocabulary.py. These
do not say which tokens are added: add_bos_token and add_eos_token do, and without them BOS is added and EOS is not.
"""

import base64
import contextlib
import json
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from penstock.errors import ModelLoadError, check_unicode, fail, invalid, one_line, shown
from penstock.interface.structured_outputs import StructuredOutputsParams
from penstock.spec.gguf import is_gguf
from penstock.tokenizer.chat_template import ChatTemplate
from penstock.tokenizer.gguf import gguf_backend
from penstock.tokenizer.grammars import Grammars
from penstock.tokenizer.tokenizer import TokenBytes, Tokenizer, render_chat, turn_of
from penstock.tokenizer.vocabulary import add_around, read_sentencepiece, sentencepiece_backend, tekken_backend

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")  # replaced in this order
MAX_ID_DIGITS = 10
MAX_CACHED_TOKENS = 2**14  # whose bytes are kept: an answer with log-probabilities names many, mostly the same


class HFTokenizer:
    """A `tokenizers` backend with the settings of the files beside it: a thread-safe `Tokenizer`.

    Args:
        backend: changed in place; padding and truncation are turned off.
        named_tokens: special tokens by name (bos_token, ...).
        template, chat_template: source of a `ChatTemplate`, and the template to use instead (its `chosen`).
        clean_up: whether to remove spaces before punctuation, as `clean_up_tokenization_spaces` does.
        only_decodes: nothing is rendered here, so the template is not compiled.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        named_tokens: Mapping[str, str] | None = None,
        template: Any = None,
        chat_template: str | None = None,
        clean_up: bool = False,
        only_decodes: bool = False,
    ) -> None:
        named = named_tokens or {}
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._clean_up = clean_up and type(backend.model).__name__ != "BPE"  # would remove real spaces from BPE texts
        token_bytes = TokenBytes(backend)
        added = backend.get_added_tokens_decoder()
        self._grammars: dict[tuple[int, tuple[int, ...]], Grammars] = {}
        self._added_ids = frozenset(added)
        self._normalized = (
            []
            if backend.normalizer is None
            else [backend.normalizer.normalize_str(token.content) for token in added.values() if token.normalized]
        )
        self.bos_token_id, self.eos_token_id = (
            backend.token_to_id(named[name]) if name in named else None for name in ("bos_token", "eos_token")
        )
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.joins_bytes = token_bytes.joins
        self.byte_fallback_ids = token_bytes.fallback_ids
        self.token_to_bytes = lru_cache(MAX_CACHED_TOKENS)(token_bytes.__getitem__)
        has_template = template is not None or chat_template is not None
        self.chat_template = ChatTemplate(template, named, chat_template) if has_template else None
        if self.chat_template is not None and not only_decodes:
            self.chat_template.compile()

    @cached_property
    def vocab_size(self) -> int:
        """The number of ids. Computed on first use, because it takes 0.2 s for 128k tokens."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def may_forge(self) -> bool:
        """Whether there are added tokens that are looked for in the normalised text."""
        return bool(self._normalized)

    def forges_token(self, text: str) -> bool:
        """Tell whether the normalizer may make the spelling of an added token of a text that does not contain it."""
        if not self._normalized:
            return False
        text = self._backend.normalizer.normalize_str(text)
        return any(spelling in text for spelling in self._normalized)

    def to_json(self) -> str:
        """Write the tokenizer as a tokenizer.json, with the tokens that the files beside it declare."""
        return str(self._backend.to_str())

    def check_form(self, form: StructuredOutputsParams, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Raise InvalidRequestError if a model with these ids cannot follow a form of answers."""
        self.grammars(vocab_size, eos_token_ids).check(form)

    def grammars(self, vocab_size: int, eos_token_ids: Sequence[int]) -> Grammars:
        """Make the compiler of answer forms for a model with these ids, once: `check_form` uses it, too."""
        key = vocab_size, tuple(eos_token_ids)
        if key not in self._grammars:
            self._grammars[key] = Grammars(lambda: self, vocab_size, eos_token_ids)
        return self._grammars[key]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        check_unicode(text)
        with library_errors("prompt", "this text cannot be tokenised"):
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        """Encode two texts, as tokenizer.encode_pair says."""
        for text in (first, second):
            check_unicode(text)
        with library_errors("prompt", "these texts cannot be tokenised"):
            found = self._backend.encode(first, second)
            return list(found.ids), found.type_ids.index(1) if 1 in found.type_ids else None

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        with library_errors("tokens", "these tokens cannot be turned into text"):
            if spaces_between_special_tokens or skip_special_tokens:
                text = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
            else:
                tokens = self._tokens_with_joined_specials(ids)
                decoder = self._backend.decoder
                text = " ".join(tokens) if decoder is None else decoder.decode(tokens)
        return clean_up_spaces(text) if self._clean_up else str(text)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **template_kwargs: Any,
    ) -> list[int] | str:
        """Render a conversation through the chat template, as Transformers' method of this name does.

        Returns:
            Its token ids, in which nothing inside a message has become a control token; its text if not `tokenize`.

        Raises:
            InvalidRequestError: there is no template, or it refuses the conversation.
        """
        chat = render_chat(
            self,
            [turn_of(message) for message in conversation],
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )
        return chat.token_ids(self) if tokenize else chat.text

    def _tokens_with_joined_specials(self, ids: Sequence[int]) -> list[str]:
        """Find the tokens' strings, with neighbouring added tokens joined into one string."""
        tokens: list[str] = []
        known = ((token_id, token) for token_id in ids if (token := self._backend.id_to_token(token_id)) is not None)
        for is_added, group in groupby(known, key=lambda pair: pair[0] in self._added_ids):
            strings = [token for _, token in group]
            tokens += ["".join(strings)] if is_added else strings
        return tokens

    def check_token_lengths(self, limit: int) -> None:
        """Raise ModelLoadError if a token has more characters than `limit`."""
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=0)
        if longest > limit:
            raise ModelLoadError(f"tokenizer.json: a token has {longest} characters; at most {limit} are allowed")

    def token_to_text(self, token_id: int) -> str:
        return self.token_to_bytes(token_id).decode("utf-8", errors="replace")


def clean_up_spaces(text: str) -> str:
    """Remove the spaces that word-level vocabularies put before punctuation."""
    for spaced in SPACED:
        text = text.replace(spaced, spaced.strip())
    return text


def load_tokenizer(
    directory: str | Path, *, only_decodes: bool = False, chat_template: str | None = None
) -> HFTokenizer:
    """Read the tokenizer of a model directory.

    chat_template: a file with the chat template to use, or the name of one of the model's.
    only_decodes: it may leave out what only `encode` needs, which takes most of the time for other files than
        tokenizer.json, and compiles no template.

    Raises:
        ModelLoadError: a file is missing or damaged; the message names it.
    """
    folder = Path(directory)
    config = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read_json(folder / "special_tokens_map.json")
    file = find_tokenizer_file(folder)
    if file is None:
        raise ModelLoadError(_missing_message(folder))
    is_json = file.name == JSON
    backend, own_names = (read_backend(file), {}) if is_json else read_original(file, config, only_decodes)
    config = own_names | config
    named = _named_tokens(config)
    _add_declared_tokens(backend, config, named)
    if not is_json and backend.post_processor is None:
        ends = (("bos_token", config.get("add_bos_token", True)), ("eos_token", config.get("add_eos_token", False)))
        add_around(backend, *(named[name].content if is_added and name in named else None for name, is_added in ends))
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return HFTokenizer(
        backend,
        named_tokens={name: token.content for name, token in named.items()},
        template=_read_chat_template(folder, config),
        chat_template=chat_template,
        clean_up=bool(config.get("clean_up_tokenization_spaces", False)),
        only_decodes=only_decodes,
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Read the object in a file; {} if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must contain a JSON object, not {type(value).__name__}")
    return value


def _named_tokens(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Read bos_token, eos_token, ... and the model's further tokens (image_token), by name."""
    own = [name for name in config if name.endswith("_token") and name not in NAMED_TOKENS]
    values = {name: config.get(name) for name in (*NAMED_TOKENS, *own)}
    return {name: _token(name, value, special=True) for name, value in values.items() if isinstance(value, str | dict)}


def _add_declared_tokens(backend: Backend, config: Mapping[str, Any], named: Mapping[str, AddedToken]) -> None:
    """Add the tokens that tokenizer.json lacks. added_tokens_decoder also changes the flags of tokens that it has."""
    listed = config.get("added_tokens_decoder") or {}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if not isinstance(listed, dict) or not isinstance(extra, dict | list):
        raise ModelLoadError(
            "tokenizer_config.json: added_tokens_decoder must be an object, and the extra tokens must be a list"
        )
    for key in listed:
        if not key.isdecimal() or len(key) > MAX_ID_DIGITS:
            raise ModelLoadError(f"tokenizer_config.json: added_tokens_decoder: {shown(key)} is not a token id")
    backend.add_tokens([_token("added_tokens_decoder", listed[key]) for key in sorted(listed, key=int)])
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    values = extra.values() if isinstance(extra, dict) else extra
    tokens = [*named.values(), *(_token("extra_special_tokens", value, special=True) for value in values)]
    backend.add_tokens([token for token in tokens if token.content not in known])


def _token(name: str, value: Any, *, special: bool = False) -> AddedToken:
    """Read a token of the config: an object with content and flags or, if `special`, its content alone."""
    if special and isinstance(value, str):
        value = {"content": value, "normalized": False}
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise ModelLoadError(f"tokenizer_config.json: {name}: a token must be a string or an object with its content")
    flags = {key: bool(value[key]) for key in TOKEN_FLAGS if key in value} | ({"special": True} if special else {})
    try:
        return AddedToken(value["content"], **flags)
    except UnicodeEncodeError:
        content = shown(value["content"])
        raise ModelLoadError(f"tokenizer_config.json: {name}: {content} contains a lone surrogate") from None


def _read_chat_template(folder: Path, config: Mapping[str, Any]) -> Any:
    """Read the template or named templates: .jinja files, else the config's, else those of chat_template.json."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    named = {name: read_text(path) for name, path in files.items() if path.is_file()}
    if named:
        return named
    return config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")


def adopt_tokenizer(given: Any, chat_template: str | None = None) -> Tokenizer:
    """Convert a Transformers tokenizer to an HFTokenizer, without Transformers. A `Tokenizer` is returned unchanged.

    The object's `tokenizers` backend is copied, because HFTokenizer changes it. An object without a backend is saved to
    a temporary directory and read from there.

    Raises:
        InvalidRequestError: the object is neither a `Tokenizer` nor a tokenizer of Transformers.
        ModelLoadError: the object cannot be saved as a tokenizer.json.
    """
    if callable(getattr(given, "token_to_bytes", None)):
        if chat_template is not None:
            raise fail("chat_template", chat_template, "left out: the tokenizer that was passed brings its own")
        return cast(Tokenizer, given)
    if isinstance(getattr(given, "backend_tokenizer", None), Backend):
        backend = Backend.from_str(given.backend_tokenizer.to_str())
        backend.encode_special_tokens = bool(getattr(given, "split_special_tokens", False))
        return HFTokenizer(
            backend,
            named_tokens={
                name: str(token) for name in NAMED_TOKENS if (token := getattr(given, name, None)) is not None
            },
            template=getattr(given, "chat_template", None),
            chat_template=chat_template,
            clean_up=bool(getattr(given, "clean_up_tokenization_spaces", False)),
        )
    if not callable(getattr(given, "save_pretrained", None)):
        raise invalid(
            "tokenizer",
            f"an object of type {type(given).__name__} is not supported; give a directory, a tokenizer of "
            "Transformers, or an object with the methods of penstock.tokenizer.tokenizer.Tokenizer",
        )
    with tempfile.TemporaryDirectory() as directory:
        given.save_pretrained(directory)
        return load_tokenizer(directory, chat_template=chat_template)


# --- tokenizer.json, so that a damaged file raises an error instead of ending the process -----------------------------

LOGGER = logging.getLogger("penstock")
MAX_BYTES = 2**28  # of a file; the largest files in use have 35 MB
SLOW_CHARS = 2**25  # a longer file takes so long to load that it is logged
MAX_GROWTH = 1000  # factor by which a text may become longer; files in use make it at most three times as long
MAX_CHARSMAP = 2**24  # characters of base64; the largest maps in use have 400,000
PROBE = "a A1. \t\n\u00e9\ufb01\u2460\u4f60\U0001f642"  # letters, spaces, and characters that normalizers change
JSON, TEKKEN = "tokenizer.json", "tekken.json"
SENTENCEPIECE = "tokenizer.model"  # also with a version: tokenizer.model.v3
OTHER_FORMATS = ("vocab.json", "vocab.txt")  # not read
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a directory holds any file of a tokenizer, even one that does not suffice."""
    return find_tokenizer_file(folder) is not None or any(
        (folder / name).exists() for name in (JSON, *OTHER_FORMATS, *SETTINGS)
    )


def find_tokenizer_file(folder: Path) -> Path | None:
    """Find the file of a model directory that holds the vocabulary: tokenizer.json if there is one, or a GGUF file."""
    if is_gguf(folder):
        return folder
    names = [
        JSON,
        TEKKEN,
        SENTENCEPIECE,
        *sorted((file.name for file in folder.glob(f"{SENTENCEPIECE}.v*")), reverse=True),
    ]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_original(path: Path, config: Mapping[str, Any], only_decodes: bool = False) -> tuple[Backend, dict[str, Any]]:
    """Read tekken.json, a SentencePiece model or a GGUF file, and which tokens are bos_token, eos_token, ...

    config: of tokenizer_config.json; add_prefix_space and legacy say where a text gets a space in front.

    Raises:
        ModelLoadError: the file is damaged.
    """
    if path.name == TEKKEN:
        with _load_errors(path):
            backend = tekken_backend(path, read_text(path), only_decodes=only_decodes)
        named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        return backend, {name: token for name, token in named.items() if backend.token_to_id(token) is not None}
    if is_gguf(path):
        with _load_errors(path):
            return gguf_backend(path, only_decodes=only_decodes)
    words = read_sentencepiece(path, _read_bytes(path))
    with _load_errors(path):
        if words.charsmap and not _is_charsmap(base64.b64encode(words.charsmap).decode()):
            raise ValueError("precompiled_charsmap is damaged")
        prefix = config.get("add_prefix_space")
        words = words if prefix is None else replace(words, add_prefix=bool(prefix))
        legacy = bool(config.get("legacy", False))
        backend = sentencepiece_backend(words, every_part=legacy, only_decodes=only_decodes)
        _probe(backend)
    return backend, dict(words.named)


def read_backend(path: Path) -> Backend:
    """Read a tokenizer.json.

    Raises:
        ModelLoadError: the file is damaged.
    """
    text = read_text(path)
    if len(text) > SLOW_CHARS:
        LOGGER.warning("loading %s: %d MB, which may take a while", path, len(text) // 10**6)
    with _load_errors(path):
        _check_charsmaps(text)
        backend = Backend.from_str(text)
        _check_growth("normalizer", backend.normalizer)
        _check_growth("decoder", backend.decoder)
        _probe(backend)
    return backend


def _probe(backend: Backend) -> None:
    """Encode a text: the library panics if a normaliser's table has entries that point outside it."""
    with contextlib.suppress(Exception):  # an error of the text, not of the file: an unknown word, for instance
        backend.encode(PROBE)


@contextlib.contextmanager
def _load_errors(path: Path) -> Iterator[None]:
    """Turn the library's errors and panics into a ModelLoadError that names the file."""
    try:
        yield
    except ModelLoadError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or is_panic(error):
            raise ModelLoadError(f"{path}: is not a valid tokenizer: {one_line(error)}") from error
        raise


def is_panic(error: BaseException) -> bool:
    """Recognise a panic of the library, which is not a subclass of Exception."""
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def library_errors(param: str, what: str) -> Iterator[None]:
    """Turn the library's errors (plain Exceptions and panics) into an InvalidRequestError that names `param`."""
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or is_panic(error):
            raise invalid(param, f"{what} with the model's tokenizer: {one_line(error)}") from error
        raise


def _check_growth(what: str, component: Any) -> None:
    """Raise ValueError if the replacements together may make a text more than MAX_GROWTH times as long.

    A decoder must not have a regular expression either, because it runs in the serving process for every token.
    """
    if component is None:
        return
    growth = 1.0
    for step in _steps(json.loads(component.__getstate__())):
        pattern, content = step.get("pattern"), step.get("content")
        if isinstance(pattern, dict) and isinstance(content, str):
            if what == "decoder" and "Regex" in pattern:
                raise ValueError(f"decoder: a replacement by a regular expression, {shown(pattern)}, is not supported")
            shortest = len(pattern.get("String", "")) or 1
            growth *= max(1.0, (len(content) + ("Regex" in pattern)) / shortest)
    if growth > MAX_GROWTH:
        raise ValueError(f"{what}: its replacements make a text up to {growth:.0e} times as long")


def _steps(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a component, at any depth."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _steps(item)


def _check_charsmaps(text: str) -> None:
    """Raise ValueError for a `Precompiled` normalizer with a damaged table, because the library panics on it.

    Checked: base64, size, the announced length, UTF-8. Not checked: the running time of regular expressions, and
    entries that point outside the table, which panic on the first text that reaches them (PROBE or a later text).
    """
    if not re.search(r"precompiled_charsmap|\\u00[4-7]", text):  # the letters of the key may be escaped
        return

    def visit(pairs: list[tuple[str, Any]]) -> None:  # gets every duplicate key, as the library does
        for key, value in pairs:
            if key == "precompiled_charsmap" and isinstance(value, str) and not _is_charsmap(value):
                raise ValueError(f"precompiled_charsmap = {shown(value)} is damaged")

    json.loads(text, object_pairs_hook=visit)


def _is_charsmap(text: str) -> bool:
    """Check that a base64 text holds a length (4 bytes, a multiple of 4), a table of that length, and UTF-8."""
    if len(text) > MAX_CHARSMAP:
        return False
    try:
        content = base64.b64decode(text, validate=True)
        length = int.from_bytes(content[:4], "little")
        content[4 + length :].decode("utf-8")
    except ValueError:
        return False
    return length % 4 == 0 and 4 <= length <= len(content) - 4


def _missing_message(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such directory"
    others = [name for name in OTHER_FORMATS if (folder / name).is_file()]
    if not others:
        return f"{folder}: tokenizer.json is missing"
    return (
        f"{folder}: tokenizer.json is missing; found only {', '.join(others)}. Convert it once with Transformers: "
        f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    )


def read_text(path: Path) -> str:
    """Read a file; raise ModelLoadError if it is too large or cannot be read as UTF-8."""
    try:
        return _read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error


def _read_bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelLoadError(f"{path}: has {path.stat().st_size} bytes; at most {MAX_BYTES} are allowed")
        return path.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
