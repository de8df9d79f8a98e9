"""IncrementalDetokenizer: pieces against the whole, over every kind of vocabulary."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from penstock.tokenizer.hf import HFTokenizer
from penstock.tokenizer.tokenizer import IncrementalDetokenizer
from tests.tokenizer import vocabularies as voc

KINDS = list(voc.KINDS)
TEXTS = [
    "The quick brown fox.",
    "naïve Füße 你好世界 🙂🙃 привет",
    "  two\n\n\tspaces ",
    "🙂",
    f"a{voc.END}b {voc.NOTE}",
]


def stream(tok, ids, prompt=(), **options):
    detokenizer = IncrementalDetokenizer(tok, prompt_token_ids=prompt, **options)
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.finish()]


def ids_of(tok):
    """Ids of all kinds, with many bytes among them: half characters are what goes wrong."""
    low = [i for i in range(tok.vocab_size) if len(tok.token_to_bytes(i)) == 1]
    return st.lists(st.one_of(st.integers(0, tok.vocab_size + 1), st.sampled_from(low)), max_size=14)


def shows_a_run_that_breaks(tok, ids):
    """True where decode() takes back characters that a stream has shown (see the module's docstring)."""
    return _breaks(tok, ids) or _breaks(tok, [token_id for token_id in ids if token_id not in tok.special_ids])


def _breaks(tok, ids):
    kept = [token_id for token_id in ids if token_id < tok.vocab_size]
    marks = "".join("b" if token_id in tok.byte_fallback_ids else "." for token_id in kept)
    for run in re.finditer("b+", marks):
        data = b"".join(map(tok.token_to_bytes, kept[run.start() : run.end()]))
        try:
            data.decode()
        except UnicodeDecodeError as error:
            if data[: error.start]:
                return True
    return False


@pytest.mark.covers("F8")
@pytest.mark.parametrize("kind", KINDS)
class TestPiecesAreTheWhole:
    @settings(max_examples=50)
    @given(data=st.data())
    def test_any_ids(self, kind, data):
        """Guards against lost, doubled or changed text for sequences that no text gives."""
        tok = voc.make(kind)
        ids = data.draw(ids_of(tok).filter(lambda ids: not shows_a_run_that_breaks(tok, ids)))
        for skip in (True, False):
            assert "".join(stream(tok, ids, skip_special_tokens=skip)) == tok.decode(ids, skip_special_tokens=skip)

    @settings(max_examples=25)
    @given(data=st.data())
    def test_after_a_prompt(self, kind, data):
        """Guards against the first token losing its leading space, or getting one too many."""
        tok = voc.make(kind)
        prompt = data.draw(st.sampled_from([tok.encode(text) for text in TEXTS]))
        ids = data.draw(ids_of(tok).filter(lambda ids: not shows_a_run_that_breaks(tok, [*prompt, *ids])))
        whole = tok.decode([*prompt, *ids])
        assert tok.decode(prompt) + "".join(stream(tok, ids, prompt)) == whole

    @settings(max_examples=50)
    @given(data=st.data())
    def test_cuts_do_not_matter(self, kind, data):
        """Guards against a result that depends on how many tokens a step brings."""
        tok = voc.make(kind)
        ids = data.draw(ids_of(tok))
        cut = data.draw(st.integers(0, len(ids)))
        detokenizer = IncrementalDetokenizer(tok)
        text = detokenizer.push(ids[:cut]) + detokenizer.push(ids[cut:]) + detokenizer.finish()
        assert text == "".join(stream(tok, ids))

    def test_texts(self, kind):
        """Guards against half a character in a piece, and against holding back what is certain."""
        tok = voc.make(kind)
        for text in TEXTS:
            ids = tok.encode(text, add_special_tokens=False)
            pieces = stream(tok, ids)
            assert "".join(pieces) == tok.decode(ids)
            assert not any("\ufffd" in piece for piece in pieces)
            assert pieces[-1] == ""

    def test_joined_special_tokens(self, kind):
        """Guards against spaces_between_special_tokens=False being ignored in streams."""
        tok = voc.make(kind)
        ids = tok.encode(f"a{voc.END}{voc.NOTE}{voc.END} b{voc.NOTE}", add_special_tokens=False)
        options = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
        assert "".join(stream(tok, ids, **options)) == tok.decode(ids, **options)


class TestBytes:
    def test_shown_characters_of_a_broken_run_stay(self):
        """The exception that the docstring states: decode() takes back what was complete, a stream does not."""
        tok = voc.make("pieces")
        ids = [3 + byte for byte in ("é".encode() + b"\xff" + "é".encode())]
        assert tok.decode(ids) == "\ufffd" * 5
        assert "".join(stream(tok, ids)) == "é" + "\ufffd" * 3

    def test_each_character_at_once(self):
        """Guards against holding a whole run of byte tokens back until it ends."""
        tok = voc.make("pieces")
        ids = [3 + byte for byte in "你好".encode()]
        assert stream(tok, ids) == ["", "", "你", "", "", "好", ""]

    def test_after_a_prompt_that_ends_in_bytes(self):
        """Guards against a context cut inside a character, which would turn the answer's characters into U+FFFD."""
        tok = voc.make("pieces")
        whole, half = ([3 + byte for byte in text] for text in ("你好".encode(), b"\xe4\xbd"))
        answer = [3 + byte for byte in "世界".encode()]
        for prompt in (whole, half, [1, 300, *half]):
            assert "".join(stream(tok, answer, prompt)) == "世界"

    @pytest.mark.parametrize("kind", ["byte_level", "pieces"])
    def test_invalid_bytes_do_not_wait(self, kind):
        """Guards against a stream that hangs (and takes quadratic time) while the model writes invalid bytes."""
        tok = voc.make(kind)
        (bad,) = [i for i in range(tok.vocab_size) if tok.token_to_bytes(i) == b"\xff"]
        pieces = stream(tok, [bad] * 5000)
        assert all(piece == "\ufffd" for piece in pieces[:-1])

    def test_only_the_last_character_waits(self):
        """Guards against holding back text in front of a half character."""
        tok = voc.make("byte_level")
        table = {tok.token_to_bytes(i): i for i in range(tok.vocab_size)}
        assert stream(tok, [table[b"a"], table[b"\xf0"], table[b"\x9f"], table[b"b"]]) == ["a", "", "", "\ufffdb", ""]

    def test_first_space_after_a_prompt(self):
        """Guards against " fox" becoming "fox" because decoders of pieces strip the first space."""
        tok = voc.make("pieces")
        prompt, answer = tok.encode("The quick"), tok.encode("fox", add_special_tokens=False)
        assert "".join(stream(tok, answer, prompt)) == " fox"
        assert "".join(stream(tok, answer, [*prompt, tok.eos_token_id])) == " fox"
        assert "".join(stream(tok, answer, [tok.bos_token_id])) == "fox"


def test_another_kind_of_decoder():
    """Guards against half characters where a decoder does more than join bytes. No known model has one."""
    backend = voc.byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("~", "-")])
    tok = HFTokenizer(backend)
    assert not tok.joins_bytes
    for text in ("naïve ~ 你好 🙂🙃~", "ends in half \U0001f642"):
        ids = tok.encode(text, add_special_tokens=False)
        pieces = stream(tok, ids)
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) == tok.decode(ids)
        for cut in range(len(ids)):
            assert "".join(stream(tok, ids[:cut])) == tok.decode(ids[:cut])


class _CountingTokenizer:
    """Counts the tokens that are decoded."""

    def __init__(self, tok):
        self._tok, self.count = tok, 0

    def __getattr__(self, name):
        return getattr(self._tok, name)

    def decode(self, ids, **options):
        self.count += len(ids)
        return self._tok.decode(ids, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_linear_work(kind):
    """Guards against decoding the whole text again for every token. Counts tokens, not seconds, so it cannot flake."""
    tok = _CountingTokenizer(voc.make(kind))
    ids = tok.encode("The quick brown 你好 fox " * 50, add_special_tokens=False)
    stream(tok, ids)
    assert tok.count <= 20 * len(ids)
