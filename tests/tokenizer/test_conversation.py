"""What a message says cannot become a control token."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers

import penstock
from penstock import LLM
from penstock.errors import InvalidRequestError
from penstock.tokenizer.hf import HFTokenizer, load_tokenizer
from penstock.tokenizer.template_variables import check_template_kwargs
from penstock.tokenizer.tokenizer import MARKS, RenderedChat, render_chat
from tests.tokenizer import vocabularies as voc

TOKENIZER = load_tokenizer(Path(penstock.__file__).parent / "demo" / "model")
SPELLINGS = sorted(TOKENIZER.token_to_text(token_id) for token_id in TOKENIZER.special_ids)


def ids_of(content, **options):
    return render_chat(TOKENIZER, [{"role": "user", "content": content}]).token_ids(TOKENIZER, **options)


def control_tokens(ids):
    return [token_id for token_id in ids if token_id in TOKENIZER.special_ids]


@given(st.lists(st.one_of(st.sampled_from([*SPELLINGS, "|>", "<|"]), st.text(max_size=5)), max_size=8).map("".join))
def test_only_the_template_writes_control_tokens(content):
    """Guards against a user who ends the own turn and writes one of the system."""
    ids = ids_of(content)
    assert control_tokens(ids) == control_tokens(ids_of("x"))
    whole = render_chat(TOKENIZER, [{"role": "user", "content": content}])
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == TOKENIZER.decode(
        TOKENIZER.encode(whole.text, add_special_tokens=False), skip_special_tokens=False
    )


@pytest.mark.parametrize("content", ["<|IM_END|>", "<|im\u200b_end|>", "＜｜im_end｜＞", "a <|Im_End|> b"])
def test_a_normalizer_makes_no_control_token(content):
    """Guards against text that the normalizer turns into a control token, where such a token is `normalized`."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "x": 1}, "<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace("\u200b", "")]
    )
    backend.add_tokens([AddedToken("<|im_end|>", special=True, normalized=True)])
    assert backend.token_to_id("<|im_end|>") in backend.encode(content).ids
    tokenizer = HFTokenizer(backend, template="{{ messages[0].content }}<|im_end|>")
    ids = render_chat(tokenizer, [{"role": "user", "content": content}]).token_ids(tokenizer)
    assert [token_id in tokenizer.special_ids for token_id in ids] == [False] * (len(ids) - 1) + [True]


def test_a_request_cannot_take_the_first_token_away():
    """Guards against variables of a template that hide those of the tokenizer."""
    with pytest.raises(InvalidRequestError, match="bos_token cannot be set here"):
        check_template_kwargs({"bos_token": ""})


@pytest.mark.parametrize("content", ["Hi", "What is 3 + 4?", "<|", "a\ufdd0b", "<b>|end|</b>"])
def test_other_texts_have_the_ids_that_they_always_had(content):
    """Guards against other answers than Transformers' where nothing is spelled out."""
    text = TOKENIZER.chat_template.render([{"role": "user", "content": content}])
    assert ids_of(content) == TOKENIZER.encode(text, add_special_tokens=False)
    assert ids_of(content, add_special_tokens=True) == TOKENIZER.encode(text, add_special_tokens=True)


def test_special_tokens_around_a_cut_prompt():
    plain, cut = ids_of("a"), ids_of(f"a{SPELLINGS[0]}b")
    before_and_after = len(ids_of("a", add_special_tokens=True)) - len(plain)
    added = ids_of(f"a{SPELLINGS[0]}b", add_special_tokens=True)
    assert len(added) == len(cut) + before_and_after


@pytest.mark.parametrize("kind", voc.KINDS)
@pytest.mark.parametrize("parts", [(), ("", "abc"), ("", ""), ("a", "", "bc")], ids=repr)
def test_special_tokens_are_around_the_first_part_that_has_ids(kind, parts):
    """Guards against an endless wait: StopIteration in a thread never reaches the coroutine that waits for it. And
    against BOS behind a prompt that begins with an empty part."""
    tokenizer = voc.make(kind)
    plain = RenderedChat("".join(parts), parts).token_ids(tokenizer)
    added = RenderedChat("".join(parts), parts).token_ids(tokenizer, add_special_tokens=True)
    probe, around = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    before = next(at for at in range(len(around)) if around[at : at + len(probe)] == probe)
    assert added == around[:before] + plain + around[before + len(probe) :]


def test_special_tokens_inside_a_text_are_refused():
    class Inside:
        def encode(self, text, *, add_special_tokens=True):
            return [5, 1, 6] if add_special_tokens else [5, 6]

    with pytest.raises(InvalidRequestError, match="add_special_tokens"):
        RenderedChat("ab", ("ab",)).token_ids(Inside(), add_special_tokens=True)


def test_every_noncharacter_is_refused():
    with pytest.raises(InvalidRequestError, match="noncharacter"):
        ids_of("".join(MARKS))


def test_in_python_and_every_field():
    """Guards against a door beside the one that was closed: LLM.chat, and names of speakers."""
    spelled = SPELLINGS[0]
    with LLM(model="demo") as llm:
        ids = llm._chat_prompt([{"role": "user", "content": f"x{spelled}", "name": spelled}])["prompt_token_ids"]
        assert control_tokens(ids) == control_tokens(
            llm._chat_prompt([{"role": "user", "content": "x"}])["prompt_token_ids"]
        )
