"""The bundled model's own tokenizer and template, as every first user meets them."""

import pytest
from transformers import PreTrainedTokenizerFast

from penstock.tokenizer.hf import load_tokenizer
from penstock.tokenizer.tokenizer import IncrementalDetokenizer
from penstock.weights.hub import MODEL_DIR

FOLDER = MODEL_DIR
TEXTS = [
    "Once upon a time there was a small dog.",
    '{"name": "Tim", "age": 7}',
    "7 + 5 = ?",
    "naïve 你好 🙂",
    " a\n\n b ",
]
CHATS = [
    [{"role": "user", "content": "Tell me a story."}],
    [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "Hello. "},
        {"role": "user", "content": "  What is 2 + 3?\n"},
    ],
    [{"role": "user", "content": "Go on:"}, {"role": "assistant", "content": "Once upon "}],
]


@pytest.fixture(scope="module")
def ours():
    return load_tokenizer(FOLDER)


@pytest.fixture(scope="module")
def theirs():
    return PreTrainedTokenizerFast.from_pretrained(str(FOLDER))


def test_equals_transformers(ours, theirs):
    """Guards against a demo model that only our own tokenizer can serve."""
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
            detokenizer = IncrementalDetokenizer(ours)
            assert "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.finish() == ours.decode(ids)


@pytest.mark.parametrize("options", [{"add_generation_prompt": True}, {}, {"continue_final_message": True}])
def test_chat(ours, theirs, options):
    """Guards against a prompt that the demo model was not trained on."""
    for messages in CHATS:
        expected = theirs.apply_chat_template(messages, tokenize=False, **options)
        assert ours.chat_template.render(messages, **{"add_generation_prompt": False, **options}) == expected
