"""A Hugging Face tokenizer directory, read with the `tokenizers` library alone.

In: tokenizer.json and the small files beside it (tokenizer_config.json, special_tokens_map.json, chat_template.jinja
or .json). Out: a HFTokenizer whose ids and texts equal those of Transformers' PreTrainedTokenizerFast on the same
directory. As there, tokenizer.json alone decides what `add_special_tokens` adds: add_bos_token and add_eos_token of
tokenizer_config.json are history. Nothing here converts other formats (tokenizer.model, tiktoken).
"""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from penstock.errors import ModelLoadError
from penstock.tokenizer.chat_template import ChatTemplate
from penstock.tokenizer.tokenizer import check_unicode
from penstock.tokenizer.vocabulary import TokenBytes
from penstock.validation import shown

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# What `clean_up_tokenization_spaces` writes without its spaces, in this order.
SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
MAX_ID_DIGITS = 10
MAX_CHARSMAP = 2**24  # characters of base64; the largest in use have 400,000
PROBE = "a A1. \t\n\u00e9\ufb01\u2460\u4f60\U0001f642"  # letters, spaces, and what normalizers like to change


class HFTokenizer:
    """A `tokenizers` backend with what the files beside it say. Implements `Tokenizer`; safe to share by threads."""

    def __init__(
        self,
        backend: Backend,
        *,
        named_tokens: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
        clean_up: bool = False,
    ) -> None:
        named = named_tokens or {}
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._clean_up = clean_up and type(backend.model).__name__ != "BPE"  # it would eat real spaces of a BPE text
        self._token_bytes = TokenBytes(backend)
        added = backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.bos_token_id = self._id_of(named.get("bos_token"))
        self.eos_token_id = self._id_of(named.get("eos_token"))
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.joins_bytes = self._token_bytes.joins
        self.byte_fallback_ids = self._token_bytes.fallback_ids
        self.chat_template = chat_template

    @cached_property
    def vocab_size(self) -> int:
        """Looked up when asked for: it takes 0.2 s for 128k tokens."""
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
        """The tokens' strings, where added tokens that follow each other are one string."""
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
    """Undo the spaces that vocabularies of whole words put before punctuation."""
    for spaced in SPACED:
        text = text.replace(spaced, spaced.strip())
    return text


def load_tokenizer(directory: str | Path) -> HFTokenizer:
    """Read the tokenizer of a model directory.

    Raises ModelLoadError, which names the file that is missing or broken.
    """
    folder = Path(directory)
    backend = _read_backend(folder)
    config = _read_config(folder)
    _add_declared_tokens(backend, config)
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    named = {name: token.content for name, token in _named_tokens(config).items()}
    source = _read_chat_template(folder, config)
    return HFTokenizer(
        backend,
        named_tokens=named,
        chat_template=None if source is None else ChatTemplate(source, named),
        clean_up=bool(config.get("clean_up_tokenization_spaces", False)),
    )


def _read_backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(_what_is_missing(folder))
    text = _read_text(path)
    _check_charsmaps(path, text)
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # a malformed file: the library raises plain Exception, nothing narrower
        raise ModelLoadError(f"{path}: is no tokenizer: {error}") from error
    except BaseException as error:
        raise _panic(path, error) from None
    _probe(path, backend)
    return backend


def _probe(path: Path, backend: Backend) -> None:
    """Encode once: a table that leads out of its own memory does so only then."""
    try:
        backend.encode(PROBE)
    except Exception:  # a word outside the vocabulary, say: an error of that text, not of the file
        return
    except BaseException as error:
        raise _panic(path, error) from None


def _panic(path: Path, error: BaseException) -> BaseException:
    """The library's panic, which is no Exception and can only be told by its name, as an error; others as they are."""
    return ModelLoadError(f"{path}: is no tokenizer: {error}") if type(error).__name__ == "PanicException" else error


def _check_charsmaps(path: Path, text: str) -> None:
    """Refuse a `Precompiled` normalizer whose table is no table, because the library panics on it.

    Checked: base64, size, the length it announces, UTF-8. What remains: a table whose entries lead out of it is found
    by `_probe` if its text meets them, otherwise by the text that does; a regular expression may take very long.
    """
    if not re.search(r"precompiled_charsmap|\\u00[4-7]", text):  # letters may be escaped
        return

    def visit(pairs: list[tuple[str, Any]]) -> None:  # sees both of two equal keys, as the library does
        for key, value in pairs:
            if key == "precompiled_charsmap" and isinstance(value, str) and not _is_charsmap(value):
                raise ModelLoadError(f"{path}: is no tokenizer: precompiled_charsmap = {shown(value)} is damaged")

    try:
        json.loads(text, object_pairs_hook=visit)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: is no tokenizer: {error}") from error


def _is_charsmap(text: str) -> bool:
    """Four bytes of length, a table of that length in units of 4, then its texts."""
    if len(text) > MAX_CHARSMAP:
        return False
    try:
        content = base64.b64decode(text, validate=True)
        length = int.from_bytes(content[:4], "little")
        content[4 + length :].decode("utf-8")
    except ValueError:
        return False
    return length % 4 == 0 and 4 <= length <= len(content) - 4


def _what_is_missing(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: there is no such directory"
    others = [
        name for name in ("tokenizer.model", "vocab.json", "tekken.json", "vocab.txt") if (folder / name).is_file()
    ]
    if not others:
        return f"{folder}: tokenizer.json is missing, and so the model's vocabulary"
    return (
        f"{folder}: tokenizer.json is missing; there is only {', '.join(others)}. Make it once with Transformers: "
        f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    )


def _read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; special_tokens_map.json counts where that does not list the added tokens."""
    config = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read_json(folder / "special_tokens_map.json")
    return config


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the file; {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def _named_tokens(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """bos_token, eos_token, ... and a model's own (image_token), by name."""
    own = [name for name in config if name.endswith("_token") and name not in NAMED_TOKENS]
    values = {name: config.get(name) for name in (*NAMED_TOKENS, *own)}
    return {name: _special(name, value) for name, value in values.items() if isinstance(value, str | dict)}


def _add_declared_tokens(backend: Backend, config: Mapping[str, Any]) -> None:
    """Add the tokens that tokenizer.json itself does not have; those of added_tokens_decoder also change its flags."""
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
    if isinstance(value, dict):
        return _added(name, value | {"special": True})
    return _token(name, value, special=True, normalized=False) if isinstance(value, str) else _added(name, value)


def _added(name: str, value: Any) -> AddedToken:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise ModelLoadError(f"tokenizer_config.json: {name}: a token must be a string or an object with its content")
    flags = {
        key: bool(value[key]) for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in value
    }
    return _token(name, value["content"], **flags)


def _token(name: str, content: str, **flags: bool) -> AddedToken:
    try:
        return AddedToken(content, **flags)
    except UnicodeEncodeError:
        raise ModelLoadError(f"tokenizer_config.json: {name}: {shown(content)} has half a surrogate pair") from None


def _read_chat_template(folder: Path, config: Mapping[str, Any]) -> Any:
    """The template, or named templates: files before tokenizer_config.json before chat_template.json."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    named = {name: _read_text(path) for name, path in files.items() if path.is_file()}
    if named:
        return named
    return config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
