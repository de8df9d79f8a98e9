"""HFTokenizer against Transformers' PreTrainedTokenizerFast on the same directory."""

import base64
import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.tokenizer import hf
from penstock.tokenizer.hf import HFTokenizer, clean_up_spaces, load_tokenizer
from penstock.tokenizer.tokenizer import check_prompt_length
from tests.tokenizer import vocabularies as voc

TEXTS = [
    "",
    " ",
    "The quick  brown fox.",
    "  two spaces first\n\ttab",
    "naïve Füße 你好 🙂 \u200d e\u0301",
    f"{voc.BOS}a{voc.EOS} b {voc.END}{voc.END} {voc.NOTE}{voc.NOTE} <｜边｜>",
    "isn't it , a 'test' ?",
]


def pair(folder):
    return load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(str(folder))


@pytest.fixture(params=voc.KINDS, scope="module")
def both(request, tmp_path_factory):
    return pair(voc.write(tmp_path_factory.mktemp(request.param), request.param))


class TestOracle:
    @pytest.mark.matrix("ids", "`tokenizer.json`")
    @pytest.mark.covers("M27")
    def test_encode(self, both):
        """Guards against a lost BOS, a truncation setting left on, an added token not seen."""
        ours, theirs = both
        for text in TEXTS:
            for special in (True, False):
                assert ours.encode(text, add_special_tokens=special) == theirs.encode(text, add_special_tokens=special)

    @pytest.mark.matrix("texts", "`tokenizer.json`")
    def test_decode(self, both):
        """Guards against special tokens shown or dropped in the wrong place, and ids that do not exist."""
        ours, theirs = both
        for ids in (*map(ours.encode, TEXTS), list(range(ours.vocab_size)), [ours.vocab_size + 5, 3, 2**31]):
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)

    @settings(max_examples=60)
    @given(data=st.data())
    def test_any_ids(self, both, data):
        """Guards against decode differing on sequences that no text gives (half characters, bytes in disorder)."""
        ours, theirs = both
        ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=12))
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)

    @pytest.mark.matrix("BOS and EOS", "`tokenizer.json`")
    def test_attributes(self, both):
        """Guards against a vocabulary size without added tokens, and special ids that are only added ones."""
        ours, theirs = both
        assert ours.vocab_size == len(theirs)
        assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
        special = {i for i, token in theirs.added_tokens_decoder.items() if token.special}
        assert ours.special_ids == special


CONFIGS = {
    "old switches": {"bos_token": voc.BOS, "eos_token": voc.EOS, "add_bos_token": False, "add_eos_token": True},
    "token objects": {"eos_token": {"__type": "AddedToken", "content": voc.END, "lstrip": False, "rstrip": True}},
    "new tokens": {"pad_token": "<pad>", "extra_special_tokens": ["<tool>", "fox"], "image_token": "<image>"},
    "older name": {"additional_special_tokens": ["<tool>", voc.END]},
    "listed": {
        "eos_token": "<over>",
        "added_tokens_decoder": {
            "700": {"content": "<over>", "special": True, "lstrip": True, "rstrip": False, "normalized": False},
            "701": {"content": " quick", "special": False, "normalized": True, "single_word": False},
        },
    },
    "split": {"bos_token": voc.BOS, "split_special_tokens": True},
    "clean": {"clean_up_tokenization_spaces": True},
}


