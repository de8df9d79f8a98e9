"""Build a `tokenizers` backend from a vocabulary: SentencePiece's pieces and scores, or Mistral's tekken.json.

`sentencepiece_backend` takes the parts of a vocabulary, because other formats than tokenizer.model hold the same parts.
Ids and texts equal those of the libraries that the formats belong to, sentencepiece and mistral-common, except that the
spellings of control tokens become these tokens, as in a tokenizer.json.
"""

import base64
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from penstock.errors import ModelLoadError, one_line, shown
from penstock.tokenizer.tokenizer import byte_of_char

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of pieces, as SentencePiece numbers them
UNIGRAM, BPE = 1, 2
SPACE = "\u2581"  # stands for a space in pieces
MAX_PIECE = 256  # characters of a piece that others are merged into; the longest in use have 80
MAX_PIECES = 2**24
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # kinds of values in a protocol buffer
SPECIAL_NAME = "<SPECIAL_{}>"
# The first special tokens of a tekken.json that does not list them.
SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pieces:
    """A SentencePiece vocabulary. `scores` and `kinds` (NORMAL, ...) have an item for each of `pieces`.

    Attributes:
        model: UNIGRAM or BPE.
        add_prefix: whether a text gets a space in front.
        remove_extra_whitespaces: whether spaces at both ends and repeated ones are removed.
        charsmap: SentencePiece's compiled table of normalisation; empty: characters are kept.
        named: the pieces that are bos_token, eos_token, ..., as far as the vocabulary has them.
    """

    pieces: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    model: int = BPE
    add_prefix: bool = True
    remove_extra_whitespaces: bool = False
    charsmap: bytes = b""
    named: Mapping[str, str] = field(default_factory=dict)


def sentencepiece_backend(words: Pieces, *, every_part: bool = False, only_decodes: bool = False) -> Backend:
    """Build the backend of a SentencePiece vocabulary.

    Control pieces and the unknown one become special tokens. A text is one word; BOS is not added.

    every_part: whether the text after a special token gets a space in front, too, not only the beginning.
    only_decodes: leave out what only encoding needs, the merges of a BPE.

    Raises:
        ValueError: the vocabulary contradicts itself.
    """
    vocab = {piece: token_id for token_id, piece in enumerate(words.pieces)}
    if len(vocab) < len(words.pieces):
        repeated = next(piece for token_id, piece in enumerate(words.pieces) if vocab[piece] != token_id)
        raise ValueError(f"the piece {shown(repeated)} is there twice")
    by_kind: dict[int, list[str]] = {kind: [] for kind in range(NORMAL, BYTE + 1)}
    for piece, kind, score in zip(words.pieces, words.kinds, words.scores, strict=True):
        if kind not in by_kind or not math.isfinite(score):
            raise ValueError(f"the piece {shown(piece)} is of kind {kind}, with the score {score}")
        by_kind[kind].append(piece)
    unknown = by_kind[UNKNOWN][0] if by_kind[UNKNOWN] else None
    scores = dict(zip(words.pieces, words.scores, strict=True))
    if words.model == BPE:
        ranked = [] if only_decodes else sorted(by_kind[NORMAL], key=scores.__getitem__, reverse=True)
        has_bytes = bool(by_kind[BYTE])
        model: models.Model = models.BPE(
            vocab, merges_of(ranked), unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes
        )
    elif words.model == UNIGRAM:
        if unknown is None:
            raise ValueError("no piece stands for unknown characters")
        found = set(by_kind[NORMAL])
        lowest = min((scores[piece] for piece in found), default=0.0)  # so that no other piece is preferred
        entries = [(piece, score if piece in found else lowest) for piece, score in scores.items()]
        model = models.Unigram(entries, unk_id=vocab[unknown], byte_fallback=bool(by_kind[BYTE]))
    else:
        raise ValueError(
            f"a model of type {words.model} is not supported; supported are {UNIGRAM} (unigram) and {BPE} (BPE)"
        )
    backend = Backend(model)
    backend.normalizer = _normalizer(words)
    scheme = "never" if not words.add_prefix else "always" if every_part else "first"
    prefix: pre_tokenizers.PreTokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    if not words.remove_extra_whitespaces:  # a space comes before a space, too: this step sees none, all are replaced
        prefix = pre_tokenizers.Metaspace(" ", prepend_scheme=scheme, split=False)
        prefix = pre_tokenizers.Sequence([prefix, pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False)])
    backend.pre_tokenizer = prefix
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if words.add_prefix else steps)
    special = [AddedToken(piece, special=True, normalized=False) for piece in by_kind[UNKNOWN] + by_kind[CONTROL]]
    backend.add_tokens(special + [AddedToken(piece, normalized=True) for piece in by_kind[USER_DEFINED]])
    return backend


