"""The shipped files: size, format, special tokens, chat template. Weights are looked at, the model is not run."""

import json
import struct
from math import prod

import pytest
from tokenizers import Tokenizer

from penstock.weights.hub import MODEL_DIR
from penstock_lab.training import chats, corpus, export

CONFIG = json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8"))
TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
TALK = [("system", "Be brief."), ("user", "Hi"), ("assistant", " Hello! "), ("user", "Tell me a story about Zoé.\n")]


def header() -> dict[str, dict[str, object]]:
    """The table at the head of model.safetensors."""
    with (MODEL_DIR / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        table = json.loads(file.read(size))
    table.pop("__metadata__", None)
    return table


def test_size_limits() -> None:
    assert sum(prod(entry["shape"]) for entry in header().values()) <= 3_000_000  # type: ignore[arg-type]
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= 8_000_000


def test_weights_are_bfloat16_and_the_head_is_tied() -> None:
    table = header()
    assert {entry["dtype"] for entry in table.values()} == {"BF16"}
    assert CONFIG["tie_word_embeddings"] is True
    assert "lm_head.weight" not in table
    assert table["model.embed_tokens.weight"]["shape"] == [CONFIG["vocab_size"], CONFIG["hidden_size"]]


def test_configuration_fits_the_tokenizer() -> None:
    assert CONFIG["architectures"] == ["LlamaForCausalLM"]
    assert CONFIG["vocab_size"] == TOKENIZER.get_vocab_size()
    assert CONFIG["max_position_embeddings"] == 1024
    assert CONFIG["torch_dtype"] == "bfloat16"
    generation = json.loads((MODEL_DIR / "generation_config.json").read_text(encoding="utf-8"))
    assert {name: generation[name] for name in export.SAMPLING} == export.SAMPLING
    assert generation["eos_token_id"] == [TOKENIZER.token_to_id(chats.EOS), TOKENIZER.token_to_id(chats.END)]


def test_special_tokens_are_one_token_each_and_come_back() -> None:
    for number, token in enumerate(chats.SPECIAL_TOKENS):
        assert TOKENIZER.encode(token, add_special_tokens=False).ids == [number]
        assert TOKENIZER.decode([number], skip_special_tokens=False) == token
        assert TOKENIZER.decode([number]) == ""


def test_bos_is_added_unless_told_not_to() -> None:
    bos = TOKENIZER.token_to_id(chats.BOS)
    assert TOKENIZER.encode("Once").ids == [bos, *TOKENIZER.encode("Once", add_special_tokens=False).ids]


@pytest.mark.parametrize(
    "text", ["Once upon a time", " 17 + 4 = 21.", "Zoé naïve 漢字 🙂", "a\n\nb\tc  d", '{"a": [1, null]}', ""]
)
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


def test_heldout_text_comes_back_and_fits_the_context() -> None:
    for document in corpus.read_heldout():
        ids = TOKENIZER.encode(document, add_special_tokens=False).ids
        assert len(ids) <= 1024
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == document


def test_chat_template_renders_as_the_training_text() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    messages = [{"role": role, "content": content} for role, content in TALK]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == chats.render_prompt(TALK)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == chats.render(TALK)
    assert tokenizer("Once upon").input_ids == TOKENIZER.encode("Once upon").ids
    assert (
        tokenizer(rendered, add_special_tokens=False).input_ids
        == TOKENIZER.encode(rendered, add_special_tokens=False).ids
    )


def test_unknown_roles_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    with pytest.raises(Exception, match="Roles are"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": "x"}], tokenize=False)


def test_the_card_states_the_figures() -> None:
    card = (MODEL_DIR / "README.md").read_text(encoding="utf-8")
    assert "Held-out loss" in card
    assert "Limits" in card
    assert "{" not in card.split("## Samples")[0]
