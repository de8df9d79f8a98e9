"""Which tokens count in training, and how rows are cut."""

import numpy as np

from penstock_lab.training import chats, packing

DOCUMENTS = [
    chats.render([("system", "Be brief."), ("user", "Hi there"), ("assistant", "Hello!")]),
    chats.BOS + "Once upon a time." + chats.EOS,
] * 200
TOKENIZER = packing.train_tokenizer(DOCUMENTS, vocab_size=300)
BOS = TOKENIZER.token_to_id(chats.BOS)
ENDS = (TOKENIZER.token_to_id(chats.EOS), TOKENIZER.token_to_id(chats.END))


def test_only_plain_text_and_the_assistant_count() -> None:
    ids = TOKENIZER.encode("".join(DOCUMENTS[:2]) + "<|pad|><|pad|>", add_special_tokens=False).ids
    counted = packing.counted(np.array(ids))
    text = TOKENIZER.decode(np.array(ids)[counted].tolist(), skip_special_tokens=False)
    assert text == "Hello!<|end|>Once upon a time.<|eos|>"


def test_rows_hold_whole_documents() -> None:
    """No document may lose its end: the model would not learn to stop."""
    batches = packing.Batches(DOCUMENTS, TOKENIZER, per_step=128, lengths=(64, 128))
    seen = list(batches)
    assert {inputs.shape for inputs, _ in seen} >= {(2, 64)}
    assert batches.documents == len(DOCUMENTS)
    for inputs, labels in seen:
        assert (inputs[:, 0] == BOS).all()
        kept = labels[:, :-1] != packing.IGNORE
        assert (labels[:, :-1][kept] == inputs[:, 1:][kept]).all()
        starts, ends = (inputs == BOS).sum(), np.isin(labels, ENDS).sum()
        assert starts == ends


def test_equal_streams_give_equal_batches() -> None:
    one, two = (list(packing.Batches(DOCUMENTS, TOKENIZER, 128, (64, 128))) for _ in range(2))
    assert all((a[0] == b[0]).all() and (a[1] == b[1]).all() for a, b in zip(one, two, strict=True))
