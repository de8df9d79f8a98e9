"""HFTokenizer: a Hugging Face tokenizer directory or object, read with the `tokenizers` library alone.

In: tokenizer.json and the small files beside it (tokenizer_config.json, special_tokens_map.json, chat_template.jinja
or .json). Out: a HFTokenizer whose ids and texts equal those of Transformers' PreTrainedTokenizerFast on the same
directory. As there, tokenizer.json alone decides what `add_special_tokens` adds; add_bos_token and add_eos_token of
tokenizer_config.json have no effect. Other formats (tokenizer.model, tiktoken) are not converted.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.tokenizer.chat_template import ChatTemplate
from penstock.tokenizer.tokenizer import Tokenizer, check_unicode
from penstock.tokenizer.tokenizer_json import read_backend, read_text
from penstock.tokenizer.vocabulary import TokenBytes
from penstock.validation import shown

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# Texts whose spaces `clean_up_tokenization_spaces` removes, in this order.
SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
MAX_ID_DIGITS = 10


class HFTokenizer:
    """A `tokenizers` backend with the settings of the files beside it. Implements `Tokenizer`; thread-safe."""

    def __init__(
        self,
        backend: Backend,
        *,
        named_tokens: Mapping[str, str] | None = None,
        template: Any = None,
        clean_up: bool = False,
    ) -> None:
        """Take a backend, the special tokens by name, the source of a chat template, and whether to clean up spaces."""
        named = named_tokens or {}
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._clean_up = clean_up and type(backend.model).__name__ != "BPE"  # removes real spaces from BPE texts
        self._token_bytes = TokenBytes(backend)
        added = backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.bos_token_id = self._id_of(named.get("bos_token"))
        self.eos_token_id = self._id_of(named.get("eos_token"))
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.joins_bytes = self._token_bytes.joins
        self.byte_fallback_ids = self._token_bytes.fallback_ids
        self.chat_template = None if template is None else ChatTemplate(template, named)

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; computed on first use, as it takes 0.2 s for 128k tokens."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        check_unicode(text)
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        if spaces_between_special_tokens or skip_special_tokens:
            text = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        else:
            tokens = self._tokens_with_joined_specials(ids)
            decoder = self._backend.decoder
            text = " ".join(tokens) if decoder is None else decoder.decode(tokens)
        return clean_up_spaces(text) if self._clean_up else str(text)

    def _tokens_with_joined_specials(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens' strings, with neighbouring added tokens joined to one string."""
        tokens: list[str] = []
        after_added = False
        for token_id in ids:
            token, is_added = self._backend.id_to_token(token_id), token_id in self._added_ids
            if token is None:
                continue
            if is_added and after_added:
                tokens[-1] += token
            else:
                tokens.append(token)
            after_added = is_added
        return tokens

    def token_to_text(self, token_id: int) -> str:
        return self.token_to_bytes(token_id).decode("utf-8", errors="replace")

    def token_to_bytes(self, token_id: int) -> bytes:
        return self._token_bytes[token_id]


def clean_up_spaces(text: str) -> str:
    """Remove the spaces that vocabularies of whole words put before punctuation."""
    for spaced in SPACED:
        text = text.replace(spaced, spaced.strip())
    return text


def load_tokenizer(directory: str | Path) -> HFTokenizer:
    """Read the tokenizer of a model directory.

    Raises:
        ModelLoadError: a file is missing or damaged; the message names it.
    """
    folder = Path(directory)
    backend = read_backend(folder)
    config = _read_config(folder)
    _add_declared_tokens(backend, config)
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    named = {name: token.content for name, token in _named_tokens(config).items()}
    return HFTokenizer(
        backend,
        named_tokens=named,
        template=_read_chat_template(folder, config),
        clean_up=bool(config.get("clean_up_tokenization_spaces", False)),
    )


