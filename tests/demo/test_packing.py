"""Which tokens count in training, and how rows are cut."""

import pytest

pytest.importorskip("numpy")

from penstock.demo import chats, packing
from penstock.demo.bpe import train_tokenizer

DOCUMENTS = [
    chats.render([("system", "Be brief."), ("user", "Hi there"), ("assistant", "Hello!")]),
    chats.BOS + "Once upon a time." + chats.EOS,
] * 20
TOKENIZER = train_tokenizer(DOCUMENTS, vocab_size=300)


def test_only_plain_text_and_the_assistant_count() -> None:
    tokens = packing.encode(iter(DOCUMENTS[:2]), TOKENIZER, 1)
    counted = TOKENIZER.decode(tokens.ids[tokens.counts].tolist(), skip_special_tokens=False)
    assert counted == "Hello!<|end|>Once upon a time.<|eos|>"


def test_rows_begin_with_documents_and_have_the_length() -> None:
    tokens = packing.encode(iter(DOCUMENTS), TOKENIZER, 400)
    seen = list(packing.batches(tokens, per_step=64, lengths=(32, 64)))
    assert [inputs.shape for inputs, _ in seen[:2]] == [(2, 32), (1, 64)]
    bos = TOKENIZER.token_to_id(chats.BOS)
    for inputs, labels in seen:
        assert (inputs[:, 0] == bos).all()
        assert inputs.shape == labels.shape
        kept = labels[:, :-1] != packing.IGNORE
        assert (labels[:, :-1][kept] == inputs[:, 1:][kept]).all()
