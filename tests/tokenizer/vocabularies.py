"""Small real tokenizers, trained here in a few milliseconds: one of each kind that models use."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from penstock.tokenizer.hf import HFTokenizer, load_tokenizer

TEXT = [
    "The quick brown fox jumps over the lazy dog.",
    "Once upon a time there was a small house, and in it lived an old woman.",
    "naïve café, Füße, 你好世界, привет мир, 🙂🙃",
    "def f(x):\n    return x + 1\n\n# it's fine, isn't it?",
] * 3
BOS, EOS, END, NOTE = "<s>", "</s>", "<|end|>", "<note>"  # NOTE is an added token that is not special


def check_only_decodes(place: Path, texts: list[str]) -> None:
    """Load a tokenizer that only decodes. Its texts are those of the whole one, and it has no merges."""
    whole, part = load_tokenizer(place), load_tokenizer(place, only_decodes=True)
    ids = range(whole.vocab_size)
    assert [part.token_to_bytes(token) for token in ids] == [whole.token_to_bytes(token) for token in ids]
    assert part.special_ids == whole.special_ids
    for found in map(whole.encode, texts):
        for skips in (False, True):
            assert part.decode(found, skip_special_tokens=skips) == whole.decode(found, skip_special_tokens=skips)
    assert json.loads(part.to_json())["model"]["merges"] == []


def byte_level() -> Tokenizer:
    """As Llama 3, Qwen and GPT-2: every byte has a character."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=[BOS, EOS], show_progress=False
    )
    tok.train_from_iterator(TEXT, trainer)
    tok.add_special_tokens([AddedToken(END, special=True)])
    tok.add_tokens([AddedToken(NOTE, special=False), AddedToken("<｜边｜>", special=False)])
    tok.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tok


def pieces(strip: bool = True) -> Tokenizer:
    """As Llama 2 and Mistral (strip) or Gemma (not): sentencepiece-like pieces, unknown characters as bytes."""
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.train_from_iterator(TEXT[:2], trainers.BpeTrainer(vocab_size=250, show_progress=False))
    trained: dict[str, Any] = json.loads(tok.to_str())
    words = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [word for word in trained["model"]["vocab"] if word not in words]
    trained["model"] |= {
        "vocab": {word: index for index, word in enumerate(words)},
        "unk_token": "<unk>",
        "byte_fallback": True,
        "fuse_unk": True,
    }
    tok = Tokenizer.from_str(json.dumps(trained))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tok.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tok.add_special_tokens(["<unk>", BOS, EOS, END])
    tok.add_tokens([AddedToken(NOTE, special=False, normalized=False)])
    tok.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return tok


def metaspace() -> Tokenizer:
    """As newer sentencepiece conversions: Metaspace on both sides, no bytes."""
    tok = Tokenizer(models.BPE(unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tok.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", BOS, EOS, END], show_progress=False)
    tok.train_from_iterator(TEXT, trainer)
    tok.add_tokens([AddedToken(NOTE, special=False)])
    return tok


def word_pieces() -> Tokenizer:
    """As BERT: ##ing, and a decoder that puts spaces between tokens."""
    tok = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<unk>", BOS, EOS, END], show_progress=False)
    tok.train_from_iterator(TEXT, trainer)
    tok.add_tokens([AddedToken(NOTE, special=False)])
    return tok


KINDS = {
    "byte_level": byte_level,
    "pieces": pieces,
    "pieces_unstripped": lambda: pieces(strip=False),
    "metaspace": metaspace,
    "word_pieces": word_pieces,
}


@cache
def make(kind: str) -> HFTokenizer:
    """A tokenizer of this kind, without a chat template."""
    return HFTokenizer(KINDS[kind](), named_tokens={"bos_token": BOS, "eos_token": EOS})


def write(folder: Path, kind: str, config: dict[str, Any] | None = None) -> Path:
    """The tokenizer's directory as a model has it."""
    folder.mkdir(parents=True, exist_ok=True)
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": EOS} if config is None else config
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
