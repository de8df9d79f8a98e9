"""The tokenizer: a byte-level BPE that splits numbers into digits; ids 0 to 6 are the special tokens."""

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from penstock.demo.chats import BOS, SPECIAL_TOKENS

VOCAB_SIZE = 4096


def plain_texts(documents: Iterable[str]) -> Iterable[str]:
    """Yield documents without their special tokens, so that BPE does not learn pieces of them."""
    for document in documents:
        for token in SPECIAL_TOKENS:
            document = document.replace(token, "\n")
        yield document


def train_tokenizer(documents: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Return a tokenizer of at most `vocab_size` tokens, the special ones first. It adds <|bos|> by default."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(plain_texts(documents), trainer)
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos_id)]
    )
    return tokenizer