def _read_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, with special_tokens_map.json if it does not list the added tokens."""
    config = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read_json(folder / "special_tokens_map.json")
    return config


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in the file; {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def _named_tokens(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Return bos_token, eos_token, ... and a model's own tokens (image_token), by name."""
    own = [name for name in config if name.endswith("_token") and name not in NAMED_TOKENS]
    values = {name: config.get(name) for name in (*NAMED_TOKENS, *own)}
    return {name: _special(name, value) for name, value in values.items() if isinstance(value, str | dict)}


def _add_declared_tokens(backend: Backend, config: Mapping[str, Any]) -> None:
    """Add the tokens that tokenizer.json does not have; those of added_tokens_decoder also change its flags."""
    listed = config.get("added_tokens_decoder") or {}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if not isinstance(listed, dict) or not isinstance(extra, dict | list):
        raise ModelLoadError("tokenizer_config.json: added_tokens_decoder must be an object, the extra tokens a list")
    backend.add_tokens([_added("added_tokens_decoder", listed[key]) for key in sorted(listed, key=_as_id)])
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    values = extra.values() if isinstance(extra, dict) else extra
    tokens = [*_named_tokens(config).values(), *(_special("extra_special_tokens", value) for value in values)]
    backend.add_tokens([token for token in tokens if token.content not in known])


def _as_id(key: str) -> int:
    if not key.isdecimal() or len(key) > MAX_ID_DIGITS:
        raise ModelLoadError(f"tokenizer_config.json: added_tokens_decoder: {shown(key)} is no token id")
    return int(key)


def _special(name: str, value: Any) -> AddedToken:
    plain = {"content": value, "normalized": False} if isinstance(value, str) else value
    return _added(name, plain | {"special": True} if isinstance(plain, dict) else plain)


def _added(name: str, value: Any) -> AddedToken:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise ModelLoadError(f"tokenizer_config.json: {name}: a token must be a string or an object with its content")
    flags = {key: bool(value[key]) for key in TOKEN_FLAGS if key in value}
    try:
        return AddedToken(value["content"], **flags)
    except UnicodeEncodeError:
        content = shown(value["content"])
        raise ModelLoadError(f"tokenizer_config.json: {name}: {content} has half a surrogate pair") from None


def _read_chat_template(folder: Path, config: Mapping[str, Any]) -> Any:
    """Return the template or named templates: files before tokenizer_config.json before chat_template.json."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    named = {name: read_text(path) for name, path in files.items() if path.is_file()}
    if named:
        return named
    return config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")


def adopt_tokenizer(given: Any) -> Tokenizer:
    """Return a tokenizer object of Transformers as a HFTokenizer, without importing Transformers; ours is kept.

    Its `tokenizers` backend is copied, because ours turns padding and truncation off. An object without one is saved
    to a temporary directory and read from there.

    Raises:
        InvalidRequestError: the object is neither a Tokenizer nor one of Transformers.
        ModelLoadError: it cannot be written as a tokenizer.json.
    """
    if callable(getattr(given, "token_to_bytes", None)):
        ours: Tokenizer = given
        return ours
    if isinstance(getattr(given, "backend_tokenizer", None), Backend):
        return _copy_backend(given)
    if not callable(getattr(given, "save_pretrained", None)):
        raise InvalidRequestError(
            f"tokenizer: an object of type {type(given).__name__} is not supported; give a directory, a tokenizer of "
            f"Transformers, or one with the methods of penstock.tokenizer.tokenizer.Tokenizer",
            param="tokenizer",
        )
    with tempfile.TemporaryDirectory() as directory:
        given.save_pretrained(directory)
        return load_tokenizer(directory)


def _copy_backend(given: Any) -> HFTokenizer:
    backend = Backend.from_str(given.backend_tokenizer.to_str())
    backend.encode_special_tokens = bool(getattr(given, "split_special_tokens", False))
    named = {name: str(getattr(given, name)) for name in NAMED_TOKENS if getattr(given, name, None) is not None}
    return HFTokenizer(
        backend,
        named_tokens=named,
        template=getattr(given, "chat_template", None),
        clean_up=bool(getattr(given, "clean_up_tokenization_spaces", False)),
    )
