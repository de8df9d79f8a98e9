"""Build the tokenizer that the metadata of a GGUF file describes.

Three kinds of vocabularies are read. "llama" is a SentencePiece BPE: pieces with scores, and bytes for what has no
piece. "gpt2" is a byte-level BPE with merges; its pre-tokenizer, which cuts a text into words, is known by name only,
so the expressions are here. "bert" is BERT's WordPiece; a file does not say whether texts become lower case, which a
vocabulary without capital letters means. Ids and texts equal those of the model's own tokenizer.json.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from penstock.errors import ModelLoadError, shown
from penstock.spec.gguf import Strings, read_file
from penstock.tokenizer.vocabulary import (
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Pieces,
    sentencepiece_backend,
)

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
NO_TOKEN = 2**32 - 1
NAMED = {  # the names in tokenizer_config.json -> the keys
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "cls_token": "cls_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}


@dataclass(frozen=True, slots=True)
class Words:
    """How a byte-level vocabulary cuts a text.

    Attributes:
        patterns: each cuts what it matches out of the pieces that those before it have left.
        ignore_merges: whether a word that is a token needs no merges.
        adds_bos: whether BOS is added if the file does not say.
        normalizes: whether texts are brought into Unicode's form C first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    normalizes: bool = False


_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_REST_OF_CASED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_PUNCTUATION = r"[\p{P}$+<=>^~|`]+"
_OF_GPT2, _OF_LLAMA3 = Words((_GPT2,)), Words((_LLAMA3,), ignore_merges=True, adds_bos=True)
_OF_SMOLLM, _OF_QWEN2 = Words((r"\p{N}", _GPT2)), Words((_QWEN2,), normalizes=True)
# tokenizer.ggml.pre -> the words.
WORDS = {
    **dict.fromkeys(("gpt-2", "phi-2", "a.x-4.0", "mellum", "trillion", "exaone4"), _OF_GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), _OF_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), Words((_LLAMA3,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"), _OF_SMOLLM),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "stablelm2"), _OF_QWEN2),
    "bloom": Words((r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    "olmo": Words((_GPT2,), normalizes=True),
    "default": Words((_PUNCTUATION, _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": Words((_PUNCTUATION, _GPT2, "[0-9][0-9][0-9]")),
    "tekken": Words((rf"{'|'.join(_CASED)}|\p{{N}}|{_REST_OF_CASED}",), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(
        ("gpt-4o", "minimax-m2"),
        Words((rf"{_CASED[0]}{_SHORT}?|{_CASED[1]}{_SHORT}?|\p{{N}}{{1,3}}|{_REST_OF_CASED}",)),
    ),
    "deepseek-coder": Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": Words(
        (
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    "seed-coder": Words((_QWEN2.replace(r"]+[\r\n]*|", r"\r\n]+|"),)),
}


def gguf_backend(path: Path, *, only_decodes: bool = False) -> tuple[Backend, dict[str, Any]]:
    """Return the backend, and the keys that tokenizer_config.json would have.

    only_decodes: leave out what only encoding needs, the merges.

    Raises:
        ModelLoadError: the file is damaged, or describes a tokenizer that is not supported.
    """
    metadata = read_file(path).metadata
    read = _Keys(path, {key.removeprefix(PREFIX): item for key, item in metadata.items() if key.startswith(PREFIX)})
    tokens = list(read.strings("tokens"))
    kinds = read.numbers("token_type", len(tokens)) or [NORMAL] * len(tokens)
    model = read.values.get("model")
    if model == "llama":
        backend, adds_bos = _sentencepiece(read, tokens, kinds, only_decodes=only_decodes), True
    elif model == "gpt2":
        words = WORDS.get(read.values.get("pre", ""))
        if words is None:
            raise read.fail("pre", f"one of {', '.join(WORDS)}")
        backend = _byte_level(read, tokens, kinds, words, only_decodes=only_decodes)
        adds_bos = words.adds_bos
    elif model == "bert":
        backend, adds_bos = _wordpiece(read, tokens, kinds), False
    else:
        raise read.fail("model", "llama (a SentencePiece BPE), gpt2 (a byte-level BPE) or bert (WordPiece)")
    named = {name: read.token(key, tokens) for name, key in NAMED.items()}
    flags = {"add_bos_token": read.flag("add_bos_token", adds_bos), "add_eos_token": read.flag("add_eos_token", False)}
    templates = {
        key.removeprefix(TEMPLATE).removeprefix(".") or "default": item
        for key, item in metadata.items()
        if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")
    }
    template = templates.get("default") if len(templates) == 1 else templates or None
    return backend, named | flags | {"chat_template": template}


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of a tokenizer, without their prefix, which are checked as they are read."""

    path: Path
    values: Mapping[str, Any]

    def fail(self, key: str, allowed: str) -> ModelLoadError:
        """Return the error for a key that is missing or whose value is not allowed."""
        found = f"= {shown(self.values[key])} is not allowed" if key in self.values else "is missing"
        return ModelLoadError(f"{self.path}: {PREFIX}{key} {found}; it must be {allowed}")

    def strings(self, key: str) -> Strings:
        found = self.values.get(key)
        if not isinstance(found, Strings):
            raise self.fail(key, "an array of strings")
        return found

    def numbers(self, key: str, count: int) -> Sequence[Any]:
        """Return an array with a number for each token, or an empty one."""
        found = self.values.get(key, ())
        if isinstance(found, Strings | str | int | float) or len(found) not in (0, count):
            raise self.fail(key, f"an array of {count} numbers")
        return list(found)

    def flag(self, key: str, default: bool) -> bool:
        found = self.values.get(key, default)
        if not isinstance(found, bool):
            raise self.fail(key, "true or false")
        return found

    def token(self, key: str, tokens: Sequence[str]) -> str | None:
        """Return the token whose id a key names."""
        found = self.values.get(key)
        if found in (None, NO_TOKEN):
            return None
        if not isinstance(found, int) or not 0 <= found < len(tokens):
            raise self.fail(key, f"an id below {len(tokens)}")
        return tokens[found]


def _sentencepiece(read: _Keys, tokens: list[str], kinds: Sequence[int], *, only_decodes: bool) -> Backend:
    scores = read.numbers("scores", len(tokens))
    if not scores:
        raise read.fail("scores", f"an array of {len(tokens)} numbers")
    for index, kind in enumerate(kinds):
        if kind == USER_DEFINED:  # the file has them as they look
            tokens[index] = tokens[index].replace(" ", SPACE)
    prefix = read.flag("add_space_prefix", True)
    pieces = Pieces(tokens, scores, kinds, add_prefix=prefix)
    return sentencepiece_backend(pieces, every_part=True, only_decodes=only_decodes)


def _wordpiece(read: _Keys, tokens: list[str], kinds: Sequence[int]) -> Backend:
    """Build BERT's tokenizer. A file marks the beginnings of words, not, as vocab.txt, what goes on with a word."""
    for index, token in enumerate(tokens):
        if not (token.startswith("[") and token.endswith("]")):
            tokens[index] = token[1:] if token.startswith(SPACE) else f"##{token}"
    is_lower = all(token == token.lower() for token in tokens if not token.startswith("["))
    vocab = {token: index for index, token in enumerate(tokens)}
    found = {name: read.token(NAMED[name], tokens) for name in ("unk_token", "cls_token", "sep_token")}
    special = {name: token or f"[{name[:3].upper()}]" for name, token in found.items()}
    missing = [token for token in special.values() if token not in vocab]
    if missing:
        raise read.fail("tokens", f"an array with {missing[0]} in it")
    backend = Backend(models.WordPiece(vocab, unk_token=special["unk_token"]))
    backend.normalizer = normalizers.BertNormalizer(lowercase=is_lower)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    first, last = special["cls_token"], special["sep_token"]
    text, ends = f"{first}:0 $A:0 {last}:0", [(first, vocab[first]), (last, vocab[last])]
    backend.post_processor = processors.TemplateProcessing(text, f"{text} $B:1 {last}:1", ends)
    backend.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, UNKNOWN)])
    return backend


def _byte_level(read: _Keys, tokens: list[str], kinds: Sequence[int], words: Words, *, only_decodes: bool) -> Backend:
    merges = read.strings("merges")
    parts = [merge.partition(" ") for merge in (() if only_decodes else merges)]
    pairs = [(left, right) for left, _, right in parts]
    if not all(left and right for left, right in pairs):
        raise read.fail("merges", "an array of pairs of tokens")
    vocab = {token: index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED}
    backend = Backend(models.BPE(vocab, pairs, ignore_merges=words.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    if words.normalizes:
        backend.normalizer = normalizers.NFC()
    added = zip(tokens, kinds, strict=True)
    special = (CONTROL, UNKNOWN)
    backend.add_tokens(
        [
            AddedToken(token, special=kind in special, normalized=False)
            for token, kind in added
            if kind in (*special, USER_DEFINED)
        ]
    )
    return backend
