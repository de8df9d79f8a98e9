"""Tokenizers from the metadata of GGUF files, written by the package `gguf`, against the tokenizers they came from."""

from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import (
    AddedToken,
    BertWordPieceTokenizer,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from penstock.client.text import choose_tokenizer
from penstock.errors import ModelLoadError
from penstock.tokenizer.gguf import WORDS
from penstock.tokenizer.hf import HFTokenizer, load_tokenizer
from tests.tokenizer.vocabularies import BOS, END, EOS, NOTE, TEXT, byte_level, check_only_decodes, pieces
from tests.weights.gguf_files import add_vocabulary, add_wordpiece

HARD = [
    "", " ", "Once upon a time", " two  spaces   three ", "don't I'LL we're it’s", "1234567 3.14159 1,000",
    "x\n\n\ny\r\n\tz",
    "naïve café e\u0301 ﬁ ① Ａ", "你好世界 привет мир", "🙂🙃👩\u200d👩\u200d👧 🇩🇪",
    "def f(x):\n    return x + 1", f"a{END}b {NOTE} {BOS}{EOS} c", "\u200b\u00a0\u3000", "x" * 70, "a_b-c/d\\e",
    "!?.. ...", "AbcDEF ghiJKL", "\x00\x7f", "▁ ▁▁x",
]  # fmt: skip
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"


def _write(path: Path, backend: Tokenizer, pre: str = "gpt-2", **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    add_vocabulary(writer, backend, pre)
    vocabulary = backend.get_vocab()
    writer.add_bos_token_id(vocabulary[BOS])
    writer.add_eos_token_id(vocabulary[EOS])
    for key, value in metadata.items():
        writer.add_key_value(f"tokenizer.{key.replace('__', '.')}", value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _check(found: HFTokenizer, backend: Tokenizer, texts: list[str] = HARD) -> None:
    original = HFTokenizer(backend, named_tokens={"bos_token": BOS, "eos_token": EOS})
    for text in texts:
        for adds in (False, True):
            ids = original.encode(text, add_special_tokens=adds)
            assert found.encode(text, add_special_tokens=adds) == ids, text
        for skips in (False, True):
            assert found.decode(ids, skip_special_tokens=skips) == original.decode(ids, skip_special_tokens=skips)
    assert (found.bos_token_id, found.eos_token_id) == (original.bos_token_id, original.eos_token_id)
    assert found.special_ids == original.special_ids | {backend.token_to_id(token) for token in (BOS, EOS)}
    assert found.vocab_size == original.vocab_size


def _trained(words: list[pre_tokenizers.PreTokenizer], normalizer: Any = None, **options: Any) -> Tokenizer:
    """A byte-level tokenizer as a published one is written, with these steps before the bytes."""
    tok = Tokenizer(models.BPE(**options))
    tok.pre_tokenizer = pre_tokenizers.Sequence(words)
    tok.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tok.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [BOS, EOS]
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tok.train_from_iterator([*TEXT, *HARD], trainer)
    tok.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    tok.add_tokens([AddedToken(NOTE, special=False, normalized=False)])
    return tok


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
TO_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
# tokenizer.ggml.pre -> the same steps as a published tokenizer.json has them.
PUBLISHED: dict[str, Any] = {
    "gpt-2": lambda: _trained([GPT2]),
    "bloom": lambda: _trained([pre_tokenizers.Split(Regex(BLOOM), "isolated"), TO_BYTES]),
    "smollm": lambda: _trained([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "llama-bpe": lambda: _trained([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), TO_BYTES], ignore_merges=True),
    "qwen2": lambda: _trained(
        [pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), TO_BYTES], normalizers.NFC()
    ),
}


@pytest.mark.matrix("ids", "GGUF, byte-level BPE")
@pytest.mark.matrix("texts", "GGUF, byte-level BPE")
@pytest.mark.parametrize("pre", PUBLISHED)
def test_byte_level_vocabularies(pre: str, tmp_path: Path) -> None:
    """Guards against words that are cut elsewhere, and an unlike treatment of added tokens."""
    backend = PUBLISHED[pre]()
    if pre == "llama-bpe":  # which adds BOS where the file does not say
        backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    _check(load_tokenizer(_write(tmp_path / "model.gguf", backend, pre)), backend)


@pytest.mark.matrix("ids", "GGUF, SentencePiece")
@pytest.mark.matrix("texts", "GGUF, SentencePiece")
@pytest.mark.matrix("BOS and EOS", "GGUF, SentencePiece")
@pytest.mark.parametrize("strip", [False, True])
def test_pieces_with_scores(strip: bool, tmp_path: Path) -> None:
    """Guards against merges in another order than the scores', a space too many in front, and lost bytes."""
    backend = pieces(strip)
    if not strip:
        backend.normalizer = normalizers.Replace(" ", "▁")
    path = _write(tmp_path / "model.gguf", backend, ggml__add_space_prefix=strip)
    _check(load_tokenizer(path), backend, [text for text in HARD if "▁" not in text])


@pytest.mark.matrix("ids", "GGUF, WordPiece")
@pytest.mark.matrix("texts", "GGUF, WordPiece")
@pytest.mark.matrix("BOS and EOS", "GGUF, WordPiece")
@pytest.mark.parametrize("is_lower", [True, False])
def test_words_of_bert(is_lower: bool, tmp_path: Path) -> None:
    """Guards against capital letters and accents that are kept or lost, the beginning of a word that is taken for its
    middle, ends that are missing or doubled, and the second text of a pair that counts as the first."""
    oracle = BertWordPieceTokenizer(lowercase=is_lower)
    texts = [*TEXT, *(text for text in HARD if "▁" not in text)]  # which marks the beginning of a word in the file
    oracle.train_from_iterator([*texts, "Name naming Names"], vocab_size=400, show_progress=False)
    oracle = BertWordPieceTokenizer(oracle.get_vocab(), lowercase=is_lower)  # which then has the tokens at both ends
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "bert")
    words = sorted(oracle.get_vocab(), key=oracle.token_to_id)
    assert words[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    add_wordpiece(writer, words)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = load_tokenizer(tmp_path / "model.gguf")
    for text in [*texts, "naming NAMES", "Élan [MASK] vital!"]:
        assert found.encode(text) == oracle.encode(text).ids, text
        assert found.decode(found.encode(text)) == oracle.decode(oracle.encode(text).ids)
    both = oracle.encode("Once", "upon a time")
    assert found.encode_pair("Once", "upon a time") == (both.ids, both.type_ids.index(1))


@pytest.mark.parametrize("backend", [byte_level, pieces])
def test_decoding_needs_no_merges(backend: Any, tmp_path: Path) -> None:
    """Guards against streams whose text depends on what only prompts need, and against loading that."""
    check_only_decodes(_write(tmp_path / "model.gguf", backend()), HARD)


@pytest.mark.matrix("BOS and EOS", "GGUF, byte-level BPE")
@pytest.mark.parametrize("adds", [(False, False), (True, False), (False, True), (True, True)])
def test_flags_say_what_is_added(adds: tuple[bool, bool], tmp_path: Path) -> None:
    """Guards against a BOS that is lost or doubled."""
    backend = byte_level()
    path = _write(tmp_path / "model.gguf", backend, ggml__add_bos_token=adds[0], ggml__add_eos_token=adds[1])
    found = load_tokenizer(path)
    ids = found.encode("Once upon", add_special_tokens=False)
    bos, eos = backend.token_to_id(BOS), backend.token_to_id(EOS)
    assert found.encode("Once upon") == [bos] * adds[0] + ids + [eos] * adds[1]


@pytest.mark.matrix("chat template", "GGUF, byte-level BPE")
def test_the_chat_template_is_read(tmp_path: Path) -> None:
    """Guards against conversations that are refused, or rendered without the special tokens."""
    path = _write(tmp_path / "model.gguf", byte_level(), chat_template=TEMPLATE)
    found = choose_tokenizer(None, str(path))
    assert found is not None
    assert found.chat_template is not None
    assert found.chat_template.render([{"role": "user", "content": "Hi"}]) == f"{BOS}Hi{EOS}"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"ggml__pre": "no-such"}, r"tokenizer\.ggml\.pre = 'no-such' is not allowed; it must be one of gpt-2, "),
        ({"ggml__model": "t5"}, r"tokenizer\.ggml\.model = 't5' is not allowed; it must be llama .*, gpt2 .* or bert"),
        ({"ggml__bos_token_id": 10**6}, r"bos_token_id = 1000000 is not allowed; it must be an id below \d+"),
        ({"ggml__add_bos_token": 1}, r"add_bos_token = 1 is not allowed; it must be true or false"),
        ({"ggml__tokens": "x"}, r"tokens = 'x' is not allowed; it must be an array of strings"),
        ({"ggml__token_type": [1, 2]}, r"token_type = .* is not allowed; it must be an array of \d+ numbers"),
    ],
)
def test_what_is_refused(metadata: dict[str, Any], message: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Guards against a pre-tokenizer that is guessed, and a damaged vocabulary that raises another error."""
    original = gguf.GGUFWriter.add_key_value

    def replacing(self: Any, key: str, value: Any, kind: Any, sub_type: Any = None) -> None:
        self.kv_data[0].pop(key, None)
        original(self, key, value, kind, sub_type)

    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", replacing)
    path = _write(tmp_path / "model.gguf", byte_level(), **metadata)
    with pytest.raises(ModelLoadError, match=message):
        load_tokenizer(path)


@pytest.mark.parametrize("pre", WORDS)
def test_every_expression_compiles(pre: str, tmp_path: Path) -> None:
    """Guards against an expression that the library does not understand, which no other test would meet."""
    path = _write(tmp_path / "model.gguf", byte_level(), pre)
    found = load_tokenizer(path)
    for text in HARD:
        if END not in text and "e\u0301" not in text:
            assert found.decode(found.encode(text, add_special_tokens=False)) == text