def _normalizer(words: Pieces) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if words.charsmap:
        steps.append(normalizers.Precompiled(words.charsmap))
    if words.remove_extra_whitespaces:
        ends = " +$" if words.add_prefix else "^ +| +$"
        steps += [normalizers.Replace(Regex(ends), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def merges_of(ranked: Sequence[str]) -> list[tuple[str, str]]:
    """Return every pair of tokens that makes a third one, in the order of these third ones, best first.

    Raises:
        ValueError: a token is too long.
    """
    longest = max(map(len, ranked), default=0)
    if longest > MAX_PIECE:
        raise ValueError(f"a piece has {longest} characters; at most {MAX_PIECE} are allowed")
    known = set(ranked)
    return [  # one expression, because a vocabulary of 262,000 has 1.2 million places to cut
        (left, right)
        for token in ranked
        for cut in range(len(token) - 1, 0, -1)
        if (left := token[:cut]) in known and (right := token[cut:]) in known
    ]


def add_around(backend: Backend, before: str | None, after: str | None) -> None:
    """Put special tokens (BOS, EOS) around texts that are encoded with them; None: nothing."""
    special = [(token, backend.token_to_id(token)) for token in dict.fromkeys((before, after)) if token is not None]
    around = ([before] if before else [], [after] if after else [])
    pair = [*around[0], "$A:0", *around[1], *(f"{token}:1" for token in around[0]), "$B:1"]
    pair += [f"{token}:1" for token in around[1]]
    backend.post_processor = processors.TemplateProcessing([*around[0], "$A", *around[1]], pair, special)


# --- tokenizer.model -------------------------------------------------------------------------------------------------


def read_sentencepiece(path: Path, data: bytes) -> Pieces:
    """Read a SentencePiece model.

    Raises:
        ModelLoadError: it is damaged, of another format, or of a type that is not supported.
    """
    try:
        return _read_pieces(data)
    except (ValueError, struct.error, IndexError) as error:
        if _is_tiktoken(data):
            problem = "holds tokens without the expression that cuts a text (tiktoken's format), which is not supported"
        else:
            problem = f"is not a valid SentencePiece model: {one_line(error)}"
        raise ModelLoadError(f"{path}: {problem}") from None


def _read_pieces(data: bytes) -> Pieces:
    pieces: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    trainer, normalizer, denormalizer = {}, {}, {}
    for number, value in _fields(data):
        if number == 1:
            item = dict(_fields(value))
            pieces.append(_bytes_of(item, 1).decode())
            scores.append(struct.unpack("<f", _bytes_of(item, 2))[0] if 2 in item else 0.0)
            kinds.append(_number_of(item, 3, NORMAL))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
        elif number == 5:
            denormalizer = dict(_fields(value))
    if not pieces:
        raise ValueError("it holds no pieces")
    if _number_of(trainer, 24, 0) or not _number_of(normalizer, 5, 1) or _bytes_of(denormalizer, 2):
        raise ValueError("spaces after words, spaces that are kept, and denormalisation are not supported")
    names = {
        "unk_token": (45, "<unk>"),
        "bos_token": (46, "<s>"),
        "eos_token": (47, "</s>"),
        "pad_token": (48, "<pad>"),
    }
    named = {name: _bytes_of(trainer, number).decode() or default for name, (number, default) in names.items()}
    kind_of = dict(zip(pieces, kinds, strict=True))
    return Pieces(
        pieces,
        scores,
        kinds,
        model=_number_of(trainer, 3, UNIGRAM),
        add_prefix=bool(_number_of(normalizer, 3, 1)),
        remove_extra_whitespaces=bool(_number_of(normalizer, 4, 1)),
        charsmap=_bytes_of(normalizer, 2),
        named={name: piece for name, piece in named.items() if kind_of.get(piece) in (UNKNOWN, CONTROL)},
    )


def _fields(data: Any) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a protocol buffer: an integer, or bytes.

    Raises:
        ValueError, IndexError: it is cut short or damaged.
    """
    if not isinstance(data, bytes):
        raise ValueError("a number where a message is expected")
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        length, at = _varint(data, at) if kind == BYTES else ({FIXED32: 4, FIXED64: 8}.get(kind, -1), at)
        if not 0 <= length <= len(data) - at:
            raise ValueError("it is cut short, or damaged")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a number of variable length and where it ends."""
    value = 0
    for index in range(10):
        byte = data[at + index]
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, at + index + 1
    raise ValueError("a number is too long")


def _number_of(fields: Mapping[int, Any], number: int, default: int) -> int:
    value = fields.get(number, default)
    if not isinstance(value, int):
        raise ValueError(f"field {number} is not a number")
    return value


def _bytes_of(fields: Mapping[int, Any], number: int) -> bytes:
    value = fields.get(number, b"")
    if not isinstance(value, bytes):
        raise ValueError(f"field {number} is not a text")
    return value


def _is_tiktoken(data: bytes) -> bool:
    """Tell whether the first line is a token in base64 and its number."""
    token, _, number = data[:1000].partition(b"\n")[0].partition(b" ")
    try:
        return number.strip().isdigit() and bool(base64.b64decode(token, validate=True))
    except ValueError:
        return False


# --- tekken.json -----------------------------------------------------------------------------------------------------


def tekken_backend(path: Path, text: str, *, only_decodes: bool = False) -> Backend:
    """Build the backend of Mistral's tekken.json: special tokens have the first ids, then the tokens by their ranks.

    only_decodes: as in sentencepiece_backend.

    Raises:
        ModelLoadError: the file is damaged.
    """
    try:
        return _tekken_backend(json.loads(text), only_decodes=only_decodes)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else one_line(error)
        raise ModelLoadError(f"{path}: is not a valid tekken.json: {problem}") from None


def _tekken_backend(contents: Any, *, only_decodes: bool) -> Backend:
    config = contents["config"]
    size, num_special, pattern = (
        config[key] for key in ("default_vocab_size", "default_num_special_tokens", "pattern")
    )
    if type(size) is not int or type(num_special) is not int or not 0 <= num_special < size <= MAX_PIECES:
        raise ValueError(f"default_vocab_size = {shown(size)}, default_num_special_tokens = {shown(num_special)}")
    special = _special_tokens(contents.get("special_tokens"), num_special)
    chars = {byte: char for char, byte in byte_of_char().items()}
    ordinary = {}
    for token in contents["vocab"][: size - num_special]:
        word = "".join(chars[byte] for byte in base64.b64decode(token["token_bytes"], validate=True))
        ordinary[word] = num_special + token["rank"]
    if sorted(ordinary.values()) != list(range(num_special, size)):
        raise ValueError(f"vocab does not hold {size - num_special} different tokens with the ranks from 0 on")
    ranked = [] if only_decodes else sorted(ordinary.keys() - set(special), key=ordinary.__getitem__)
    vocab = ordinary | {token: token_id for token_id, token in enumerate(special)}
    backend = Backend(models.BPE(vocab, merges_of(ranked), ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return backend


def _special_tokens(listed: Any, count: int) -> list[str]:
    """Return the texts of the special tokens, by their ids."""
    if listed is None:
        listed = [{"rank": rank, "token_str": token} for rank, token in enumerate(SPECIAL[:count])]
    special = [SPECIAL_NAME.format(rank) for rank in range(count)]
    for token in listed:
        rank, content = token["rank"], token["token_str"]
        if type(rank) is not int or not 0 <= rank < count or not isinstance(content, str) or not content:
            raise ValueError(f"special_tokens: {shown(token)}")
        special[rank] = content
    if len(set(special)) < count:
        raise ValueError("special_tokens: one is there twice")
    return special