@pytest.mark.parametrize("kind", ["byte_level", "pieces", "word_pieces"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_config_variants(tmp_path, kind, config):
    """Guards against reading tokenizer_config.json unlike Transformers: who adds tokens, and in which order."""
    ours, theirs = pair(voc.write(tmp_path, kind, config))
    texts = [*TEXTS, "a <tool>b <image> <pad> <over>  c fox quick"]
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.eos_token_id == theirs.eos_token_id


def test_special_tokens_map(tmp_path):
    """Guards against ignoring special_tokens_map.json of older models, or preferring it where it is outdated."""
    voc.write(tmp_path, "byte_level", {"bos_token": voc.BOS})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    ours, theirs = pair(tmp_path)
    assert ours.eos_token_id == theirs.eos_token_id == ours.encode("<stop>", add_special_tokens=False)[0]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": voc.EOS, "added_tokens_decoder": {}}))
    ours, theirs = pair(tmp_path)
    assert ours.eos_token_id == theirs.eos_token_id == 1


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    """Guards against a prompt cut to the length that tokenizer.json was trained with."""
    backend = voc.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    ours, theirs = pair(tmp_path)
    text = "a rather long sentence of many words"
    assert ours.encode(text) == theirs.encode(text)
    assert len(ours.encode(text)) > 9


class TestTokenBytes:
    @pytest.mark.parametrize("text", ["The fox. naïve 你好 🙂", "it's\n\nfine"])
    @pytest.mark.parametrize("kind", ["byte_level", "pieces", "pieces_unstripped"])
    def test_joined_bytes_are_the_text(self, kind, text):
        """Guards against logprobs whose bytes do not add up to the answer."""
        tok = voc.make(kind)
        data = b"".join(map(tok.token_to_bytes, tok.encode(text, add_special_tokens=False)))
        assert data.decode().removeprefix(" ") == text

    def test_each_byte(self):
        """Guards against a wrong table of bytes: all 256 must be told apart."""
        for kind, prefix in (("byte_level", None), ("pieces", "<0x")):
            tok = voc.make(kind)
            ids = [i for i in range(tok.vocab_size) if len(tok.token_to_bytes(i)) == 1 and (prefix is None or i < 259)]
            assert {tok.token_to_bytes(i) for i in ids} == {bytes([value]) for value in range(256)}

    def test_texts_of_tokens(self):
        """Guards against a lost leading space, and half characters that raise."""
        tok = voc.make("pieces")
        assert tok.token_to_text(tok.encode("a the", add_special_tokens=False)[0]).startswith(" ")
        assert tok.token_to_text(3 + 0xE2) == "\ufffd"
        assert tok.token_to_text(tok.eos_token_id) == voc.EOS
        assert tok.token_to_bytes(10**6) == b""
        words = voc.make("word_pieces")
        assert not any(words.token_to_text(i).startswith("##") for i in range(10, words.vocab_size))

    def test_added_token_outside_the_alphabet(self):
        """Guards against an added token with wide characters breaking the byte table (DeepSeek's <｜...｜>)."""
        tok = voc.make("byte_level")
        (token_id,) = tok.encode("<｜边｜>", add_special_tokens=False)
        assert tok.token_to_text(token_id) == "<｜边｜>"


class TestSpacesBetweenSpecialTokens:
    @pytest.mark.parametrize("kind", voc.KINDS)
    def test_false_joins_neighbouring_added_tokens(self, kind):
        """Guards against the option being accepted and ignored where the decoder puts spaces between tokens."""
        tok = voc.make(kind)
        end, note, a, b = (tok.encode(text, add_special_tokens=False)[-1] for text in (voc.END, voc.NOTE, "a", "b"))
        ids = [a, end, note, b]
        text = tok.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)
        assert voc.END + voc.NOTE in text
        if kind == "word_pieces":
            assert f"a {voc.END} {voc.NOTE} b" in tok.decode(ids, skip_special_tokens=False)


class TestErrors:
    def test_what_is_missing(self, tmp_path):
        """Guards against a bare FileNotFoundError; the message must say how to make tokenizer.json."""
        with pytest.raises(ModelLoadError, match="no such directory"):
            load_tokenizer(tmp_path / "nowhere")
        with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing"):
            load_tokenizer(tmp_path)
        (tmp_path / "vocab.json").write_bytes(b"x")
        with pytest.raises(ModelLoadError, match=r"only vocab\.json.*save_pretrained"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize("text", ["{", "[]", '{"model": 5}', "\x00", "[" * 100_000])
    def test_broken_tokenizer(self, tmp_path, text):
        """Guards against the library's own exception reaching the user without the file's name."""
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize(
        "config",
        [
            "[]",
            "{",
            '{"added_tokens_decoder": [5]}',
            '{"added_tokens_decoder": {"x": {}}}',
            '{"extra_special_tokens": 3}',
            '{"added_tokens_decoder": {"1": {"content": 5}}}',
            '{"extra_special_tokens": [5]}',
            '{"chat_template": 5}',
            '{"added_tokens_decoder": {"' + "9" * 5000 + '": {"content": "x"}}}',
            '{"bos_token": "\\ud800"}',
            '{"added_tokens_decoder": {"1": {"content": "\\ud800"}}}',
        ],
    )
    def test_broken_config(self, tmp_path, config):
        """Guards against a TypeError from deep inside for a malformed tokenizer_config.json."""
        voc.write(tmp_path, "byte_level")
        (tmp_path / "tokenizer_config.json").write_text(config)
        with pytest.raises(ModelLoadError):
            load_tokenizer(tmp_path)

    def test_an_error_about_a_long_id_is_short(self, tmp_path):
        """Guards against Python's ValueError for an id of 5,000 digits, and against an error that repeats them."""
        config = json.dumps({"added_tokens_decoder": {"9" * 5000: {"content": "x"}}})
        voc.write(tmp_path, "byte_level")
        (tmp_path / "tokenizer_config.json").write_text(config)
        with pytest.raises(ModelLoadError, match="not a token id") as caught:
            load_tokenizer(tmp_path)
        assert len(str(caught.value)) < 200

    def test_lone_surrogate(self):
        """Guards against a 500 for the JSON string "\\ud800"."""
        with pytest.raises(InvalidRequestError, match="surrogate"):
            voc.make("byte_level").encode("a\ud800")

    def test_prompt_length(self):
        """Guards against tokenising 100 MB only to refuse it."""
        check_prompt_length("a" * 864, 100)
        with pytest.raises(InvalidRequestError) as caught:
            check_prompt_length("a" * 865, 100)
        assert caught.value.code == "context_length_exceeded"


SOUND = struct.pack("<I", 1024) + bytes(1024)  # a table that maps nothing
CHARSMAPS = {
    "no base64": "not base64!",
    "empty": "",
    "no table": struct.pack("<I", 0),
    "announces 4 GB": struct.pack("<I", 2**32 - 4),
    "cut short": struct.pack("<I", 400) + b"aa",
    "odd length": struct.pack("<I", 5) + bytes(5),
    "texts are no UTF-8": SOUND + b"\xff\xff",
}


class TestPrecompiled:
    """The library panics on a damaged table, and a panic is no Exception."""

    def write(self, folder, charsmap, escape=False):
        voc.write(folder, "word_pieces")
        contents = json.loads((folder / "tokenizer.json").read_text())
        text = charsmap if isinstance(charsmap, str) else base64.b64encode(charsmap).decode()
        precompiled = {"type": "Precompiled", "precompiled_charsmap": text}
        contents["normalizer"] = {"type": "Sequence", "normalizers": [precompiled]}
        text = json.dumps(contents)
        if escape:
            text = text.replace("precompiled_charsmap", "\\u0070recompiled_charsmap")
        (folder / "tokenizer.json").write_text(text)
        return folder

    @pytest.mark.parametrize("escape", [False, True])
    @pytest.mark.parametrize("kind", CHARSMAPS)
    def test_damaged_tables(self, tmp_path, kind, escape):
        """Guards against a panic that passes `except Exception` and ends the process with a traceback."""
        with pytest.raises(ModelLoadError, match=r"tokenizer\.json.*precompiled_charsmap = .* is damaged"):
            load_tokenizer(self.write(tmp_path, CHARSMAPS[kind], escape))

    def test_a_sound_table(self, tmp_path):
        """Guards against refusing T5's and XLM-R's tokenizers."""
        assert load_tokenizer(self.write(tmp_path, SOUND)).encode("fox")

    def test_the_first_of_two_equal_keys(self, tmp_path):
        """Guards against a check that sees only the last of two normalizers, where the library reads both."""
        text = (self.write(tmp_path, "x!") / "tokenizer.json").read_text()
        (tmp_path / "tokenizer.json").write_text(text[:-1] + ', "normalizer": null}')
        with pytest.raises(ModelLoadError, match="charsmap"):
            load_tokenizer(tmp_path)

    def test_a_table_that_leads_out_of_itself(self, tmp_path):
        """Guards against a panic with the first request: the table is encoded with once while the model loads."""
        with pytest.raises(ModelLoadError, match=r"tokenizer\.json.*out of bounds"):
            load_tokenizer(self.write(tmp_path, struct.pack("<II", 4, 2**32 - 1)))

    def test_a_panic_of_the_library(self, tmp_path, monkeypatch):
        """Guards against damage that our own check does not know."""
        monkeypatch.setattr(hf, "_check_charsmaps", lambda text: None)
        with pytest.raises(ModelLoadError, match=r"tokenizer\.json.*Precompiled"):
            load_tokenizer(self.write(tmp_path, "x!"))


def test_clean_up():
    """Guards against a wrong order of the replacements; the oracle is in test_config_variants."""
    assert clean_up_spaces("it 's a ' test ' , is n't it ?") == "it's a'test ', isn't it?"


class TestChatTemplateFiles:
    @pytest.mark.matrix("chat template", "`tokenizer.json`")
    def test_order(self, tmp_path):
        """Guards against an outdated template in tokenizer_config.json winning over the file."""
        voc.write(tmp_path, "byte_level", {"bos_token": voc.BOS})
        assert load_tokenizer(tmp_path).chat_template is None
        found = {}
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json{{ bos_token }}"}))
        found["json"] = self.render(tmp_path)
        voc.write(tmp_path, "byte_level", {"bos_token": voc.BOS, "chat_template": "config"})
        found["config"] = self.render(tmp_path)
        (tmp_path / "chat_template.jinja").write_text("file")
        found["file"] = self.render(tmp_path)
        assert found == {"json": "json" + voc.BOS, "config": "config", "file": "file"}
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
        assert self.render(tmp_path, tools=[]) == "tools"

    def render(self, folder, **kwargs):
        tok: HFTokenizer = load_tokenizer(folder)
        return tok.chat_template.render([{"role": "user", "content": "x"}], **kwargs)


def test_grammars_belong_to_a_vocabulary_and_its_end_tokens():
    """Guards against two models with one tokenizer object, of which the second gets the grammars of the first."""
    tokenizer = voc.make("byte_level")
    first = tokenizer.grammars(tokenizer.vocab_size, [1])
    assert tokenizer.grammars(tokenizer.vocab_size, (1,)) is first
    assert tokenizer.grammars(tokenizer.vocab_size + 8, [1]) is not first
    assert tokenizer.grammars(tokenizer.vocab_size, [2]) is not first
